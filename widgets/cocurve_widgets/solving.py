"""What the lambda explorer solves on: the matrix it was given, or the additive KL of its sketch.

Both answer the same questions. A solve on the matrix takes milliseconds. One on the additive KL
takes seconds, so the explorer leaves it to a thread, and what was found is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import cocurve_lab as cl
from cocurve_lab.base.tables import brief
from cocurve_lab.extensions.surrogates.additive import ADDITIVE_KL
from cocurve_lab.solver.path import LambdaPath
from cocurve_lab.solver.solve import longest

_MOST_KEPT = 64  # removal orders and paths, a few kB each

EachStep = Callable[[], object] | None


class Kept:
    """Plans and paths of a surrogate that were found before."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def keep(self, key: Any, find: Callable[[], Any]) -> Any:
        """What was found before, or find it now; the oldest is forgotten."""
        if key not in self._kept:
            found = find()
            while len(self._kept) >= _MOST_KEPT:
                self._kept.pop(next(iter(self._kept)), None)
            self._kept[key] = found
        return self._kept[key]


class OnMatrix(Kept):
    """On H [M, M], or another matrix of its kind."""

    at_once = True  # quick enough to solve while a control is dragged

    def __init__(self, curvature: cl.Curvature) -> None:
        super().__init__()
        self.curvature = curvature

    def solve(
        self, ratio: float, strength: float, guards: cl.Guards, each_step: EachStep = None
    ) -> cl.Selection:
        return cl.solve_greedy(self.curvature, ratio, strength, guards)

    def longest(
        self, guards: cl.Guards, upto: float, strength: float, each_step: EachStep = None
    ) -> cl.Selection:
        found = (guards, upto, strength)
        return self.keep(found, lambda: longest(self.curvature, guards, upto, strength))

    def path(self, ratio: float, guards: cl.Guards, each_step: EachStep = None) -> LambdaPath:
        return cl.lambda_path(self.curvature, ratio, guards)

    def parts(self, order: list[int]) -> dict[str, float]:
        node = float(self.curvature.saliency[order].sum()) / 2
        return {"node": node, "edge": float(self.curvature.risk(order)) - node}

    def price(self, plan: cl.Selection) -> str:
        assert plan.predicted_risk is not None
        return f"Predicted risk {brief(plan.predicted_risk, 4)} nats per token"


class OnAdditiveKL(Kept):
    """On the additive KL: solved on the positions "fit" of the sketch, priced on "price"."""

    at_once = False

    def __init__(self, curvature: cl.Curvature) -> None:
        super().__init__()
        self.additive = curvature.additive()
        self.singles = self.additive.singles("price")

    def solve(
        self, ratio: float, strength: float, guards: cl.Guards, each_step: EachStep = None
    ) -> cl.Selection:
        return self.keep(
            ("plan", ratio, strength, guards),
            lambda: self.additive.solve(ratio, strength, guards, part="fit", each_step=each_step),
        )

    def longest(
        self, guards: cl.Guards, upto: float, strength: float, each_step: EachStep = None
    ) -> cl.Selection:
        return self.keep(
            ("longest", guards, upto, strength),
            lambda: self.additive.longest(guards, upto, strength, part="fit", each_step=each_step),
        )

    def path(self, ratio: float, guards: cl.Guards, each_step: EachStep = None) -> LambdaPath:
        return self.keep(
            ("path", ratio, guards),
            lambda: self.additive.lambda_path(ratio, guards, part="fit", each_step=each_step),
        )

    def parts(self, order: list[int]) -> dict[str, float]:
        node = float(self.singles[order].sum())
        return {"node": node, "edge": self.additive.predict(order, "price") - node}

    def price(self, plan: cl.Selection) -> str:
        found = self.additive.predict(plan, "price")
        return f"Additive KL {brief(found, 4)} nats per token at positions it was not solved on"


Solving: TypeAlias = OnMatrix | OnAdditiveKL


def solving(curvature: cl.Curvature, surrogate: str) -> Solving:
    """What solves on a surrogate: the curvature's own, or the additive KL."""
    return OnAdditiveKL(curvature) if surrogate == ADDITIVE_KL else OnMatrix(curvature)


def surrogates_of(curvature: cl.Curvature) -> tuple[str, ...]:
    """What plans can be solved on: the curvature's own matrix, then the additive KL if it can."""
    return (curvature.surrogate, *((ADDITIVE_KL,) if curvature.shifts is not None else ()))
