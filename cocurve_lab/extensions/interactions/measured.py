"""Measured interactions: the KL of parts of a model removed alone, and in pairs.

H adds up the logit shifts of single units. The shifts of large parts saturate: two layers removed
together often cost less than the sum of both, where H says more. So between parts the edge is
measured. With R(S) the KL of the model without S (eq. risk),

    Q_aa = 2 R(a),    Q_ab = R(a + b) - R(a) - R(b),

and 1/2 s^T Q s is R itself for one part and for two. Q takes the place of H at the scale of the
parts: the solver, the path over lambda, the graph and the instruments read it. It is no Gram
matrix, and a sum of many negative edges may fall below 0, which no KL does.

This departs from the paper, whose edges are those of H.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...base.arguments import as_int, as_list
from ...base.atomic import write_atomically
from ...base.errors import FileFormatError, InputError
from ...base.progress import Progress
from ...base.schema import (
    COUNT,
    OBJECT,
    TEXT,
    Field,
    Schema,
    array_of,
    is_count,
    list_of,
    reading,
    require_fields,
)
from ...base.storage import dump_npz, load_npz
from ...calibration import CalibrationSet
from ...curvature.groups import Groups
from ...curvature.matrix import Curvature
from ...measuring.plan_memory import model_settings
from ...measuring.risk import Meter
from ...models.architectures import UNIT_KINDS, kind_number
from ...models.identity import known_record, model_name
from ...models.unit import Unit
from ...models.units import UnitSet, enumerate_units
from ...solver.guards import FREE, Guards
from ...solver.selection import Selection, Terms
from ...solver.solve import solve_greedy
from ..analysis.refinement import refine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEASURED = "measured KL"  # the `matrix_name` of measured interactions
FORMAT, VERSION = "cocurve-interactions", 1
Parts = Literal["units", "blocks", "layers"] | Iterable[Iterable[Unit | str | int]]
_FILE: Schema = {
    "format": TEXT,
    "version": COUNT,
    "units": OBJECT,
    "provenance": OBJECT,
    "parts": Field("lists of the numbers of units", list_of(list_of(is_count))),
    "pool": Field("a list of the numbers of parts", list_of(is_count)),
    "alone": Field("finite float64 [rows, parts]", array_of("float64", 2)),
    "together": Field("finite float64 [rows, pool, pool]", array_of("float64", 3)),
}


@dataclass(frozen=True, eq=False)
class Interactions:
    """KL of parts alone and of their pairs, measured row by row; made by `measure_interactions`.

    Attributes:
        units: the M units of the model.
        parts: for each of the P parts the indices of its units.
        pool: indices of the parts whose pairs were measured; the solver chooses among them.
        alone: R(a) [rows, P] float64, nats per token.
        together: R(a + b) [rows, pool, pool] float64, nats per token; R(a) on the diagonal.
        provenance: the model, the text, and what the parts are.
    """

    units: UnitSet
    parts: tuple[tuple[int, ...], ...]
    pool: tuple[int, ...]
    alone: np.ndarray
    together: np.ndarray
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, size = len(self.alone), len(self.pool)
        wanted = (rows, len(self.parts)), (rows, size, size)
        if (self.alone.shape, self.together.shape) != wanted:
            raise InputError(
                f"alone has shape {self.alone.shape} and together {self.together.shape}, but the "
                f"parts and rows need {wanted[0]} and {wanted[1]}. Take them from one measurement."
            )

    @cached_property
    def costs(self) -> np.ndarray:
        """Costs of the parts [P] int64, in parameters."""
        return np.array([self.units.costs[list(part)].sum() for part in self.parts], np.int64)

    @cached_property
    def interaction(self) -> np.ndarray:
        """R(a + b) - R(a) - R(b) [pool, pool], nats per token, mean over rows; 0 on the diagonal.

        Negative where the second part costs less once the first is gone.
        """
        return self.by_row.mean(axis=0)

    @cached_property
    def by_row(self) -> np.ndarray:
        """R(a + b) - R(a) - R(b) [rows, pool, pool], nats per token; 0 on the diagonal."""
        own = self.alone[:, list(self.pool)]
        found = self.together - own[:, :, None] - own[:, None, :]
        found[:, range(len(self.pool)), range(len(self.pool))] = 0
        return found

    @cached_property
    def curvature(self) -> Curvature:
        """Q [pool, pool] as a Curvature, a drop-in for H at the scale of the parts.

        Each part of the pool has a stand-in unit: the kind with most of its parameters, its first
        layer, and its cost. Each row is a group, so error bars are over rows. `expand` turns a plan
        of stand-ins into one of the model's units.
        """
        grams = self.by_row.copy()
        own = self.alone[:, list(self.pool)]
        grams[:, range(len(self.pool)), range(len(self.pool))] = 2 * own
        order = [self.pool.index(part) for part in self._ordered]
        positions = int(self.provenance.get("positions_per_sequence", 1))
        facts = {"surrogate": MEASURED, "complete": True} | {
            key: self.provenance[key]
            for key in (
                "model_name",
                "model_fingerprint",
                "checkpoint",
                "model_dtype",
                "row_fingerprints",
                "calibration_source",
                "text_windows",
            )
            if key in self.provenance
        }
        groups = Groups(
            grams[:, order][:, :, order] * positions,
            np.full(len(grams), positions, np.int64),
            own[:, order] * positions,
        )
        return Curvature.from_groups(self._stand_ins, groups, facts)

    @cached_property
    def _ordered(self) -> list[int]:
        """The parts of the pool in the order of their stand-ins."""
        return sorted(self.pool, key=lambda part: (*self._place(part), part))

    def _place(self, part: int) -> tuple[int, int]:
        """Return the first layer of a part, and the number of the kind with most parameters."""
        costs = Counter[int]()
        for unit in (self.units[i] for i in self.parts[part]):
            costs[kind_number(unit.kind)] += unit.cost
        most = max(costs, key=lambda kind: (costs[kind], -kind))
        return min(self.units[i].layer for i in self.parts[part]), most

    @cached_property
    def _stand_ins(self) -> UnitSet:
        seen, units = Counter[tuple[int, int]](), []
        for part in self._ordered:
            layer, kind = place = self._place(part)
            width = sum(self.units[i].stop - self.units[i].start for i in self.parts[part])
            start = seen[place] * width
            units.append(
                Unit(
                    tuple(UNIT_KINDS)[kind],
                    layer,
                    seen[place],
                    start,
                    start + width,
                    int(self.costs[part]),
                )
            )
            seen[place] += 1
        facts = self.units.total_parameters, self.units.model_layers
        return UnitSet(tuple(units), None, *facts)

    # Plans --------------------------------------------------------------------------------------

    def solve(
        self, ratio: float, interaction_strength: float = 1.0, guards: Guards = FREE
    ) -> Selection:
        """Remove parts worth `ratio` of the model's removable parameters, by Algorithm 2 on Q.

        Greedy, then exchanges that lower the objective (`refine`). The ratio is exceeded by less
        than the largest part.

        Args:
            ratio: share of the removable parameters of the whole model, [0, 1).
            interaction_strength: lambda >= 0; 0 takes the KL of each part alone.
            guards: over the parts' stand-ins.

        Returns:
            A plan over the model's units.

        Raises:
            InfeasibleError: the pool does not reach the ratio.
        """
        own = ratio * self.units.total_cost / self._stand_ins.total_cost
        if own >= 1:
            raise InputError(
                f"the {len(self.pool)} parts whose pairs were measured have "
                f"{self._stand_ins.total_cost / self.units.total_cost:.0%} of the removable "
                f"parameters, and ratio is {ratio:.0%}. Measure more parts, or ask for less."
            )
        found = solve_greedy(self.curvature, own, interaction_strength, guards)
        return self.expand(refine(found, self.curvature)).with_made(requested_ratio=ratio)

    def expand(self, selection: Selection) -> Selection:
        """Turn a plan of stand-ins (a solve or path of `curvature`) into one of the model's units.

        The predicted terms of a part are those of its first unit.
        """
        selection.units.require_same(self._stand_ins, mine="the plan", theirs="the stand-ins")
        pruned: list[int] = []
        node, edge = [], []
        terms = Terms.of(self.curvature, selection.pruned)
        for at, place in enumerate(selection.pruned):
            part = self.parts[self._ordered[place]]
            pruned += part
            node += [terms.node[at], *[0.0] * (len(part) - 1)]
            edge += [terms.edge[at], *[0.0] * (len(part) - 1)]
        plan = Selection.from_pruned(
            self.units,
            pruned,
            interaction_strength=selection.interaction_strength,
            matrix=MEASURED,
            curvature_fingerprint=self.curvature.fingerprint,
            origin=self.curvature.origin,
            text_windows=self.provenance.get("text_windows"),
        )
        return replace(plan, terms=Terms(np.array(node), np.array(edge)))

    # Files --------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to an `.npz`."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "units": self.units.to_plain(),
            "provenance": self.provenance,
            "parts": [list(part) for part in self.parts],
            "pool": list(self.pool),
            "alone": self.alone,
            "together": self.together,
        }
        write_atomically(path, dump_npz(content))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Interactions:
        """Read what `save` wrote, and check it."""
        content = load_npz(path, format_name=FORMAT, version=VERSION)
        with reading(path, "Measure again, or use a copy."):
            require_fields(content, _FILE)
            units = UnitSet.from_plain(content["units"])
            parts, pool = content["parts"], content["pool"]
            if max((i for part in parts for i in part), default=0) >= len(units) or (
                max(pool, default=0) >= len(parts)
            ):
                raise FileFormatError("parts or pool name what is not there")
            arrays = content["alone"], content["together"]
            return cls(units, tuple(map(tuple, parts)), tuple(pool), *arrays, content["provenance"])

    def __repr__(self) -> str:
        rows, size = len(self.alone), len(self.pool)
        pairs = self.interaction[np.triu_indices(size, 1)]
        negative = f", {(pairs < 0).mean():.0%} of them negative" if len(pairs) else ""
        return (
            f"Interactions of {self.provenance.get('model_name', 'a model')}: {len(self.parts)} "
            f"parts alone and {len(pairs)} pairs{negative}, measured on {rows} rows"
        )


def measure_interactions(
    model: PreTrainedModel,
    parts: Parts,
    text: CalibrationSet,
    *,
    units: UnitSet | None = None,
    pool: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress = True,
) -> Interactions:
    """Measure the KL of parts removed alone and in pairs.

    A removal runs from the first layer that it touches. P parts take P + P (P - 1) / 2 removals of
    each row; what that is, is printed first.

    Args:
        model: the dense model.
        parts: "layers", "blocks" (the attention and the FFN of each layer), "units", or disjoint
            groups of units, by Unit, name or index.
        text: rows and scored positions.
        units: the units that plans are made of; None takes the model's own with 16 FFN groups.
        pool: how many parts, the cheapest by KL per parameter, enter pairs; None takes all.
        checkpoint: a file of measured plans, written after every row, to resume from. It is one of
            `measure_plans`, too.
        progress: show a bar with ETA; "lines" writes lines for a log file instead.

    Returns:
        Interactions. Ctrl-C raises KeyboardInterrupt; with a checkpoint nothing is lost.
    """
    units = enumerate_units(model) if units is None else units
    groups, kind = _parts_of(units, parts)
    most = len(groups) if pool is None else min(as_int(pool, "pool", 2), len(groups))
    meter = Meter(model, text, checkpoint=checkpoint, replay=True)
    if progress:
        pairs = most * (most - 1) // 2
        print(
            f"{len(groups)} parts alone and {pairs} pairs: {len(groups) + pairs} removals on each "
            f"of {len(text)} rows",
            flush=True,
        )
    alone = _measure(meter, units, groups, progress)
    costs = [units.costs[list(group)].sum() for group in groups]
    cheapest = np.argsort(alone.mean(axis=0) / costs, kind="stable")[:most]
    chosen = sorted(int(part) for part in cheapest)
    together = np.zeros((len(text), most, most))
    together[:, range(most), range(most)] = alone[:, chosen]
    if pairs_of := list(combinations(range(most), 2)):
        sets = [groups[chosen[a]] + groups[chosen[b]] for a, b in pairs_of]
        values = _measure(meter, units, sets, progress)
        first, second = np.array(pairs_of).T
        together[:, first, second] = together[:, second, first] = values
    provenance = {
        "model_name": model_name(model),
        **model_settings(model),
        "checkpoint": known_record(model)["checkpoint"],
        "parts": kind,
        "calibration_source": text.source,
        "row_fingerprints": text.row_fingerprints,
        "text_windows": text.text_windows,
        "positions_per_sequence": text.positions_per_sequence,
    }
    return Interactions(units, groups, tuple(chosen), alone, together, provenance)


def _measure(
    meter: Meter, units: UnitSet, sets: Sequence[tuple[int, ...]], progress: Progress
) -> np.ndarray:
    """KL of removing each set of units [rows, sets]."""
    plans = [Selection.from_pruned(units, sorted(chosen)) for chosen in sets]
    return meter.measure(plans, progress=progress)[..., 0].T


def _parts_of(units: UnitSet, parts: Parts) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Return the units of each part, and what the parts are in a word."""
    keys: dict[str, list[Any]] = {
        "units": list(range(len(units))),
        "blocks": [(unit.layer, unit.kind) for unit in units],
        "layers": [unit.layer for unit in units],
    }
    if isinstance(parts, str):
        if parts not in keys:
            raise InputError(
                f"parts is {parts!r}. Choose one of {', '.join(keys)}, or give groups of units."
            )
        members: dict[Any, list[int]] = {}
        for at, key in enumerate(keys[parts]):
            members.setdefault(key, []).append(at)
        return tuple(map(tuple, members.values())), parts
    groups = tuple(units.indices(group) for group in as_list(parts, "parts"))
    every = [at for group in groups for at in group]
    if not groups or not all(groups):
        raise InputError("parts has no group, or an empty one. Give groups of at least one unit.")
    if len(set(every)) != len(every):
        twice = Counter(every).most_common(1)[0][0]
        raise InputError(f"unit {units[twice]} is in two parts. Give disjoint groups.")
    return groups, "given"
