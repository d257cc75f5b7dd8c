"""`cocurve search`: from a plan to one of lower measured KL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..extensions.choosing.search import SearchOptions, search_plan
from ..extensions.judging.kept import plans_file
from ..solver.solve import solve_greedy
from .common import (
    PlannedModel,
    Rows,
    progress,
    read_curvature,
    read_plan,
    require_counts,
    require_new,
    require_writable,
    rows_of,
    write_new,
)
from .options import Verb, argument, flag, part


@dataclass(frozen=True, kw_only=True)
class Search(Verb):
    """Search for a plan of lower measured KL near a plan.

    Swap a few units, measure, and keep what is better. The start is a plan (--plan), or the plan of
    H for a share of the parameters (--ratio); its budget and guards are kept. Swaps are measured on
    the first rows of the calibration text, and the result is judged on held-out rows after it, so
    --calibration and --sequences must be those H was built with. The plan found is a JSON file, as
    from `cocurve solve`.

    Examples:
      cocurve search demo H --sequences 64 --ratio 0.2 --evaluations 2000 --out found.json
      cocurve search MODEL H --plan plan.json --evaluations 5000 --calibration c4.jsonl \\
          --checkpoint measured --out found.json
    """

    model: PlannedModel = part()
    curvature: str = argument("H", "the file of H, or its folder")
    ratio: float | None = flag("start from the plan of H for this share", one_of="start")
    plan: Path | None = flag("start from this plan", one_of="start", metavar="PLAN")
    strength: float = flag("of the start of --ratio (1.0)", 1.0, name="lambda")
    evaluations: int = flag("budget: one plan on one row is one evaluation", metavar="N")
    text: Rows = rows_of("calibration", 128, "text of the rows of H", "C4 from the hub")
    rows: int = flag("of them, the rows to search on (32)", 32)
    held_out: int = flag("rows to judge on (16)", 16)
    assume_unseen: bool = flag("they are not in the text of H or the plan, if it is not recorded")
    search_seed: int = flag("seed of the swaps (0)", 0)
    checkpoint: Path | None = flag(
        "keep what is measured here; the same command goes on from it", metavar="FOLDER"
    )
    out: Path = flag("file for the plan found", metavar="FILE")

    def run(self) -> int:
        """Run `cocurve search`."""
        settings = SearchOptions(seed=self.search_seed)
        require_counts(self, "rows", "held_out")
        self.text.require()
        require_new(self.out)
        if self.checkpoint is not None:
            require_writable(self.checkpoint)
        start = None if self.plan is None else read_plan(self.plan)
        curvature = read_curvature(self.curvature)
        if start is None:
            ratio: Any = self.ratio  # one of the two is given
            start = solve_greedy(curvature, ratio, self.strength)
        model, tokenizer = self.model.load(self.model.place)
        curvature = self.model.allowing(curvature, model)
        start = self.model.allowing(start, model)
        calibration, held_out = self.text.calibration_and_held_out(
            self.model.place, tokenizer, self.held_out
        )
        held_out = held_out.assume_unseen() if self.assume_unseen else held_out
        rows = calibration.rows(0, min(self.rows, len(calibration)))
        checkpoint = plans_file(self.checkpoint, model, rows)
        try:
            found = search_plan(
                model,
                start,
                rows,
                held_out=held_out,
                evaluations=self.evaluations,
                surrogate=curvature,
                checkpoint=checkpoint,
                progress=progress(),
                options=settings,
            )
        except KeyboardInterrupt:  # `main` prints this and exits with 130
            kept = "nothing is kept. With --checkpoint FOLDER what is measured stays."
            if checkpoint is not None:
                kept = f"what was measured is in {self.checkpoint}. To resume: {self.again}"
            raise KeyboardInterrupt(f"interrupted; {kept}") from None
        write_new(self.out, found.selection.to_json())
        print(f"{found}\nSaved to {self.out}.")
        return 0
