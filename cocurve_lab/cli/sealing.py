"""`cocurve seal`: accept what was changed on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..base.storage import seal_file
from ..pruner.saving import accept_changes
from .options import Verb, argument


@dataclass(frozen=True, kw_only=True)
class Seal(Verb):
    """Accept what was changed on purpose, and write checksums anew.

    A pruned model's folder is refused if something in it changed after it was saved. This accepts a
    change made on purpose, as of a chat template or by a trainer, and the manifest keeps what it
    was. Files of earlier releases get their checksums; no number of them changes.

    Examples:
      cocurve seal smaller
      cocurve seal plan.json data/smollm2/plans.json
    """

    places: tuple[Path, ...] = argument("PLACE", "folders of pruned models, and JSON files")

    def run(self) -> int:
        """Run `cocurve seal`."""
        for place in self.places:
            if place.is_dir():
                changed = ", ".join(accept_changes(place)) or "nothing; all is the same"
                print(f"{place}: sealed. Accepted: {changed}.")
            else:
                print(f"{place}: {'sealed' if seal_file(place) else 'was sealed already'}.")
        return 0
