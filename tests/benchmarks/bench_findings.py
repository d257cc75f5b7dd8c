"""Claims of the paper beside what notebooks measured: the page of findings.

    python tests/benchmarks/bench_findings.py                                # write the page
    python tests/benchmarks/bench_findings.py notebooks/08_how_sure_is_H.ipynb    # run it in full

The page is written from notebooks/results/findings.json, which holds the findings of each
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
SAID = {True: "✓ agrees", False: "✗ contradicts", None: "? cannot be told"}
HEAD = """# Findings

*Command: `python tests/benchmarks/bench_findings.py`, from [findings.json](findings.json). Days and
commits stand in the first table; the notebooks are those of these commits.*

What notebooks measure on the demo model beside what the paper claims. ± is one standard error; a
verdict needs two, else it cannot be told. The demo model has four million parameters, the paper's 3
to 32 billion: a claim that fails here says something about this model first.
[SMOLLM2_FINDINGS.md](SMOLLM2_FINDINGS.md) has a real model, and is computed anew from what ships.
These values need hours: claims that today's notebooks judge no more were taken out, and the others
stand as they were measured.
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
    """The text of the page."""
    found = json.loads(KEPT.read_text(encoding="utf-8"))
    everything = [finding for part in found.values() for finding in part["findings"]]
    rows = [
        [f"notebook {part['title']}", *counts(part["findings"]), part["run"], part["commit"]]
        for part in found.values()
    ]
    rows.append(["all", *counts(everything), "", ""])
    parts = [HEAD, table(["claims of the paper", *SAID.values(), "run on", "commit"], rows)]
    for part in found.values():
        parts += [f"\n## Notebook {part['title']}\n", told(part["findings"])]
    return {RESULTS / "FINDINGS.md": "\n".join(parts) + "\n"}


def counts(found: Findings) -> list[str]:
    """How many of the findings agree, do not, and cannot be told."""
    verdicts = Counter(finding["agrees"] for finding in found)
    return [str(verdicts[verdict]) for verdict in SAID]


def told(found: Findings) -> str:
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
    return table(["study", "the paper", "where", "here", "verdict"], rows)


if __name__ == "__main__":
    main()
