"""`cocurve recover`: a little training after pruning."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.errors import InputError
from ..extensions.repairing.recovery import RecoverOptions, recover
from ..models.identity import is_pruned
from ..pruner.saving import load_pruned, save_pruned
from .common import Device, Rows, progress, require_counts, require_writable, rows_of
from .options import Verb, argument, flag, part


@dataclass(frozen=True, kw_only=True)
class Recover(Verb):
    """Train a pruned model until it answers as the dense one does.

    These are low-rank updates of its linear layers, by KL on calibration text (LoRA; needs pip
    install 'cocurve-lab[recover]'). They are added to the weights, so the new folder has the size
    of the old one. Held-out rows choose the epoch. Both models must fit in memory. A folder that
    `prune --refit` wrote is a better start than one without a refit. The state after each epoch is
    kept beside the new folder until it is written; the same command goes on from there.

    Examples:
      cocurve recover smaller --against demo --out trained
      cocurve recover smaller --against MODEL --calibration c4.jsonl --dtype bfloat16 --out trained
    """

    folder: Path = argument("FOLDER", "folder from `cocurve prune`")
    against: str = flag("the dense model", metavar="MODEL")
    on: Device = part()
    text: Rows = rows_of("calibration", 128, "text to train on", "C4 from the hub")
    held_out: int = flag("rows that choose the epoch (16)", 16)
    settings: RecoverOptions = part(
        rank="of the updates (%(default)s)",
        learning_rate="of AdamW, the largest (%(default)s)",
        epochs="times each row is read (4)",
    )
    out: Path = flag("a new folder", metavar="FOLDER")

    def run(self) -> int:
        """Run `cocurve recover`."""
        self.text.require()
        require_counts(self, "held_out")
        state = Path(f"{self.out}.state")
        if state.exists() and is_pruned(self.out):  # killed between its last two steps
            shutil.rmtree(state, ignore_errors=True)
            print(f"{self.out} is there already (nothing was trained).")
            return 0
        if self.out.exists():
            raise InputError(f"{self.out} exists and is not overwritten. Choose another --out.")
        require_writable(self.out.resolve().parent)
        pruned: Any = load_pruned(self.folder, device=self.on.device, dtype=self.on.dtype)
        model, tokenizer = self.on.load(self.against)
        texts = self.text.calibration_and_held_out(self.against, tokenizer, self.held_out)
        settings = replace(self.settings, progress=progress())
        try:
            trained: Any = recover(model, pruned, *texts, options=settings, checkpoint=state)
        except KeyboardInterrupt:  # `main` prints this and exits with 130
            raise KeyboardInterrupt(
                f"interrupted; the state is in {state}. To go on: {self.again}"
            ) from None
        save_pruned(trained, self.out, tokenizer=tokenizer)
        shutil.rmtree(state, ignore_errors=True)
        now, before = trained.cocurve_manifest, pruned.cocurve_manifest
        taken = "no epoch lowered the held-out KL, and the weights are those of the start"
        if now["weights_fingerprint"] != before["weights_fingerprint"]:
            epoch = now["recovery"]["epoch"]
            taken = f"trained on {len(texts[0])} rows; the weights are those of epoch {epoch}"
        print(f"{taken}.\nSaved to {self.out}.")
        return 0
