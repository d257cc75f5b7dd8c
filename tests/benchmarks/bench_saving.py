"""A saved pruned model, read where cocurve_lab cannot be imported: logits, text, sizes.

python tests/benchmarks/bench_saving.py             # the demo model at 25 %
python tests/benchmarks/bench_saving.py --quick     # for checking the script
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import cocurve_lab as cl
from cocurve_lab.export.card import CardFacts
from cocurve_lab.loading import demo_folder

BARE = Path(__file__).resolve().parents[1] / "bare.py"


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = cl.load_model(options.model, device="cpu", dtype="float32")
    texts = demo_folder().parent / "texts"

    def rows(name: str, count: int) -> cl.CalibrationSet:
        return cl.CalibrationSet.from_file(
            texts / f"{name}.jsonl", tokenizer, num_sequences=count, positions_per_sequence="all"
        )

    held_out = rows("test", options.rows)
    curvature = cl.estimate_curvature(
        model, cl.enumerate_units(model), rows("calibration", options.rows), progress=False
    )
    with tempfile.TemporaryDirectory() as place:
        for uniform in (False, True):
            plan = cl.solve_greedy(curvature, options.ratio, uniform=uniform)
            folder = Path(place, "uniform" if uniform else "free")
            facts = CardFacts(
                kl=cl.pruning_risk(model, plan, held_out),
                kl_text=f"{options.rows} rows of the test text.",
            )
            cl.save_pruned(cl.prune(model, plan), folder, tokenizer=tokenizer, evaluation=facts)
            expect(model, plan, held_out, folder)
            report(plan, folder)
        if options.card:
            print(Path(place, "free", "README.md").read_text(encoding="utf-8"))


@torch.no_grad()
def expect(model: Any, plan: cl.Selection, held_out: cl.CalibrationSet, folder: Path) -> None:
    """What the masked dense model computes, beside the folder."""
    ids = held_out.input_ids[:2, :64].contiguous()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with cl.ablate(model, plan):
        logits = model(**inputs).logits
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        made = model.generate(**inputs, **settings)
    save_file(inputs | {"logits": logits, "generated": made}, f"{folder}.expected.safetensors")


def report(plan: cl.Selection, folder: Path) -> None:
    saw, size = bare("load", folder), (folder / "model.safetensors").stat().st_size
    print(plan)
    print(f"  {saw['class']}, {saw['parameters']:,} parameters, {size / 1e6:.1f} MB of weights")
    print(f"  largest logit difference to the masked model: {saw['difference']:.2g}")
    print(f"  the same after save_pretrained and from_pretrained: {saw['again']:.2g}")
    print(f"  greedy tokens equal, with and without cache: {saw['generated']}")
    print(f"  text: {bare('text', folder)!r}\n")


def bare(action: str, folder: Path) -> Any:
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("PY", "HF_"))}
    done = subprocess.run(
        [sys.executable, "-I", BARE, action, folder],
        env=keep | {"HF_HOME": str(folder.parent / "home"), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])[folder.name]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="demo")
    made.add_argument("--ratio", type=float, default=0.25)
    made.add_argument("--rows", type=int, default=16)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--card", action="store_true", help="print the card of the free plan")
    made.add_argument("--quick", action="store_const", const=2, dest="rows")
    return made


if __name__ == "__main__":
    main()
