"""Models on another device, and spread over two: the same numbers, with pretended devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.models.identity import model_device
from cocurve_lab.models.layers import weights_of
from cocurve_lab.models.loading import pick_device, pick_dtype
from helpers.devices import FIRST, SECOND, WITHOUT_DOUBLE, pretended_devices
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer

TEXT = tiny_text(2, 20, 6)


@pytest.fixture(autouse=True)
def pretended() -> Iterator[None]:
    with pretended_devices():
        yield


def build(model: Any) -> cl.Curvature:
    return cl.estimate_curvature(model, cl.enumerate_units(model, GROUPS), TEXT, 16, progress=False)


def same(model: Any, whole: Any) -> None:
    """H, the KL of plans and text are those of a model on the CPU."""
    expected = build(whole)
    found = build(model)
    assert np.array_equal(found.matrix, expected.matrix)
    assert found.matrix.trace() > 0
    plans = [cl.Selection.from_pruned(expected.units, chosen) for chosen in ([0], [1, 5], [3, 9])]
    tables = [cl.measure_plans(each, plans, TEXT, progress=False) for each in (model, whole)]
    assert np.array_equal(tables[0].kl, tables[1].kl)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_a_model_on_another_device_gives_the_same_numbers(family: str) -> None:
    model = tiny_model(family, "gqa").to(FIRST)
    assert model_device(model) == FIRST
    same(model, tiny_model(family, "gqa"))


def test_a_device_without_float64_leaves_sums_to_the_cpu() -> None:
    with pytest.raises(TypeError, match="float64"):
        torch.ones(2, device=WITHOUT_DOUBLE).double()
    model = tiny_model().to(WITHOUT_DOUBLE)
    same(model, tiny_model())
    tokenizer, text = word_tokenizer(), " ".join(f"w{at % 90}" for at in range(80))
    values = [
        cl.perplexity(m, tokenizer, text, context=16, stride=8) for m in (model, tiny_model())
    ]
    assert values[0] == values[1]
    with pytest.raises(TypeError, match="float64"):
        cl.load_model("demo", device="mps", dtype="float64")


@pytest.mark.parametrize(
    ("device", "demo", "asked", "chosen"),
    [
        ("cpu", False, None, torch.float32),
        ("cuda:1", False, None, "auto"),
        ("xpu", False, None, "auto"),
        ("cuda", True, None, torch.float32),
        ("cpu", False, "bfloat16", torch.bfloat16),
        ("cuda", True, torch.float64, torch.float64),
        ("mps", False, "float16", torch.float16),
    ],
)
def test_the_dtype_follows_from_device_and_wish(
    device: str, demo: bool, asked: Any, chosen: Any
) -> None:
    assert pick_dtype(torch.device(device), asked, demo) == chosen


def test_the_device_is_the_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for usable, best in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda usable=usable: usable)
        assert pick_device() == torch.device(best)
        assert pick_device("lazy:1") == SECOND
        assert pick_device("cpu").type == "cpu"


def saved(folder: Path, family: str = "llama") -> Path:
    tiny_model(family, "gqa").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "rest"),
    [
        ("llama", []),
        ("gemma2", []),
        ("llama", ["cpu"]),
        ("llama", ["disk"]),
        ("llama", ["cpu", "disk"]),
    ],
)
def test_a_device_map_of_load_model_gives_the_same_numbers(
    tmp_path: Path, family: str, rest: list[str]
) -> None:
    folder = saved(tmp_path, family)
    layers = [FIRST, SECOND, SECOND][: 3 - len(rest)] + rest
    places = {f"model.layers.{at}": place for at, place in enumerate(layers)}
    places |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb"), FIRST)
    # the head of gemma2 is its embedding
    places |= {"model.norm": SECOND, "lm_head": FIRST if family == "gemma2" else SECOND}
    model, _ = cl.load_model(folder, dtype="float32", device_map=places)
    whole, _ = cl.load_model(folder, device="cpu")
    same(model, whole)
    assert len(weights_of(model).devices) == len(rest)


def test_a_model_streamed_to_another_device_gives_the_same_numbers(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    model, tokenizer = cl.load_model(folder, device=FIRST, dtype="float32", stream=True)
    assert set(weights_of(model).devices.values()) == {FIRST}
    whole, _ = cl.load_model(folder, device="cpu")
    same(model, whole)
    texts = [
        cl.continue_text(each, tokenizer, "w3 w9", max_new_tokens=4) for each in (model, whole)
    ]
    assert texts[0] == texts[1]
