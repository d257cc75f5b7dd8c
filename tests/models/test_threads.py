"""A model that one thread measures is whole for all others."""

from __future__ import annotations

import threading

import pytest
import torch

import cocurve_lab as cl
from helpers.tiny_models import tiny_model, tiny_text


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_other_threads_may_use_a_model_while_it_is_measured(family: str) -> None:
    model, text = tiny_model(family), tiny_text(6)
    units = cl.enumerate_units(model, 4)
    with torch.inference_mode():
        dense = model(text.input_ids[:2]).logits
    expected = cl.pruning_risk(model, [units[1]], text)
    alone = cl.estimate_curvature(model, units, text, progress=False)
    over, right = threading.Event(), []

    def use() -> None:
        while not over.is_set():
            with torch.inference_mode():
                right.append(torch.equal(model(text.input_ids[:2]).logits, dense))

    thread = threading.Thread(target=use)
    thread.start()
    try:
        risks = [cl.pruning_risk(model, [units[1]], text) for _ in range(5)]
        built = cl.estimate_curvature(model, units, text, progress=False)
    finally:
        over.set()
        thread.join()
    assert right
    assert all(right)
    assert risks == [expected] * 5
    assert (built.matrix == alone.matrix).all()
