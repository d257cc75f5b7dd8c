"""`cocurve recover`: a little training after pruning."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from ..base.errors import InputError
from .common import (
    add_device,
    add_text,
    add_verb,
    as_path,
    calibration_and_held_out,
    progress,
    read_model,
    require_text,
    require_writable,
)

DESCRIPTION = """\
Train a pruned model until it answers as the dense one does: low-rank updates of its linear layers,
by KL on calibration text (LoRA; needs pip install 'cocurve-lab[recover]'). They are added to the
weights, so the new folder has the size of the old one. Held-out rows choose the epoch. Both models
must fit in memory. A folder that `prune --refit` wrote is a better start than one without a refit.
The state after each epoch is kept beside the new folder until it is
written; the same command goes on from there."""
EXAMPLE = """\
  cocurve recover smaller --against demo --out trained
  cocurve recover smaller --against MODEL --calibration c4.jsonl --dtype bfloat16 --out trained"""


def add_to(verbs: Any) -> None:
    """Add the verb `recover`."""
    parser = add_verb(verbs, "recover", run, DESCRIPTION, EXAMPLE)
    parser.add_argument(
        "folder", metavar="FOLDER", type=as_path, help="folder from `cocurve prune`"
    )
    parser.add_argument("--against", metavar="MODEL", required=True, help="the dense model")
    add_device(parser)
    add_text(parser, "calibration", 128, "text to train on", "C4 from the hub")
    parser.add_argument("--held-out", type=int, default=16, help="rows that choose the epoch (16)")
    parser.add_argument("--rank", type=int, default=16, help="of the updates (%(default)s)")
    parser.add_argument(
        "--learning-rate", type=float, default=1e-3, help="of AdamW, the largest (%(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=4, help="times each row is read (4)")
    parser.add_argument("--out", metavar="FOLDER", type=as_path, required=True, help="a new folder")


def run(options: argparse.Namespace) -> int:
    """Run `cocurve recover`."""
    from ..extensions.repairing.recovery import RecoverOptions, recover
    from ..pruner.saving import load_pruned, save_pruned

    settings = RecoverOptions(
        rank=options.rank,
        learning_rate=options.learning_rate,
        epochs=options.epochs,
        progress=progress(),
    )
    require_text(options)
    if options.out.exists():
        raise InputError(f"{options.out} exists and is not overwritten. Choose another --out.")
    require_writable(options.out.resolve().parent)
    pruned: Any = load_pruned(options.folder, device=options.device, dtype=options.dtype)
    model, tokenizer = read_model(options, options.against)
    named = argparse.Namespace(**vars(options) | {"model": options.against})
    rows, held_out = calibration_and_held_out(named, tokenizer, options.held_out)
    state = Path(f"{options.out}.state")
    try:
        trained: Any = recover(model, pruned, rows, held_out, options=settings, checkpoint=state)
    except KeyboardInterrupt:  # `main` prints this and exits with 130
        raise KeyboardInterrupt(
            f"interrupted; the state is in {state}. To go on:\n  {options.again}"
        ) from None
    save_pruned(trained, options.out, tokenizer=tokenizer)
    shutil.rmtree(state, ignore_errors=True)
    now, before = trained.cocurve_manifest, pruned.cocurve_manifest
    taken = "no epoch lowered the held-out KL, and the weights are those of the start"
    if now["weights_fingerprint"] != before["weights_fingerprint"]:
        epoch = now["recovery"]["epoch"]
        taken = f"trained on {len(rows)} rows; the weights are those of epoch {epoch}"
    print(f"{taken}.\nSaved to {options.out}.")
    return 0
