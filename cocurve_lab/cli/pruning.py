"""`cocurve prune` and `export`: a smaller model as folders and as one GGUF file."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import InputError
from ..models.identity import MANIFEST, model_dtype
from .common import (
    add_model,
    add_text,
    add_verb,
    as_path,
    calibration_rows,
    held_out_rows,
    progress,
    read_model,
    read_plan,
    read_tokenizer,
    require_new,
    require_text,
    require_writable,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..calibration import CalibrationSet
    from ..solver.selection import Selection

PRUNE = """\
Remove the units of a plan from a model. The smaller model is saved as a folder with its tokenizer;
its weights are the model's own, bit for bit, apart from gains. They are read, cut and written one
after the other, in the dtype of the model's files, so no GPU is needed, and memory for the largest
of them is enough. --refit and --verify load the model, unless --stream lets them read one layer
at a time; a model without safetensors files is loaded, too. --refit fits the output projections
again by least squares on calibration text, which needs memory for both models without --stream;
the folder's manifest and card tell of it. --verify checks on two rows of text that it computes
what the masked model computes. This is done before anything is saved, or, if the folder holds this
result already, with the model in the folder. With --refit it is done before the refit."""
PRUNE_EXAMPLE = """\
  cocurve prune demo plan.json --out smaller --verify
  cocurve prune MODEL plan.json --out smaller --verify --text held_out.jsonl --dtype bfloat16
  cocurve prune MODEL RELEASE/llama-3.1-8b-instruct/r20 --out smaller
  cocurve prune MODEL plan.json --out smaller --refit --calibration c4.jsonl"""
EXPORT = """\
Write a pruned model as one GGUF file, which llama.cpp runs without this library. Its weights are
read one after the other, so memory for the largest of them is enough. --quantize lets llama.cpp's
own quantizer make the file smaller: the program llama-quantize, or the Python package cyllama."""
EXPORT_EXAMPLE = """\
  cocurve export smaller --gguf smaller.gguf --dtype f16
  cocurve export smaller --gguf smaller.gguf --quantize Q4_K_M
  cocurve export smaller --gguf ids.gguf --no-tokenizer"""


def add_to(verbs: Any) -> None:
    """Add the verbs `prune` and `export`."""
    parser = add_verb(verbs, "prune", prune, PRUNE, PRUNE_EXAMPLE)
    add_model(
        parser,
        dtype="dtype of the weights; default: as stored (the demo model and, on the CPU, --refit: "
        "float32)",
        stream=True,
    )
    parser.add_argument(
        "plan",
        metavar="PLAN",
        type=as_path,
        help="file from `cocurve solve`, or the folder rXX of a ratio in the authors' release",
    )
    parser.add_argument("--out", metavar="FOLDER", type=as_path, required=True, help="a new folder")
    parser.add_argument("--verify", action="store_true", help="compare with the masked model")
    add_text(parser, "text", 2, "text to verify on", "none")
    parser.add_argument("--refit", action="store_true", help="refit what stays, layer by layer")
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        type=as_path,
        help="text to refit on, as for `cocurve build`; cut like --text",
    )
    parser.add_argument(
        "--calibration-sequences", metavar="N", type=int, default=128, help="its rows (%(default)s)"
    )
    parser = add_verb(verbs, "export", export, EXPORT, EXPORT_EXAMPLE)
    parser.add_argument(
        "folder", metavar="FOLDER", type=as_path, help="folder from `cocurve prune`"
    )
    parser.add_argument("--gguf", metavar="FILE", type=as_path, required=True, help="a new file")
    parser.add_argument(
        "--dtype", default="f16", choices=("f32", "f16", "q8_0"), help="dtype of the matrices (f16)"
    )
    parser.add_argument(
        "--quantize",
        metavar="KIND",
        help="then quantize the file of --dtype, for example to Q4_K_M (for Q8_0: --dtype q8_0)",
    )
    parser.add_argument(
        "--pretokenizer",
        help="llama.cpp's name for rules that split text; default: the tokenizer's",
    )
    tokenizers = parser.add_mutually_exclusive_group()
    tokenizers.add_argument(
        "--tokenizer", metavar="MODEL", help="tokenizer of a folder without one"
    )
    tokenizers.add_argument(
        "--no-tokenizer",
        action="store_true",
        help="write a file that takes token ids only, for a tokenizer that llama.cpp has not",
    )


def prune(options: argparse.Namespace) -> int:
    """Run `cocurve prune`."""
    if options.calibration is not None and not options.refit:
        raise InputError("--calibration is text to refit on. Add --refit, or leave it out.")
    if options.stream and options.refit == options.verify:
        why = (
            "not both: a refitted model computes something else than the masked one. Leave one out."
            if options.refit
            else "which run the model. Without them it stays on disk anyway: leave --stream out."
        )
        raise InputError(f"--stream is for --refit or --verify, {why}")
    selection = read_plan(options.plan)
    there = _manifest_there(options.out, selection)
    if there is None:
        require_writable(options.out.resolve().parent)  # it is made there, and then renamed
        require_writable(options.out)
    if options.verify:
        require_text(options)
    # the options of rows are those of `build`, with a text of its own
    own = {"text": options.calibration, "sequences": options.calibration_sequences}
    refit = argparse.Namespace(**vars(options) | own) if options.refit else None
    if refit is not None:
        require_text(refit)
    stored = _opened(options)
    if stored is not None and not options.verify and refit is None:
        return _prune_on_disk(options, stored, selection, there)
    if stored is not None and refit is None and options.dtype is None:
        options.dtype = model_dtype(stored)
    return _prune_running(options, selection, there, refit)


def _opened(options: argparse.Namespace) -> PreTrainedModel | None:
    """The model with its weights on disk; None if they are pickled, and so must be loaded."""
    from ..extensions.big_models.on_disk import open_model
    from ..models.weights import PickledError

    try:
        return open_model(options.model, dtype=options.dtype)
    except PickledError:
        return None


def _prune_on_disk(
    options: argparse.Namespace,
    model: PreTrainedModel,
    selection: Selection,
    there: dict[str, Any] | None,
) -> int:
    """Prune a model whose weights are on disk, one after the other."""
    from ..extensions.big_models.on_disk import prune_to_folder
    from ..models.loading import load_tokenizer
    from ..pruner.cutting import require_prunable

    tokenizer = load_tokenizer(options.model)
    require_prunable(model, selection, on_disk=True)
    if there is not None:
        _require_result(options.out, there, model, None)
        print(f"{options.out} already holds this plan's model (nothing was written).")
        return 0
    prune_to_folder(model, selection, options.out, tokenizer=tokenizer, progress=progress())
    before = model.num_parameters()
    _say_done(options.out, selection, before, before - selection.pruned_cost)
    return 0


def _prune_running(
    options: argparse.Namespace,
    selection: Selection,
    there: dict[str, Any] | None,
    refit: argparse.Namespace | None,
) -> int:
    """Prune a model that is also run, or that cannot be read in parts."""
    from ..extensions.repairing import repair
    from ..pruner import cutting
    from ..pruner.saving import save_pruned

    model, tokenizer = read_model(options)
    before = model.num_parameters()
    text = held_out_rows(options, options.model, tokenizer) if options.verify else None
    rows = None if refit is None else calibration_rows(refit, tokenizer)
    if there is not None:
        _require_result(options.out, there, model, rows)
        checked = "" if text is None else _verified(options, model, selection, text)
        print(f"{options.out} already holds this plan's model{checked} (nothing was written).")
        return 0
    checked = "; computes what the masked model computes" if options.verify else ""
    settings = repair.RepairOptions(progress=progress())
    if rows is not None:
        checked += f"{' before the refit' * options.verify}; refitted on {len(rows)} rows"
    if options.stream:
        place: Any = {"out": options.out, "tokenizer": tokenizer}
        if rows is None:
            cutting.prune(model, selection, verify=text, **place)
        else:
            repair.repair(model, selection, rows, options=settings, **place)
    else:
        # in place, because two models may not fit, and the dense one can be loaded again
        pruned = cutting.prune(model, selection, inplace=rows is None, verify=text)
        if rows is not None:
            repair.refit(model, pruned, selection, rows, options=settings)
        save_pruned(pruned, options.out, tokenizer=tokenizer)
    _say_done(options.out, selection, before, before - selection.pruned_cost, checked)
    return 0


def _say_done(
    folder: Path, selection: Selection, before: int, after: int, checked: str = ""
) -> None:
    print(f"{selection}\n{before:,} -> {after:,} parameters{checked}\nSaved to {folder}.")


def _manifest_there(folder: Path, selection: Selection) -> dict[str, Any] | None:
    """The manifest of this plan's model in a folder; None if the folder is empty or new."""
    from ..pruner.manifest import read_manifest

    if folder.is_dir() and (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        if manifest.get("selection_fingerprint") == selection.fingerprint:
            return manifest
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise _taken(folder, "is not this plan's model")
    return None


def _require_result(
    folder: Path, manifest: dict[str, Any], model: PreTrainedModel, rows: CalibrationSet | None
) -> None:
    """Raise InputError unless a folder was made from this model, in its dtype, with this refit."""
    from ..models.identity import fingerprint_model

    if manifest["dtype"] != model_dtype(model):
        raise _taken(folder, f"holds this plan in {manifest['dtype']}, not {model_dtype(model)}")
    repair = manifest.get("repair")
    if (None if repair is None else repair["calibration_fingerprint"]) != (
        None if rows is None else rows.fingerprint
    ):
        how = "without a refit" if repair is None else f"refitted on {repair['sequences']} rows"
        raise _taken(folder, f"holds this plan {how}, which is not what was asked for")
    mark = manifest.get("dense_fingerprint")
    if mark is None:
        raise _taken(folder, "holds this plan, but does not say of which dense model")
    if mark != fingerprint_model(model):
        raise _taken(folder, "holds this plan of another dense model")


def _taken(folder: Path, why: str) -> InputError:
    """The error for a folder that must not be overwritten."""
    return InputError(
        f"{folder} exists and {why}; it is not overwritten. Choose another --out, or move it away."
    )


def _verified(
    options: argparse.Namespace, model: PreTrainedModel, selection: Selection, text: CalibrationSet
) -> str:
    """Compare the model in the folder with the masked model; return a clause for the output."""
    from ..pruner.equivalence import check_equivalence
    from ..pruner.saving import load_pruned

    if options.refit:
        return ", refitted, and so not compared with the masked model"
    pruned = load_pruned(options.out, device=options.device, stream=options.stream)
    check_equivalence(model, pruned, selection, text)
    return ", and it computes what the masked model computes"


def export(options: argparse.Namespace) -> int:
    """Run `cocurve export`."""
    from ..extensions.gguf.gguf import export_gguf
    from ..extensions.gguf.quantizing import quantize_gguf, require_kind
    from ..pruner.manifest import read_manifest
    from ..pruner.saving import open_pruned

    require_new(options.gguf)
    if options.quantize is not None:
        if options.dtype == "q8_0":
            raise InputError("--quantize starts from f32 or f16. Leave --dtype q8_0 out.")
        require_kind(options.quantize)
    read_manifest(options.folder)  # otherwise a mistyped folder would be taken for a hub id
    tokenizer = None
    if not options.no_tokenizer:
        tokenizer = read_tokenizer(str(options.folder), options.tokenizer)
        if tokenizer is None:
            place = options.tokenizer or options.folder
            raise InputError(
                f"{place} holds no tokenizer. Give the dense model as --tokenizer, or "
                "--no-tokenizer for a file that takes token ids only."
            )
    pruned = open_pruned(options.folder)
    settings = {"dtype": options.dtype, "pretokenizer": options.pretokenizer}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the notes that are printed say the same
        if options.quantize is None:
            found = export_gguf(pruned, tokenizer, options.gguf, **settings)
        else:
            options.gguf.parent.mkdir(parents=True, exist_ok=True)
            # beside the result, because the file may not fit where temporary files lie
            with tempfile.TemporaryDirectory(dir=options.gguf.parent, prefix=".cocurve.") as place:
                whole = export_gguf(pruned, tokenizer, Path(place, "whole.gguf"), **settings)
                found = quantize_gguf(whole.path, options.gguf, options.quantize)
    print(found)
    return 0
