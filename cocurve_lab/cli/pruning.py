"""Verbs that write a smaller model: `prune`, `recover`, `compress`, and `export` as a GGUF file."""

from __future__ import annotations

import shutil
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, create_mutex_group

from .. import (
    InputError,
    Selection,
    Target,
    allow_other_weights,
    best_plan,
    export_gguf,
    load_pruned,
    repair,
    save_pruned,
)
from .. import recover as train
from ..base.storage import fingerprint
from ..extensions.big_models import on_disk, stored
from ..extensions.repairing.recovery import RecoverOptions
from ..extensions.repairing.repair import RepairOptions
from ..models import identity, loading
from ..pruner import cutting, manifest, saving
from ..pruner.folder import CardFacts
from .arguments import Count, File, Readable, progress, require_new, require_writable
from .common import Device, Rows, StreamedDevice, quieten, read_plan, read_tokenizer

BUDGET = create_mutex_group(required=True, title="budget")
TOKENIZER = create_mutex_group(required=False, title="tokenizer")


def prune(
    model: Positional[str],
    plan: Positional[File],
    *,
    out: File,
    on: StreamedDevice = StreamedDevice(),
    other_weights: bool = False,
    verify: bool = False,
    refit: bool = False,
    rows: Rows = Rows(),
) -> None:
    """Remove the units of a plan from a model.

    The smaller model is saved as a folder with its tokenizer; its weights are the model's own, bit
    for bit, apart from gains. They are read, cut and written one after the other, in the dtype of
    the model's files (the demo model and, on the CPU, --refit: float32), so no GPU is needed, and
    memory for the largest of them is enough. --refit and --verify load the model, unless --stream
    lets them read one layer at a time; a model without safetensors files is loaded, too. --refit
    fits the output projections again by least squares on the text, which needs memory for both
    models without --stream; the folder's manifest and card tell of it. --verify checks on two rows
    of the text that it computes what the masked model computes, before anything is saved and before
    the refit.

    Examples:
      cocurve prune demo plan.json --out smaller --verify
      cocurve prune MODEL plan.json --out smaller --verify --text held_out.jsonl --dtype bfloat16
      cocurve prune MODEL RELEASE/llama-3.1-8b-instruct/r20 --out smaller
      cocurve prune MODEL plan.json --out smaller --refit --text c4.jsonl

    Args:
        model: "demo", "smollm2" (see fetch), a folder, or a hub id
        plan: file from `cocurve solve`, or the folder rXX of a ratio in the authors' release
        out: a new folder
        other_weights: allow a plan of other weights
        verify: compare with the masked model
        refit: refit what stays, layer by layer
    """
    if on.stream and refit == verify:
        raise InputError(
            "--stream is for --refit or for --verify, not for both: a refitted model computes "
            "something else than the masked one. Leave one out, or leave out --stream."
        )
    quieten()
    selection = read_plan(plan)
    require_writable(out.resolve().parent)  # it is made there, and then renamed
    dense: Any = None
    with suppress(stored.PickledError):  # such a model must be loaded
        dense = on_disk.open_model(model, dtype=on.dtype)
    if dense is not None and on.dtype is None and not refit:
        as_stored: Any = identity.model_dtype(dense)
        on = replace(on, dtype=as_stored)
    if verify or refit or dense is None:
        dense, tokenizer = on.load(model)
    else:
        tokenizer = loading.load_tokenizer(model)
    text = rows.calibration(model, tokenizer) if refit else None
    if out.exists() and (out.is_file() or any(out.iterdir())):
        if not _holds(out, selection, dense, on, text):
            raise InputError(
                f"{out} exists and holds something else than this plan's model in this dtype and "
                "with this refit; it is not overwritten. Choose another --out, or move it away."
            )
        print(f"{out} already holds this plan's model (nothing was written).")
        return
    before = dense.num_parameters()
    if other_weights:
        selection = allow_other_weights(selection, dense)
    checked = None
    if verify:
        checked = text or replace(rows, sequences=2).calibration(model, tokenizer)
    if text is not None:
        if checked is not None:
            cutting.prune(dense, selection, verify=checked)
        options = RepairOptions(progress=progress())
        repair(dense, selection, text, options=options, out=out, tokenizer=tokenizer)
    elif checked is not None and not on.stream:
        # in place, because two models may not fit, and the dense one can be loaded again
        pruned = cutting.prune(dense, selection, inplace=True, verify=checked)
        save_pruned(pruned, out, tokenizer=tokenizer)
    elif checked is not None:
        cutting.prune(dense, selection, verify=checked, out=out, tokenizer=tokenizer)
    else:
        cutting.require_prunable(dense, selection, on_disk=True)
        on_disk.prune_to_folder(dense, selection, out, tokenizer=tokenizer, progress=progress())
    done = "; computes what the masked model computes" if verify else ""
    done += f"; refitted on {len(text)} rows" if text is not None else ""
    after = before - selection.pruned_cost
    print(f"{selection}\n{before:,} -> {after:,} parameters{done}\nSaved to {out}.")


def _holds(out: Path, plan: Selection, model: Any, on: Device, text: Any) -> bool:
    """Whether a folder holds this result: of this model and dtype, refitted on this text."""
    if not identity.is_pruned(out):
        return False
    facts = manifest.read_manifest(out)
    refitted = (facts.get("repair") or {}).get("calibration_fingerprint")
    manifest.require_dense(model, facts)
    return (
        facts.get("selection_fingerprint") == plan.fingerprint
        and on.dtype in (None, facts["dtype"])
        and refitted == (None if text is None else text.fingerprint)
        # each weight is compared when it is read
        and fingerprint(identity.weight_marks(saving.open_pruned(out)))
        == facts["weights_fingerprint"]
    )


