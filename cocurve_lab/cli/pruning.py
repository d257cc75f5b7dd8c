"""`cocurve prune` and `export`: a smaller model as folders and as one GGUF file."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..base.errors import InputError
from ..base.storage import fingerprint
from ..extensions.big_models.on_disk import open_model, prune_to_folder
from ..extensions.big_models.stored import PickledError
from ..extensions.gguf.gguf import export_gguf
from ..extensions.repairing.repair import RepairOptions, refit, repair
from ..models.identity import MANIFEST, model_dtype, weight_marks
from ..models.loading import load_tokenizer
from ..pruner import cutting
from ..pruner.manifest import read_manifest, require_dense
from ..pruner.saving import open_pruned, save_pruned
from .common import (
    PlannedModel,
    Rows,
    progress,
    read_plan,
    read_tokenizer,
    require_new,
    require_writable,
    rows_of,
)
from .options import Verb, argument, flag, part

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..calibration import CalibrationSet
    from ..solver.selection import Selection


@dataclass(frozen=True, kw_only=True)
class Prune(Verb):
    """Remove the units of a plan from a model.

    The smaller model is saved as a folder with its tokenizer; its weights are the model's own, bit
    for bit, apart from gains. They are read, cut and written one after the other, in the dtype of
    the model's files, so no GPU is needed, and memory for the largest of them is enough. --refit
    and --verify load the model, unless --stream lets them read one layer at a time; a model without
    safetensors files is loaded, too. --refit fits the output projections again by least squares on
    calibration text, which needs memory for both models without --stream; the folder's manifest and
    card tell of it. --verify checks on two rows of text that it computes what the masked model
    computes, before anything is saved and before the refit.

    Examples:
      cocurve prune demo plan.json --out smaller --verify
      cocurve prune MODEL plan.json --out smaller --verify --text held_out.jsonl --dtype bfloat16
      cocurve prune MODEL RELEASE/llama-3.1-8b-instruct/r20 --out smaller
      cocurve prune MODEL plan.json --out smaller --refit --calibration c4.jsonl
    """

    model: PlannedModel = part(
        dtype="dtype of the weights; default: as stored (the demo model and, on the CPU, --refit: "
        "float32)"
    )
    plan: Path = argument(
        "PLAN",
        "file from `cocurve solve`, or the folder rXX of a ratio in the authors' release",
    )
    out: Path = flag("a new folder", metavar="FOLDER")
    verify: bool = flag("compare with the masked model")
    text: Rows = rows_of("text", 2, "text to verify on", "none")
    refit: bool = flag("refit what stays, layer by layer")
    calibration: Path | None = flag(
        "text to refit on, as for `cocurve build`; cut like --text", metavar="FILE"
    )
    calibration_sequences: int = flag("its rows (%(default)s)", 128, metavar="N")

    def run(self) -> int:
        """Run `cocurve prune`."""
        if self.calibration is not None and not self.refit:
            raise InputError("--calibration is text to refit on. Add --refit, or leave it out.")
        if self.model.stream and self.refit == self.verify:
            raise InputError(
                "--stream is for --refit or for --verify, not for both: a refitted model computes "
                "something else than the masked one. Leave one out, or leave out --stream."
            )
        selection = read_plan(self.plan)
        there = self._manifest(selection)
        if there is None:
            require_writable(self.out.resolve().parent)  # it is made there, and then renamed
            require_writable(self.out)
        if self.verify:
            self.text.require()
        # cut like the text to verify on
        text = replace(self.text, file=self.calibration, sequences=self.calibration_sequences)
        if self.refit:
            text.require()
        on = self.model
        loaded = None
        try:
            stored = open_model(on.place, dtype=on.dtype)
            tokenizer = load_tokenizer(on.place)
        except PickledError:  # it must be loaded
            loaded = on.load(on.place)
            stored, tokenizer = loaded
        if there is not None:
            rows = text.calibration(on.place, tokenizer) if self.refit else None
            return self._same(there, stored, rows)
        if loaded is None and not self.verify and not self.refit:
            cutting.require_prunable(stored, selection, on_disk=True)
            selection = on.allowing(selection, stored)
            prune_to_folder(stored, selection, self.out, tokenizer=tokenizer, progress=progress())
            return self._done(selection, stored.num_parameters())
        if not self.refit and on.dtype is None:
            dtype: Any = model_dtype(stored)
            on = replace(on, dtype=dtype)
        model, tokenizer = loaded or on.load(on.place)
        return self._prune_running(model, tokenizer, selection, text)

    def _prune_running(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        selection: Selection,
        text: Rows,
    ) -> int:
        """Prune a model that is also run, or that cannot be read in parts."""
        on = self.model
        before = model.num_parameters()
        verified = self.text.held_out(on.place, tokenizer) if self.verify else None
        rows = text.calibration(on.place, tokenizer) if self.refit else None
        selection = on.allowing(selection, model)
        settings = RepairOptions(progress=progress())
        if on.stream:
            to: Any = {"out": self.out, "tokenizer": tokenizer}
            if rows is None:
                cutting.prune(model, selection, verify=verified, **to)
            else:
                repair(model, selection, rows, options=settings, **to)
        else:
            # in place, because two models may not fit, and the dense one can be loaded again
            pruned = cutting.prune(model, selection, inplace=rows is None, verify=verified)
            if rows is not None:
                refit(model, pruned, selection, rows, options=settings)
            save_pruned(pruned, self.out, tokenizer=tokenizer)
        checked = "; computes what the masked model computes" if self.verify else ""
        if rows is not None:
            checked += " before the refit" if self.verify else ""
            checked += f"; refitted on {len(rows)} rows"
        return self._done(selection, before, checked)

    def _done(self, selection: Selection, before: int, checked: str = "") -> int:
        after = before - selection.pruned_cost
        print(f"{selection}\n{before:,} -> {after:,} parameters{checked}\nSaved to {self.out}.")
        return 0

    def _manifest(self, selection: Selection) -> dict[str, Any] | None:
        """The manifest of this plan's model in the folder; None if that is empty or new."""
        folder = self.out
        if folder.is_dir() and (folder / MANIFEST).is_file():
            manifest = read_manifest(folder)
            if manifest.get("selection_fingerprint") == selection.fingerprint:
                return manifest
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            raise self._taken("is not this plan's model")
        return None

    def _same(
        self, manifest: dict[str, Any], model: PreTrainedModel, rows: CalibrationSet | None
    ) -> int:
        """Check that the folder holds this result: of this model and dtype, refitted on rows."""
        if self.model.dtype not in (None, manifest["dtype"]):
            raise self._taken(f"holds this plan in {manifest['dtype']}, not {self.model.dtype}")
        refitted = (manifest.get("repair") or {}).get("calibration_fingerprint")
        if refitted != (None if rows is None else rows.fingerprint):
            raise self._taken("holds this plan with another refit, or without one")
        require_dense(model, manifest)
        there = open_pruned(self.out)  # each weight is compared when it is read
        if fingerprint(weight_marks(there)) != manifest["weights_fingerprint"]:
            raise self._taken("holds this plan with weights that changed since")
        print(f"{self.out} already holds this plan's model (nothing was written).")
        return 0

    def _taken(self, why: str) -> InputError:
        """The error for a folder that must not be overwritten."""
        return InputError(
            f"{self.out} exists and {why}; it is not overwritten. Choose another --out, or move it "
            "away."
        )


