"""Every claim that notebooks test, the paper's and the lab's: FINDINGS.md and FINDINGS_LAB.md.

    python tests/benchmarks/bench_findings.py                # run all, then write all files
    python tests/benchmarks/bench_findings.py --only 06 09   # measure these anew, keep the others
    python tests/benchmarks/bench_findings.py --page-only    # the pages from findings.json alone

It runs the notebooks whole (`FULL = True`). Tables that are kept in `--folder` are read instead
of measured; delete `kept/bake_off/study_speed_*.json` there to time notebook 09's plans anew, on a
quiet machine. findings.json holds the findings of each notebook, when and on what it ran.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cocurve_lab.extensions.pretrained.kept import kept_curvature, kept_plans
from cocurve_lab.extensions.writing import plus_minus, typeset
from cocurve_lab.measuring.results import standard_error
from cocurve_studies.findings import MIME, Finding
from helpers.benchmarks import arguments, flag, seconds
from helpers.lab import SMALL
from helpers.notebooks import NOTEBOOKS, run

HERE = Path(__file__).resolve().parent
README = HERE.parents[1] / "README.md"
BEGIN, END = "<!-- first result -->\n", "<!-- end of first result -->"
SHOWN = ("06", "07", "08", "09", "12", "13")  # the notebooks of the studies, and those of GONE
GONE = {  # of which findings are kept: what they ask moved into the others
    "12_appendix_edges": "12 · Appendix: H and its edges, closer",
    "13_appendix_plans": "13 · Appendix: plans and methods, closer",
}
HEAD = """# Findings

What notebooks measure on the demo model beside what is claimed. ± is one standard error; a verdict
needs two, else it cannot be told. The lab's own claims and quantities stand on
[a page of their own](FINDINGS_LAB.md). The demo model has four million parameters, the paper's 3 to
32 billion: a claim that fails here says something about this model first.
[SMOLLM2_FINDINGS.md](SMOLLM2_FINDINGS.md) has a real model.
`bench_findings.py` runs the notebooks and writes this page from [findings.json](findings.json).
"""
LAB = """# Findings on claims of the lab

Claims that the paper does not make, or judges by another quantity, beside what the notebooks
measure on the demo model. Those of the paper are in [FINDINGS.md](FINDINGS.md), with the rules.

"""


def main() -> None:
    options = arguments(
        __doc__,
        {},
        folder=flag(str(NOTEBOOKS[0].parent), "where the notebooks run and keep tables"),
        out=flag(str(HERE), "where findings.json and FINDINGS.md go"),
        only=flag(list(SHOWN), "run these alone", choices=SHOWN),
        page_only=flag(False, "run nothing"),
    )
    kept = Path(options.out) / "findings.json"
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    if not options.page_only:
        folder = Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        for notebook in NOTEBOOKS:
            if notebook.stem[:2] in options.only:
                found[notebook.stem] = measured(
                    notebook, folder, SMALL if options.quick else {"FULL": True}
                )
                text = json.dumps(dict(sorted(found.items())), indent=1, ensure_ascii=False)
                kept.write_text(text + "\n", encoding="utf-8")
    for name, text in (("FINDINGS.md", page(found)), ("FINDINGS_LAB.md", lab_page(found))):
        (Path(options.out) / name).write_text(text, encoding="utf-8")
    if Path(options.out) == HERE:
        README.write_text(with_first_result(README.read_text(encoding="utf-8"), found))


def measured(notebook: Path, folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Run a notebook; return its last findings, the day and the parameters."""
    took, done = seconds(lambda: run(notebook, folder, values, timeout=24 * 3600))
    outputs = (output for cell in done.cells for output in cell.get("outputs", []))
    tables = [output["data"][MIME] for output in outputs if MIME in output.get("data", {})]
    (cell,) = (c for c in done.cells if "parameters" in c.metadata.get("tags", []))
    print(f"{notebook.stem}: {took:.0f} s, {len(tables[-1])} findings")
    return {
        "run": date.today().isoformat(),
        "parameters": cell.source.splitlines(),
        "findings": tables[-1],  # the notebooks that test much end with all of it
    }


