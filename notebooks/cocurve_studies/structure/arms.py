"""The arms of the causal study: for every pair of thresholds, every fill and every seed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import numpy as np

from cocurve_lab.base.errors import InfeasibleError, InputError
from cocurve_lab.curvature.graph import bridge_units
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.targets import require_ratio

from ..tables import Row
from .matching import Fill, Matching, causal_arms, match_controls


@dataclass(frozen=True)
class CausalOptions:
    """The choices behind the arms.

    Attributes:
        ratio: share of removable cost of each arm, (0, 1).
        thresholds: (saliency quantile, connectivity quantile) pairs for `bridge_units`. Looser
            ones give more pairs where the default finds few bridges.
        fills: of `causal_arms`.
        seeds: of the random fill.
        caliper: of `match_controls`: the largest |log saliency| difference of a pair.
        guards: where units may go, in both arms.
    """

    ratio: float = 0.2
    thresholds: tuple[tuple[float, float], ...] = ((0.5, 0.5), (0.5, 0.3), (0.7, 0.4))
    fills: tuple[Fill, ...] = ("greedy", "diagonal", "random")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    caliper: float = 0.2
    guards: Guards = field(default_factory=Guards)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", require_ratio(self.ratio))
        unknown = set(self.fills) - set(get_args(Fill))
        if unknown or not self.fills or not self.thresholds:
            raise InputError(
                f"fills is {self.fills!r} and thresholds {self.thresholds!r}. Give at least one of "
                f"each, with fills from {get_args(Fill)}."
            )
        if "random" in self.fills and not self.seeds:
            raise InputError("the random fill needs a seed. Give seeds=(0, 1, 2), say.")


@dataclass(frozen=True, eq=False)
class Trial:
    """Two arms of one threshold pair, fill and seed; without arms, `note` gives the reason."""

    options: CausalOptions
    thresholds: tuple[float, float]
    fill: Fill
    seed: int | None
    bridges: int
    ranked: bool
    matching: Matching | None = None
    arms: tuple[Selection, ...] = ()
    note: str = ""

    def columns(self) -> Row:
        """Return the columns of `causal_study` that describe the arms."""
        row: Row = {
            "requested_ratio": self.options.ratio,
            "saliency_quantile": self.thresholds[0],
            "connectivity_quantile": self.thresholds[1],
            "fill": self.fill,
            "seed": self.seed,
            "seeds": 1,
            "bridges": self.bridges,
            "ranked": self.ranked,
            "note": self.note,
        }
        if self.matching is not None:
            row |= _matching_columns(self.matching)
        if self.arms:
            row |= _arm_columns(self.arms)
        return row


def make_trials(curvature: Curvature, options: CausalOptions) -> Iterator[Trial]:
    """Make the arms of every pair of thresholds, fill and seed, in this order."""
    for thresholds in options.thresholds:
        bridges = bridge_units(curvature, *thresholds)
        matching, note = None, "no unit passes the thresholds"
        if len(bridges):
            matching = match_controls(curvature, bridges, options.caliper, guards=options.guards)
            note = "" if matching.pairs else "no bridge has a control within the caliper"
        for fill in options.fills:
            for seed in options.seeds if fill == "random" else (None,):
                trial = partial(
                    Trial, options, thresholds, fill, seed, len(bridges), bridges.ranked
                )
                if matching is None or note:
                    yield trial(matching, (), note)
                else:
                    yield trial(*_fit(curvature, matching, options, fill, seed or 0))


def _fit(
    curvature: Curvature, matching: Matching, options: CausalOptions, fill: Fill, seed: int
) -> tuple[Matching, tuple[Selection, ...], str]:
    """Return arms of as many of the closest pairs as budget and guards admit."""
    reason = ""
    for count in range(len(matching), 0, -1):
        fewer = matching.closest(count)
        try:
            arms = causal_arms(curvature, fewer, options.ratio, options.guards, fill, seed)
        except (InputError, InfeasibleError) as error:
            reason = reason or str(error)
            continue
        note = f"{count} of {len(matching)} pairs fit: {reason}" if reason else ""
        return fewer, arms, note
    return matching, (), f"not even one pair fits: {reason}"


def _matching_columns(matching: Matching) -> Row:
    worst = matching.worst
    # distances differ from unit to unit: without them the reasons can be counted
    reasons = Counter(re.sub(r"\d[\d.e-]* ", "", why) for why in matching.unmatched.values())
    return {
        "pairs": len(matching),
        "unmatched": len(matching.unmatched),
        "reasons": "; ".join(f"{count} x {why}" for why, count in reasons.most_common()),
        "worst_pair": None if worst is None else f"{worst['bridge']} and {worst['control']}",
        "worst_distance": None if worst is None else worst["distance"],
        "contrast": float(np.median(matching.contrast)) if worst else None,
        "smallest_contrast": float(matching.contrast.min()) if worst else None,
    }


def _arm_columns(arms: tuple[Selection, ...]) -> Row:
    bridge, control = arms
    predicted = [arm.predicted_risk or 0.0 for arm in arms]
    return {
        "forced": bridge.forced,
        "shared": len(set(bridge.pruned) & set(control.pruned)),
        "realized_ratio": bridge.realized_ratio,
        "control_realized_ratio": control.realized_ratio,
        "predicted_bridge": predicted[0],
        "predicted_control": predicted[1],
        "predicted_difference": predicted[0] - predicted[1],
    }
