"""Plans on weights that are read when a layer runs: the bits of the loaded model, one reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.estimator import batches
from cocurve_lab.extensions.big_models.layerwise import LayerwisePasses
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.layers import weights_of
from helpers.tiny_models import (
    GROUPS,
    tiny_model,
    tiny_text,
    word_tokenizer,
)

TEXT = tiny_text(2, 20, 6)
CHOSEN = ([0], [], [1, 5], [3, 7, 9], [2, 4], [17], [0, 16])


def streamed(folder: Path, model: PreTrainedModel) -> tuple[PreTrainedModel, Any]:
    """The same model, its layers left in files, and what brings them."""
    model.save_pretrained(folder, max_shard_size="20KB")
    word_tokenizer().save_pretrained(folder)
    own, _ = cl.load_model(folder, device="cpu", dtype=model.dtype, stream=True)
    return own, weights_of(own)


def plans_of(model: PreTrainedModel) -> list[cl.Selection]:
    units = cl.enumerate_units(model, GROUPS)
    plans = [
        cl.Selection.from_pruned(units, [at for at in chosen if at < len(units)])
        for chosen in CHOSEN
    ]
    return [*plans, plans[2].with_gains({4: 1.25})]


@pytest.mark.parametrize(
    ("family", "heads", "dtype"),
    [
        ("llama", "mqa", torch.float32),
        ("phi3", "gqa", torch.float32),
        ("gpt_neox", "mha", torch.float32),
        ("opt_350m", "mha", torch.float32),
        ("olmo2", "gqa", torch.float32),
        ("gpt2", "mha", torch.bfloat16),
        ("gemma2", "gqa", torch.bfloat16),
    ],
)
def test_all_plans_of_a_row_take_one_reading_and_keep_their_bits(
    tmp_path: Path, family: str, heads: str, dtype: torch.dtype
) -> None:
    own, stream = streamed(tmp_path, tiny_model(family, heads, dtype=dtype))
    model, _ = cl.load_model(tmp_path, device="cpu", dtype=dtype)
    plans = plans_of(model)
    expected = cl.measure_plans(model, plans, TEXT, plans_per_batch=3, progress=False)
    cl.pruning_risk(own, plans[0], TEXT)  # what is checked once is checked now
    before = stream.bytes_read
    found = cl.measure_plans(own, plans, TEXT, plans_per_batch=3, progress=False)
    assert stream.bytes_read - before == len(TEXT) * 3 * stream.bytes_present // 2
    assert np.array_equal(found.kl, expected.kl)
    assert np.array_equal(found.nll, expected.nll)
    assert cl.pruning_risk(own, plans[3], TEXT) == cl.pruning_risk(model, plans[3], TEXT)


def test_how_many_advance_follows_from_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, stream = streamed(tmp_path, tiny_model())
    fixed = batches.Room.of(describe(own), (), TEXT, 0).needed(3)
    assert fixed > stream.bytes_present
    state = 20 * 32 * 4  # T x d float32
    # half of what is left beside a batch, in whole batches of 3
    for free, most in ((fixed + 2 * 8.5 * state, 6), (0, 3), (1e12, 99)):
        monkeypatch.setattr(batches, "free_memory", lambda _, free=free: free)
        passes = LayerwisePasses(describe(own), stream, TEXT)
        assert passes.most_together(3, 100) == most


def test_what_does_not_fit_together_is_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    own, _ = streamed(tmp_path, model)
    plans = plans_of(model)
    expected = cl.measure_plans(model, plans, TEXT, plans_per_batch=1, progress=False)
    real, tried, most = LayerwisePasses.run, [], 1

    def tight(passes: Any, ids: Any, positions: Any, parts: Any) -> list[torch.Tensor]:
        tried.append([len(rows) for rows in parts])
        found = real(passes, ids, positions, parts)
        if sum(tried[-1]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(LayerwisePasses, "run", tight)
    found = cl.measure_plans(own, plans, TEXT, plans_per_batch=2, progress=False)
    assert tried[:3] == [[2, 2, 2, 1], [2, 1], [1]]
    assert all(sizes == [1] for sizes in tried[3:])
    assert np.array_equal(found.kl, expected.kl)
    most = 0
    with pytest.raises(cl.InputError):
        cl.measure_plans(own, plans, TEXT, progress=False)


def test_the_split_of_a_risk_keeps_its_bits_in_three_readings(tmp_path: Path) -> None:
    model = tiny_model()
    own, stream = streamed(tmp_path, model)
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), [1, 2, 8, 13, 17])
    cl.pruning_risk(own, plan, TEXT)
    before = stream.bytes_read
    found = cl.split_risk(own, plan, TEXT, progress=False)
    # the dense model, the units, and the plan as a whole
    assert stream.bytes_read - before == len(TEXT) * 3 * 3 * stream.bytes_present // 2
    expected = cl.split_risk(model, plan, TEXT, progress=False)
    for name in ("quadratic_of_sum", "kl_of_joint", "units_measured"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
