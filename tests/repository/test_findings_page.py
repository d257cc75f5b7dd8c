"""The page of findings is what its command writes from the values kept beside it."""

from __future__ import annotations

import json
import re
from datetime import date
from types import ModuleType

import pytest

from cocurve_studies.findings import Finding
from helpers.benchmarks import FOLDER, command

KEPT = json.loads((FOLDER / "findings.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return command("bench_findings")


def test_the_page_is_written_from_the_kept_values(bench: ModuleType) -> None:
    for name, text in (
        ("FINDINGS.md", bench.page(KEPT)),
        ("FINDINGS_LAB.md", bench.lab_page(KEPT)),
    ):
        page = (FOLDER / name).read_text(encoding="utf-8")
        assert page == text, "run: python tests/benchmarks/bench_findings.py --page-only"
    assert {"06", "07", "08"} <= {stem[:2] for stem in KEPT} <= set(bench.SHOWN)


def test_every_notebook_says_when_it_ran_and_counts_its_verdicts(bench: ModuleType) -> None:
    for stem, part in KEPT.items():
        assert date.fromisoformat(part["run"]) >= date(2026, 11, 23)
        found = [Finding(**row) for row in part["findings"]]
        both = (sum(map(int, bench.counts(found, lab))) for lab in (False, True))
        least = 4 if stem.startswith("12") else 5
        assert sum(both) == len(found) >= least


def test_the_paper_is_judged_by_its_claims_alone(bench: ModuleType) -> None:
    paper, lab = bench.page(KEPT), bench.lab_page(KEPT)
    for words in ("the jackknife", "here it is kept", "artifact of the draw", "a plan is for any"):
        assert words not in paper
    assert "the jackknife" in lab
    assert not re.search(r" 0 ± 0 .*(?:✓|✗)", paper + lab)  # equal plans


def test_a_bar_in_a_cell_is_no_border(bench: ModuleType) -> None:
    assert bench.row_of("mean |ρ|", "b") == r"| mean \|ρ\| | b |"


def test_readme_begins_its_results_with_the_kept_values(bench: ModuleType) -> None:
    text = bench.README.read_text(encoding="utf-8")
    assert text == bench.with_first_result(text, KEPT), "run: bench_findings.py --page-only"
    first = text.split(bench.BEGIN)[1].split(bench.END)[0]
    assert 1 < len(re.findall(r"\.\s", first)) <= 4  # sentences


def test_edges_help_or_harm_beyond_two_errors(bench: ModuleType) -> None:
    said = bench.judged("10%: 0.30 ± 0.10, 20%: −0.50 ± 0.20, 30%: 0.10 ± 0.10, 40%: −0.1 ± 0.1")
    assert said.endswith("they help at 10%, and harm at 20%")
    assert bench.judged("10%: 0.1 ± 0.1").endswith("they help at no ratio, and harm at no ratio")
