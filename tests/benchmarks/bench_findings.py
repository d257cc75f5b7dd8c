"""Claims of the paper and of the lab beside what notebooks measured: the two pages of findings.

    python tests/benchmarks/bench_findings.py                                # write the pages
    python tests/benchmarks/bench_findings.py notebooks/08_how_sure_is_H.ipynb    # run it in full

The pages are written from notebooks/results/findings.json, which holds the findings of each
notebook, its title and parameters, the day, and the commit. A notebook that is run, for hours,
replaces its own part.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cocurve_lab.extensions.writing import typeset
from helpers.benchmarks import RESULTS, arguments, flag, table

KEPT = RESULTS / "findings.json"
SAID = {True: "✓ agrees", False: "✗ does not agree", None: "? cannot be told"}
HEAD = """# Findings

*Command: `python tests/benchmarks/bench_findings.py`, from [findings.json](findings.json). Days and
commits stand in the first table; the notebooks are those of these commits.*

What notebooks measure on the demo model beside what is claimed. ± is one standard error; a verdict
needs two, else it cannot be told. The lab's own claims and quantities stand on
[a page of their own](FINDINGS_LAB.md). The demo model has four million parameters, the paper's 3 to
32 billion: a claim that fails here says something about this model first.
[SMOLLM2_FINDINGS.md](SMOLLM2_FINDINGS.md) has a real model.
"""
LAB = """# Findings on claims of the lab

*Command, days and commits as in [FINDINGS.md](FINDINGS.md), which has the rules and the claims of
the paper.*

Claims that the paper does not make, or judges by another quantity, beside what the notebooks
measure on the demo model.
"""
Findings = list[dict[str, Any]]


def main() -> None:
    notebooks = flag([], "to run in full first", nargs="*", type=Path, positional=True)
    options = arguments(__doc__, notebooks=notebooks)
    for notebook in options.notebooks:
        found = json.loads(KEPT.read_text(encoding="utf-8"))
        found[notebook.stem] = measured(notebook)
        text = json.dumps(dict(sorted(found.items())), indent=1, ensure_ascii=False)
        KEPT.write_text(text + "\n", encoding="utf-8")
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")


def measured(notebook: Path) -> dict[str, Any]:
    """Run a notebook with FULL = True; return its last findings, and what they were measured by."""
    from cocurve_studies.findings import MIME

    content = nbformat.read(notebook, as_version=4)
    (place,) = (
        number
        for number, cell in enumerate(content.cells)
        if "parameters" in cell.metadata.get("tags", [])
    )
    content.cells.insert(place + 1, nbformat.v4.new_code_cell("FULL = True"))
    resources = {"metadata": {"path": str(notebook.parent)}}
    done = NotebookClient(content, timeout=24 * 3600, resources=resources).execute()
    outputs = (output for cell in done.cells for output in cell.get("outputs", []))
    tables = [output["data"][MIME] for output in outputs if MIME in output.get("data", {})]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    return {
        "title": content.cells[0].source.splitlines()[0].removeprefix("# "),
        "run": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "parameters": content.cells[place].source.splitlines(),
        "findings": tables[-1],  # a notebook that tests much ends with all of it
    }


def pages() -> dict[Path, str]:
    """The text of both pages."""
    found = json.loads(KEPT.read_text(encoding="utf-8"))
    everything = [finding for part in found.values() for finding in part["findings"]]
    paper, lab = (
        {stem: [f for f in part["findings"] if f["lab"] is mine] for stem, part in found.items()}
        for mine in (False, True)
    )
    rows = [
        [
            f"notebook {found[stem]['title']}",
            *counts(part),
            found[stem]["run"],
            found[stem]["commit"],
        ]
        for stem, part in paper.items()
    ]
    rows.append(["the paper's, all", *counts([f for f in everything if not f["lab"]]), "", ""])
    rows.append(
        ["[the lab's](FINDINGS_LAB.md)", *counts([f for f in everything if f["lab"]]), "", ""]
    )
    parts = [HEAD, table(["claims of the paper", *SAID.values(), "run on", "commit"], rows)]
    for stem, part in paper.items():
        parts += [f"\n## Notebook {found[stem]['title']}\n", told("the paper", part)]
    of_lab = told("the lab", [finding for part in lab.values() for finding in part])
    return {
        RESULTS / "FINDINGS.md": "\n".join(parts) + "\n",
        RESULTS / "FINDINGS_LAB.md": f"{LAB}\n{of_lab}\n",
    }


def counts(found: Findings) -> list[str]:
    """How many of the findings agree, do not, and cannot be told."""
    verdicts = Counter(finding["agrees"] for finding in found)
    return [str(verdicts[verdict]) for verdict in SAID]


def told(who: str, found: Findings) -> str:
    """A table of findings."""
    rows = [
        [
            finding["study"],
            typeset(finding["claim"]),
            typeset(finding["where"]),
            typeset(finding["ours"]),
            SAID[finding["agrees"]],
        ]
        for finding in found
    ]
    return table(["study", who, "where", "here", "verdict"], rows)


if __name__ == "__main__":
    main()
