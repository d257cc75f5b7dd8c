"""Rankings of the experts of a mixture, one by one: REAP, and how often they are chosen.

Both remove the same number of experts from every layer, as the methods are published. Attention and
FFN units stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base.errors import InputError
from ..extensions.repairing.projection_inputs import run_rows
from ..models.unit import Kind
from ..models.units import UnitSet
from ..solver.greedy import fill
from ..solver.guards import FREE, Guards, PartialPlan, Rules
from ..solver.selection import Selection
from .base import Evidence, Scored, Subject

_ALONE: tuple[Kind, ...] = ("expert",)


class ExpertScored(Scored):
    """A method that scores experts, and removes the lowest of every layer together."""

    knows_experts = True

    def of_tokens(self, experts: Any, hidden: Tensor, gates: Tensor, number: int) -> Tensor:
        """Score an expert by the tokens [n, d] that chose it and their gates [n]: n numbers."""
        raise NotImplementedError

    def mean_over(self, tokens: float, chosen: float) -> float:
        """Return the number of tokens by which an expert's sum is divided."""
        raise NotImplementedError

    def scores(self, subject: Subject) -> np.ndarray:
        """Score each expert on the tokens that choose it [M]; 0 for units of other kinds."""
        architecture, units = subject.architecture, subject.units
        tokens = subject.calibration.input_ids.numel()
        layers = sorted({unit.layer for unit in units if unit.kind == "expert"})
        if not layers:
            raise InputError(
                f"{self.title} ranks experts, and this model has none. Use another method, such as "
                "wanda-sp."
            )
        sums = {at: np.zeros((2, architecture.width(at, "expert"))) for at in layers}

        def watch(layer: int, experts: Any, args: tuple[Tensor, ...], _: Any) -> None:
            hidden, chosen, gates = args
            for number in chosen.unique().tolist():
                rows, places = torch.where(chosen == number)
                found = self.of_tokens(experts, hidden[rows], gates[rows, places], number)
                sums[layer][:, number] += float(found.double().sum()), len(rows)

        hooks = {architecture.block(at, "expert").experts: partial(watch, at) for at in layers}
        run_rows(
            subject.model,
            subject.calibration,
            hooks,
            progress=subject.progress,
            title=self.title,
        )
        scores = np.zeros(len(units))
        for at, unit in enumerate(units):
            if unit.kind == "expert":
                total, count = sums[unit.layer][:, unit.start]
                scores[at] = total / max(1.0, self.mean_over(tokens, count))
        return scores

    def select(
        self, evidence: Evidence, units: UnitSet, ratio: float, guards: Guards = FREE
    ) -> Selection:
        """Remove the lowest expert of every layer, then the next ones, up to the ratio."""
        self.require_own(evidence, units)
        rules = Rules(units, guards, ratio)
        plan = PartialPlan(rules)
        order = np.argsort(evidence.scores, kind="stable").tolist()
        ranked = [u for u in order if units[u].kind == "expert"]
        layers = sorted(set(units.layers[ranked].tolist()))

        def rounds() -> Iterator[list[int]]:
            while True:
                gone = set(plan.order)
                left = (u for u in ranked if u not in gone and plan.fits(u))
                lowest: dict[int, int] = {}
                for u in left:
                    lowest.setdefault(int(units.layers[u]), u)
                if len(lowest) < len(layers) or not lowest:
                    return
                yield list(lowest.values())

        def remove(chosen: list[int]) -> None:
            for u in chosen:
                plan.remove(u)

        if not fill(rounds(), remove, plan.enough):
            raise rules.out_of_reach(
                f"{self.title} removes experts alone, equally many of each layer, and comes to "
                f"{plan.spent / units.total_cost:.2%}. Lower the ratio or loosen the guards.",
                plan.spent,
            )
        return Selection.from_pruned(
            units,
            plan.order,
            requested_ratio=float(ratio),
            ordered=True,
            guards=guards,
            uniform=_ALONE if plan.order else False,
            **evidence.source,
        )


@dataclass(frozen=True)
class Reap(ExpertScored):
    """Router-weighted expert activation pruning (REAP).

    An expert's score is the mean of gate x |output| over the tokens that choose it, where the
    output is the expert's alone: what it adds to the stream of these tokens. The lowest go. The
    published method, without the merging that it argues against.
    """

    name = "reap"
    title = "REAP"

    def of_tokens(self, experts: Any, hidden: Tensor, gates: Tensor, number: int) -> Tensor:
        """Multiply each token's gate by the norm of what the expert makes of it."""
        only = torch.full((len(hidden), 1), number, device=hidden.device)
        output = type(experts).forward(experts, hidden, only, torch.ones_like(gates)[:, None])
        return gates.float() * output.float().norm(dim=-1)

    def mean_over(self, tokens: float, chosen: float) -> float:
        """Divide by the tokens that chose the expert."""
        return chosen


@dataclass(frozen=True)
class ExpertFrequency(ExpertScored):
    """The share of tokens that choose an expert; the rarest go."""

    name = "expert-frequency"
    title = "Expert frequency"

    def of_tokens(self, experts: Any, hidden: Tensor, gates: Tensor, number: int) -> Tensor:
        """Count each token once."""
        return torch.ones_like(gates)

    def mean_over(self, tokens: float, chosen: float) -> float:
        """Divide by all tokens."""
        return tokens
