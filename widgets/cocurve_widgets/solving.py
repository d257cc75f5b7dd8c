"""What the lambda explorer solves on: the matrix it was given, or the additive KL of its sketch.

Both answer the same questions. A solve on the matrix takes milliseconds. One on the additive KL
takes seconds, so the explorer leaves it to a thread, and what was found is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cocurve_lab as cl
from cocurve_lab.base.tables import brief
from cocurve_lab.extensions.surrogates.additive import ADDITIVE_KL
from cocurve_lab.solver.path import LambdaPath
from cocurve_lab.solver.solve import longest

_MOST_KEPT = 64  # removal orders, a few kB each; paths of the additive KL alone

EachStep = Callable[[], object] | None


class Solving:
    """On H [M, M], or another matrix of its kind. A path is not kept: it can have many MB."""

    at_once = True  # quick enough to solve while a control is dragged
    priced = "Predicted risk {} nats per token"

    def __init__(self, curvature: cl.Curvature) -> None:
        self.curvature = curvature
        self.alone = curvature.saliency / 2  # what each unit costs without the others [M]
        self._kept: dict[Any, Any] = {}

    def solve(
        self, ratio: float, strength: float, guards: cl.Guards, each_step: EachStep = None
    ) -> cl.Selection:
        return cl.solve_greedy(self.curvature, ratio, strength, guards)

    def longest(
        self, guards: cl.Guards, upto: float, strength: float, each_step: EachStep = None
    ) -> cl.Selection:
        controls = (guards, upto, strength)
        return self.keep(controls, lambda: longest(self.curvature, *controls))

    def path(self, ratio: float, guards: cl.Guards, each_step: EachStep = None) -> LambdaPath:
        return cl.lambda_path(self.curvature, ratio, guards)

    def predict(self, pruned: Sequence[int]) -> float:
        return self.curvature.risk(pruned)

    def parts(self, order: Sequence[int]) -> dict[str, float]:
        node = float(self.alone[list(order)].sum())
        return {"node": node, "edge": self.predict(order) - node}

    def price(self, plan: cl.Selection) -> str:
        known = plan.predicted_risk if self.at_once else None  # of these plans H's is the price
        return self.priced.format(brief(self.predict(plan.pruned) if known is None else known, 4))

    def keep(self, key: Any, find: Callable[[], Any]) -> Any:
        """What was found before, or find it now; the oldest is forgotten."""
        if key not in self._kept:
            found = find()
            while len(self._kept) >= _MOST_KEPT:
                self._kept.pop(next(iter(self._kept)), None)
            self._kept[key] = found
        return self._kept[key]


class OnAdditiveKL(Solving):
    """On the additive KL: solved on the positions "fit" of the sketch, priced on "price"."""

    at_once = False
    priced = "Additive KL {} nats per token at positions it was not solved on"

    def __init__(self, curvature: cl.Curvature) -> None:
        super().__init__(curvature)
        self.additive = curvature.additive()
        self.alone = self.additive.singles("price")

    def solve(
        self, ratio: float, strength: float, guards: cl.Guards, each_step: EachStep = None
    ) -> cl.Selection:
        return self._fit(self.additive.solve, ratio, strength, guards, each_step=each_step)

    def longest(
        self, guards: cl.Guards, upto: float, strength: float, each_step: EachStep = None
    ) -> cl.Selection:
        return self._fit(self.additive.longest, guards, upto, strength, each_step=each_step)

    def path(self, ratio: float, guards: cl.Guards, each_step: EachStep = None) -> LambdaPath:
        return self._fit(self.additive.lambda_path, ratio, guards, each_step=each_step)

    def predict(self, pruned: Sequence[int]) -> float:
        return self.additive.predict(pruned, "price")

    def _fit(self, solve: Callable[..., Any], *controls: Any, each_step: EachStep) -> Any:
        find = partial(solve, *controls, part="fit", each_step=each_step)
        return self.keep((solve.__name__, *controls), find)


def solving(curvature: cl.Curvature, surrogate: str) -> Solving:
    """What solves on a surrogate: the curvature's own, or the additive KL."""
    return OnAdditiveKL(curvature) if surrogate == ADDITIVE_KL else Solving(curvature)


def surrogates_of(curvature: cl.Curvature) -> tuple[str, ...]:
    """What plans can be solved on: the curvature's own matrix, then the additive KL if it can."""
    return (curvature.surrogate, *((ADDITIVE_KL,) if curvature.shifts is not None else ()))
