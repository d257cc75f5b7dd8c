"""Training after pruning: what it lowers, what it leaves alone, and going on after a stop."""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

import cocurve_lab as cl
from cocurve_lab.extensions.repairing import recovery
from cocurve_lab.extensions.repairing.recovery import RecoverOptions
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.measuring.risk import model_risk
from cocurve_lab.models.architectures import describe
from helpers.tiny_models import GROUPS, full_logits, tiny_model, tiny_text

pytest.importorskip("peft", reason="recovery trains with PEFT")
TEXT, OTHER = tiny_text(12, 24, seed=3), tiny_text(6, 24, seed=4)
NAMES = ["L0.attention[0]", "L0.ffn[1]", "L1.ffn[0]", "L2.attention[1]"]
# the random models answer almost at random, so that only large updates change much
QUICK = RecoverOptions(4, 1e-2, epochs=3, progress=False)


def pair(family: str = "llama", **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    grouped = family not in ("gpt2", "opt", "olmo2")
    model = tiny_model(family, "gqa" if grouped else "mha", **changes)
    units = cl.enumerate_units(model, GROUPS)
    named = [u.name for u in units if u.name in NAMES or u.name.startswith("L2.ffn")]
    return model, cl.prune(model, cl.Selection.from_pruned(units, named))


def state(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def require_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("gpt2", torch.float32), ("gemma3_text", torch.bfloat16)],
)
def test_the_kl_falls_and_the_size_stays(family: str, dtype: torch.dtype) -> None:
    model, pruned = pair(family, dtype=dtype)
    dense, before = state(model), state(pruned)
    trained = cl.recover(model, pruned, TEXT, options=QUICK)
    require_equal(state(model), dense)
    require_equal(state(pruned), before)
    bound = 0.8 if dtype == torch.float32 else 1.0
    risks = [model_risk(model, each, TEXT).mean() for each in (trained, pruned)]
    assert risks[0] < bound * risks[1]
    after = state(trained)
    for name, weight in before.items():
        assert (after[name].shape, after[name].dtype) == (weight.shape, weight.dtype)
    assert type(trained) is type(pruned)
    # only the linear layers of the decoder change, and by the rank
    inside = describe(pruned).stack
    linear = {
        f"{name}.weight"
        for name, module in pruned.named_modules()
        if name.startswith(f"{inside}.")
        and (isinstance(module, nn.Linear) or hasattr(module, "nf"))
        and module.weight.numel()
    }
    for name, weight in before.items():
        update = after[name] - weight
        if name not in linear:
            assert not update.any(), name
        elif dtype == torch.float32:  # rounding adds to the rank
            assert 1 <= int(torch.linalg.matrix_rank(update, rtol=1e-4)) <= QUICK.rank, name


def test_the_loss_is_the_measured_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pruned = pair()
    losses: list[float] = []
    real = Trainer.training_step

    def watched(self: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        losses.append(float(loss := real(self, *args, **kwargs)))
        return loss

    monkeypatch.setattr(Trainer, "training_step", watched)
    options = RecoverOptions(rows_per_step=12, epochs=1, progress=False)
    cl.recover(model, pruned, TEXT, options=options)
    p, q = (full_logits(m, TEXT.input_ids).log_softmax(-1) for m in (model, pruned))
    assert losses == [pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)]


def test_held_out_rows_choose_the_epoch() -> None:
    model, pruned = pair()

    def risk(of: PreTrainedModel) -> float:
        return model_risk(model, of, OTHER).mean()

    trained = cl.recover(model, pruned, TEXT, OTHER, options=QUICK)
    assert 1 <= trained.cocurve_manifest["recovery"]["epoch"] <= 3
    assert risk(trained) < risk(pruned)
    # a rate that destroys the model: the start is best, and is what comes back
    wild = RecoverOptions(4, 0.5, epochs=2, progress=False)
    same = cl.recover(model, pruned, TEXT, OTHER, options=wild)
    require_equal(state(same), state(pruned))
    assert same.cocurve_manifest == pruned.cocurve_manifest
    assert risk(cl.recover(model, pruned, TEXT, options=wild)) > risk(pruned)


