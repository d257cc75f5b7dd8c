"""Training after pruning: what it lowers, what it leaves alone, and going on after a stop."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.repairing import recovery
from cocurve_lab.measuring.risk import model_risk
from cocurve_lab.models.architectures import describe
from helpers.tiny_models import GROUPS, full_logits, tiny_model, tiny_text

pytest.importorskip("peft", reason="recovery trains with PEFT")
TEXT, OTHER = tiny_text(12, 24, seed=3), tiny_text(6, 24, seed=4)
NAMES = ["L0.attention[0]", "L0.ffn[1]", "L1.ffn[0]", "L2.attention[1]"]
# the random models answer almost at random, so that only large updates change much
QUICK = cl.RecoverOptions(4, 1e-2, epochs=3, progress=False)


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


class Stop(KeyboardInterrupt):
    pass


def stopped_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C arrive in the backward pass of the next step."""
    count = 0
    real = recovery._backward

    def backward(*args: Any) -> float:
        nonlocal count
        if count == steps:
            raise Stop
        count += 1
        return real(*args)

    monkeypatch.setattr(recovery, "_backward", backward)


# What it does ------------------------------------------------------------------------------------


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


def naive_step(
    model: PreTrainedModel, pruned: PreTrainedModel, options: cl.RecoverOptions
) -> dict[str, Tensor]:
    """One step by autograd through functional_call, without PEFT: the weights W + 2 B A after it.

    A is what the seed draws, layer by layer, as `nn.Linear` is initialized.
    """
    inside = f"{describe(pruned).stack}."
    weights = dict(pruned.state_dict())
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    torch.manual_seed(options.seed)
    for name, module in pruned.named_modules():
        if name.startswith(inside) and isinstance(module, nn.Linear) and module.weight.numel():
            rows, columns = module.weight.shape
            a = nn.Linear(columns, options.rank, bias=False)
            nn.Linear(options.rank, rows, bias=False)  # PEFT draws B before it is set to zero
            nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
            b = torch.zeros(rows, options.rank, requires_grad=True)
            pairs[f"{name}.weight"] = (a.weight.detach().requires_grad_(), b)

    def merged() -> dict[str, Tensor]:
        return weights | {n: weights[n] + 2 * b @ a for n, (a, b) in pairs.items()}

    with torch.no_grad():
        p = F.log_softmax(model(TEXT.input_ids).logits, dim=-1)
    out: Any = torch.func.functional_call(pruned, merged(), (TEXT.input_ids,))
    q = F.log_softmax(out.logits, dim=-1)
    loss = F.kl_div(q, p, log_target=True, reduction="sum") / TEXT.input_ids.numel()
    leaves = [w for ab in pairs.values() for w in ab]
    gradients = torch.autograd.grad(loss, leaves)
    norm = torch.sqrt(sum((g.square().sum() for g in gradients), torch.zeros(())))
    with torch.no_grad():
        for leaf, gradient in zip(leaves, gradients, strict=True):
            g = gradient * min(1.0, 1.0 / float(norm))
            leaf -= options.learning_rate * g / (g.abs() + 1e-8)  # AdamW's first step
    return {name: weight.detach() for name, weight in merged().items()}


def test_a_step_is_that_of_a_naive_one() -> None:
    model, pruned = pair(dtype=torch.float64)
    options = cl.RecoverOptions(4, 1e-3, epochs=1, rows_per_step=12, progress=False)
    trained = cl.recover(model, pruned, TEXT, options=options)
    before = pruned.state_dict()
    changed = 0
    with torch.random.fork_rng():
        expected = naive_step(model.float(), copy.deepcopy(pruned).float(), options)
    for name, weight in trained.state_dict().items():
        found, wanted = weight - before[name], expected[name] - before[name].float()
        if bool(wanted.any()):
            changed += 1
            # A alone moves nothing while B is 0: the update is B's first step times A
            torch.testing.assert_close(found.float(), wanted, atol=2e-5, rtol=0.05)
    assert changed > 6


