"""What the extensions on H refuse: one table of calls, with the error and what it must name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_lab.base.errors import InfeasibleError, InputError
from cocurve_lab.extensions.analysis.stability import StopWhenConverged
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import tiny_model, tiny_text

GROUPED = random_curvature(make_units(), groups=4)


def early(**options: Any) -> Callable[[], Any]:
    return lambda: StopWhenConverged(**options)


CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # stability
    (lambda: cl.selection_stability(GROUPED, 0.3, draws=0), InputError, "draws is 0"),
    (lambda: cl.selection_stability(GROUPED, 1.0), InputError, "ratio is 1"),
    (
        lambda: cl.selection_stability(GROUPED, 0.9, guards=cl.Guards(layer_cap=0.5)),
        InfeasibleError,
        "0.9",
    ),
    (early(ratio=1.0), InputError, "ratio"),
    (early(interaction_strength=-1), InputError, "interaction_strength"),
    (early(patience=0), InputError, "patience is 0"),
    (
        lambda: cl.estimate_curvature(
            tiny_model(),
            None,
            tiny_text(16, 12),
            progress=False,
            options=cl.BuildOptions(groups=4, on_sequence=StopWhenConverged()),
        ),
        InputError,
        "4 groups",
    ),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_it_is_refused_and_what_is_wrong_is_named(number: int) -> None:
    call, error, named = CALLS[number]
    with pytest.raises(error, match=named):
        call()
