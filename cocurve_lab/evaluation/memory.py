"""The most memory held at one time while a model runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


@contextmanager
def most_held(device: torch.device) -> Iterator[list[int]]:
    """One number: the most bytes allocated at a time inside, beyond what was there before."""
    held = [0]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield held
        held[0] = torch.cuda.max_memory_allocated(device) - before
        return
    with _Allocations() as record:
        yield held
    held[0] = record.most


class _Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operations return, while they live; not their scratch space.

    Attributes:
        most: the largest sum so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self._held = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):  # weights and views of them are not new
            if isinstance(given, Tensor):
                self._known.setdefault(given.untyped_storage(), True)
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage() not in self._known:
                storage = made.untyped_storage()
                self._known[storage] = True
                self._held += storage.nbytes()
                weakref.finalize(storage, self._release, storage.nbytes())
        self.most = max(self.most, self._held)
        return result

    def _release(self, size: int) -> None:
        self._held -= size
