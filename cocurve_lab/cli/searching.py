"""`cocurve search`: from a plan to one of lower measured KL."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import InputError
from .common import (
    add_model,
    add_text,
    add_verb,
    as_path,
    calibration_and_held_out,
    progress,
    read_curvature,
    read_model,
    read_plan,
    require_new,
    require_text,
    require_writable,
    write_new,
)
from .planning import SURROGATES, solve_on

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..calibration import CalibrationSet
    from ..extensions.repairing.repaired import Repair
    from ..solver.selection import Selection

DESCRIPTION = """\
Search for a plan of lower measured KL near a plan: swap a few units, measure, and keep what is
better. The start is a plan (--plan), or the plan of H for a share of the parameters (--ratio); its
budget and guards are kept. Swaps are measured on the first rows of the calibration text, and the
result is judged on held-out rows after it, so --calibration and --sequences must be those H was
built with. --refit refits every plan before it is measured, on the calibration rows after --rows,
which is slow. The plan found is a JSON file, as from `cocurve solve`."""
EXAMPLE = """\
  cocurve search demo H --sequences 64 --ratio 0.2 --evaluations 2000 --out found.json
  cocurve search MODEL H --plan plan.json --evaluations 5000 --calibration c4.jsonl \\
      --checkpoint measured --out found.json
  cocurve search demo H --sequences 64 --ratio 0.2 --evaluations 800 --refit --out found.json"""


def add_to(verbs: Any) -> None:
    """Add the verb `search`."""
    parser = add_verb(verbs, "search", run, DESCRIPTION, EXAMPLE)
    add_model(parser, stream=True)
    parser.add_argument("curvature", metavar="H", help="the file of H, or its folder")
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--ratio", type=float, help="start from the plan of H for this share")
    start.add_argument("--plan", metavar="PLAN", type=as_path, help="start from this plan")
    parser.add_argument(
        "--lambda", dest="strength", type=float, default=1.0, help="of the start of --ratio (1.0)"
    )
    parser.add_argument(
        "--surrogate",
        choices=SURROGATES,
        default="H",
        help="what solves the start of --ratio and proposes half of the swaps (H); for additive-kl "
        "the pair KL proposes them",
    )
    parser.add_argument(
        "--evaluations",
        metavar="N",
        type=int,
        required=True,
        help="budget: one plan on one row is one evaluation",
    )
    add_text(parser, "calibration", 128, "text of the rows of H", "C4 from the hub")
    parser.add_argument("--rows", type=int, default=32, help="of them, the rows to search on (32)")
    parser.add_argument("--held-out", type=int, default=16, help="rows to judge on (16)")
    parser.add_argument("--refit", action="store_true", help="refit every plan before it is judged")
    parser.add_argument(
        "--refit-rows", type=int, help="rows of the refit, after --rows; default: all that are left"
    )
    parser.add_argument("--search-seed", type=int, default=0, help="seed of the swaps (0)")
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        type=as_path,
        help="keep what is measured here; the same command goes on from it",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=as_path, required=True, help="file for the plan found"
    )


def run(options: argparse.Namespace) -> int:
    """Run `cocurve search`."""
    from ..extensions.choosing.search import SearchOptions, search_plan

    settings = SearchOptions(seed=options.search_seed)
    if options.refit_rows is not None and not options.refit:
        raise InputError(f"--refit-rows is {options.refit_rows}. Add --refit, or leave it out.")
    if options.refit and options.stream:
        raise InputError(
            "--refit refits every plan in memory, which --stream is to avoid. Search without "
            "--refit, then refit the plan: cocurve prune MODEL PLAN --refit --stream --out FOLDER."
        )
    require_text(options)
    require_new(options.out)
    if options.checkpoint is not None:
        require_writable(options.checkpoint)
    start = None if options.plan is None else read_plan(options.plan)
    curvature = read_curvature(options.curvature)
    if start is None:
        start = solve_on(curvature, options.surrogate, options.ratio, options.strength)
    model, calibration, held_out = _model_and_text(options)
    rows = calibration.rows(0, min(options.rows, len(calibration)))
    repair, checkpoint = _repair_and_file(options, model, calibration, rows)
    try:
        found = search_plan(
            model,
            start,
            rows,
            held_out=held_out,
            evaluations=options.evaluations,
            repair=repair,
            surrogate=curvature if options.surrogate == "H" else curvature.pair_kl(),
            checkpoint=checkpoint,
            progress=progress(),
            options=settings,
        )
    except KeyboardInterrupt:  # `main` prints this and exits with 130
        kept = "nothing is kept. With --checkpoint FOLDER what is measured stays."
        if checkpoint is not None:
            kept = f"what was measured is in {options.checkpoint}. To resume:\n  {options.again}"
        raise KeyboardInterrupt(f"interrupted; {kept}") from None
    write_new(options.out, found.selection.to_json())
    print(f"{found}\nSaved to {options.out}.")
    return 0


def _model_and_text(
    options: argparse.Namespace,
) -> tuple[PreTrainedModel, CalibrationSet, CalibrationSet]:
    """The model, the rows of H, and the held-out rows after them."""
    for name in ("rows", "held_out", "refit_rows"):
        count = getattr(options, name)
        if count is not None and count < 1:
            raise InputError(f"--{name.replace('_', '-')} is {count}. Give at least 1.")
    model, tokenizer = read_model(options)
    return model, *calibration_and_held_out(options, tokenizer, options.held_out)


def _repair_and_file(
    options: argparse.Namespace,
    model: PreTrainedModel,
    calibration: CalibrationSet,
    rows: CalibrationSet,
) -> tuple[Repair | None, Path | None]:
    """What is done to a plan before it is measured, and the file of what is measured."""
    from ..extensions.repairing.repair import RepairOptions, repair
    from ..measuring.plan_memory import plans_file

    file = plans_file(options.checkpoint, model, rows)
    if not options.refit:
        return None, file
    left = len(calibration) - len(rows)
    if left < (options.refit_rows or 1):
        raise InputError(
            f"--rows {options.rows} leaves {left} of {len(calibration)} rows to refit on, which "
            "must not be those of the search. Give fewer --rows or --refit-rows."
        )
    text = calibration.rows(len(rows), len(rows) + (options.refit_rows or left))
    quiet = RepairOptions(progress=False)

    def refitted(model: PreTrainedModel, plan: Selection) -> PreTrainedModel:
        return repair(model, plan, text, options=quiet)

    # a file of its own for each text of the refit
    mark = f"{'' if file is None else file.stem}_refit_{text.fingerprint[:10]}.ckpt"
    return refitted, None if file is None else file.with_name(mark)
