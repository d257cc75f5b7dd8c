"""The coverage of H's error bars, and the stability of its plans as the text grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.uncertainty import ENOUGH, Sample
from cocurve_lab.extensions.analysis.stability import is_converged, selection_stability
from cocurve_lab.extensions.figures import DASHES, SYMBOLS, look
from cocurve_lab.measuring.results import mean_and_error
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from ..chart import add, chart, empty, share_axis
from ..shared import Recipe, marks, plan_overlap
from ..tables import Columns, DataFrame, Folder, Row, Rows, Table, column, kept_table, pick
from .resampling import GATE, coverage, of_groups

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel


STATISTICS = ("saliency", "edges", "block_means", "ffn_redundancy", GATE)

# columns of the two tables for reading, with `shown`
COVERAGE_COLUMNS: Columns = {
    "statistic": "",
    "groups": "",
    "coverage": "",
    "lowest_coverage": "lowest coverage",
    "error_ratio": "claimed / real error",
}
STABILITY_COLUMNS: Columns = {
    "groups": "rows",
    "interaction_strength": "λ",
    "halves_overlap": "overlap of halves",
    "optimism": "",
    "risk_error": "relative error of the risk",
}

_READOUTS = {
    "halves_overlap": "overlap of halves",
    "optimism": "optimism of the plan",
    "risk_error": "relative error of the predicted risk",
}


# Coverage -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CoverageOptions:
    """The statistics and resampled calibrations of `coverage_study`.

    Attributes:
        statistics: names `coverage` knows.
        sizes: rows in a resampled calibration; a quarter of the reference or less, so that the
            reference is the better known of the two.
        groups: groups it keeps; pairs with more groups than rows are omitted.
        draws, seed: of the resampled calibrations per row of the table.
        top_r: of the reference build.
    """

    statistics: tuple[str, ...] = STATISTICS
    sizes: tuple[int, ...] = (16, 32)
    groups: tuple[int, ...] = (4, 8, 16, 32)
    draws: int = 200
    top_r: int = 256
    seed: int = 0


def coverage_study(
    model: PreTrainedModel,
    units: UnitSet,
    calibration: CalibrationSet,
    options: CoverageOptions = CoverageOptions(),
    *,
    cache: Folder = None,
    progress: bool = True,
) -> DataFrame:
    """Measure the share of the 95 % intervals of `jackknife` that hold the true value.

    The reference H, with one group per row of `calibration` (several times the largest size),
    stands for the world: see `coverage`.

    Returns:
        A row per statistic, size and number of groups: `coverage`, the mean share over the
        `values` of the statistic, and `lowest_coverage` of one value; `coverage_error`, the
        binomial standard error sqrt(c (1 - c) / draws) of one value that covers as it should (of a
        mean over many values it is an upper bound, for they come from the same draws); and
        `error_ratio`, the median over values of claimed over real standard error, 1 is honest,
        with `still`, the count of values that never moved and have none.
    """
    pairs = [(n, g) for n in options.sizes for g in options.groups if g <= n]
    if not pairs:
        raise InputError(
            f"sizes {options.sizes} are all below the groups {options.groups}, and a group holds "
            "at least one row. Give larger sizes or fewer groups."
        )
    settings = marks(
        model,
        units=units.fingerprint,
        calibration=calibration.fingerprint,
        options=asdict(options),
    )

    def compute() -> Rows:
        recipe = Recipe(calibration, options.top_r, len(calibration), cache, progress)
        reference = recipe.build(model, units)
        return [
            _coverage(reference, name, size, groups, options)
            for name in options.statistics
            for size, groups in pairs
        ]

    return kept_table(cache, "coverage", settings, compute)


def _coverage(
    reference: Curvature, statistic: str, size: int, groups: int, options: CoverageOptions
) -> Row:
    found = coverage(reference, statistic, size, groups, options.draws, options.seed)
    moving = found.error_ratio[np.isfinite(found.error_ratio)]
    return {
        "statistic": statistic,
        "size": size,
        "groups": groups,
        "reference_rows": len(Sample.of(reference)),
        "draws": found.draws,
        "confidence": found.confidence,
        "coverage": found.share.mean(),
        "coverage_error": found.simulation_error,
        "lowest_coverage": found.share.min(),
        "values": found.share.size,
        "error_ratio": np.median(moving) if moving.size else None,
        "still": found.error_ratio.size - moving.size,
        "enough_groups": groups >= ENOUGH,
    }


def on_most_text(table: Table) -> dict[str, Row]:
    """Return the row of each statistic at the most rows and groups."""
    names = dict.fromkeys(row["statistic"] for row in pick(table))
    return {
        name: max(pick(table, statistic=name), key=lambda row: (row["size"], row["groups"]))
        for name in names
    }


def coverage_sentence(table: Table) -> str:
    """Say which intervals held too seldom, as often as they promise, or more often.

    Judged at the most rows and groups of each statistic, within two simulation errors.
    """
    said: dict[str, list[str]] = {
        "too seldom": [],
        "as often as they promise": [],
        "more often": [],
    }
    for name, row in on_most_text(table).items():
        off = (row["coverage"] - row["confidence"]) / (2 * row["coverage_error"])
        how = "as often as they promise" if abs(off) <= 1 else "more often"
        told = f"{name.replace('_', ' ')} ({row['coverage']:.0%})"
        said["too seldom" if off < -1 else how].append(told)
    aim = column(table, "confidence")[0]
    parts = (f"{how}: {', '.join(names) or 'none'}" for how, names in said.items())
    return f"Intervals of {aim:.0%} that held " + "; ".join(parts) + "."


def plot_coverage(table: Table) -> Figure:
    """Plot coverage by number of groups, a line per statistic and size; dotted is the aim."""
    figure, hover = empty(), "%{x} groups: %{y:.1%} held<extra>%{fullData.name}</extra>"
    sizes = list(dict.fromkeys(row["size"] for row in pick(table)))
    for number, statistic in enumerate(dict.fromkeys(row["statistic"] for row in pick(table))):
        for dash, size in zip(cycle(DASHES), sizes, strict=False):
            rows = pick(table, statistic=statistic, size=size)
            name = f"{statistic.replace('_', ' ')}, {size} rows"
            add(figure, rows, "groups", "coverage", name, number, line=dash, hover=hover)
    aim = next((row["confidence"] for row in pick(table)), 0.95)
    title = f"Coverage of {aim:.0%} intervals (± simulation error)"
    ticks = [2**k for k in range(1, 8)]
    x = {"title_text": "groups of sequences", "type": "log", "tickvals": ticks}
    y = share_axis("share of intervals that hold the truth")
    return chart(figure, title, x, y, across=aim)


# Stability ----------------------------------------------------------------------------------------
def stability_table(
    curvature: Curvature,
    ratios: Sequence[float] = (0.2, 0.4),
    strengths: Sequence[float] = (0.0, 1.0),
    *,
    draws: int = 50,
    seed: int = 0,
    cache: Folder = None,
) -> DataFrame:
    """Return the stability of plans by amount of text: readouts on parts of one H.

    For each number of groups g (2, 4, 8, ... and all) the groups are shuffled once and cut into
    disjoint parts of g, each an H of its own, so that the spread over parts is that of independent
    calibrations. Readouts are means over parts; their error is None for a single part.

    Args:
        curvature: H [M, M] with its groups, more than 16 to see all of it.
        ratios, strengths: of the plans, without guards.
        draws, seed: bootstrap draws per part.

    Returns:
        A row per ratio, lambda and number of groups: `positions` (mean of a part), `parts`;
        `bootstrap_overlap` and `infeasible` (draws that stalled) of `selection_stability`, too
        high for few groups (of two, half of all draws are the part itself);
        `risk_error`, `saliency_error`, `optimism`, `halves_overlap` (relative errors and a Jaccard
        overlap) and `converged` (share of parts) of `is_converged`; `overlap_with_whole`.
    """
    groups = Sample.of(curvature)
    if len(groups) < 2:
        raise InputError(
            "this H has a single group. Build it with BuildOptions(groups=16) or more."
        )
    settings = marks(
        groups=fingerprint(groups.grams, groups.positions, curvature.units.fingerprint),
        plans=[list(ratios), list(strengths)],
        draws=[draws, seed],
    )

    def compute() -> Rows:
        assert curvature.group_positions is not None
        filled = np.flatnonzero(curvature.group_positions)
        # neighboring groups hold neighboring documents, which are alike; parts must not be
        order = np.random.default_rng(seed).permutation(filled)
        counts = sorted({len(groups), *(2**k for k in range(1, len(groups).bit_length()))})
        rows: Rows = []
        for count in counts:
            starts = range(0, len(groups) - count + 1, count)
            parts = [of_groups(curvature, order[start : start + count]) for start in starts]
            for ratio in ratios:
                for strength in strengths:
                    whole = solve_greedy(curvature, ratio, strength)
                    looks = [_look(part, whole, draws, seed) for part in parts]
                    head: Row = {"requested_ratio": ratio, "interaction_strength": strength}
                    head |= {"groups": count, "parts": len(parts)}
                    rows.append(head | _averaged(looks))
        return rows

    return kept_table(cache, "stability", settings, compute)


def _look(part: Curvature, whole: Selection, draws: int, seed: int) -> Row:
    """Return the readouts of one part."""
    ratio, strength = whole.requested_ratio, whole.interaction_strength or 0.0
    readout = is_converged(part, ratio, strength)
    again = selection_stability(part, ratio, strength, draws=draws, seed=seed)
    assert part.group_positions is not None
    return {
        "positions": int(part.group_positions.sum()),
        "bootstrap_overlap": again.mean_overlap,
        "infeasible": again.infeasible,
        "risk_error": readout.risk_error,
        "saliency_error": readout.saliency_error,
        "optimism": readout.optimism,
        "halves_overlap": readout.overlap,
        "overlap_with_whole": plan_overlap(again.selection, whole),
        "converged": float(readout.converged),
    }


def _averaged(looks: Rows) -> Row:
    row: Row = {}
    for name in looks[0]:
        values = column(looks, name)
        row[name] = values.sum() if name == "infeasible" else values.mean()
        if name not in ("positions", "infeasible", "converged"):
            row[f"{name}_error"] = mean_and_error(values)[1] if len(values) > 1 else None
    return row


def plot_stability(table: Table) -> Figure:
    """Plot overlap, optimism and risk error by scored positions, a line per readout and plan."""
    figure, hover = empty(), "%{x} positions: %{y:.3f}<extra>%{fullData.name}</extra>"
    plans = dict.fromkeys(
        (row["requested_ratio"], row["interaction_strength"]) for row in pick(table)
    )
    for (ratio, strength), dash, symbol in zip(plans, cycle(DASHES), cycle(SYMBOLS), strict=False):
        rows = pick(table, requested_ratio=ratio, interaction_strength=strength)
        for step, (readout, label) in enumerate(_READOUTS.items()):
            style = {"color": look(step)["color"], "symbol": symbol}
            name = f"{label}, {ratio:.0%}, λ = {strength:g}"
            add(figure, rows, "positions", readout, name, style, line=dash, hover=hover)
    x = {"title_text": "scored positions in the calibration", "type": "log"}
    y = share_axis("share (of units, of the predicted risk)")
    return chart(figure, "Stability of plans by amount of text", x, y, height=520)
