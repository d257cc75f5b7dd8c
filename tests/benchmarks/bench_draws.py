"""Eight draws of H behind every verdict on plans: computed once, kept beside notebooks 06 to 08.

    python tests/benchmarks/bench_draws.py                       # kept in notebooks/kept
    python tests/benchmarks/bench_draws.py --quick --folder DIR  # a few rows, to check the script

It runs the notebooks with REDRAWS = 8 and their own other parameters, so the tables are those that
their cells look for. A killed run goes on from the plans measured. It prints every finding whose
error is over rows and draws of H. `git status` of the folder stays clean: kept tables are ignored.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cocurve_studies.draws import MOST
from helpers.lab import SMALL
from helpers.notebooks import NOTEBOOKS, run, text_of

SHOWN = ("06", "07", "08")
QUICK: dict[str, dict[str, Any]] = {
    "06": {"RATIOS": (0.2, 0.4), "SWEEP": (0.1,), "POOL": 5, "PAIRS": 2, "PLANS": 2, "FEW_ROWS": 2},
    "07": {"EDGE_RATIOS": (0.2,), "QUESTIONS": 1, "FAMILY_ROWS": 1, "SEEDS": (0,)},
    "08": {"SHORT_ROWS": 16, "SHORT_LENGTH": 32, "DRAWS": 5},
}


def main() -> None:
    options = parser().parse_args()
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for notebook in NOTEBOOKS:
        number = notebook.stem[:2]
        if number not in SHOWN:
            continue
        values = {"REDRAWS": options.draws} | (SMALL | QUICK[number] if options.quick else {})
        start = time.monotonic()
        text = text_of(run(notebook, folder, values)).replace("\n  ", " ")
        print(f"\n{notebook.stem}: {time.monotonic() - start:.0f} s with {options.draws} draws\n")
        for line in text.splitlines():
            if "draws of H" in line and "Paper (" in line:
                print(f"- {line.removeprefix('- ')}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    beside = str(NOTEBOOKS[0].parent)
    made.add_argument("--folder", default=beside, help="where the tables are kept")
    made.add_argument("--draws", type=int, default=MOST, help="draws of H, at least 2")
    made.add_argument("--quick", action="store_true", help="a few short rows")
    return made


if __name__ == "__main__":
    main()