@pytest.mark.parametrize(("seconds", "most"), [(0.01, 1), (5.5, 6)])
def test_the_clock_ends_the_training(
    seconds: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pruned = pair()
    real, now, steps = Trainer.training_step, [0.0], []

    def monotonic() -> float:
        now[0] += 1e-3
        return now[0]

    def slow(self: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        now[0] += 1.0  # far longer than the step that was timed
        steps.append(now[0])
        return real(self, *args, **kwargs)

    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(Trainer, "training_step", slow)
    trained = cl.recover(model, pruned, TEXT, OTHER, options=replace(QUICK, minutes=seconds / 60))
    assert len(steps) == most
    risks = [model_risk(model, each, OTHER).mean() for each in (trained, pruned)]
    if most > 1:
        assert risks[0] < risks[1]
        assert trained.cocurve_manifest["recovery"]["epoch"] == 1
    else:
        assert risks[0] <= risks[1] * (1 + 1e-6)


def test_a_stopped_run_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pruned = pair()
    real, steps = Trainer.training_step, []

    def stopped(self: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        steps.append(1)
        if len(steps) == 5:  # in the second of three epochs of three steps
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    def trained(text: cl.CalibrationSet = TEXT, place: Path | None = tmp_path / "state") -> Any:
        return cl.recover(model, pruned, text, OTHER, options=QUICK, checkpoint=place)

    whole = trained(place=None)
    monkeypatch.setattr(Trainer, "training_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        trained()
    # one that was killed while it wrote its second state
    killed = next((tmp_path / "state").iterdir()) / "checkpoint-6"
    killed.mkdir()
    (killed / "trainer_state.json").write_text('{"epoch": 2')
    for _ in range(2):  # a finished run is read, not trained again
        rest = trained()
        require_equal(state(rest), state(whole))
        assert rest.cocurve_manifest == whole.cocurve_manifest
        assert len(steps) == 5 + 6
    trained(tiny_text(12, 24, seed=9))  # a run with other rows does not take its state
    assert len(steps) == 5 + 6 + 9


def test_saved_and_loaded_with_its_record(tmp_path: Path) -> None:
    model, _ = pair()
    units = cl.enumerate_units(model, GROUPS)
    plan = cl.Selection.from_pruned(units, [u.name for u in units if u.name in NAMES])
    refitted = cl.repair(model, plan, TEXT, options=RepairOptions(progress=False))
    trained = cl.recover(model, refitted, TEXT, OTHER, options=QUICK)
    folder = cl.save_pruned(trained, tmp_path / "smaller")
    loaded: Any = cl.load_pruned(folder)
    require_equal(state(loaded), state(trained))
    manifest = loaded.cocurve_manifest
    recorded = manifest["recovery"]
    assert (manifest["weights_since_pruning"], manifest["repair"]["method"]) == ("trained", "refit")
    assert (recorded["rank"], recorded["sequences"], recorded["positions"]) == (4, 12, 288)
    # a round of pruning after it keeps the record
    plan = cl.Selection.from_pruned(cl.enumerate_units(loaded, GROUPS), [0])
    more = cl.prune(loaded, plan).cocurve_manifest
    assert (more["recovery"], more["earlier_rounds"][0]["recovery"]) == (None, recorded)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rank", 0), ("epochs", 0), ("rows_per_step", -1), ("seed", -1)),
        *(("learning_rate", rate) for rate in (0.0, math.nan, "fast")),
        *(("minutes", value) for value in (0.0, math.inf, "5")),
    ],
)
def test_options_are_checked(name: str, value: Any) -> None:
    with pytest.raises(cl.InputError):
        RecoverOptions(**{name: value})


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, pruned), other = pair(), tiny_model("llama", "gqa", vocab_size=98)
    broken = copy.deepcopy(pruned)
    describe(broken).output_weight(1, "ffn").data.fill_(math.nan)
    nowhere = copy.deepcopy(pruned).to("meta")
    for given, error in (
        ((model, pruned, TEXT, TEXT), cl.MismatchError),
        ((other, pruned, TEXT), cl.MismatchError),
        ((model, nowhere, TEXT), cl.InputError),
        ((model, broken, TEXT), cl.NumericalError),
    ):
        with pytest.raises(error):
            cl.recover(*given, options=QUICK)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(cl.InputError):
        cl.recover(model, pruned, TEXT, options=QUICK)
