"""Training after pruning: what it lowers, what it leaves alone, and going on after a stop."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

import cocurve_lab as cl
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
    assert {k: (w.shape, w.dtype) for k, w in after.items()} == {
        k: (w.shape, w.dtype) for k, w in before.items()
    }
    assert type(trained) is type(pruned)
    assert [w.requires_grad for w in trained.parameters()] == [
        w.requires_grad for w in pruned.parameters()
    ]
    # only the linear layers of the decoder change, and by the rank
    inside = describe(pruned).stack
    linear = {
        f"{name}.weight"
        for name, module in pruned.named_modules()
        if name.startswith(f"{inside}.")
        and (isinstance(module, nn.Linear) or hasattr(module, "nf"))
        and module.weight.numel()
    }
    assert len(linear) > 6
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
    trained = cl.recover(model, pruned, TEXT, OTHER, options=QUICK)
    record = trained.cocurve_manifest["recovery"]  # type: ignore[union-attr, index]
    assert 1 <= record["epoch"] <= 3
    assert model_risk(model, trained, OTHER).mean() < model_risk(model, pruned, OTHER).mean()
    # a rate that destroys the model: the start is best, and is what comes back
    wild = RecoverOptions(4, 0.5, epochs=2, progress=False)
    same = cl.recover(model, pruned, TEXT, OTHER, options=wild)
    require_equal(state(same), state(pruned))
    assert same.cocurve_manifest == pruned.cocurve_manifest
    worse = cl.recover(model, pruned, TEXT, options=wild)
    assert model_risk(model, worse, OTHER).mean() > model_risk(model, pruned, OTHER).mean()


def test_a_stopped_run_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model, pruned), held_out = pair(), OTHER
    whole = cl.recover(model, pruned, TEXT, held_out, options=QUICK)
    real, count = Trainer.training_step, 0

    def stopped(self: Trainer, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal count
        count += 1
        if count == 5:  # in the second of three epochs of three steps
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", stopped)
    place = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        cl.recover(model, pruned, TEXT, held_out, options=QUICK, checkpoint=place)
    rest = cl.recover(model, pruned, TEXT, held_out, options=QUICK, checkpoint=place)
    require_equal(state(rest), state(whole))
    assert rest.cocurve_manifest == whole.cocurve_manifest
    assert count == 5 + 6
    # a finished run is read, not trained again
    again = cl.recover(model, pruned, TEXT, held_out, options=QUICK, checkpoint=place)
    require_equal(state(again), state(whole))
    assert count == 5 + 6
    # a run with other rows does not take its state
    other = tiny_text(12, 24, seed=9)
    cl.recover(model, pruned, other, held_out, options=QUICK, checkpoint=place)
    assert count == 5 + 6 + 9


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
    assert manifest["weights_since_pruning"] == "trained"
    assert manifest["repair"]["method"] == "refit"
    recorded = manifest["recovery"]
    assert (recorded["rank"], recorded["sequences"], recorded["positions"]) == (4, 12, 288)
    card = (folder / "README.md").read_text()
    assert "refitted by least squares; low-rank updates were trained" in card
    assert "nothing else was trained" in card
    assert "updates of rank 4" in card
    assert "cl.recover(model, pruned, calibration, options=options)" in card
    assert "KL predicted" not in card
    # another change is still seen
    with torch.no_grad():
        loaded.get_output_embeddings().weight.mul_(1.01)
    again = cl.save_pruned(loaded, tmp_path / "changed")
    assert "changed after training" in (again / "README.md").read_text()
    # and a round of pruning after it keeps the record
    more = cl.prune(cl.load_pruned(folder), cl.Selection.from_pruned(
        cl.enumerate_units(cl.load_pruned(folder), GROUPS), [0]
    ))  # fmt: skip
    assert more.cocurve_manifest["earlier_rounds"][0]["recovery"] == recorded  # type: ignore[union-attr, index]
    assert more.cocurve_manifest["recovery"] is None  # type: ignore[union-attr, index]


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, pruned), other = pair(), tiny_model("llama", "gqa", vocab_size=98)
    broken, call = copy.deepcopy(pruned), cl.recover
    with torch.no_grad():
        describe(broken).output_weight(1, "ffn").fill_(math.nan)
    nowhere = copy.deepcopy(pruned).to("meta")
    calls: list[tuple[Any, type[Exception]]] = [
        (lambda: call(model, pruned, TEXT, TEXT, options=QUICK), cl.MismatchError),
        (lambda: call(other, pruned, TEXT, options=QUICK), cl.MismatchError),
        (lambda: call(model, nowhere, TEXT, options=QUICK), cl.InputError),
        (lambda: call(model, broken, TEXT, options=QUICK), cl.NumericalError),
        *(
            (lambda name=name, value=value: RecoverOptions(**{name: value}), cl.InputError)
            for name, values in {
                "rank": [0],
                "epochs": [0],
                "rows_per_step": [-1],
                "seed": [-1],
                "learning_rate": [0.0, math.nan, "fast"],
            }.items()
            for value in values
        ),
    ]
    for refused, error in calls:
        with pytest.raises(error):
            refused()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(cl.InputError):
        cl.recover(model, pruned, TEXT, options=QUICK)