def test_the_loss_is_the_measured_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pruned = pair()
    losses = []
    real = recovery._backward
    monkeypatch.setattr(
        recovery, "_backward", lambda *args: losses.append(real(*args)) or losses[-1]
    )
    options = cl.RecoverOptions(rows_per_step=12, epochs=1, progress=False)
    cl.recover(model, pruned, TEXT, options=options)
    p, q = (full_logits(m, TEXT.input_ids).log_softmax(-1) for m in (model, pruned))
    assert losses == [pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)]


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pruned = pair()
    options = cl.RecoverOptions(4, 1e-2, epochs=1, rows_per_step=12, progress=False)
    whole = cl.recover(model, pruned, TEXT, options=options)
    monkeypatch.setattr(recovery, "LOGIT_BYTES", 1)
    monkeypatch.setattr(recovery, "TOKENS_PER_BATCH", 5 * 24)
    parts = cl.recover(model, pruned, TEXT, options=options)
    for name, weight in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], weight, atol=2e-4, rtol=1e-3)


def test_half_precision_is_rounded_once() -> None:
    model, pruned = pair(dtype=torch.bfloat16)
    taken: dict[str, Tensor] = {}
    real = recovery._Run.merge

    def watched(run: Any) -> None:
        for name, layer in run.layers.items():
            base = layer.get_base_layer().weight.detach().clone()
            assert layer.lora_B["default"].weight.dtype == torch.float32
            taken[name] = (base.float() + layer.get_delta_weight("default").detach()).bfloat16()
        real(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery._Run, "merge", watched)
        trained = cl.recover(model, pruned, TEXT, options=QUICK)
    assert len(taken) > 6
    for name, weight in taken.items():
        assert torch.equal(trained.get_submodule(name).weight, weight)
    assert model_risk(model, trained, TEXT).mean() < model_risk(model, pruned, TEXT).mean()


def test_held_out_rows_choose_the_epoch() -> None:
    model, pruned = pair()
    trained = cl.recover(model, pruned, TEXT, OTHER, options=QUICK)
    record = trained.cocurve_manifest["recovery"]  # type: ignore[union-attr, index]
    assert 1 <= record["epoch"] <= 3
    assert model_risk(model, trained, OTHER).mean() < model_risk(model, pruned, OTHER).mean()
    # a rate that destroys the model: the start is best, and is what comes back
    wild = cl.RecoverOptions(4, 0.5, epochs=2, progress=False)
    same = cl.recover(model, pruned, TEXT, OTHER, options=wild)
    require_equal(state(same), state(pruned))
    assert same.cocurve_manifest == pruned.cocurve_manifest
    worse = cl.recover(model, pruned, TEXT, options=wild)
    assert model_risk(model, worse, OTHER).mean() > model_risk(model, pruned, OTHER).mean()


