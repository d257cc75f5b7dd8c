"""Eight draws of H behind every verdict on plans: computed once, kept beside the notebooks.

    python tests/benchmarks/bench_draws.py                       # kept in notebooks/kept
    python tests/benchmarks/bench_draws.py --quick --folder DIR  # a few rows, to check the script

It runs the notebooks with REDRAWS = 8 and their own other parameters, so the tables are those that
their cells look for. A killed run goes on from the plans measured. It prints every finding whose
error is over rows and draws of H. `git status` of the folder stays clean: kept tables are ignored.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cocurve_studies.draws import MOST
from helpers.benchmarks import arguments, flag, seconds
from helpers.lab import SMALL
from helpers.notebooks import NOTEBOOKS, run, text_of

SHOWN = ("06", "07", "08", "12", "13")
QUICK: dict[str, dict[str, Any]] = {
    "06": {"RATIOS": (0.2, 0.4), "SWEEP": (0.1,), "POOL": 5, "PAIRS": 2, "PLANS": 2, "FEW_ROWS": 2},
    "12": {"RATIOS": (0.2, 0.4), "PAIRS": 2, "FEW_ROWS": 2},
    "13": {"RATIOS": (0.2, 0.4), "PLANS": 2, "ASKED": 1, "QUESTIONS": 1},
    "07": {"EDGE_RATIOS": (0.2,), "QUESTIONS": 1, "FAMILY_ROWS": 1, "SEEDS": (0,)},
    "08": {"SHORT_ROWS": 16, "SHORT_LENGTH": 32, "DRAWS": 5},
}


def main() -> None:
    options = arguments(
        __doc__,
        {},
        folder=flag(str(NOTEBOOKS[0].parent), "where the tables are kept"),
        draws=flag(MOST, "draws of H, at least 2"),
    )
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for notebook in NOTEBOOKS:
        number = notebook.stem[:2]
        if number not in SHOWN:
            continue
        values = {"REDRAWS": options.draws} | (SMALL | QUICK[number] if options.quick else {})
        took, done = seconds(lambda: run(notebook, folder, values))  # noqa: B023  (called here)
        print(f"\n{notebook.stem}: {took:.0f} s with {options.draws} draws\n")
        for line in text_of(done).replace("\n  ", " ").splitlines():
            if "draws of H" in line and ("Paper (" in line or "Lab (" in line):
                print(f"- {line.removeprefix('- ')}")


if __name__ == "__main__":
    main()
