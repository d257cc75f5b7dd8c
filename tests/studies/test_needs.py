"""What `cocurve paper` says before it begins: memory and hours."""

from __future__ import annotations

import pytest

import cocurve_lab as cl
from cocurve_lab.estimator.batches import memory_needed
from cocurve_lab.evaluation.suites import PAPER_NAMES
from cocurve_lab.evaluation.task_files import generation, multiple_choice
from cocurve_lab.evaluation.tasks import TaskOptions, suite_tasks
from cocurve_lab.extensions.big_models.forecast import rows_of
from cocurve_lab.models.architectures import describe
from cocurve_studies.paper.needs import (
    LOADS,
    Speed,
    build_hours,
    gradient_bytes,
    load_of,
    memory_words,
    suite_hours,
    timed,
)
from helpers.tiny_models import GROUPS, tiny_model


def test_memory_is_of_the_dense_model_and_the_largest_pruned_one() -> None:
    model = tiny_model()
    units, rows = cl.enumerate_units(model, GROUPS), rows_of(1, 2, 1)
    bytes_each = 4
    plan = cl.Selection.from_pruned(units, range(0, len(units), 6))
    smaller = cl.prune(model, plan).num_parameters()
    most, words = memory_words(model, units, rows, 1, [0.5, plan.realized_ratio])
    assert most == pytest.approx(bytes_each * (model.num_parameters() + smaller))
    assert "dense model" in words
    # a build that needs more than a pruned model counts instead
    long = rows_of(1, 60, 59)
    needed = memory_needed(describe(model), units, long, 64, 1)
    assert needed > bytes_each * smaller
    whole = bytes_each * model.num_parameters() + needed
    assert memory_words(model, units, long, 64, [0.5])[0] == pytest.approx(whole)


def test_hours_add_up_over_tasks_and_limits() -> None:
    assert LOADS.keys() == set(PAPER_NAMES)
    speed = Speed(token=1e-4, reply=0.1)
    one = LOADS["gsm8k"]
    alone = one.requests * (one.tokens * 1e-4 + one.reply / 16 * 0.1) / 3600
    assert suite_hours(speed, {"gsm8k": None}) == pytest.approx(alone)
    both = suite_hours(speed, {"gsm8k": None, "boolq": None})
    assert both == pytest.approx(alone + suite_hours(speed, {"boolq": None}))
    assert suite_hours(speed, {"gsm8k": None}, 10) == pytest.approx(alone * 40 / one.requests)


def test_a_task_of_a_file_is_counted_from_its_records() -> None:
    rows = [{"query": "q" * 60, "choices": ["a", "b", "c"], "gold": 0}] * 5
    assert load_of("own", multiple_choice("own", rows)) == (15, round(len(str(rows[0])) / 4), 0)
    asked = generation("said", [{"prompt": "p", "answer": "x"}] * 7, ["\n"], 33)
    assert load_of("said", asked)[::2] == (7, 33)
    for suite in ("demo", "paper"):
        tasks = suite_tasks(suite, TaskOptions())
        assert all(load_of(name, made).requests > 0 for name, made in tasks.items())


def test_gradients_count_where_a_method_takes_them() -> None:
    """More than the two float32 buffers of the layers of one pass, all of them in this model."""
    model = tiny_model()
    units, rows = cl.enumerate_units(model, GROUPS), rows_of(1, 8, 4)
    layers = sum(p.numel() for part in describe(model).layers for p in part.parameters())
    most, words = memory_words(model, units, rows, 8, [0.5], gradients=True)
    weights = 4 * model.num_parameters()
    assert most == pytest.approx(weights + gradient_bytes(model, 8))
    assert gradient_bytes(model, 8) > 8 * layers
    assert gradient_bytes(model, 16) > gradient_bytes(model, 8)
    assert "for gradients" in words
    assert memory_words(model, units, rows, 8, [0.5])[0] < most


def test_a_build_takes_the_rows_that_it_has() -> None:
    model = tiny_model()
    units = cl.enumerate_units(model, GROUPS)
    speed = timed(model, 20)
    assert speed.token > 0
    assert speed.reply > 0
    four, eight = (build_hours(model, units, rows_of(n, 20, 8), 16, Speed(1e-3, 1)) for n in (4, 8))
    assert eight == pytest.approx(2 * four)
    # at least a forward pass for each row
    assert four > 4 * 20 * 1e-3 / 3600
