"""The whole flow in the terminal: `python -m cocurve_lab.cli.demo`, or `make demo`.

Builds H of a model, solves for two ratios, measures the plans on held-out text, prunes, checks the
result, and shows text before and after.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
import transformers

from ..base.errors import CocurveError
from ..estimator.estimate import estimate_curvature
from ..extensions.analysis.gate import redundancy_gate
from ..extensions.device import report_device
from ..extensions.judging.agreement import random_set
from ..extensions.judging.generation import continue_text, example_prompts
from ..extensions.texts.documents import default_calibration
from ..measuring.risk import measure_plans
from ..models.identity import DEMO
from ..models.loading import load_model
from ..models.units import UnitSet, enumerate_units
from ..pruner.cutting import prune
from ..pruner.equivalence import check_equivalence
from ..solver.selection import Selection
from ..solver.solve import solve_greedy

RANDOM_PLANS = 5  # per ratio
NEW_TOKENS = 32


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo; None means the arguments of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m cocurve_lab.cli.demo",
        description="Build H, solve, measure, prune, check, and show text before and after.",
    )
    parser.add_argument("--model", default=DEMO, help='"demo", a hub id, or a folder')
    parser.add_argument("--device", help="default: a GPU if torch can use one")
    parser.add_argument("--rows", type=int, default=64, help="calibration sequences")
    parser.add_argument("--held-out", type=int, default=16, help="sequences to measure plans on")
    parser.add_argument("--ratios", type=float, nargs="+", default=(0.2, 0.4))
    parser.add_argument("--text-file", help="calibration text, if there is no network")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    print(report_device(options.device))
    model, tokenizer = load_model(options.model, device=options.device)
    units = enumerate_units(model)
    print(f"{options.model}: {units}\n")

    calibration, held_out = default_calibration(
        options.model,
        tokenizer,
        num_sequences=options.rows,
        held_out=options.held_out,
        positions_per_sequence="all",
        text_file=options.text_file,
    )
    curvature = estimate_curvature(model, units, calibration)
    gate = redundancy_gate(curvature)
    print(f"\n{curvature}\n{gate.reason}\n")

    plans: list[Selection] = []
    for ratio in options.ratios:
        plans += [solve_greedy(curvature, ratio, strength) for strength in (0.0, 1.0)]
        plans += [random_plan(units, ratio, seed) for seed in range(RANDOM_PLANS)]
    table = measure_plans(model, plans, held_out, calibrated_on=calibration)
    print(f"\nAt each ratio: lambda 0, lambda 1, and {RANDOM_PLANS} random plans.\n{table}\n")

    strength = 1.0 if gate.recommended is None else gate.recommended
    for ratio in options.ratios:
        selection = solve_greedy(curvature, ratio, strength)
        pruned = prune(model, selection)
        print(f"{selection}\n  {check_equivalence(model, pruned, selection, held_out)}")
        print(f"  {model.num_parameters():,} -> {pruned.num_parameters():,} parameters\n")
    for text in example_prompts(options.model, held_out, tokenizer):
        print(f"prompt  {text!r}")
        print(f"dense   {continue_text(model, tokenizer, text, NEW_TOKENS)!r}")
        print(f"pruned  {continue_text(pruned, tokenizer, text, NEW_TOKENS)!r}\n")


def random_plan(units: UnitSet, ratio: float, seed: int) -> Selection:
    """Remove units in random order until the ratio is reached: the baseline plan."""
    chosen = random_set(units, ratio, np.random.default_rng(seed))
    return Selection.from_pruned(units, chosen, requested_ratio=ratio)


if __name__ == "__main__":
    try:
        main()
    except (CocurveError, OSError) as error:
        sys.exit(f"error: {error}")
