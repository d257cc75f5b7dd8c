"""Every study of a finding has a section, and every section is a heading of its notebook."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat

from cocurve_studies.findings import MIME, Finding, Findings
from cocurve_studies.sections import SECTIONS, link_to

ROOT = Path(__file__).resolve().parents[2]


def studies() -> set[str]:
    """The studies that findings are made for, as they are written in the code."""
    found = set()
    for path in (ROOT / "notebooks" / "cocurve_studies").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (
                isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Finding", "Claim")
            ):
                continue
            given = [k.value for k in node.keywords if k.arg == "study"] or node.args[:1]
            found |= {str(ast.literal_eval(x)) for x in given if isinstance(x, ast.Constant)}
    return found


def test_every_study_has_a_section() -> None:
    assert len(studies()) > 20
    assert studies() <= SECTIONS.keys()


def test_every_section_is_a_heading_of_its_notebook() -> None:
    for study, (notebook, heading, cell) in SECTIONS.items():
        content = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", as_version=4)
        (source,) = (c.source for c in content.cells if c.id == cell)
        lines = [line.lstrip("#").strip() for line in source.splitlines() if line.startswith("#")]
        assert heading in lines, study


def test_a_finding_links_to_its_section_and_carries_its_values() -> None:
    link = link_to("lambda")
    assert link == "06_when_to_trust_the_edges.ipynb#cell-id=24"
    assert link_to("mine") is None
    found = Findings([Finding(name, "c", "w", "o", None) for name in ("lambda", "<mine>")])
    page = found._repr_html_()
    assert f'<a href="{link}">lambda</a>' in page
    assert ">&lt;mine&gt;<" in page
    (first, _) = found._repr_mimebundle_()[MIME]
    assert Finding(**first) == found[0]
