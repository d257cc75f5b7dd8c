"""H: the fast build against the paper's definition, and what a build must survive."""

from __future__ import annotations

import errno
import operator
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.base import storage
from cocurve_lab.base.atomic import previous
from cocurve_lab.curvature.settings import BuildOptions
from cocurve_lab.estimator import algorithm1 as features
from cocurve_lab.estimator import build as build_module
from cocurve_lab.estimator import support as head_rows
from cocurve_lab.estimator.replay import Replay
from cocurve_lab.estimator.support import SupportHead, top_support
from helpers.builds import build, require_same_bits, stop_after
from helpers.problems import interrupt_at
from helpers.tiny_models import (
    FAMILIES,
    GROUPS,
    VOCAB,
    naive_build,
    relative_error,
    tiny_model,
    tiny_text,
)

# Replay = naive ---------------------------------------------------------------------------------


DOUBLE = {"dtype": torch.float64}
BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


@pytest.mark.parametrize("scored", ["all", 5])
@pytest.mark.parametrize(
    "changes",
    [
        *({"family": family} | DOUBLE for family in FAMILIES),
        *({"family": family, "attention": "eager"} for family in ("llama", "phi3")),
        *({"heads": heads} for heads in ("mha", "mqa")),
        BIASES,
        {"layers": 1},
        {"layers": 2},
        {"family": "mistral", "sliding_window": 5},
    ],
    ids=str,
)
def test_replay_is_naive_full_passes(changes: dict[str, Any], scored: Any) -> None:
    """The contract of tests/models does this for every family."""
    model, text = tiny_model(**changes), tiny_text(2, 20, scored)
    curvature = build(model, text)
    expected, risks = naive_build(model, text, 32)
    rounding, of_risk = (1e-11, 1e-9) if model.dtype == torch.float64 else (1e-5, 2e-4)
    assert relative_error(curvature.matrix, expected) <= rounding
    np.testing.assert_allclose(curvature.single_unit_risk, risks, rtol=of_risk)
    if "sliding_window" in changes:  # the window matters here
        assert relative_error(naive_build(tiny_model("mistral"), text, 32)[0], expected) > 0.01


def test_half_precision_is_close_to_float32() -> None:
    model, text = tiny_model(dtype=torch.bfloat16), tiny_text(3, 20)
    found = build(model, text)
    expected, _ = naive_build(model.float(), text, 32)  # the same rounded weights, exact arithmetic
    assert found.provenance["model_dtype"] == "bfloat16"
    assert relative_error(found.matrix, expected) <= 0.05


