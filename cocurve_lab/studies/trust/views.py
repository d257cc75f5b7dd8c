"""Studies as a reader sees them: few columns, headings in words, value ± error, lines that fit."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import InputError
from ...tables import Row, Table, plus_minus

# heading -> column, or (column, column of its standard error)
View = Mapping[str, str | tuple[str, str]]


_PLAN: View = {"removed": "requested_ratio", "λ": "interaction_strength"}


_MORE: View = {"difference": ("difference", "difference_error")}


VIEWS: dict[str, View] = {
    "sweep": {
        "plan": "method",
        "removed": "requested_ratio",
        "units": "units",
        "predicted": "predicted",
        "measured": ("measured", "standard_error"),
        "measured / predicted": "ratio",
    },
    "best lambda": {
        "removed": "requested_ratio",
        "plans measured": "plans",
        "best λ from": "best_from",
        "to": "best_to",
        "gate's λ": "gate",
        "KL of the best": ("kl_best", "error_best"),
        "KL, λ 0": ("kl_lambda_0", "error_lambda_0"),
        "KL, λ 1": ("kl_lambda_1", "error_lambda_1"),
    },
    "edge benefit": {
        "removed": "requested_ratio",
        "KL(λ 0) - KL(λ 1)": ("edge_benefit", "edge_benefit_error"),
        "KL(λ 0) - KL(best)": ("lambda_0_behind", "lambda_0_behind_error"),
        "KL(λ 1) - KL(best)": ("lambda_1_behind", "lambda_1_behind_error"),
    },
    "fitting lambda": {
        "removed": "requested_ratio",
        "E": "edge_mass",
        "b": ("remainder", "error_lambda_1"),
        "1 + b/E, fits": ("fitting", "fitting_error"),
        "1 - b/E, printed": "printed",
    },
    "guards": {
        "removed": "requested_ratio",
        "judged by": "judge",
        "plan": "role",
        "guards": "guards",
        "KL": "kl",
        "perplexity": "perplexity",
        **_MORE,
    },
    "refinement": {
        **_PLAN,
        "R_λ, greedy": "objective",
        "after search": "refined_objective",
        "bound": "bound",
        "bound / after": "certified",
        "units exchanged": "units_exchanged",
        "KL, greedy": "kl",
        "KL after - before": ("difference", "difference_error"),
    },
    "gains": {
        **_PLAN,
        "γ": "ridge",
        "τ": "clip",
        "KL with gains": ("kl", "standard_error"),
        "KL with - without": ("difference", "difference_error"),
    },
    "infinitesimal": {
        "removed": "ratio",
        "λ": "interaction_strength",
        "overlap": "overlap",
        "KL, plan of H": ("measured_finite", "measured_finite_error"),
        "KL, plan of H*": ("measured_exact", "measured_exact_error"),
        "H* - H": ("difference", "difference_error"),
    },
    "matrices": {
        "‖H* - H‖ / ‖H‖": ("frobenius_distance", "frobenius_distance_error"),
        "median H*_uu / H_uu": ("diagonal_ratio", "diagonal_ratio_error"),
        "correlation of log H_uu": ("log_diagonal_correlation", "log_diagonal_correlation_error"),
        "rank correlation of edges": ("edge_spearman", "edge_spearman_error"),
    },
    "redundancy": {
        "model": "model",
        "removed": "ratio",
        "mean |ρ| of FFN": ("redundancy", "redundancy_se"),
        "KL(λ 0) - KL(λ 1)": ("edge_benefit", "edge_benefit_se"),
        "share of KL(λ 0)": ("relative_benefit", "relative_benefit_se"),
        "band": "gate_band",
        "gate's λ": "gate_lambda",
        "gate right": "gate_right",
    },
    "steps": {
        "plan": "plan",
        "builds of H": "builds",
        "removed": "ratio",
        "λ": "interaction_strength",
        "KL": ("kl", "kl_se"),
        "KL minus one shot's": ("difference", "difference_se"),
        "overlap": "overlap",
    },
}


def view(table: Table, name: str) -> Table:
    """A table for reading: the columns of VIEWS[name], numbers rounded, errors beside values.

    Args:
        table: of the study; it keeps all digits.
        name: one of VIEWS.

    Returns:
        One row per row, ready for a DataFrame: floats of three digits; "value ± error" where the
        error is known; shares removed as percentages; "" for None.

    Raises:
        InputError: no such view.
    """
    if name not in VIEWS:
        raise InputError(f"there is no view {name!r}. Choose of {', '.join(VIEWS)}.")
    return [
        {heading: _shown(row, heading, source) for heading, source in VIEWS[name].items()}
        for row in table
    ]


def _shown(row: Row, heading: str, source: str | tuple[str, str]) -> str | int | float:
    if isinstance(source, tuple):
        value, error = (row[name] for name in source)
        return "" if value is None else plus_minus(value, error)
    value = row[source]
    if value is None:
        return ""
    if heading == "removed":
        return f"{value:.0%}"
    return float(f"{value:.3g}") if isinstance(value, float) else value
