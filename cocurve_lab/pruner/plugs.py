"""What extensions do for a smaller model: write it weight by weight, and let others use it.

torch is imported for annotations only, so that an extension can plug itself in without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..base.plugs import Plug, missing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..models.architectures import Architecture
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


# "stock": AutoModelForCausalLM.from_pretrained(folder); "own code": the same with
# trust_remote_code=True; "cocurve_lab": load_pruned only
Loader = Literal["stock", "own code", "cocurve_lab"]


class WriteConfiguration(Protocol):
    """Writes the files that transformers needs to load a folder."""

    def __call__(
        self, pruned: Architecture, layers: Sequence[Mapping[str, int]], folder: Path
    ) -> Loader:
        """Write them, and return what loads the folder.

        `layers` are the widths of the manifest. A config.json of the dense model is there already.
        """


class WriteCard(Protocol):
    """Writes the model card, README.md, into a folder."""

    def __call__(
        self, folder: Path, manifest: Mapping[str, Any], facts: CardFacts, *, has_tokenizer: bool
    ) -> None: ...


def _missing() -> Any:
    raise missing("prune(out=)")


def _for_this_library() -> WriteConfiguration:
    return lambda pruned, layers, folder: "cocurve_lab"


def _no_card() -> WriteCard:
    return lambda folder, manifest, facts, *, has_tokenizer: None


FOLDERS: Plug[PruneToFolder] = Plug(_missing)
CONFIGURATIONS: Plug[WriteConfiguration] = Plug(_for_this_library)
CARDS: Plug[WriteCard] = Plug(_no_card)
