"""Arguments of a wrong type: each is an InputError that names it, whatever verb it is given to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.base.arguments import MOST_THREADS
from cocurve_lab.evaluation.code_execution import Limits
from cocurve_lab.methods.base import Evidence
from cocurve_lab.models.runtime import measuring
from helpers.problems import random_curvature
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer

MODEL, TOKENIZER, ROWS = tiny_model(), word_tokenizer(), tiny_text(3, 14)
UNITS = cl.enumerate_units(MODEL, GROUPS)
H = random_curvature(UNITS)
PLAN = cl.solve_greedy(H, 0.2)
TEXTS = ["w1 w2 w3 w4"] * 99
KEPT = next(i for i, unit in enumerate(UNITS) if i not in PLAN.pruned and unit.kind == "ffn")


def packed(**options: Any) -> cl.CalibrationSet:
    given = {"num_sequences": 2, "seq_len": 8, "positions_per_sequence": 4} | options
    return cl.CalibrationSet.from_texts(TEXTS, TOKENIZER, **given)


def estimated(top_r: Any = 8, units: Any = UNITS, rows: Any = ROWS, **options: Any) -> Any:
    built = cl.BuildOptions(**options)
    return cl.estimate_curvature(MODEL, units, rows, top_r, progress=False, options=built)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "ratio as text": (lambda: cl.solve_greedy(H, "0.2"), "ratio is '0.2'"),
    "layers as a float": (lambda: cl.Guards(protect_first=1.5), "protect_first is 1.5"),
    "kinds as a number": (lambda: cl.Guards(kinds=3), "kinds is 3"),
    "kinds of lists": (lambda: cl.Guards(kinds=[["ffn"]]), "kinds is"),
    "guards as a dict": (lambda: cl.solve_greedy(H, 0.2, 1.0, {}), "guards is a dict"),
    "H as a matrix": (lambda: cl.solve_greedy(H.matrix, 0.2), "curvature is a ndarray"),
    "a number as H": (lambda: cl.redundancy_gate(3), "curvature is a int"),
    "a model as H": (lambda: cl.edge_graph(MODEL), "curvature is a LlamaForCausalLM"),
    "H and plan swapped": (lambda: cl.refine(H, PLAN), "selection is a Curvature"),
    "plan and H swapped": (lambda: cl.solve_gains(PLAN, H), "curvature is a Selection"),
    "rows and units swapped": (lambda: estimated(units=ROWS, rows=UNITS), "is a CalibrationSet"),
    "a unit that is a float": (lambda: cl.solve_greedy(H, 0.2, include=[1.5]), "no unit 1.5"),
    "a unit for units": (lambda: cl.solve_greedy(H, 0.2, include=3), "the list of units is 3"),
    "risk below the first": (lambda: H.risk([-1]), "no unit -1"),
    "risk beyond the last": (lambda: H.risk([99999]), "no unit 99999"),
    "risk of a number": (lambda: H.risk(3), "the list of units is 3"),
    "masked number": (lambda: cl.pruning_risk(MODEL, 3, ROWS), "the list of units is 3"),
    "masked float": (lambda: cl.pruning_risk(MODEL, [1.5], ROWS), "no unit 1.5"),
    "gains as a list": (lambda: PLAN.with_gains([1]), "gains is"),
    "a gain as text": (lambda: PLAN.with_gains({KEPT: "2"}), "a gain is '2'"),
    "thousands of digits": (lambda: cl.Target(parameters="9" * 5000), "parameters is '9+\\.\\.\\."),
    "a number as long": (lambda: cl.Target(parameters=10**5000), "an integer of 16610 bits"),
    "ridge as text": (lambda: cl.solve_gains(H, PLAN, ridge="x"), "ridge is 'x'"),
    "top_k as a float": (lambda: cl.edge_graph(H, top_k=1.5), "top_k is 1.5"),
    "threshold as text": (lambda: cl.edge_graph(H, threshold="x"), "threshold is 'x'"),
    "a method by number": (lambda: cl.get_method(3), "name of a method is a int"),
    "a device by number": (lambda: cl.load_model("demo", device=3.5), "device '3.5'"),
    "rows as text": (lambda: packed(num_sequences="3"), "num_sequences is '3'"),
    "half a token": (lambda: packed(seq_len=8.5), "seq_len is 8.5"),
    "half a position": (lambda: packed(positions_per_sequence=1.5), "positions_.* is 1.5"),
    "a seed as text": (lambda: packed(seed="a"), "seed is 'a'"),
    "a seed beyond 64 bits": (lambda: packed(seed=2**70), "seed is 1180591620717411303424"),
    "complex ids": (
        lambda: cl.CalibrationSet(torch.ones(2, 4, dtype=torch.complex64)),
        "input_ids is torch.complex64",
    ),
    "half a held-out row": (lambda: ROWS.split(held_out=1.5), "held_out is 1.5"),
    "half of a support": (lambda: estimated(3.5), "top_r is 3.5"),
    "units as a list": (lambda: estimated(units=[1]), "units is a list"),
    "a tensor for text": (lambda: estimated(rows=ROWS.input_ids), "calibration is a Tensor"),
    "groups as a float": (lambda: cl.BuildOptions(groups=1.5), "groups is 1.5"),
    "seconds as text": (lambda: cl.BuildOptions(checkpoint_seconds="1"), "checkpoint_.* is '1'"),
    "a shard as text": (lambda: cl.BuildOptions(shard="12"), "shard is '12'"),
    "a shard of floats": (lambda: cl.BuildOptions(shard=(1.5, 2)), "shard is 1.5"),
    "a million threads": (lambda: cl.BuildOptions(num_threads=10**6), "num_threads is 1,000,000"),
    "context as text": (lambda: cl.perplexity(MODEL, TOKENIZER, TEXTS, "8"), "context is '8'"),
    "no text": (lambda: cl.perplexity(MODEL, TOKENIZER, None), "text is None"),
    "half a sample": (lambda: cl.evaluate_tasks(MODEL, TOKENIZER, limit=1.5), "limit is 1.5"),
    "seconds of a program": (lambda: Limits(seconds="3"), "seconds is '3'"),
    "half a new token": (lambda: cl.continue_text(MODEL, TOKENIZER, "w1", 1.5), "max_new_tokens"),
    "a prompt by number": (lambda: cl.continue_text(MODEL, TOKENIZER, 3), "prompt is a int"),
    "an H by number": (lambda: cl.Curvature.load(3), "path is 3, not a path"),
    "a folder by number": (lambda: cl.load_pruned(3), "folder is 3"),
    "an evidence by number": (lambda: Evidence.load(3), "path is 3, not a path"),
    "one part": (lambda: cl.Curvature.merge(3), "parts is 3, not a list"),
    "parts that are none": (lambda: cl.Curvature.merge([3]), "a part is a int"),
    "a plan by number": (lambda: cl.refine(3, H), "selection is a int"),
    "a plan as a model": (lambda: cl.pruning_risk(PLAN, MODEL, ROWS), "Give a"),
    "a text for rows": (lambda: cl.pruning_risk(MODEL, PLAN, "a text"), "Give a"),
    "a name as a model": (lambda: cl.enumerate_units("demo"), "Give a"),
    "a tokenizer as a model": (lambda: cl.continue_text(TOKENIZER, MODEL, "w1"), "Give a"),
    "a tokenizer in a model's place": (lambda: cl.perplexity(TOKENIZER, MODEL, "w1 w2"), "Give a"),
    "questions and plans swapped": (
        lambda: cl.answer_accuracy(MODEL, TOKENIZER, ["a question"], [PLAN]),
        "Give a",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    call, said = WRONG[name]
    with pytest.raises(cl.InputError, match=said):
        call()


def test_no_way_leads_to_more_threads_than_torch_survives() -> None:
    """A checkpoint, too, says how many threads there were."""
    with pytest.raises(cl.InputError), measuring(MODEL, 10**6):
        pass
    assert cl.BuildOptions(num_threads=MOST_THREADS).num_threads == MOST_THREADS
