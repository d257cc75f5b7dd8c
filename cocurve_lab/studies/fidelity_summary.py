"""What the fidelity table says, with intervals over text: correlations, exponent of the gap."""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata

from ..fidelity import RANDOM
from .fidelity import ACROSS, PAPER, POOL, number, sequence_values
from .tables import Row, Table, column


def fidelity_summary(table: Table, draws: int = 2000, seed: int = 0) -> Table:
    """How well `fidelity_study` predicted, beside what the paper reports.

    Each group gets pearson, pearson_log, spearman and median_ratio, and the spearman of two
    predictions without edges (columns diagonal and single_units). Plans across ratios get the
    exponent of the gap: slope of log |measured - predicted| on the log of the number of units
    (||s||_1; Proposition "Surrogate-KL gap" bounds it by a cube) and of the predicted risk; the
    pool how much worse random plans are. standard_error, low and high (95 %) are a bootstrap over
    sequences with plans and predictions fixed; fit_error is the regression's own standard error.

    Args:
        table: from `fidelity_study`.
        draws: of the bootstrap.
        seed: of the draws.

    Returns:
        Rows of group, statistic, value, standard_error, low, high, fit_error, points, left_out and
        paper (its figure where it states one). Left out are plans without a logarithm (values at or
        below 0), for exponents also gaps within two standard errors of 0.
    """
    means = resampled_means(sequence_values(table), draws, seed)
    predicted, error = column(table, "predicted"), column(table, "standard_error")
    rows: Table = []
    for group, members in _groups(table).items():
        x, y = predicted[members], means[:, members]
        rows += _agreement_rows(group, x, y)
        for name in ("diagonal", "single_units"):
            other = column(table, name)[members].astype(float)
            known = np.isfinite(other)
            values = correlations(rankdata(other[known]), rankdata(y[:, known], axis=1))
            left_out = int((~known).sum())
            rows.append(
                statistic_row(group, f"spearman, {name}", values, int(known.sum()), left_out)
            )
        if group.startswith(ACROSS):
            clear = np.abs(y[0] - x) > 2 * np.nan_to_num(error[members].astype(float))
            size = column(table, "units")[members].astype(float)
            gap = np.abs(y - x)
            for name, scale in (("units", size), ("predicted risk", x)):
                rows.append(_exponent(group, name, scale, gap, clear & (scale > 0)))
    rows += _random_rows(table, means)
    paper = {
        (f"{ACROSS}, lambda 1", "spearman"): PAPER["spearman"],
        (f"{ACROSS}, lambda 1", "pearson"): PAPER["pearson"],
        (POOL, "spearman"): PAPER["pool"],
        (POOL, "random over structured"): PAPER["random"],
        (f"{ACROSS}, lambda 1", "gap exponent in units"): PAPER["exponent"],
    }
    return [row | {"paper": paper.get((row["group"], row["statistic"]))} for row in rows]


def resampled_means(values: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Means [1 + draws, rows] of values [rows, sequences]: as measured, then bootstrap draws."""
    count = values.shape[1]
    counts = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=draws)
    return np.vstack([np.ones(count), counts]) @ values.T / count


def _groups(table: Table) -> dict[str, np.ndarray]:
    """Which rows each group of the summary has."""
    group, method = column(table, "group"), column(table, "method")
    across, pool, random = group == ACROSS, group == POOL, method == RANDOM
    members = {ACROSS: across}
    members |= {f"{ACROSS}, {name}": across & (method == name) for name in dict.fromkeys(method)}
    members |= {POOL: pool, f"{POOL}, random": pool & random}
    members[f"{POOL}, structured"] = pool & ~random
    return {name: np.flatnonzero(mask) for name, mask in members.items() if mask.any()}


def _agreement_rows(group: str, x: np.ndarray, y: np.ndarray) -> Table:
    good = (x > 0) & (y[0] > 0)
    left_out, x, y = int((~good).sum()), x[good], y[:, good]
    log_y = np.log(np.where(y > 0, y, np.nan))  # a draw may reach 0 where the mean does not
    parts = {
        "pearson": correlations(x, y),
        "pearson_log": correlations(np.log(x), log_y),
        "spearman": correlations(rankdata(x), rankdata(y, axis=1)),
        "median_ratio": np.median(y / x, axis=1) if len(x) else np.full(len(y), np.nan),
    }
    return [statistic_row(group, name, v, len(x), left_out) for name, v in parts.items()]


def _exponent(group: str, name: str, x: np.ndarray, gap: np.ndarray, good: np.ndarray) -> Row:
    """Slope of log gap [1 + draws, n] on log x [n] over the good points."""
    count, left_out = int(good.sum()), int((~good).sum())
    slopes, error = np.full(len(gap), np.nan), None
    if count >= 3 and np.ptp(x[good]) > 0:
        centred = np.log(x[good]) - np.log(x[good]).mean()
        log_gap = np.log(gap[:, good])
        slopes = log_gap @ centred / (centred @ centred)
        rest = log_gap[0] - log_gap[0].mean() - slopes[0] * centred
        error = float(np.sqrt(rest @ rest / (count - 2) / (centred @ centred)))
    row = statistic_row(group, f"gap exponent in {name}", slopes, count, left_out)
    return row | {"fit_error": error}


def _random_rows(table: Table, means: np.ndarray) -> Table:
    """Mean KL of the pool's random plans over that of its structured ones, and of its greedy."""
    members = _groups(table)
    if f"{POOL}, random" not in members or f"{POOL}, structured" not in members:
        return []
    random = members[f"{POOL}, random"]
    others = {"structured": members[f"{POOL}, structured"], "greedy": members[POOL][:1]}
    rows = []
    for name, other in others.items():
        below = means[:, other].mean(axis=1)
        factor = means[:, random].mean(axis=1) / np.where(below > 0, below, np.nan)
        rows.append(statistic_row(POOL, f"random over {name}", factor, len(random) + len(other), 0))
    return rows


def correlations(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson correlation [draws] of x [n] with each row of y [draws, n]; NaN below 3 points."""
    if len(x) < 3:
        return np.full(len(y), np.nan)
    x, y = x - x.mean(), y - y.mean(axis=1, keepdims=True)
    scale = np.sqrt((x @ x) * (y**2).sum(axis=1))
    return np.divide(y @ x, scale, out=np.full(len(y), np.nan), where=scale > 0)


def statistic_row(
    group: str, statistic: str, values: np.ndarray, points: int, left_out: int
) -> Row:
    """A row of a summary from a statistic as measured and on bootstrap draws [1 + draws]."""
    drawn = values[1:][np.isfinite(values[1:])]
    enough = np.isfinite(values[0]) and len(drawn) > 1
    low, high = np.quantile(drawn, (0.025, 0.975)) if enough else (None, None)
    return {
        "group": group,
        "statistic": statistic,
        "value": number(values[0]),
        "standard_error": float(drawn.std(ddof=1)) if enough else None,
        "low": None if low is None else float(low),
        "high": None if high is None else float(high),
        "fit_error": None,
        "points": points,
        "left_out": left_out,
    }
