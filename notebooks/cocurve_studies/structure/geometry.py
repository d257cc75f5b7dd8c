"""The structure of H: its blocks, and the budgets of its plans.

Sections "Geometry of the Pruning Risk" and "Mechanism Analysis"; `propositions.py` has the paper's
propositions. Nothing here runs a model: numpy alone, from H and its groups of sequences. Standard
errors are None for an H without groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cocurve_lab.curvature.matrix import BLOCKS, Curvature
from cocurve_lab.extensions.analysis.gate import noise_of, redundancy_gate
from cocurve_lab.extensions.figures import (
    COLORS,
    DASHES,
    LABELS,
    SYMBOLS,
)
from cocurve_lab.models.kinds import KINDS
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from ..chart import add, chart, empty, share_axis
from ..lazy import DataFrame, Figure
from ..shared import errors_of, group_marks, resampled, solved, spread_of
from ..tables import Columns, Folder, Row, Rows, Table, kept_table, pick

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
    rho = curvature.correlation()
    rows = []
    for number, ((block, reach), mask) in enumerate(masks.items()):
        row: Row = {"block": block, "reach": reach, "pairs": int(mask.sum()) // 2}
        for offset, name in enumerate(("mean_absolute", "mean_signed")):
            row[name] = values[2 * number + offset]
            row[f"{name}_error"] = errors[2 * number + offset]
        floor, corrected = noise_of(curvature, mask)
        share = (rho[mask] > 0).mean()
        row |= {"positive_share": share, "noise_floor": floor, "corrected": corrected}
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


# Propositions -------------------------------------------------------------------------------------
# columns of `proposition_table` for reading, with `shown`
COLUMNS: Columns = {
    "quantity": "",
    "requested_ratio": "removed",
    "value": "",
    "reference": "by the proposition",
}


def proposition_table(
    curvature: Curvature,
    ratios: Sequence[float] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5),
    cache: Folder = None,
) -> DataFrame:
    """Return both sides of the paper's propositions about H and its plans, for this H.

    - "smallest eigenvalue over the largest" (Prop. "Gram equivalence"): at least -1e-6, what
      float32 features leave.
    - "share of |H| off the diagonal", and "single-unit KL CV, FFN": std / mean of the measured KL
      of single FFN groups.
    - "edge over diagonal" (Prop. "Edge-to-diagonal balance"), on the lambda = 0 plan S: median over
      u in S with H_uu > 0 of |sum over v in S, v != u of H_uv| / (1/2 H_uu), against the median of
      2 |S| |rho_bar|, with the mean correlation rho_bar over pairs of S.
    - "weighted mean correlation" (Prop. "The diagonal omission"), on the same plan: the mean of
      rho_uv over its pairs, weighted by sqrt(H_uu H_vv); the paper calls it the statistic of its
      gate, so the reference is the FFN redundancy without sampling noise.
    - "share of positive edges" of the plan of lambda 1.
    - "overshoot" (Prop. "Overshoot bound"): realized less requested ratio, at most the largest
      unit's share of the cost.

    Returns:
        Rows of quantity, requested_ratio, units (|S|), value, value_error (plan fixed: a jackknife,
        for medians and shares a bootstrap of the groups), reference and holds.
    """
    settings = group_marks(curvature, ratios=list(ratios))

    def compute() -> Rows:
        rows = _whole_rows(curvature)
        for ratio in ratios:
            zero, one = (solve_greedy(curvature, ratio, strength) for strength in (0.0, 1.0))
            rows += [_overshoot(plan) for plan in (zero, one)]
            if len(zero) > 1 and len(one) > 1:
                rows += [_balance(curvature, zero), _weighted(curvature, zero)]
                rows.append(_positive(curvature, one))
        return rows

    return kept_table(cache, "propositions", settings, compute)


def _row(quantity: str, value: float, error: float | None, plan: Selection | None = None) -> Row:
    return {
        "quantity": quantity,
        "requested_ratio": None if plan is None else plan.requested_ratio,
        "units": None if plan is None else len(plan),
        "value": value,
        "value_error": error,
        "reference": None,
        "holds": None,
    }


def _whole_rows(curvature: Curvature) -> Rows:
    spectrum = curvature.spectrum()
    relative = spectrum[-1] / spectrum[0] if spectrum[0] > 0 else 0.0

    def mass(part: Curvature) -> float:
        total = float(np.abs(part.matrix).sum())
        return 1 - float(part.saliency.sum()) / total if total > 0 else np.nan

    gram = _row("smallest eigenvalue over the largest", relative, None)
    rows = [gram | {"reference": 0.0, "holds": bool(relative >= -1e-6)}]
    error = errors_of(curvature, mass, 1)[0]
    rows.append(_row("share of |H| off the diagonal", mass(curvature), error))
    if curvature.group_risks is not None:
        risks = curvature.group_risks[:, curvature.units.kinds == "ffn"]
        count = len(risks)
        # the positions of a draw are one factor for all units, so they cancel in std / mean
        drop = [_variation(risks.sum(axis=0) - part) for part in risks]
        error = float(np.sqrt((count - 1) * np.var(drop))) if count > 1 else None
        rows.append(_row("single-unit KL CV, FFN", _variation(risks.sum(axis=0)), error))
    return rows


def _variation(values: np.ndarray) -> float:
    """Return std / mean, NaN of nothing."""
    return float(values.std() / values.mean()) if values.any() else float("nan")


def _overshoot(plan: Selection) -> Row:
    most = float(plan.units.costs.max() / plan.units.total_cost)
    over = plan.realized_ratio - plan.requested_ratio
    return _row("overshoot", over, 0.0, plan) | {"reference": most, "holds": over <= most}


def _balance(curvature: Curvature, plan: Selection) -> Row:
    block = np.ix_(plan.pruned, plan.pruned)

    def median(part: Curvature) -> float:
        matrix = part.matrix[block]
        diagonal = np.diagonal(matrix)
        live = diagonal > 0
        edges = np.abs(matrix.sum(axis=1) - diagonal)
        return float(np.median(edges[live] / (diagonal[live] / 2))) if live.any() else np.nan

    row = _bootstrapped("edge over diagonal", curvature, median, plan)
    return row | {"reference": redundancy_gate(curvature, plan.requested_ratio).edge_to_diagonal}


def _weighted(curvature: Curvature, plan: Selection) -> Row:
    block, pairs = np.ix_(plan.pruned, plan.pruned), np.triu_indices(len(plan), k=1)

    def weighted(part: Curvature) -> float:
        root = np.sqrt(part.saliency[list(plan.pruned)])
        weights = np.outer(root, root)[pairs]
        total = float(weights.sum())
        return float(part.correlation()[block][pairs] @ weights) / total if total > 0 else np.nan

    error = errors_of(curvature, weighted, 1)[0]
    _, clean = noise_of(curvature, curvature.pair_mask("ffn"))
    reference = curvature.ffn_redundancy if clean is None else clean
    row = _row("weighted mean correlation", weighted(curvature), error, plan)
    return row | {"reference": reference}


def _positive(curvature: Curvature, plan: Selection) -> Row:
    block, pairs = np.ix_(plan.pruned, plan.pruned), np.triu_indices(len(plan), k=1)

    def positive(part: Curvature) -> float:
        return float((part.matrix[block][pairs] > 0).mean())

    return _bootstrapped("share of positive edges", curvature, positive, plan)


def _bootstrapped(
    quantity: str, curvature: Curvature, statistic: Callable[[Curvature], float], plan: Selection
) -> Row:
    spread = spread_of([statistic(part) for part in resampled(curvature)])
    error = None if spread is None else float(spread)
    return _row(quantity, statistic(curvature), error, plan)