def page(found: dict[str, Any]) -> str:
    """The paper's page as Markdown: the count of verdicts, then a table for each notebook."""
    parts = {stem: [Finding(**row) for row in part["findings"]] for stem, part in found.items()}
    everything = [finding for part in parts.values() for finding in part]
    lines = [
        HEAD,
        *table(["claims", "✓ agrees", "✗ does not agree", "? cannot be told", "run on"]),
    ]
    for stem, part in parts.items():
        link = f"[the paper's, notebook {stem[:2]}](#{anchor(stem)})"
        lines.append(row_of(link, *counts(part), found[stem]["run"]))
    lines.append(row_of("the paper's, all", *counts(everything), ""))
    lines.append(row_of("[the lab's](FINDINGS_LAB.md)", *counts(everything, lab=True), ""))
    for stem, part in parts.items():
        lines += ["", f"## {heading(stem)}", ""]
        lines += told("the paper", [finding for finding in part if not finding.lab])
    return "\n".join(lines) + "\n"


def lab_page(found: dict[str, Any]) -> str:
    """The page of the lab's claims, one table."""
    everything = (Finding(**row) for part in found.values() for row in part["findings"])
    return LAB + "\n".join(told("the lab", [one for one in everything if one.lab])) + "\n"


def told(who: str, found: list[Finding]) -> list[str]:
    """A table of findings."""
    lines = table(["study", who, "where", "here", "verdict"])
    for finding in found:
        words = (finding.study, finding.claim, finding.where, finding.ours, finding.said)
        lines.append(row_of(*map(typeset, words)))
    return lines


def with_first_result(text: str, found: dict[str, Any]) -> str:
    """README with what the paper's protocol gives today: edges against the diagonal, two models."""
    before, rest = text.split(BEGIN)
    demo = next(
        Finding(**row).ours
        for row in found["06_when_to_trust_the_edges"]["findings"]
        if row["study"] == "edges or diagonal" and row["lab"] and "own guards" in row["claim"]
    )
    demo = re.sub(r" \(rows.*?\)", "", demo.split(", ", 1)[1])  # the errors' parts
    words = (
        "H in full (λ = 1) against its diagonal (λ = 0), guards of both chosen by one rule on "
        "held-out text: KL(λ 0) − KL(λ 1) in nats per token, above 0 where the edges help, ± one "
        f"standard error. SmolLM2-135M, on C4: {judged(real_benefit())}. The demo model: "
        f"{judged(typeset(demo))}."
    )
    lines = textwrap.wrap(words, 118, initial_indent="> ", subsequent_indent="> ")
    return before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1]


def real_benefit() -> str:
    """What edges save on SmolLM2, from its kept plans with guards of their own; ± over rows."""
    curvature = kept_curvature("smollm2")
    kept = None if curvature is None else kept_plans(curvature)
    assert kept is not None
    kl = {(p.name, p.selection.requested_ratio): p.kl["c4"] for p in kept.plans}
    name = "H, lambda {}, own guards"
    ratios = sorted(ratio for key, ratio in kl if key == name.format(0) and ratio)
    saved = {r: kl[name.format(0), r] - kl[name.format(1), r] for r in ratios}
    return typeset(
        ", ".join(
            f"{ratio:.0%}: {plus_minus(float(x.mean()), float(standard_error(x)))}"
            for ratio, x in saved.items()
        )
    )


def judged(values: str) -> str:
    """The values, and at which ratios the edges help or harm by two standard errors."""
    found = re.findall(r"(\d+%): (−?[\d.]+) ± ([\d.]+)", values)
    signs = {ratio: float(v.replace("−", "-")) / float(e) for ratio, v, e in found}
    helped, harmed = ([r for r, x in signs.items() if sign * x > 2] for sign in (1, -1))
    named = [", ".join(ratios) or "no ratio" for ratios in (helped, harmed)]
    return f"{values}; they help at {named[0]}, and harm at {named[1]}"


def counts(found: list[Finding], lab: bool = False) -> list[str]:
    """How many claims of the paper (or the lab) agree, do not, and cannot be told."""
    verdicts = Counter(finding.agrees for finding in found if finding.lab == lab)
    return [str(verdicts[verdict]) for verdict in (True, False, None)]


def heading(stem: str) -> str:
    """The title of a notebook, without its number sign."""
    first = GONE.get(stem)
    if first is None:
        (path,) = (path for path in NOTEBOOKS if path.stem == stem)
        first = nbformat.read(path, as_version=4).cells[0].source.splitlines()[0]
    return f"Notebook {first.removeprefix('# ').replace(' · ', ': ')}"


def anchor(stem: str) -> str:
    """The place of a notebook's table on the page."""
    kept = (c for c in heading(stem).lower().replace(" ", "-") if c.isalnum() or c in "-_")
    return "".join(kept)


def table(heads: list[str]) -> list[str]:
    """The two first lines of a Markdown table."""
    return [row_of(*heads), "|" + "---|" * len(heads)]


def row_of(*cells: str) -> str:
    """One line of a Markdown table; a bar inside a cell is no border."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    main()