@pytest.mark.parametrize("way", ["once", "whole", "piecewise"])
def test_the_head_on_the_support(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Of the whole head, of rows gathered once, and of rows gathered a few at a time."""
    if way != "once":
        monkeypatch.setattr(head_rows, "GATHER_BYTES", 3 * 20 * 8 * 4)  # three positions at a time
        monkeypatch.setattr(head_rows, "_WHOLE_HEAD_FACTOR", {"whole": 1000, "piecewise": 0}[way])
    head = torch.nn.Linear(8, 50)
    hidden = torch.randn(3, 5, 8)
    for top_r in (4, 20, 50):
        support = top_support(head, hidden[:1], top_r)
        expected = head(hidden).gather(-1, support.expand(3, -1, -1))
        mine = SupportHead(SimpleNamespace(head=head, settled=lambda z: z), support)
        torch.testing.assert_close(mine(hidden), expected)
        if top_r == 20:
            assert (mine.columns is not None, mine.whole) == (way == "once", way == "whole")


# The paper's identities -------------------------------------------------------------------------


def test_gram_is_the_definition_on_the_full_vocabulary() -> None:
    """H_uv = E[dz_u^T (diag(p0) - p0 p0^T) dz_v], eq. (huv), with F written out."""
    model, text = tiny_model("qwen2", "mqa", layers=2, dtype=torch.float64), tiny_text(2, 12)
    units = cl.enumerate_units(model, GROUPS)
    expected = np.zeros((len(units), len(units)))
    for ids in text.input_ids:
        dense = model(ids[None]).logits[0, :-1]
        shifts = []
        for unit in units:
            with cl.ablate(model, [unit]):
                shifts.append(dense - model(ids[None]).logits[0, :-1])
        delta, p0 = torch.stack(shifts, dim=1), torch.softmax(dense, dim=-1)
        fisher = torch.diag_embed(p0) - p0[:, :, None] * p0[:, None, :]
        expected += torch.einsum("tuy,tyz,tvz->uv", delta, fisher, delta).numpy()
    found = build(model, text, VOCAB)
    assert relative_error(found.matrix, expected / text.positions.numel()) <= 1e-10


def test_half_the_diagonal_is_the_risk_of_a_weak_unit() -> None:
    model = tiny_model(dtype=torch.float64)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:, :11] *= 1e-3
    curvature = build(model, tiny_text(2, 20), VOCAB)
    unit = curvature.units.index("L1.ffn[0]")
    ratio = curvature.saliency[unit] / 2 / curvature.single_unit_risk[unit]
    assert ratio == pytest.approx(1, abs=2e-3)


def test_groups_sum_to_the_whole() -> None:
    curvature = build(text=tiny_text(5, 20, 6), groups=2)
    assert curvature.group_positions.tolist() == [18, 12]
    total = curvature.group_grams.sum(0) / 30
    total = (total + total.T) / 2  # by some kernels a float32 Gram is symmetric to rounding only
    np.testing.assert_allclose(total, curvature.matrix, rtol=1e-12)
    np.testing.assert_array_equal(curvature.single_unit_risk, curvature.group_risks.sum(0) / 30)


# Interruption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_is_uninterrupted_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    model, text, path = tiny_model(), tiny_text(5, 20, 6), tmp_path / "build.ckpt"
    whole = build(model, text, groups=2, units_per_batch=3)
    with monkeypatch.context() as patch:
        interrupt_at(patch, stop, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            build(model, text, checkpoint=path, groups=2, units_per_batch=3)
    gram = Mock(side_effect=features.gram_matrix)
    monkeypatch.setattr(features, "gram_matrix", gram)
    resumed = build(model, text, checkpoint=path, groups=2)
    assert gram.call_count == 5 - stop
    assert resumed.provenance["runtime"]["units_per_batch"] == 3  # as the checkpoint says
    assert resumed.provenance["complete"] is True
    require_same_bits(resumed, whole)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
from helpers.tiny_models import GROUPS, tiny_model, tiny_text
import cocurve_lab as cl
from cocurve_lab.estimator import algorithm1 as features
torch.set_num_threads(1)
real, calls = features.gram_matrix, [0]
def gram(features):
    calls[0] += 1
    if calls[0] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(features)
features.gram_matrix = gram
model = tiny_model()
cl.estimate_curvature(model, cl.enumerate_units(model, GROUPS), tiny_text(6, 20, 6), 32,
    checkpoint=sys.argv[2], progress=False, options=cl.BuildOptions(checkpoint_seconds=0))
"""


@pytest.mark.slow
def test_a_killed_process_loses_one_sequence_at_most(tmp_path: Path) -> None:
    path = tmp_path / "build.ckpt"
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parents[1]), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    stored = storage.load_plain(path, format_name="cocurve-build", version=1)
    assert stored["done"] == 3
    model, text = tiny_model(), tiny_text(6, 20, 6)
    whole = build(model, text, num_threads=1)
    require_same_bits(build(model, text, checkpoint=path), whole)


# Checkpoints ------------------------------------------------------------------------------------


def checkpoint_of(path: Path) -> bytes:
    """Leave a checkpoint of two of four sequences."""
    build(checkpoint=path, checkpoint_seconds=0, on_sequence=stop_after(2))
    return path.read_bytes()


def of_two_groups(path: Path) -> None:
    model, text = tiny_model(), tiny_text(4, 20, 6)
    cl.estimate_curvature(model, cl.enumerate_units(model, 2), text, 32, checkpoint=path)


