"""Models larger than memory, and builds on several machines.

The files are imported when such a model is opened.
"""

from __future__ import annotations

from ...measuring.passes import PASSES, MakePasses
from ...models.layers import STORE, WeightStore
from ...pruner.folder import FOLDERS, PruneToFolder


def _store() -> WeightStore:
    from . import streaming

    return streaming


def _passes() -> MakePasses:
    from .layerwise import LayerwisePasses

    return LayerwisePasses


def _folders() -> PruneToFolder:
    from .on_disk import prune_to_folder

    return prune_to_folder


STORE.put(_store)
PASSES.put(_passes)
FOLDERS.put(_folders)
