"""A model that one thread measures is whole for all others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import cocurve_lab as cl
from helpers.tiny_models import tiny_model, tiny_text


def on_another_thread(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []

    def call() -> None:
        with torch.inference_mode():
            found.append(model(ids).logits)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_an_ablation_is_of_its_thread(family: str) -> None:
    model, ids = tiny_model(family), tiny_text(2).input_ids
    units = cl.enumerate_units(model, 4)
    with torch.inference_mode():
        dense = model(ids).logits
    with cl.ablate(model, [units[0], units[-1]], unit_set=units):
        with torch.inference_mode():
            assert not torch.equal(model(ids).logits, dense)
        assert torch.equal(on_another_thread(model, ids), dense)


def test_other_threads_may_use_a_model_while_it_is_measured() -> None:
    model, text = tiny_model(), tiny_text(6)
    units = cl.enumerate_units(model, 4)
    with torch.inference_mode():
        dense = model(text.input_ids[:2]).logits
    expected = cl.pruning_risk(model, [units[1]], text, unit_set=units)
    over, wrong = threading.Event(), []

    def use() -> None:
        while not over.is_set():
            with torch.inference_mode():
                wrong.append(not torch.equal(model(text.input_ids[:2]).logits, dense))

    thread = threading.Thread(target=use)
    thread.start()
    try:
        risks = [cl.pruning_risk(model, [units[1]], text, unit_set=units) for _ in range(10)]
        built = cl.estimate_curvature(model, units, text, progress=False)
    finally:
        over.set()
        thread.join()
    assert wrong
    assert not any(wrong)
    assert risks == [expected] * 10
    alone = cl.estimate_curvature(model, units, text, progress=False)
    assert (built.matrix == alone.matrix).all()
