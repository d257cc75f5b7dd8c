"""The structure of H: its blocks, and the budgets of its plans.

Sections "Geometry of the Pruning Risk" and "Mechanism Analysis"; `propositions.py` has the paper's
propositions. Nothing here runs a model: numpy alone, from H and its groups of sequences. Standard
errors are None for an H without groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cocurve_lab.curvature.matrix import BLOCKS, Curvature
from cocurve_lab.curvature.uncertainty import Sample
from cocurve_lab.extensions.figures import (
    COLORS,
    DASHES,
    GUIDE,
    LABELS,
    SYMBOLS,
)
from cocurve_lab.models.kinds import KINDS
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from ..chart import add, chart, empty, share_axis
from ..shared import errors_of, group_marks, resampled, solved, spread_of
from ..tables import Columns, DataFrame, Folder, Row, Rows, Table, kept_table, pick

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


REACHES = ("all", "same layer", "adjacent layers", "further")
PAPER_BLOCKS = {"attention": 0.10, "cross": 0.086, "ffn": 0.07}  # Llama-3.1-8B-Instruct

# columns of `block_table` for reading, with `shown`
BLOCK_COLUMNS: Columns = {
    "block": "",
    "reach": "",
    "pairs": "",
    "mean_absolute": "mean |ρ|",
    "noise_floor": "noise floor",
    "corrected": "",
    "mean_signed": "mean ρ",
    "positive_share": "share ρ > 0",
    "paper": "paper's 8B",
}


# Blocks -------------------------------------------------------------------------------------------
def block_table(curvature: Curvature, cache: Folder = None) -> DataFrame:
    """Return the mean correlation of each block of H, whole and by distance in layers.

    Returns:
        One row per block (BLOCKS) and reach (REACHES) that has a pair: pairs (unordered),
        mean_absolute |rho| and mean_signed rho with jackknife errors, positive_share of rho > 0,
        noise_floor (the mean_absolute that sampling alone would give, from two halves of the
        groups), corrected (mean_absolute without that upward bias), and paper (its 8B, for the
        whole blocks).
    """
    return kept_table(cache, "blocks", group_marks(curvature), lambda: _blocks(curvature))


def _blocks(curvature: Curvature) -> Rows:
    masks = _block_masks(curvature)

    def means(part: Curvature) -> list[float]:
        rho = part.correlation()
        return [v for mask in masks.values() for v in (np.abs(rho[mask]).mean(), rho[mask].mean())]

    values = means(curvature)
    errors = errors_of(curvature, means, len(values))
    rho, halves = curvature.correlation(), _halves(curvature)
    rows = []
    for number, ((block, reach), mask) in enumerate(masks.items()):
        row: Row = {"block": block, "reach": reach, "pairs": int(mask.sum()) // 2}
        for offset, name in enumerate(("mean_absolute", "mean_signed")):
            row[name] = values[2 * number + offset]
            row[f"{name}_error"] = errors[2 * number + offset]
        row |= {"positive_share": (rho[mask] > 0).mean(), "noise_floor": None, "corrected": None}
        if halves is not None:
            a, b = halves[0][mask], halves[1][mask]
            row["noise_floor"] = np.abs(a - b).mean() / 2
            # noise makes |a| too large, but not b in the direction of a: the halves are independent
            row["corrected"] = (np.sign(a) * b + np.sign(b) * a).mean() / 2
        rows.append(row | {"paper": PAPER_BLOCKS[block] if reach == "all" else None})
    return rows


def _block_masks(curvature: Curvature) -> dict[tuple[str, str], np.ndarray]:
    """Return ordered pairs u != v of each block and reach that has any: bool [M, M]."""
    layers = curvature.units.layers
    distance = np.abs(layers[:, None] - layers[None, :])
    near = {"all": distance >= 0, "same layer": distance == 0, "adjacent layers": distance == 1}
    near["further"] = distance > 1
    masks = {(b, r): curvature.pair_mask(b) & near[r] for b in BLOCKS for r in REACHES}
    return {key: mask for key, mask in masks.items() if mask.any()}


def _halves(curvature: Curvature) -> list[np.ndarray] | None:
    """Return correlations of two disjoint halves of the groups; None without two groups."""
    if curvature.group_grams is None:
        return None
    groups = Sample.of(curvature)
    return [half.correlation() for half in groups.halves()] if len(groups) > 1 else None


def plot_blocks(table: Table) -> Figure:
    """Plot mean |rho| per block and reach with error bars; gray bars are the noise floor."""
    figure = empty()
    looks = (("attention", "attention", ""), ("cross", "bridge", "x"), ("ffn", "ffn", "/"))
    for block, color, pattern in looks:
        rows = pick(table, block=block)
        errors = [row["mean_absolute_error"] or 0.0 for row in rows]
        figure.add_bar(
            x=[row["reach"] for row in rows],
            y=[row["mean_absolute"] for row in rows],
            error_y={"array": errors, "color": GUIDE["color"]},
            name=LABELS.get(block, block),
            offsetgroup=block,
            marker={"color": COLORS[color], "pattern": {"shape": pattern}},
        )
    for block in BLOCKS:
        rows = [row for row in pick(table, block=block) if row["noise_floor"] is not None]
        figure.add_bar(
            x=[row["reach"] for row in rows],
            y=[row["noise_floor"] for row in rows],
            name="noise floor",
            offsetgroup=block,
            showlegend=block == BLOCKS[0],
            marker={"color": "rgba(128,128,128,0.7)"},
        )
    figure.update_layout(barmode="group")
    title = "Curvature correlation by block and distance"
    return chart(figure, title, "distance of the two units", "mean |ρ|")


# Budgets ------------------------------------------------------------------------------------------
def budget_table(
    curvature: Curvature,
    ratio: float = 0.2,
    strengths: tuple[float, ...] = (0.0, 1.0),
    cache: Folder = None,
) -> DataFrame:
    """Return the share of cost that plans remove per layer and kind (appendix, "Layer pattern").

    Returns:
        One row per lambda, kind and layer that has such units: units and share removed, and
        share_error, the standard deviation of the share over 100 bootstrap draws of the groups,
        each solved anew.
    """
    settings = group_marks(curvature, ratio=ratio, strengths=list(strengths))

    def compute() -> Rows:
        return [row for strength in strengths for row in _budget(curvature, ratio, strength)]

    return kept_table(cache, "budgets", settings, compute)


def _budget(curvature: Curvature, ratio: float, strength: float) -> Rows:
    plan = solve_greedy(curvature, ratio, strength)
    again = [solved(part, ratio, strength)[0] for part in resampled(curvature)]
    spread = spread_of([_shares(other) for other in again if other is not None])
    shares, units, rows = _shares(plan), plan.units, []
    for number, kind in enumerate(KINDS):
        for layer in np.flatnonzero(~np.isnan(shares[number])):
            mine = plan.indicator & (units.layers == layer) & (units.kinds == kind)
            rows.append(
                {
                    "interaction_strength": strength,
                    "requested_ratio": ratio,
                    "kind": kind,
                    "layer": int(layer),
                    "units": int(mine.sum()),
                    "share": shares[number, layer],
                    "share_error": None if spread is None else spread[number, layer],
                }
            )
    return rows


def _shares(plan: Selection) -> np.ndarray:
    """Return the share removed [kinds, layers], NaN where a layer has no unit of the kind."""
    return np.stack([plan.layer_budget()[kind] for kind in KINDS])


def plot_budgets(table: Table) -> Figure:
    """Plot the share of each layer's attention and FFN cost removed, per lambda."""
    figure, done = empty(), pick(table)
    for number, strength in enumerate(dict.fromkeys(row["interaction_strength"] for row in done)):
        dash, symbol = DASHES[number % len(DASHES)], SYMBOLS[number % len(SYMBOLS)]
        for kind in KINDS:
            rows = pick(done, interaction_strength=strength, kind=kind)
            style = {"color": COLORS[kind], "symbol": symbol}
            name = f"{LABELS[kind]}, λ = {strength:g}"
            add(figure, rows, "layer", "share", name, style, line=dash)
    y = share_axis("share of the layer's parameters removed")
    return chart(figure, "Share of each layer removed, by kind and λ", "layer", y)
