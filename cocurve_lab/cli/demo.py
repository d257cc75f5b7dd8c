"""The whole flow in the terminal: `python -m cocurve_lab.cli.demo`, or `make demo`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tyro

from .. import Selection, UnitSet, continue_text, example_prompts
from ..extensions.judging.agreement import random_set
from . import DONE, main
from .common import Device, Rows


def demo(model: str = "demo", rows: str = "64", ratio: str = "0.2", text: str = "") -> int:
    """Build H, solve, prune, check, measure, and show text before and after.

    Args:
        model: "demo", a hub id, or a folder
        rows: calibration sequences
        ratio: share of the removable parameters to remove
        text: calibration text, if there is no network
    """
    given = ["--text", text] if text else []
    with TemporaryDirectory() as place:
        h, plan, smaller = (str(Path(place, name)) for name in ("H", "plan.json", "smaller"))
        for command in (
            ["build", model, "--sequences", rows, "--out", h, *given],
            ["solve", h, "--ratio", ratio, "--out", plan],
            ["prune", model, plan, "--out", smaller, "--verify", *given],
            ["evaluate", smaller, "--against", model, *given],
        ):
            print(f"\n$ cocurve {' '.join(command)}", flush=True)
            code = main(command)
            if code != DONE:
                return code
        dense, tokenizer = Device().load(model)
        pruned, _ = Device().load(smaller)
    prompts = Rows(text=Path(text) if text else None, sequences=3).calibration(model, tokenizer)
    for prompt in example_prompts(model, prompts, tokenizer):
        print(f"\nprompt  {prompt!r}")
        print(f"dense   {continue_text(dense, tokenizer, prompt)!r}")
        print(f"pruned  {continue_text(pruned, tokenizer, prompt)!r}")
    return DONE


def random_plan(units: UnitSet, ratio: float, seed: int) -> Selection:
    """Remove units in random order until the ratio is reached: the baseline plan."""
    chosen = random_set(units, ratio, np.random.default_rng(seed))
    return Selection.from_pruned(units, chosen, requested_ratio=ratio)


if __name__ == "__main__":
    raise SystemExit(tyro.cli(demo))
