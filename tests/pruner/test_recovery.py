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


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text", "gpt2", "opt"])
def test_the_kl_falls_and_the_size_stays(family: str) -> None:
    model, pruned = pair(family)
    dense, before = state(model), state(pruned)
    trained = cl.recover(model, pruned, TEXT, options=QUICK)
    require_equal(state(model), dense)
    require_equal(state(pruned), before)
    assert model_risk(model, trained, TEXT).mean() < 0.8 * model_risk(model, pruned, TEXT).mean()
    after = state(trained)
    assert {k: (w.shape, w.dtype) for k, w in after.items()} == {
        k: (w.shape, w.dtype) for k, w in before.items()
    }
    assert type(trained) is type(pruned)
    assert [w.requires_grad for w in trained.parameters()] == [
        w.requires_grad for w in pruned.parameters()
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_only_the_linear_layers_of_the_decoder_change_and_by_the_rank(family: str) -> None:
    model, pruned = pair(family)
    trained = cl.recover(model, pruned, TEXT, options=QUICK)
    inside = describe(pruned).stack
    linear = {
        f"{name}.weight"
        for name, module in pruned.named_modules()
        if name.startswith(f"{inside}.")
        and (isinstance(module, nn.Linear) or hasattr(module, "nf"))
        and module.weight.numel()
    }
    assert len(linear) > 6
    for name, before in pruned.state_dict().items():
        update = trained.state_dict()[name] - before
        if name in linear:
            assert 1 <= int(torch.linalg.matrix_rank(update, rtol=1e-4)) <= QUICK.rank, name
        else:
            assert not update.any(), name


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


def test_half_precision_stays_and_improves() -> None:
    model, pruned = pair(dtype=torch.bfloat16)
    trained = cl.recover(model, pruned, TEXT, options=QUICK)
    assert {weight.dtype for weight in trained.parameters()} == {torch.bfloat16}
    assert model_risk(model, trained, TEXT).mean() < model_risk(model, pruned, TEXT).mean()


@pytest.mark.parametrize("held_out", [None, OTHER])
def test_a_stopped_run_goes_on_to_the_same_bits(
    held_out: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pruned = pair()
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


@pytest.mark.parametrize(
    "changes",
    [
        *({"rank": 0}, {"epochs": 0}, {"rows_per_step": -1}, {"seed": -1}),
        *({"learning_rate": 0.0}, {"learning_rate": math.nan}, {"learning_rate": "fast"}),
    ],
)
def test_bad_options(changes: dict[str, Any]) -> None:
    with pytest.raises(cl.InputError):
        RecoverOptions(**changes)


def test_bad_models_and_texts() -> None:
    model, pruned = pair()
    with pytest.raises(cl.InputError):
        cl.recover(model, pruned, ["text"])  # type: ignore[arg-type]
    with pytest.raises(cl.InputError):
        cl.recover(model, pruned, TEXT, options={"rank": 4})  # type: ignore[arg-type]
    with pytest.raises(cl.MismatchError):
        cl.recover(model, pruned, TEXT, TEXT, options=QUICK)
    with pytest.raises(cl.MismatchError):
        cl.recover(tiny_model("llama", "gqa", vocab_size=98), pruned, TEXT, options=QUICK)
    with pytest.raises(cl.InputError):
        cl.recover(model, copy.deepcopy(pruned).to("meta"), TEXT, options=QUICK)


def test_a_loss_that_is_not_finite() -> None:
    model, pruned = pair()
    with torch.no_grad():
        broken = copy.deepcopy(pruned)
        describe(broken).output_weight(1, "ffn").fill_(math.nan)
    with pytest.raises(cl.NumericalError):
        cl.recover(model, broken, TEXT, options=QUICK)


def test_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    model, pruned = pair()
    with pytest.raises(cl.InputError):
        cl.recover(model, pruned, TEXT, options=QUICK)