def recover(
    folder: Positional[File],
    *,
    against: str,
    out: File,
    on: Device = Device(),
    text: Rows = Rows(),
    held_out: Count = 16,
    rank: Count = 16,
    learning_rate: float = 1e-3,
    epochs: Count = 4,
) -> None:
    """Train a pruned model until it answers as the dense one does.

    These are low-rank updates of its linear layers, by KL on the text (LoRA; needs pip install
    'cocurve-lab[recover]'). They are added to the weights, so the new folder has the size of the
    old one. Held-out rows choose the epoch. Both models must fit in memory. A folder that `prune
    --refit` wrote is a better start than one without a refit. The state after each epoch is kept
    beside the new folder until it is written; the same command goes on from there.

    Examples:
      cocurve recover smaller --against demo --out trained
      cocurve recover smaller --against MODEL --text c4.jsonl --dtype bfloat16 --out trained

    Args:
        folder: folder from `cocurve prune`
        against: the dense model
        out: a new folder
        held_out: rows that choose the epoch
        rank: of the updates
        learning_rate: of AdamW, the largest
        epochs: times each row is read
    """
    options = RecoverOptions(
        rank=rank, learning_rate=learning_rate, epochs=epochs, progress=progress()
    )
    state = Path(f"{out}.state")
    if state.exists() and identity.is_pruned(out):  # killed between its last two steps
        shutil.rmtree(state, ignore_errors=True)
        print(f"{out} is there already (nothing was trained).")
        return
    require_new(out)
    pruned = load_pruned(folder, **vars(on))
    dense, tokenizer = on.load(against)
    rows = text.calibration_and_held_out(against, tokenizer, held_out)
    trained: Any = train(dense, pruned, *rows, options=options, checkpoint=state)
    save_pruned(trained, out, tokenizer=tokenizer)
    shutil.rmtree(state, ignore_errors=True)
    epoch = (trained.cocurve_manifest["recovery"] or {}).get("epoch", 0)
    print(f"The weights are those of epoch {epoch} on {len(rows[0])} rows; epoch 0 is the start.")
    print(f"Saved to {out}.")


def compress(
    model: Positional[str],
    *,
    out: File,
    ratio: Annotated[float | None, BUDGET] = None,
    parameters: Annotated[str | None, BUDGET] = None,
    minutes: float = 30.0,
    on: Device = Device(),
    text: Readable | None = None,
    sequences: Count = 128,
    length: Count | None = None,
    no_refit: bool = False,
    checkpoint: File | None = None,
) -> None:
    """Find the best smaller model that some minutes of work buy.

    Build H on as many rows as fit, solve on it, search by measured KL from the best plan, refit,
    and measure on text that no step before has seen. The result is a folder, as `cocurve prune`
    writes it, and a report. Each step is also a verb or a function of its own. The model must fit
    in memory twice; for a larger one run the steps with --stream: build, solve, search, and prune
    with --refit.

    Examples:
      cocurve compress demo --ratio 0.2 --minutes 10 --out smaller
      cocurve compress MODEL --parameters 6B --minutes 120 --text c4.jsonl --out smaller

    Args:
        model: "demo", "smollm2" (see fetch), a folder, or a hub id
        out: a new folder
        ratio: share of removable parameters to remove
        parameters: most parameters left: "6B", "350M"
        minutes: time to spend
        text: text for all steps; default: C4 from the hub
        sequences: the most rows for H; also those of the refit
        length: tokens per row (2048, or the context)
        no_refit: leave the weights as they are
        checkpoint: keep what is measured here; the same command with more minutes goes on from it
    """
    target = Target(ratio=ratio, parameters=parameters)
    require_new(out)
    dense, tokenizer = on.load(model)
    found = best_plan(
        dense,
        tokenizer,
        target if ratio is None else ratio,
        minutes,
        refit=not no_refit,
        num_sequences=sequences,
        text_file=text,
        seq_len=length,
        checkpoint=checkpoint,
        progress=progress(),
    )
    facts = CardFacts(
        kl=found.kl,
        kl_error=found.standard_error,
        kl_text=f"{len(found.side.kl)} rows that no step of the search has seen",
    )
    save_pruned(found.model, out, tokenizer=tokenizer, evaluation=facts)
    print(f"{found}\nSaved to {out}.")


def export(
    folder: Positional[File],
    *,
    gguf: File,
    dtype: Literal["f32", "f16", "q8_0"] = "f16",
    tokenizer: Annotated[str | None, TOKENIZER] = None,
    no_tokenizer: Annotated[bool, TOKENIZER] = False,
) -> None:
    """Write a pruned model as one GGUF file, which llama.cpp runs without this library.

    Its weights are read one after the other, so memory for the largest of them is enough.

    Examples:
      cocurve export smaller --gguf smaller.gguf --dtype f16
      cocurve export smaller --gguf ids.gguf --no-tokenizer

    Args:
        folder: folder from `cocurve prune`
        gguf: a new file
        dtype: dtype of the matrices
        tokenizer: tokenizer of a folder without one
        no_tokenizer: write a file that takes token ids only, for a tokenizer that llama.cpp has not
    """
    quieten()
    require_new(gguf)
    pruned = saving.open_pruned(folder)  # first: a mistyped folder would be taken for a hub id
    words = None if no_tokenizer else read_tokenizer(str(folder), tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the notes that are printed say the same
        print(export_gguf(pruned, words, gguf, dtype=dtype))
