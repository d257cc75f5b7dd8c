"""`cocurve prune` and `cocurve export`: a smaller model as a folder, and as one GGUF file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..loading import MANIFEST
from .common import add_model, add_verb, read_tokenizer
from .texts import add_text, held_out_rows

PRUNE = """\
Remove the units of a plan from a model and save the smaller one as a folder with its tokenizer. The
weights that stay are the model's own, bit for bit. --verify compares two rows of text with the
masked model before anything is saved."""
PRUNE_EXAMPLE = """\
  cocurve prune demo plan.json --out smaller --verify
  cocurve prune MODEL plan.json --out smaller --verify --text held_out.jsonl --dtype bfloat16"""
EXPORT = """\
Write a pruned model as one GGUF file, which llama.cpp runs without this library."""
EXPORT_EXAMPLE = """\
  cocurve export smaller --gguf smaller.gguf --dtype f16"""


def add_to(verbs: Any) -> None:
    parser = add_verb(verbs, "prune", prune, PRUNE, PRUNE_EXAMPLE)
    add_model(parser)
    parser.add_argument("plan", metavar="PLAN", type=Path, help="what `cocurve solve` wrote")
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="a new folder")
    parser.add_argument("--verify", action="store_true", help="compare with the masked model")
    add_text(parser, "text", 2, "text to verify on", "it must be given")
    parser = add_verb(verbs, "export", export, EXPORT, EXPORT_EXAMPLE)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what `cocurve prune` wrote")
    parser.add_argument("--gguf", metavar="FILE", type=Path, required=True, help="a new file")
    parser.add_argument("--dtype", default="f16", help="f32, f16, bf16 or q8_0 (f16)")
    parser.add_argument(
        "--pretokenizer", help="llama.cpp's name for how text is split; default: recognised"
    )
    parser.add_argument("--tokenizer", metavar="MODEL", help="where the folder has none")


def prune(options: argparse.Namespace) -> int:
    from .. import pruner
    from ..loading import load_model
    from ..saving import save_pruned
    from ..selection import Selection

    if not options.plan.is_file():
        raise InputError(f"there is no plan {options.plan}. Solve one: cocurve solve H --out FILE.")
    selection = Selection.from_json(options.plan.read_text(encoding="utf-8"))
    if _holds(options.out, selection):
        print(f"{options.out} holds this very plan already (nothing was written).")
        return 0
    model, tokenizer = load_model(options.model, device=options.device, dtype=options.dtype)
    before = model.num_parameters()
    text = held_out_rows(options, options.model, tokenizer) if options.verify else None
    # one model in memory: it is read from its place again whenever it is wanted
    pruned = pruner.prune(model, selection, inplace=True, verify=text)
    save_pruned(pruned, options.out, tokenizer=tokenizer)
    checked = "; computes what the masked model computes" if options.verify else ""
    print(
        f"{selection}\n{before:,} -> {pruned.num_parameters():,} parameters{checked}\nSaved to "
        f"{options.out}."
    )
    return 0


def _holds(folder: Path, selection: Any) -> bool:
    """Whether a folder holds the result of a plan; anything else there is refused at once."""
    if folder.is_dir() and (folder / MANIFEST).is_file():
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.get("selection_fingerprint") == selection.fingerprint:
            return True
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise InputError(
            f"{folder} exists and is not this plan's model; it is not overwritten. Choose another "
            "--out, or move it away."
        )
    return False


def export(options: argparse.Namespace) -> int:
    from ..export.gguf import export_gguf
    from ..saving import load_pruned

    if options.gguf.exists():
        raise InputError(
            f"{options.gguf} exists; it is not overwritten. Choose another file, or move it away."
        )
    tokenizer = read_tokenizer(options.tokenizer or str(options.folder))
    if tokenizer is None:
        raise InputError(
            f"{options.folder} holds no tokenizer. Give --tokenizer with the dense model."
        )
    pruned = load_pruned(options.folder, device="cpu")
    try:
        found = export_gguf(
            pruned,
            tokenizer,
            options.gguf,
            dtype=options.dtype,
            pretokenizer=options.pretokenizer,
        )
    except ImportError as error:  # the optional package
        raise InputError(str(error)) from error
    print(found)
    return 0
