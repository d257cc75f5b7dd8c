"""How far an edge is true: measured interactions beside those of H, from two units to two layers.

The interaction of disjoint parts is R(all of them) - sum of R(each): the extra harm of removing
them together. By H it is the sum of H_uv over pairs of units from different parts (eq. decomp).
The paper's appendix "Surrogate Fidelity" says that it saturates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, combinations
from typing import Literal

import numpy as np
from scipy.stats import rankdata

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.interactions.measured import Interactions, measure_interactions
from cocurve_lab.extensions.judging.kept import plans_file
from cocurve_lab.measuring.risk import Meter, standard_error
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from ..lazy import CalibrationSet, DataFrame, PreTrainedModel
from ..shared import known, marks, sequence_columns, sequence_values
from ..study import Study
from ..tables import Columns, Folder, Row, Rows, Table, column, pick, table_of
from .fidelity import correlations

Parts = tuple[tuple[int, ...], ...]  # groups of units to remove together
Measured = tuple[str, Parts, np.ndarray, np.ndarray]  # scale, parts; KL [sequences]: all, and sum

STRONGEST, ANY = "2 units, strongest edges", "2 units, any"
SHARES = ("same_sign", "negative", "predicted_negative")
FEWEST = 6  # with fewer cases all signs agree by chance more often than a value is two errors off
_TOGETHER = 4  # removals per batch: larger ones begin at an earlier layer, and are slower on a CPU

# columns of `reach_summary` (two tables) and of `edge_reach` for reading, with `shown`
COLUMNS: Columns = {
    "scale": "removed together",
    "cases": "",
    "same_sign": "same sign",
    "spearman": "Spearman",
    "pearson": "Pearson",
    "size": "size, measured / H",
}


@dataclass(frozen=True)
class ReachOptions:
    """The parts to remove together.

    Attributes:
        ratios: of the plans of lambda 0 and 1 that units are drawn from.
        pairs: pairs of units: so many of the most negative and of the most positive H_uv inside a
            plan of the first ratio, and twice as many of any units with H_uu > 0.
        sizes, sets: units in a set, and sets of each size. They are drawn from the two plans of the
            first ratio that have twice as many units; without one the size is left out.
        blocks, layers: the cheapest by KL per parameter, all of whose pairs are measured.
        seed: of all that is drawn.
    """

    ratios: tuple[float, ...] = (0.2, 0.4)
    pairs: int = 12
    sizes: tuple[int, ...] = (4, 8, 16, 32)
    sets: int = 12
    blocks: int = 20
    layers: int = 15
    seed: int = 0


def edge_reach(
    model: PreTrainedModel,
    curvature: Curvature,
    held_out: CalibrationSet,
    options: ReachOptions = ReachOptions(),
    cache: Folder = None,
    progress: bool = True,
) -> DataFrame:
    """Measure the interaction of pairs and sets of units, and of pairs of blocks and of layers.

    Returns:
        One row per case: scale, parts (in words), units (their number), predicted (by H),
        interaction (measured), kl_<n> (all parts removed) and alone_<n> (the sum of each removed
        alone) of each sequence.
    """
    settings = marks(model, curvature, held_out, **asdict(options))

    def compute(study: Study) -> Rows:
        measured = [
            *_of_units(study, curvature, options),
            *_of_wholes(study, curvature, "blocks", options.blocks),
            *_of_wholes(study, curvature, "layers", options.layers),
        ]
        return [case_row(curvature, *case) for case in measured]

    study = Study(model, held_out, curvature, cache=cache, progress=progress)
    return study.table("edge_reach", settings, compute)


def _of_units(study: Study, curvature: Curvature, options: ReachOptions) -> Iterator[Measured]:
    cases = list(drawn_parts(curvature, options))
    sets = list(dict.fromkeys(s for _, parts in cases for s in (*parts, _union(parts))))
    plans = [Selection.from_pruned(curvature.units, s) for s in sets]
    path = plans_file(study.cache, study.model, study.text)
    meter = Meter(study.model, study.text, checkpoint=path, plans_per_batch=_TOGETHER, replay=True)
    kl = dict(zip(sets, meter.measure(plans, progress=study.progress)[..., 0], strict=True))
    for scale, parts in cases:
        yield scale, parts, kl[_union(parts)], np.sum([kl[part] for part in parts], axis=0)


def drawn_parts(curvature: Curvature, options: ReachOptions) -> Iterator[tuple[str, Parts]]:
    """Yield the scale and the single units of each pair and set that `edge_reach` removes."""
    rng, matrix, few = np.random.default_rng(options.seed), curvature.matrix, options.pairs
    plans = [
        [sorted(solve_greedy(curvature, ratio, strength).pruned) for strength in (0.0, 1.0)]
        for ratio in options.ratios
    ]
    inside = {pair for plan in plans[0] for pair in combinations(plan, 2)}
    ends = sorted(inside, key=lambda pair: (matrix[pair], pair))
    live = list(combinations(np.flatnonzero(curvature.saliency).tolist(), 2))
    drawn = [live[i] for i in rng.permutation(len(live))[: 2 * few]]
    for scale, pairs in ((STRONGEST, ends[:few] + ends[few:][-few:]), (ANY, drawn)):
        yield from ((scale, ((u,), (v,))) for u, v in pairs)
    for size in options.sizes:
        wide = next((two for two in plans if min(map(len, two)) >= 2 * size), [])
        for number in range(options.sets if wide else 0):
            chosen = rng.choice(wide[number % 2], size, replace=False)
            yield f"{size} units", tuple((u,) for u in sorted(chosen.tolist()))


def _of_wholes(
    study: Study, curvature: Curvature, kind: Literal["blocks", "layers"], pool: int
) -> Iterator[Measured]:
    found = measure_interactions(
        study.model,
        kind,
        study.text,
        units=curvature.units,
        pool=pool,
        checkpoint=plans_file(study.cache, study.model, study.text),
        progress=study.progress,
    )
    yield from pairs_of(found, f"2 {kind}")


def pairs_of(found: Interactions, scale: str) -> Iterator[Measured]:
    """Yield the measured pairs of parts."""
    for a, b in combinations(range(len(found.pool)), 2):
        both = [found.pool[a], found.pool[b]]
        parts = found.parts[both[0]], found.parts[both[1]]
        yield scale, parts, found.together[:, a, b], found.alone[:, both].sum(axis=1)


def _union(parts: Parts) -> tuple[int, ...]:
    return tuple(sorted(chain(*parts)))


def case_row(
    curvature: Curvature, scale: str, parts: Parts, kl: np.ndarray, alone: np.ndarray
) -> Row:
    """Return the row of `edge_reach` of parts, from KL [sequences] of all and the sum of each."""
    together = _union(parts)
    return {
        "scale": scale,
        "parts": ", ".join(_name(curvature.units, part) for part in parts),
        "units": len(together),
        "predicted": curvature.risk(together) - sum(map(curvature.risk, parts)),
        "interaction": float((kl - alone).mean()),
        "interaction_error": known(standard_error(kl - alone)),
        **sequence_columns(kl),
        **sequence_columns(alone, "alone"),
    }


def _name(units: UnitSet, part: tuple[int, ...]) -> str:
    first, kinds = units[part[0]], {units[u].kind for u in part}
    if len(part) == 1:
        return first.name
    return f"L{first.layer}" if len(kinds) > 1 else f"L{first.layer}.{first.kind}"


# Summary ------------------------------------------------------------------------------------------
def reach_summary(table: Table) -> DataFrame:
    """Summarize `edge_reach` by scale: sign, order and size of the interactions against H's.

    Errors (`<column>_error`) are over rows and over cases, added in squares: delete-one jackknives,
    over cases of a share that of a binomial with two hits and two misses more (Agresti and Coull).
    `<column>_rows_error` is the part over rows. They are None below 2 rows or 6 cases.

    Returns:
        One row per scale: scale, cases, same_sign (share of cases), spearman, pearson, size (mean
        |measured| / mean |predicted|), negative and predicted_negative (shares of cases), unseen
        (the former less the latter), and factor: mean KL of all parts / mean sum of each alone.
    """
    rows = []
    for scale in dict.fromkeys(row["scale"] for row in pick(table)):
        members = pick(table, scale=scale)
        h, kl = column(members, "predicted"), sequence_values(members)
        alone, (cases, count) = sequence_values(members, "alone"), kl.shape
        by_case = h, kl.mean(axis=1), alone.mean(axis=1)
        without_row = [
            _statistics(h, *(np.delete(values, n, 1).mean(axis=1) for values in (kl, alone)))
            for n in range(count if count > 1 else 0)
        ]
        without_case = [
            _statistics(*(np.delete(values, n) for values in by_case))
            for n in range(cases if cases >= FEWEST else 0)
        ]
        row: Row = {"scale": scale, "cases": cases}
        for name, value in _statistics(*by_case).items():
            over_rows, over_cases = (_jackknife(w, name) for w in (without_row, without_case))
            if name in SHARES and cases >= FEWEST:  # a jackknife has no error where all cases agree
                share = (cases * value + 2) / (cases + 4)
                over_cases = np.sqrt(share * (1 - share) / (cases + 4))
            row |= {name: known(value), f"{name}_rows_error": known(over_rows)}
            row[f"{name}_error"] = known(np.hypot(over_rows, over_cases))
        rows.append(row)
    return table_of(rows)


def _statistics(h: np.ndarray, kl: np.ndarray, alone: np.ndarray) -> dict[str, float]:
    """The columns of `reach_summary` from values by case [cases]."""
    measured = kl - alone
    negative, by_h = np.mean(measured < 0), np.mean(h < 0)
    size, total = np.abs(h).sum(), alone.sum()
    return {
        "same_sign": np.mean(np.sign(measured) == np.sign(h)),
        "spearman": correlations(rankdata(h), rankdata(measured)[None])[0],
        "pearson": correlations(h, measured[None])[0],
        "size": np.abs(measured).sum() / size if size else np.nan,
        "negative": negative,
        "predicted_negative": by_h,
        "unseen": negative - by_h,
        "factor": kl.sum() / total if total else np.nan,
    }


def _jackknife(without: list[dict[str, float]], name: str) -> float:
    """The standard error of a statistic from its values without each one; NaN for none."""
    values = [found[name] for found in without]
    return float(np.sqrt(len(values) - 1) * np.std(values)) if values else np.nan
