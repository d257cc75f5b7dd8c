"""Models larger than memory, and builds on several machines.

The files are imported when such a model is opened.
"""

from __future__ import annotations

from ...models.layers import STORE, WeightStore
from ...pruner.folder import FOLDERS, PruneToFolder


def _store() -> WeightStore:
    from . import streaming

    return streaming


def _folders() -> PruneToFolder:
    from .on_disk import prune_to_folder

    return prune_to_folder


STORE.put(_store)
FOLDERS.put(_folders)
