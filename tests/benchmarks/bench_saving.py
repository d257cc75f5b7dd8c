"""A saved pruned model, read where cocurve_lab cannot be imported: logits, text, sizes.

python tests/benchmarks/bench_saving.py             # the demo model at 25 %
python tests/benchmarks/bench_saving.py --quick     # for checking the script
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.pruner.folder import CardFacts
from helpers.bare_process import run_bare, save_expected
from helpers.benchmarks import arguments, flag
from helpers.demo_rows import demo_rows


def main() -> None:
    options = arguments(
        __doc__,
        {"rows": 2},
        model="demo",
        ratio=0.25,
        rows=16,
        threads=2,
        card=flag(False, "print the card of the free plan"),
    )
    model, tokenizer = cl.load_model(options.model, device="cpu", dtype="float32")
    held_out = demo_rows("test", options.rows, tokenizer)
    rows = demo_rows("calibration", options.rows, tokenizer)
    curvature = cl.estimate_curvature(model, cl.enumerate_units(model), rows, progress=False)
    ids = held_out.input_ids[:2, :64].contiguous()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with tempfile.TemporaryDirectory() as place:
        for uniform in (False, True):
            plan = cl.solve_greedy(curvature, options.ratio, uniform=uniform)
            folder = Path(place, "uniform" if uniform else "free")
            facts = CardFacts(
                kl=cl.pruning_risk(model, plan, held_out),
                kl_text=f"{options.rows} rows of the test text.",
            )
            cl.save_pruned(cl.prune(model, plan), folder, tokenizer=tokenizer, evaluation=facts)
            with cl.ablate(model, plan):
                save_expected(model, inputs, folder)
            report(plan, folder)
        if options.card:
            print(Path(place, "free", "README.md").read_text(encoding="utf-8"))


def report(plan: cl.Selection, folder: Path) -> None:
    saw, text = (
        run_bare(action, [folder], folder.parent / "home", timeout=None)[folder.name]
        for action in ("load", "text")
    )
    size = (folder / "model.safetensors").stat().st_size
    print(plan)
    print(f"  {saw['class']}, {saw['parameters']:,} parameters, {size / 1e6:.1f} MB of weights")
    print(f"  largest logit difference to the masked model: {saw['difference']:.2g}")
    print(f"  the same after save_pretrained and from_pretrained: {saw['again']:.2g}")
    print(f"  greedy tokens equal, with and without cache: {saw['generated']}")
    print(f"  text: {text!r}\n")


if __name__ == "__main__":
    main()