def test_the_result_is_that_of_the_epoch_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pruned = pair()
    seen = iter([3.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(recovery, "pair_risk", lambda *_: np.array([next(seen)]))
    chosen = cl.recover(model, pruned, TEXT, OTHER, options=QUICK)
    assert chosen.cocurve_manifest["recovery"]["epoch"] == 1  # type: ignore[union-attr, index]
    # the weights after the first of three epochs, by stopping there
    steps = math.ceil(len(TEXT) / QUICK.rows_per_step)
    monkeypatch.undo()
    kept: list[dict[str, np.ndarray]] = []
    real, merge = recovery._Run._take_step, recovery._Run.merge

    def step(run: Any) -> float:
        loss = real(run)
        if run.step == steps:
            kept.append(run._arrays())
        return loss

    monkeypatch.setattr(recovery._Run, "_take_step", step)
    monkeypatch.setattr(recovery._Run, "merge", lambda run: (run._set(kept[0]), merge(run))[1])
    first = cl.recover(model, pruned, TEXT, options=QUICK)
    require_equal(state(first), state(chosen))


# Going on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", [None, OTHER])
def test_a_stopped_run_goes_on_to_the_same_bits(
    held_out: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pruned = pair()
    whole = cl.recover(model, pruned, TEXT, held_out, options=QUICK)
    file = tmp_path / "state.ckpt"
    for steps in (0, 4, 3):
        with pytest.MonkeyPatch.context() as patch:
            stopped_after(steps, patch)
            with pytest.raises(KeyboardInterrupt):
                cl.recover(model, pruned, TEXT, held_out, options=QUICK, checkpoint=file)
    count = []
    real = recovery._backward
    monkeypatch.setattr(recovery, "_backward", lambda *a: count.append(1) or real(*a))
    rest = cl.recover(model, pruned, TEXT, held_out, options=QUICK, checkpoint=file)
    assert len(count) == 9 - 7
    require_equal(state(rest), state(whole))
    # a finished run is read, not trained again
    require_equal(
        state(cl.recover(model, pruned, TEXT, held_out, options=QUICK, checkpoint=file)),
        state(whole),
    )
    assert len(count) == 9 - 7


def test_memory_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    model, pruned = pair()
    noisy = cl.RecoverOptions(4, 1e-2, epochs=3, progress="lines")
    cl.recover(model, pruned, TEXT, options=noisy)
    said = " ".join(capsys.readouterr().out.split())
    shapes = [m.weight.shape for m in pruned.model.layers.modules() if isinstance(m, nn.Linear)]
    trained = sum(4 * (out + into) for out, into in shapes if out and into)
    weights = sum(w.numel() for m in (model, pruned, pruned) for w in m.state_dict().values())
    assert f"9 steps of 4 rows of 24 tokens, {trained:,} trained weights" in said
    assert f"{4 * (weights + 4 * trained) / 1e9:.2g} GB" in said  # weight, gradient, two means


def test_a_checkpoint_of_another_run_or_a_damaged_one(tmp_path: Path) -> None:
    model, pruned = pair()
    file = tmp_path / "state.ckpt"
    cl.recover(model, pruned, TEXT, options=QUICK, checkpoint=file)
    content = file.read_bytes()
    with pytest.raises(cl.MismatchError, match="options is"):
        cl.recover(model, pruned, TEXT, options=cl.RecoverOptions(progress=False), checkpoint=file)
    with pytest.raises(cl.MismatchError, match="texts is"):
        cl.recover(model, pruned, OTHER, options=QUICK, checkpoint=file)
    file.write_bytes(content[:-200] + content[-199:])
    with pytest.raises(cl.FileFormatError):
        cl.recover(model, pruned, TEXT, options=QUICK, checkpoint=file)


def test_a_full_disk_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recovery, "write_atomically", full)
    model, pruned = pair()
    trained = cl.recover(model, pruned, TEXT, options=QUICK, checkpoint=tmp_path / "a.ckpt")
    assert "The training goes on" in caplog.text
    assert model_risk(model, trained, TEXT).mean() < model_risk(model, pruned, TEXT).mean()


# What is told ------------------------------------------------------------------------------------


def test_saved_and_loaded_with_its_record(tmp_path: Path) -> None:
    model, _ = pair()
    units = cl.enumerate_units(model, GROUPS)
    plan = cl.Selection.from_pruned(units, [u.name for u in units if u.name in NAMES])
    refitted = cl.repair(model, plan, TEXT, options=cl.RepairOptions(progress=False))
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


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank"),
        ({"epochs": 0}, "epochs"),
        ({"rows_per_step": -1}, "rows_per_step"),
        ({"seed": -1}, "seed"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate"),
    ],
)
def test_bad_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(cl.InputError, match=message):
        cl.RecoverOptions(**changes)


def test_bad_models_and_texts() -> None:
    model, pruned = pair()
    with pytest.raises(cl.InputError, match="text of a recovery"):
        cl.recover(model, pruned, ["text"])  # type: ignore[arg-type]
    with pytest.raises(cl.InputError, match="options"):
        cl.recover(model, pruned, TEXT, options={"rank": 4})  # type: ignore[arg-type]
    with pytest.raises(cl.MismatchError):
        cl.recover(model, pruned, TEXT, TEXT, options=QUICK)
    with pytest.raises(cl.MismatchError, match="logits"):
        cl.recover(tiny_model("llama", "gqa", vocab_size=98), pruned, TEXT, options=QUICK)
    with pytest.raises(cl.InputError, match="meta"):
        cl.recover(model, copy.deepcopy(pruned).to("meta"), TEXT, options=QUICK)


def test_a_loss_that_is_not_finite() -> None:
    model, pruned = pair()
    with torch.no_grad():
        broken = copy.deepcopy(pruned)
        describe(broken).output_weight(1, "ffn").fill_(math.nan)
    with pytest.raises(cl.NumericalError, match="learning_rate"):
        cl.recover(model, broken, TEXT, options=QUICK)


def test_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    model, pruned = pair()
    with pytest.raises(cl.InputError, match=r"cocurve-lab\[recover\]"):
        cl.recover(model, pruned, TEXT, options=QUICK)
