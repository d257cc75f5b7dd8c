"""A plan: the units to prune, what H predicts for them, and how the plan was made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..base.arguments import as_float
from ..base.errors import FileFormatError, InputError, shown
from ..base.origin import require_same_source
from ..base.schema import reading
from ..base.storage import fingerprint, seal_json
from ..curvature.matrix import Curvature
from ..curvature.release import RELEASE
from ..models.architectures import UNIT_KINDS
from ..models.kinds import KINDS
from ..models.unit import Kind
from ..models.units import Unit, UnitSet
from .guards import FREE, Guards
from .plan_json import (
    made_from_plain,
    read_fields,
    require_consistent,
    to_plain,
)
from .targets import Target, as_budget, require_ratio

GAINED = tuple(kind for kind in KINDS if UNIT_KINDS[kind].grouped)  # kinds that may have gains


@dataclass(frozen=True, eq=False)
class Terms:
    """What H predicts for the k units of a plan, in their order (eq. decomp), nats per token.

    Attributes:
        node: [k] float64, 1/2 H_uu of each unit.
        edge: [k] float64, g_u of each unit: the sum of H_uv over the units v before it.
    """

    node: np.ndarray
    edge: np.ndarray

    @classmethod
    def of(cls, curvature: Curvature, pruned: Iterable[int]) -> Terms:
        """The terms that an H [M, M] gives to these units."""
        block = curvature.matrix[np.ix_(list(pruned), list(pruned))]
        return cls(np.diagonal(block) / 2, np.tril(block, -1).sum(axis=1))


@dataclass(frozen=True)
class Made:
    """How a plan was made, and from what.

    Attributes:
        requested_ratio: the share of removable cost asked for, [0, 1).
        interaction_strength: the lambda that made the plan; None where none did.
        guards: the guards under which it was made.
        target: the target, if one was given instead of a ratio. `requested_ratio` is then the share
            of parameters it implies, or the realized share for a target in other costs.
        uniform: whether every layer was required to lose the same number of units, or the kinds of
            which it was.
        rule: what else the plan keeps to, in words: an extension's rule on how many units a block
            may lose.
        forced: how many leading units were forced (`include`) rather than chosen.
        ordered: whether `pruned` is a removal order (a published mask has none).
        matrix: what the plan was solved on: "H", or what an extension measured instead.
        curvature_fingerprint: that of the H which predicts the terms.
        origin: the record of the model (base/origin.py); None where it is not known.
        text_windows: the record of the text that the plan has seen; None where it is not known.
    """

    requested_ratio: float
    interaction_strength: float | None = None
    guards: Guards = FREE
    target: Target | None = None
    uniform: bool | tuple[Kind, ...] = False
    rule: str = ""
    forced: int = 0
    ordered: bool = False
    matrix: str = "H"
    curvature_fingerprint: str | None = None
    origin: Mapping[str, Any] | None = None
    text_windows: str | None = None


@dataclass(frozen=True, eq=False)  # arrays have no truth value, so it compares below
class Selection:
    """A plan: the pruned set S, what H predicts for it, and how it was made.

    Plans are equal if a file of one holds what a file of the other does.

    Attributes:
        units: the whole UnitSet, M units.
        pruned: indices of the k removed units, in removal order where `ordered`.
        terms: what H predicts, unit by unit; None without a curvature.
        made: ratio, lambda, guards, and where the plan comes from.
        gains: output gain of kept FFN units, by index; empty if there are none.
    """

    units: UnitSet
    pruned: tuple[int, ...]
    terms: Terms | None
    made: Made
    gains: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def from_release(cls, folder: str | os.PathLike[str], ratio: float) -> Selection:
        """Read a mask of the authors' release: `registry.json` and `rXX/masks/prune_solution.json`.

        A mask has no removal order and no guards. The plan has a predicted risk if the folder also
        contains `matrices/H.npy`. A `ratio` of 0.2 reads r20.
        """
        release = RELEASE()
        units, pruned, facts = release.read_mask(folder, ratio)
        curvature = Curvature.from_release(folder) if release.has_matrix(folder) else None
        return cls.from_pruned(units, pruned, curvature, **facts)

    @classmethod
    def from_pruned(
        cls,
        units: UnitSet,
        pruned: Iterable[Unit | str | int],
        curvature: Curvature | None = None,
        **made: Any,
    ) -> Selection:
        """Make a plan from any set of units: random, from a baseline, or chosen by hand.

        With a curvature H [M, M] the plan has a predicted risk. `made` are fields of `Made`;
        `requested_ratio` defaults to the realized one.
        """
        plan = cls(units, units.indices(pruned), None, Made(0.0))
        plan = plan.with_made(**({"requested_ratio": plan.realized_ratio} | made))
        return plan if curvature is None else plan.predicted_by(curvature)

    def with_made(self, **changes: Any) -> Selection:
        """Return the same plan with other facts of how it was made (fields of `Made`)."""
        return replace(self, made=replace(self.made, **changes))

    def predicted_by(self, curvature: Curvature) -> Selection:
        """Return the same plan with the risk that this H [M, M] predicts, whatever made it."""
        self.require_curvature(curvature)
        plan = self.with_made(
            curvature_fingerprint=curvature.fingerprint,
            origin=curvature.origin,
            text_windows=curvature.provenance.get("text_windows"),
        )
        return replace(plan, terms=Terms.of(curvature, self.pruned))

    # Where it comes from ------------------------------------------------------------------------

    @property
    def requested_ratio(self) -> float:
        return self.made.requested_ratio

    @property
    def interaction_strength(self) -> float | None:
        return self.made.interaction_strength

    @property
    def guards(self) -> Guards:
        return self.made.guards

    @property
    def forced(self) -> int:
        return self.made.forced

    @property
    def ordered(self) -> bool:
        return self.made.ordered

    @property
    def curvature_fingerprint(self) -> str | None:
        return self.made.curvature_fingerprint

    @property
    def origin(self) -> Mapping[str, Any] | None:
        return self.made.origin

    @property
    def text_windows(self) -> str | None:
        return self.made.text_windows

    # Ratios -------------------------------------------------------------------------------------

    @cached_property
    def pruned_cost(self) -> int:
        """Number of removed parameters."""
        return int(self.units.costs[list(self.pruned)].sum())

    @property
    def realized_ratio(self) -> float:
        """Removed share of removable cost (rho_actual)."""
        return self.pruned_cost / max(self.units.total_cost, 1)  # an emptied model has no cost

    @property
    def params_removed_fraction(self) -> float | None:
        """Removed share of all parameters, embeddings included; None where no model is known."""
        total = self.units.total_parameters
        return None if total is None else self.pruned_cost / total

    @property
    def realized_target(self) -> float | None:
        """What is left in the unit of the target, or the share gone; None for a plain ratio."""
        if self.made.target is None:
            return None
        budget = self.made.target.budget(self.units)
        return budget.value(budget.costs[list(self.pruned)].sum().item())

    # Risk ---------------------------------------------------------------------------------------

    @property
    def node_risk(self) -> float | None:
        """1/2 sum of H_uu over the plan (eq. decomp), nats per token."""
        return None if self.terms is None else float(self.terms.node.sum())

    @property
    def edge_risk(self) -> float | None:
        """Sum of H_uv over pairs of the plan (eq. decomp), nats per token."""
        return None if self.terms is None else float(self.terms.edge.sum())

    @property
    def predicted_risk(self) -> float | None:
        """1/2 s^T H s with the full signed H, whatever made the plan; nats per token."""
        if self.node_risk is None or self.edge_risk is None:
            return None
        return self.node_risk + self.edge_risk

    @property
    def marginals(self) -> np.ndarray | None:
        """Delta(u | S) = 1/2 H_uu + lambda g_u [k], nats per token (eq. marginal)."""
        if self.terms is None or self.interaction_strength is None:
            return None
        return self.terms.node + self.interaction_strength * self.terms.edge

    @property
    def objective(self) -> float | None:
        """R_lambda(s) of eq. (lambda), nats per token: the sum of the marginals."""
        return None if self.marginals is None else float(self.marginals.sum())

    # Views --------------------------------------------------------------------------------------

    @cached_property
    def indicator(self) -> np.ndarray:
        """s [M], bool: True where the unit is removed."""
        s = np.zeros(len(self.units), dtype=bool)
        s[list(self.pruned)] = True
        return s

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(~self.indicator).tolist())

    def layer_budget(self) -> dict[str, np.ndarray]:
        """Return the share of each layer's cost removed, by kind [layers]; NaN without units."""
        units, budget = self.units, dict[str, np.ndarray]()
        for kind in dict.fromkeys([*KINDS, *units.kinds.tolist()]):
            total, gone = (
                np.bincount(units.layers[mask], units.costs[mask], minlength=units.num_layers)
                for mask in (units.kinds == kind, (units.kinds == kind) & self.indicator)
            )
            budget[kind] = np.divide(gone, total, out=np.full(len(total), np.nan), where=total > 0)
        return budget

    def prefix(self, ratio: float) -> Selection:
        """Return the plan of a smaller ratio without solving: under fixed guards greedy is nested.

        Raises InputError for a plan that is not greedy's under fixed guards and a ratio alone.
        """
        budget = as_budget(self.units, require_ratio(ratio))
        factor = self.guards.layer_cap_factor
        faults = {
            "it keeps to more than a ratio": not self.by_ratio,
            "it has no removal order": not self.ordered,
            f"its cap is {factor} x ratio": factor is not None,
            f"it has {len(self.gains)} gains, solved for its own pruned set": bool(self.gains),
            f"ratio {ratio} is above the {self.requested_ratio} that was solved": (
                budget.share > self.requested_ratio
            ),
        }
        for fault, holds in faults.items():
            if holds:
                raise InputError(f"{self!r} has no such prefix: {fault}. Solve at that ratio.")
        running = np.concatenate([[0], np.cumsum(self.units.costs[list(self.pruned)])])
        # the first length that reaches the target, as in the loop of greedy; 0 for ratio 0. A fresh
        # solve forces the included units at every ratio too
        length = max(int(np.searchsorted(running, budget.needed)), self.forced)
        budget.require_reached(self.pruned[:length])
        terms = self.terms
        if terms is not None:
            terms = Terms(terms.node[:length], terms.edge[:length])
        plan = self.with_made(requested_ratio=budget.share, target=None)
        return replace(plan, pruned=self.pruned[:length], terms=terms)

    def with_gains(self, gains: Mapping[int, float]) -> Selection:
        """Return the same plan with other output gains on kept FFN units, by index (eq. comp)."""
        if not isinstance(gains, Mapping):
            raise InputError(f"gains is {shown(gains)}. Give a dict from unit indices to gains.")
        found = {}
        for key, value in gains.items():
            index, gain = self.units.index(key), as_float(value, "a gain")
            unit = self.units[index]
            if unit.kind not in GAINED or self.indicator[index] or not np.isfinite(gain):
                raise InputError(
                    f"gain {gain} is on {unit}, but gains are finite and on kept FFN units. Remove "
                    "or correct it."
                )
            found[index] = gain
        return replace(self, gains=found)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the plan's effect on a model: units, pruned set and gains."""
        # not the order, the guards or lambda: plans that do the same to a model are measured once
        return fingerprint(self.units.fingerprint, sorted(self.pruned), sorted(self.gains.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Selection) and to_plain(self) == to_plain(other)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    # Files --------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Write the plan as JSON text; `from_json` reads it back."""
        return json.dumps(seal_json(to_plain(self)))

    @classmethod
    def from_json(cls, text: str) -> Selection:
        """Read `to_json` output; a FileFormatError names the field that is wrong."""
        with reading("not a selection", "Use a file that Selection.to_json wrote."):
            content = read_fields(text)
            units = UnitSet.from_plain(content["units"])
            gains = {units.index(int(index)): gain for index, gain in content["gains"].items()}
            terms = None
            if content["node_terms"] is not None:
                node = np.array(content["node_terms"], np.float64)
                terms = Terms(node, np.array(content["edge_terms"], np.float64))
            made = Made(**made_from_plain(content, units))
            plan = cls(units, units.indices(content["pruned"]), terms, made).with_gains(gains)
            require_consistent(plan)
        return plan

    def require_units(self, units: UnitSet) -> None:
        """Raise MismatchError if `units` are not this selection's; names the first difference."""
        units.require_same(self.units, mine="the model", theirs="the selection")

    def require_curvature(self, curvature: Curvature) -> None:
        """Raise MismatchError unless a curvature is of the same units and weights."""
        self.units.require_same(curvature.units, mine="the selection", theirs="the curvature")
        if self.origin is not None:
            require_same_source(curvature.origin, self.origin, between=("H", "the plan"))

    def require_own_terms(self, curvature: Curvature) -> None:
        """Raise FileFormatError if this H gave the terms of the plan, and they are not its own."""
        self.require_curvature(curvature)
        same = self.made.matrix == "H" and self.curvature_fingerprint == curvature.fingerprint
        if self.terms is None or not same:
            return
        own = Terms.of(curvature, self.pruned)
        gap = np.abs([self.terms.node - own.node, self.terms.edge - own.edge]).max(initial=0.0)
        if gap > 1e-9 * np.abs(curvature.matrix[np.ix_(self.pruned, self.pruned)]).sum():
            raise FileFormatError(
                f"the terms of the plan are {gap:.3g} from those of its H: it was changed after it "
                "was solved. Solve it again."
            )

    @property
    def by_ratio(self) -> bool:
        """Whether ratio, guards and lambda alone made the plan, in steps of single units."""
        target = self.made.target
        return not self.counted and (target is None or target.in_parameters)

    @property
    def counted(self) -> bool:
        """Whether only some counts of units were allowed in a layer or a block."""
        return bool(self.made.uniform or self.made.rule)

    def __len__(self) -> int:
        return len(self.pruned)

    def __repr__(self) -> str:
        made, strength, risk = self.made, self.interaction_strength, self.predicted_risk
        kinds = made.uniform if isinstance(made.uniform, tuple) else ("all",)
        asked = f"{self.requested_ratio:.2%} asked"
        if made.target is not None and self.realized_target is not None:
            asked = f"{made.target} asked, {made.target.shown(self.realized_target)} realized"
        parts = [
            f"Selection of {len(self)} of {len(self.units)} units",
            "" if strength is None else f" at lambda {strength:g}",
            f", the same counts of {' and '.join(kinds)} units in every layer"
            if made.uniform
            else "",
            f", {made.rule}" if made.rule else "",
            "" if made.matrix == "H" else f" on the {made.matrix}",
            f": {self.realized_ratio:.2%} of removable cost ({self.pruned_cost:,} parameters; "
            f"{asked})",
            "" if risk is None else f", predicted risk {risk:.4g} nats",
        ]
        return "".join(parts)