@pytest.mark.parametrize(
    ("resume", "field"),
    [
        (lambda at: build(tiny_model(seed=1), checkpoint=at), "model_fingerprint"),
        (lambda at: build(tiny_model(dtype=torch.bfloat16), checkpoint=at), "model_dtype"),
        (lambda at: build(text=tiny_text(4, 20, 6, seed=1), checkpoint=at), "calibration_finger"),
        (lambda at: build(text=tiny_text(3, 20, 6), checkpoint=at), "num_sequences"),
        (lambda at: build(top_r=31, checkpoint=at), "top_r"),
        (lambda at: build(groups=2, checkpoint=at), "groups"),
        (lambda at: build(full_vocabulary=True, checkpoint=at), "risk_support"),
        (lambda at: build(shard=(2, 2), checkpoint=at), "shard"),
        (of_two_groups, "units_fingerprint"),
    ],
)
def test_the_checkpoint_of_another_build_is_refused(
    tmp_path: Path, resume: Any, field: str
) -> None:
    path = tmp_path / "build.ckpt"
    before = checkpoint_of(path)
    with pytest.raises(cl.MismatchError, match=field):
        resume(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "build.ckpt"
    content = checkpoint_of(path)
    if damage == "missing":
        os.replace(path, previous(path))
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    require_same_bits(build(checkpoint=path), build())
    for file in (path, previous(path)):
        file.write_bytes(b"junk")
    with pytest.raises(cl.FileFormatError):
        build(checkpoint=path)


def test_a_full_disk_does_not_stop_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model, text = tiny_model(), tiny_text(3, 20, 6)
    monkeypatch.setattr(build_module, "write_atomically", full)
    found = build(model, text, checkpoint=tmp_path / "build.ckpt", checkpoint_seconds=0)
    assert found.provenance["events"]
    require_same_bits(found, build(model, text))


def test_checkpoint_is_written_every_sequence_or_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves: list[int] = []
    monkeypatch.setattr(build_module.Build, "save", lambda self: saves.append(self.done))
    model, text = tiny_model(), tiny_text(4, 20, 6)
    build(model, text, checkpoint=tmp_path / "a", checkpoint_seconds=0)
    assert saves == [1, 2, 3, 4]
    saves.clear()
    build(model, text, checkpoint=tmp_path / "b", checkpoint_seconds=60)
    assert saves == [4]


# Memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_out_of_memory_halves_the_batch(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    real = Replay._started
    seen: list[int] = []

    def tight(self: Replay, units: Any) -> torch.Tensor:
        seen.append(len(units))
        if len(units) > 2:
            if kind == "cpu":
                torch.empty(1 << 60)  # what a CPU allocation really raises
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, units)

    model, text = tiny_model("llama", "mha"), tiny_text(2, 20, 6)
    expected = build(model, text, units_per_batch=2)
    monkeypatch.setattr(Replay, "_started", tight)
    found = build(model, text, units_per_batch=8)
    require_same_bits(found, expected)
    assert seen[:3] == [8, 4, 2]
    assert max(seen[3:]) == 2
    assert found.provenance["runtime"]["units_per_batch"] == 2
    assert len(found.provenance["events"]) == 2


def test_memory_that_runs_out_elsewhere_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "build.ckpt"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1, torch.OutOfMemoryError("CUDA out of memory"))
        with pytest.raises(cl.InputError):
            build(checkpoint=path)
    assert storage.load_plain(path, format_name="cocurve-build", version=1)["done"] == 1
    for error, raised in (
        (torch.OutOfMemoryError("CUDA out of memory"), cl.InputError),  # one alone does not fit
        (RuntimeError("shapes cannot be multiplied"), RuntimeError),
    ):
        monkeypatch.setattr(Replay, "_started", Mock(side_effect=error))
        with pytest.raises(raised) as caught:
            build()
        assert type(caught.value) is raised


