"""The joint KL of pairs of units against the sum of the two, and the sign of the difference.

The paper's appendix "Surrogate Fidelity", paragraph "The right scale for validating the surrogate".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.tables import Folder, Row, Table, column, pick
from cocurve_lab.curvature.matrix import BLOCKS, Curvature
from cocurve_lab.solver.selection import Selection

from ..chart import add, chart, empty
from ..shared import known, marks, sequence_columns, sequence_values
from ..study import Study
from .fidelity import FidelityOptions, resampled_means, statistic_row

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel

    from cocurve_lab.calibration import CalibrationSet


PAIRS = ("random", "strongest positive", "strongest negative")
PAPER_FACTOR = 0.92

Risks = dict[tuple[int, ...], np.ndarray]  # KL [sequences] of each set of units


def pair_saturation(
    model: PreTrainedModel,
    curvature: Curvature,
    held_out: CalibrationSet,
    options: FidelityOptions = FidelityOptions(),
    cache: Folder = None,
    progress: bool = True,
) -> Table:
    """Measure pairs of units against the sum of the two and against the sign of H_uv.

    Pairs of units with H_uu > 0: drawn at random, and those of the largest and of the most negative
    correlation rho_uv (not of H_uv, which would only find the two most salient units);
    `options.pairs` per group, fewer where there are no more.

    Returns:
        One row per pair: group (one of PAIRS), first, second, block, distance in layers,
        correlation, edge = H_uv, risk_first, risk_second, risk_pair (measured), factor = R({u,v}) /
        (R({u}) + R({v})), predicted_factor, the same of 1/2 s^T H s, interaction = R({u,v}) -
        R({u}) - R({v}), and kl_<n> (the pair), alone_<n> (the sum of the two) of each sequence.
    """
    settings = marks(model, curvature, held_out, pairs=str(options.pairs), seed=str(options.seed))
    chosen = _pairs(curvature, options)

    def compute(study: Study) -> Table:
        sets: list[tuple[int, ...]] = list(
            dict.fromkeys(s for _, u, v in chosen for s in ((u,), (v,), (u, v)))
        )
        plans = [Selection.from_pruned(curvature.units, s, curvature) for s in sets]
        kl: Risks = dict(zip(sets, study.measure(plans).kl, strict=True))
        return [_pair_row(curvature, group, u, v, kl) for group, u, v in chosen]

    study = Study(model, held_out, [curvature], cache=cache, progress=progress)
    return study.table("pair_saturation", settings, compute)


def _pairs(curvature: Curvature, options: FidelityOptions) -> list[tuple[str, int, int]]:
    first, second = np.triu_indices(len(curvature.units), k=1)
    live = (curvature.saliency[first] > 0) & (curvature.saliency[second] > 0)
    first, second = first[live], second[live]
    if options.pairs < 1 or not len(first):
        raise InputError(
            f"pairs is {options.pairs}, of {len(first)} pairs of units with H_uu > 0. Ask for at "
            "least one pair, of an H that has one."
        )
    rho = curvature.correlation()[first, second]
    order, count = np.argsort(rho, kind="stable"), options.pairs
    drawn = np.random.default_rng(options.seed).permutation(len(rho))[:count]
    positive, negative = (
        order[::-1][: min(count, (rho > 0).sum())],
        order[: min(count, (rho < 0).sum())],
    )
    groups = zip(PAIRS, (drawn, positive, negative), strict=True)
    return [(group, int(first[i]), int(second[i])) for group, members in groups for i in members]


def _pair_row(curvature: Curvature, group: str, u: int, v: int, kl: Risks) -> Row:
    units, pair, alone = curvature.units, kl[u, v], kl[(u,)] + kl[(v,)]
    count, total = len(pair), float(alone.mean())
    factor = float(pair.mean()) / total if total > 0 else np.nan

    def error(values: np.ndarray) -> float:
        return float(values.std(ddof=1) / np.sqrt(count)) if count > 1 else np.nan

    block = next(b for b in BLOCKS if curvature.pair_mask(b)[u, v])
    return (
        {
            "group": group,
            "first": units[u].name,
            "second": units[v].name,
            "block": block,
            "distance": abs(units[u].layer - units[v].layer),
            "correlation": curvature.correlation()[u, v],
            "edge": curvature.matrix[u, v],
            "risk_first": kl[(u,)].mean(),
            "risk_second": kl[(v,)].mean(),
            "risk_pair": pair.mean(),
            "factor": known(factor),
            "factor_error": known(error(pair - factor * alone) / total) if total > 0 else None,
            "predicted_factor": curvature.risk([u, v])
            / (curvature.risk([u]) + curvature.risk([v])),
            "interaction": (pair - alone).mean(),
            "interaction_error": known(error(pair - alone)),
        }
        | sequence_columns(pair)
        | sequence_columns(alone, "alone")
    )


def saturation_summary(table: Table, draws: int = 2000, seed: int = 0) -> Table:
    """Summarize the pairs of `pair_saturation`, beside the paper's factor of 0.92.

    Per group, and for the random pairs also per third by the risk of the two units and per third of
    |rho|: the median factor (bootstrap over pairs and sequences at once), the share of sub-additive
    pairs, how often interaction and H_uv have one sign, and how often two such signs would agree by
    chance (where all H_uv have one sign, the two are the same number: read the strongest pairs of
    both signs together). Shares have a binomial standard error and Wilson's 95 % interval; they
    treat pairs as independent, which shared units are not.

    Returns:
        Rows of group, statistic, value, value_error, low, high, points, left_out (no factor; or
        H_uv or the interaction exactly 0; or, where the statistic says so, an interaction within
        two standard errors of 0) and paper.
    """
    rows: Table = []
    for group, members in _pair_groups(table).items():
        rows.append(_median_factor(group, members, draws, seed))
        edge, interaction = column(members, "edge"), column(members, "interaction")
        clear = np.abs(interaction) > 2 * column(members, "interaction_error").astype(float)
        rows.append(_share(group, "share sub-additive", interaction < 0, interaction != 0))
        signed = (edge != 0) & (interaction != 0)
        same = np.sign(edge) == np.sign(interaction)
        rows.append(_share(group, "sign agreement", same, signed))
        rows.append(_share(group, "sign agreement, beyond noise", same, signed & clear))
        p, q = (
            (values[signed] > 0).mean() if signed.any() else np.nan
            for values in (edge, interaction)
        )
        chance = np.array([p * q + (1 - p) * (1 - q)])
        rows.append(statistic_row(group, "agreement by chance", chance, int(signed.sum()), 0))
    return [row | {"paper": PAPER_FACTOR if _is_paper(row) else None} for row in rows]


def _is_paper(row: Row) -> bool:
    return row["group"] == PAIRS[0] and row["statistic"] == "median factor"


def _pair_groups(table: Table) -> dict[str, Table]:
    groups = {name: pick(table, group=name) for name in PAIRS}
    random = groups[PAIRS[0]]
    groups["strongest, both signs"] = groups[PAIRS[1]] + groups[PAIRS[2]]
    by = {
        "risk": column(random, "risk_first") + column(random, "risk_second"),
        "|rho|": np.abs(column(random, "correlation")),
    }
    for name, values in by.items():
        thirds = np.array_split(np.argsort(values, kind="stable"), 3)
        for place, third in zip(("lowest", "middle", "highest"), thirds, strict=True):
            groups[f"random, {place} third of {name}"] = [random[i] for i in third]
    return {name: members for name, members in groups.items() if members}


def _median_factor(group: str, members: Table, draws: int, seed: int) -> Row:
    pair = resampled_means(sequence_values(members), draws, seed)
    alone = resampled_means(sequence_values(members, "alone"), draws, seed)  # the same draws
    good = (alone > 0).all(axis=0)
    factor = pair[:, good] / alone[:, good]
    count = int(good.sum())
    if not count:
        return statistic_row(group, "median factor", np.full(1, np.nan), 0, len(members))
    which = np.random.default_rng(seed + 1).integers(count, size=factor.shape)
    which[0] = np.arange(count)  # the first row is the statistic as measured
    medians = np.median(np.take_along_axis(factor, which, axis=1), axis=1)
    return statistic_row(group, "median factor", medians, count, len(members) - count)


def _share(group: str, statistic: str, hit: np.ndarray, counted: np.ndarray) -> Row:
    """Return the share of hits among what counts, with its binomial error and Wilson's interval."""
    n, left_out = int(counted.sum()), int((~counted).sum())
    row = statistic_row(group, statistic, np.full(1, np.nan), n, left_out)
    if not n:
        return row
    # Wilson's interval stays inside [0, 1] and has a length where all pairs agree
    share, z = float(hit[counted].mean()), 1.96
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * float(np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)))
    error = float(np.sqrt(share * (1 - share) / n))
    return row | {
        "value": share,
        "value_error": error,
        "low": middle - reach,
        "high": middle + reach,
    }


def plot_pair_saturation(table: Table) -> Figure:
    """Plot R({u,v}) / (R({u}) + R({v})) of each pair against rho_uv; 1 is additive."""
    figure = empty()
    hover = "%{text}<br>ρ %{x:.3f}<br>factor %{y:.3f}<extra></extra>"
    for place, group in enumerate(PAIRS):
        rows = [row for row in pick(table, group=group) if row["factor"] is not None]
        words = [f"{row['first']}, {row['second']}" for row in rows]
        add(figure, rows, "correlation", "factor", group, place, text=words, hover=hover)
    title = "Pairs: above 1 the joint removal costs more than the sum"
    y = {"title_text": "KL of the pair / sum of the two KL", "type": "log"}
    return chart(figure, title, "correlation ρ<sub>uv</sub>", y, across=1.0)