@dataclass(frozen=True, kw_only=True)
class Export(Verb):
    """Write a pruned model as one GGUF file, which llama.cpp runs without this library.

    Its weights are read one after the other, so memory for the largest of them is enough.

    Examples:
      cocurve export smaller --gguf smaller.gguf --dtype f16
      cocurve export smaller --gguf ids.gguf --no-tokenizer
    """

    folder: Path = argument("FOLDER", "folder from `cocurve prune`")
    gguf: Path = flag("a new file", metavar="FILE")
    dtype: Literal["f32", "f16", "q8_0"] = flag("dtype of the matrices (f16)", "f16")
    tokenizer: str | None = flag(
        "tokenizer of a folder without one", metavar="MODEL", at_most_one_of="tokenizers"
    )
    no_tokenizer: bool = flag(
        "write a file that takes token ids only, for a tokenizer that llama.cpp has not",
        at_most_one_of="tokenizers",
    )

    def run(self) -> int:
        """Run `cocurve export`."""
        require_new(self.gguf)
        pruned = open_pruned(self.folder)  # first: a mistyped folder would be taken for a hub id
        tokenizer = None
        if not self.no_tokenizer:
            tokenizer = read_tokenizer(str(self.folder), self.tokenizer)
            if tokenizer is None:
                raise InputError(
                    f"{self.tokenizer or self.folder} holds no tokenizer. Give the dense model as "
                    "--tokenizer, or --no-tokenizer for a file that takes token ids only."
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the notes that are printed say the same
            print(export_gguf(pruned, tokenizer, self.gguf, dtype=self.dtype))
        return 0
