"""The paper beside what ships with SmolLM2: errors of two sources, premises, and the command."""

from __future__ import annotations

import numpy as np
import pytest

from cocurve_lab.cli import main
from cocurve_studies.paper import shipped
from cocurve_studies.structure.findings import DIFFERENT, LOW

REAL = shipped.shipped()


def test_a_difference_has_the_error_of_rows_and_of_draws() -> None:
    for text in ("c4", "wikitext"):
        gap = REAL.less(shipped.ONE, shipped.ZERO, 0.2, text)
        rows = [REAL.rows(name, 0.2, text) for name in (shipped.ONE, shipped.ZERO)]
        apart = rows[0] - rows[1]
        drawn = [
            REAL.rows(f"draw {n} of H, lambda 1", 0.2, text)
            - REAL.rows(f"draw {n} of H, lambda 0", 0.2, text)
            for n in range(20)
            if len(REAL.rows(f"draw {n} of H, lambda 1", 0.2, text))
        ]
        drawn = [values[: min(map(len, drawn))].mean() for values in drawn]
        over_draws = np.var(drawn, ddof=1) * 24 / 23  # 24 rows behind H
        assert gap is not None
        assert gap.value == pytest.approx(apart.mean())
        assert gap.error == pytest.approx((apart.var(ddof=1) / len(apart) + over_draws) ** 0.5)
        assert gap.degrees is not None
        assert gap.degrees < len(apart) - 1 + len(drawn) - 1
    other = REAL.less(shipped.ONE, "SlimLLM", 0.2, "c4")
    alone = REAL.less("searched", "SlimLLM", 0.2, "c4", of_one_h=True)
    assert other is not None
    assert alone is not None
    assert (other.error or 0) > (alone.error or 0)  # one plan of H varies with H
    unknown = REAL.less(shipped.ONE, shipped.ZERO, 0.2, "manual")  # no draws were measured
    assert unknown is not None
    assert unknown.judged((-10, 10)) is None


def test_no_sentence_agrees_where_its_premise_fails() -> None:
    found = shipped.paper_findings(REAL)
    assert len({(f.claim, f.ours) for f in found}) == len(found) > 12
    (helps,) = (f for f in found if f.claim == shipped.HELP.claim and "20%" in f.ours)
    for claim in (LOW, DIFFERENT):
        (finding,) = (f for f in found if f.claim == claim.claim)
        assert finding.agrees is not True or helps.agrees


def test_the_command_prints_what_ships_and_asks_for_a_folder_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["paper", "smollm2"]) == 0
    assert "Spearman 0.81" in capsys.readouterr().out
    assert main(["paper", "demo"]) == 1
    assert "--out" in capsys.readouterr().err
