"""What extensions do for a smaller model: write it weight by weight, and describe it to readers.

torch is imported for annotations only, so that an extension can plug itself in without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..base.plugs import Plug, missing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..solver.selection import Selection
    from .card import CardFacts


class PruneToFolder(Protocol):
    """Writes the pruned model into a folder as `save_pruned` would, weight by weight."""

    def __call__(
        self,
        model: PreTrainedModel,
        selection: Selection,
        folder: str | os.PathLike[str],
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        check: Callable[[Path], object],
    ) -> Path:
        """Write the folder, and return it.

        `check` is called with what was written before it becomes the folder, and may raise.
        """


class WriteCard(Protocol):
    """Writes the model card, README.md, into a folder."""

    def __call__(
        self, folder: Path, manifest: Mapping[str, Any], facts: CardFacts, *, has_tokenizer: bool
    ) -> None: ...


def _missing() -> Any:
    raise missing("prune(out=)")


def _no_card() -> WriteCard:
    return lambda folder, manifest, facts, *, has_tokenizer: None


FOLDERS: Plug[PruneToFolder] = Plug(_missing)
CARDS: Plug[WriteCard] = Plug(_no_card)
