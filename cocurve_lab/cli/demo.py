"""The whole flow in the terminal: `python -m cocurve_lab.cli.demo`, or `make demo`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import tyro

from .. import continue_text, example_prompts, load_model, load_pruned
from . import main
from .common import Rows


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
        for command in (
            ["build", model, "--sequences", rows, "--out", f"{place}/H", *given],
            ["solve", f"{place}/H", "--ratio", ratio, "--out", f"{place}/plan"],
            ["prune", model, f"{place}/plan", "--out", f"{place}/smaller", "--verify", *given],
            ["evaluate", f"{place}/smaller", "--against", model, *given],
        ):
            print(f"\n$ cocurve {' '.join(command)}", flush=True)
            if code := main(command):
                return code
        pruned = load_pruned(f"{place}/smaller")
    dense, tokenizer = load_model(model)
    prompts = Rows(text=Path(text) if text else None, sequences=3).calibration(model, tokenizer)
    for prompt in example_prompts(model, prompts, tokenizer):
        print(
            f"\nprompt  {prompt!r}\n"
            f"dense   {continue_text(dense, tokenizer, prompt)!r}\n"
            f"pruned  {continue_text(pruned, tokenizer, prompt)!r}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(tyro.cli(demo))