PEAK = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import torch
from helpers.tiny_models import tiny_model, tiny_text
import cocurve_lab as cl
torch.set_num_threads(1)
model = tiny_model(layers=2, vocab_size=512, max_position_embeddings=256)
units = cl.enumerate_units(model, 4)
for rows in (3, 12):  # one row's features: 12 units x 255 positions x 512 tokens = 6.3 MB
    cl.estimate_curvature(model, units, tiny_text(rows, 256, vocab=512), 512, progress=False,
        options=cl.BuildOptions(units_per_batch=2))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_sequences() -> None:
    command = [sys.executable, "-c", PEAK, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    few, many = map(int, done.stdout.split())  # KiB
    assert many - few < 12_000, "nine more rows would have stored 56,000 KiB of features"


# Bad input, and what must be put back -----------------------------------------------------------


def test_an_r_above_the_vocabulary_takes_it_whole_and_is_the_same_build(tmp_path: Path) -> None:
    model, text = tiny_model(), tiny_text(2, 20, 6)
    units = cl.enumerate_units(model, GROUPS)
    whole = cl.load_or_estimate(tmp_path, model, units, text, VOCAB, progress=False)
    again = cl.load_or_estimate(tmp_path, model, units, text, 10**6, progress=False)
    assert len(list(tmp_path.glob("*.pkl"))) == 1
    assert again.provenance == whole.provenance
    assert again.provenance["top_r"] == VOCAB
    assert np.array_equal(build(model, text, VOCAB + 1).matrix, whole.matrix)


def of_other_units() -> None:
    units = cl.enumerate_units(tiny_model("llama", "mha"), GROUPS)
    cl.estimate_curvature(tiny_model(), units, tiny_text(1), progress=False)


def without_layers() -> None:
    model = tiny_model().to("meta")
    model.model.embed_tokens = tiny_model().model.embed_tokens
    cl.pruning_risk(model, [], tiny_text(2, 20, 6))


BAD: dict[str, tuple[Any, type[Exception]]] = {
    "an empty support": (lambda: build(top_r=0), cl.InputError),
    "long rows": (lambda: build(text=tiny_text(2, 65)), cl.InputError),
    "other tokens": (lambda: build(text=tiny_text(2, 20, vocab=500)), cl.InputError),
    "no weights": (lambda: build(tiny_model().to("meta")), cl.InputError),
    "no layers": (without_layers, cl.InputError),
    "other units": (of_other_units, cl.MismatchError),
    "an unknown method": (
        lambda: cl.estimate_curvature(tiny_model(), None, tiny_text(1), method="probes"),
        cl.InputError,
    ),
    "no groups": (lambda: BuildOptions(groups=0), cl.InputError),
    "no such shard": (lambda: build(shard=(0, 2)), cl.InputError),
    "a shard beyond": (lambda: build(shard=(3, 2)), cl.InputError),
    "too many shards": (lambda: build(shard=(1, 6)), cl.InputError),
    "other options": (
        lambda: cl.estimate_curvature(tiny_model(), None, tiny_text(1), options={}),  # type: ignore[arg-type]
        cl.InputError,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    call, error = BAD[name]
    with pytest.raises(error):
        call()


@pytest.mark.parametrize("where", ["k_proj", "sequence 0"])
def test_poisoned_weights_are_named(where: str) -> None:
    model = tiny_model()
    if where == "k_proj":  # the softmax hides it: logits stay finite, and its head costs nothing
        model.model.layers[0].self_attn.k_proj.weight[:] = float("nan")
    else:  # finite weights whose products are not
        model.model.layers[0].mlp.gate_proj.weight[:] = 1e30
        model.model.layers[0].mlp.up_proj.weight[:] = 1e30
    with pytest.raises(cl.NumericalError, match=where):
        build(model, tiny_text(2, 20, 6))


def test_global_state_and_the_model_are_left_as_they_were() -> None:
    model = tiny_model()
    model.train()
    model.model.layers[1].eval()  # a mixed state must come back mixed
    modes = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    threads = torch.get_num_threads()
    build(model, tiny_text(2, 20, 6), num_threads=threads + 1)
    assert torch.get_num_threads() == threads
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("place", ["", "cuda.matmul", "mkldnn.matmul"])
def test_a_build_takes_full_precision_where_torch_is_told_otherwise(place: str) -> None:
    model, text = tiny_model(), tiny_text(2, 20, 6)
    expected = build(model, text)
    backend = operator.attrgetter(place)(torch.backends) if place else torch.backends
    before = backend.fp32_precision
    try:
        backend.fp32_precision = "tf32"
        require_same_bits(build(model, text), expected)
        assert backend.fp32_precision == "tf32"
    finally:
        backend.fp32_precision = before


def test_dropout_is_off_while_measuring() -> None:
    model, text = tiny_model(attention_dropout=0.5), tiny_text(2, 20, 6)
    expected = build(model, text)
    require_same_bits(build(model.train(), text), expected)


# Loading what was built -------------------------------------------------------------------------


def test_load_or_estimate_saves_then_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = tiny_model(), tiny_text(2, 20, 6)
    units = cl.enumerate_units(model, GROUPS)
    built = cl.load_or_estimate(tmp_path, model, units, text, 32)
    assert [path.suffix for path in tmp_path.iterdir()] == [".pkl"]  # no checkpoint left behind
    with monkeypatch.context() as patch:
        patch.setattr(features, "gram_matrix", None)  # nothing may be built from here on
        loaded = cl.load_or_estimate(tmp_path, model, units, text, 32)
    require_same_bits(built, loaded)
    assert loaded.units == units
    capsys.readouterr()
    cl.load_or_estimate(tmp_path, model, units, text, 16, progress=False)
    assert len(list(tmp_path.glob("*.pkl"))) == 2  # another r never overwrites
    assert capsys.readouterr().out == ""


def test_a_full_disk_at_the_end_does_not_lose_the_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model, text = tiny_model(), tiny_text(2, 20, 6)
    monkeypatch.setattr(cl.Curvature, "save", full)
    units = cl.enumerate_units(model, GROUPS)
    found = cl.load_or_estimate(tmp_path, model, units, text, 32, progress=False)
    require_same_bits(found, build(model, text))
    assert list(tmp_path.glob("*.ckpt"))  # what was written stays
