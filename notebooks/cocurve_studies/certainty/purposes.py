"""What a plan is for: one budget, calibrated on each of several texts and judged on all of them."""

from __future__ import annotations

from itertools import product

from cocurve_lab.measuring.results import mean_and_error

from ..paper.shipped import Shipped
from ..tables import Columns, Row, Rows

STRENGTHS = (0.0, 1.0)
# kept plans: the text of H as their names have it -> the text that judges
KEPT = {"C4": "c4", "WikiText": "wikitext", "the manual": "manual", "chat text": "chat"}
COLUMNS: Columns = {
    "judged_on": "judged on",
    "calibrated_on": "calibrated on",
    "kl": "KL",
    "against_own": "minus the plan for it",
}


def kept_purposes(shipped: Shipped, ratio: float) -> Rows:
    """Judge plans of H of each text on every text, from what ships.

    Returns:
        One row per plan and judge: calibrated_on, judged_on, interaction_strength, own (whether
        they are the same text), kl with its error, and against_own: KL less that of the plan of the
        judge's own text, with its paired error.
    """
    return [_row(shipped, ratio, *each) for each in product(KEPT, KEPT, STRENGTHS)]


def _row(shipped: Shipped, ratio: float, name: str, judge: str, strength: float) -> Row:
    mine, own = (
        shipped.rows(f"H of {text}, lambda {strength:g}", ratio, KEPT[judge])
        for text in (name, judge)
    )
    row = {"calibrated_on": name, "judged_on": judge, "interaction_strength": strength}
    for column, values in (("kl", mine), ("against_own", mine - own)):
        row[column], row[f"{column}_error"] = mean_and_error(values)
    return row | {"own": name == judge}
