"""Builds and plans of tiny models, and H compared to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedModel

import cocurve_lab as cl
from helpers.tiny_models import GROUPS, tiny_model, tiny_text

ROWS = 7
BITS = ("matrix", "group_grams", "group_risks", "group_positions")


def build(
    model: PreTrainedModel | None = None,
    text: cl.CalibrationSet | None = None,
    top_r: int = 32,
    *,
    checkpoint: Any = None,
    workers: Any = None,
    listeners: Any = (),
    progress: Any = False,
    **options: Any,
) -> cl.Curvature:
    """H of a tiny model; `options` are those of `BuildOptions`."""
    model, text = model or tiny_model(), text or tiny_text(4, 20, 6)
    return cl.estimate_curvature(
        model,
        cl.enumerate_units(model, GROUPS),
        text,
        top_r,
        checkpoint=checkpoint,
        progress=progress,
        options=cl.BuildOptions(**options),
        workers=workers,
        listeners=listeners,
    )


def build_of_seven(
    model: PreTrainedModel | None = None, text: cl.CalibrationSet | None = None, **options: Any
) -> cl.Curvature:
    """H of a tiny model over `ROWS` rows in five groups, so that some groups have two."""
    return build(model, text or tiny_text(ROWS, 20, 6), **({"groups": 5} | options))


def require_same_bits(a: cl.Curvature, b: cl.Curvature, *more: str) -> None:
    for name in (*BITS, *more):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def plan_of(
    model: PreTrainedModel, chosen: Iterable[Any], gains: Mapping[Any, float] | None = None
) -> cl.Selection:
    """A plan of units of a tiny model, by number or name, with gains of others."""
    units = cl.enumerate_units(model, GROUPS)
    plan = cl.Selection.from_pruned(units, chosen)
    return plan.with_gains({units.index(unit): gain for unit, gain in (gains or {}).items()})


def stop_after(done: int) -> Callable[[Any], str | None]:
    """Stop a build after some sequences, as its `on_sequence`."""
    return lambda build: "Enough." if build.done == done else None
