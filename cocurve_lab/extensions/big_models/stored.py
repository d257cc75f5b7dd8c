"""Weights in files, read one by one when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.errors import FileFormatError, InputError
from ...models.layers import WeightSource
from ...models.weights import DTYPES, fingerprint_tensor, require_finite, settle_ties, tied_names
from ..opening.files import (
    INDEX,
    WHOLE,
    Part,
    damaged,
    halves,
    open_weights,
    own_names,
    part_shape,
    require_shape,
    tell_ignored,
    weight_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PickledError(FileFormatError):
    """The weights are not in safetensors files, and can only be loaded as a whole."""


class Watch:
    """Compares the weights of a file with the manifest's `sums`, and again after it changed."""

    def __init__(self, file: Path, sums: Mapping[str, str] | None = None) -> None:
        self.file, self._sealed, self._sums = file, sums or {}, dict(sums or {})
        self._opened = self._state()
        self._known: dict[str, Any] = {}  # the state of the file when a weight was last compared

    def _state(self) -> Any:
        at = os.stat(self.file)
        return at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns

    def passed(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """Read a weight that must be what it was; FileFormatError or InputError if it is not."""
        before, tensor, state = self._state(), read(), self._state()
        if self._known.get(name) == before == state:
            return tensor
        mark = fingerprint_tensor(tensor)
        if name in self._sealed and mark != self._sealed[name]:
            raise FileFormatError(
                f"{name} in {self.file} does not match its checksum: it is damaged or changed. Use "
                "a copy, or save the model again."
            )
        unchanged = self._opened == before == state
        if self._sums.get(name, mark if unchanged else "") != mark:
            raise InputError(
                f"{self.file} changed after the model was loaded, and {name} may be another. What "
                "is finished is kept. Restore the file, or load the model again and start anew."
            )
        require_finite(tensor, name, self.file)
        self._sums[name], self._known[name] = mark, before
        return tensor


class StoredWeights(WeightSource):
    """The weights of a model in safetensors files, read when they are asked for, and not kept.

    Args:
        model: the model, on the meta device; its names and shapes must be those in the files.
        files: safetensors files that hold all its weights; opening them reads their headers only.
        mapped: map the files into memory instead of reading from them.
        sums: as for `Watch`, by the weights' names in the model.

    Attributes:
        tied: as from `tied_names`; these may be missing in the files.
        dtype: the dtype of the first weight in the files.
        ignored: what the files hold and the model does not need, by its names there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        files: Sequence[Path],
        *,
        mapped: bool = False,
        sums: Mapping[str, str] | None = None,
    ) -> None:
        self.tied = tied_names(model)
        self.ignored: list[str] = []
        # several where a file keeps each expert apart: by expert and half, else by None
        self._places: dict[str, dict[Part, tuple[Any, str, Watch]]] = {}
        wanted = model.state_dict()
        own = own_names(model, wanted)
        if not files:
            raise PickledError(
                f"{model.config._name_or_path} holds neither {INDEX} nor {WHOLE}. Pickled or GGUF "
                "weights cannot be read one by one: load the model with cl.load_model, save it "
                "with model.save_pretrained(folder), and give that folder."
            )
        for file in files:
            handle, watch = open_weights(file, mapped=mapped), Watch(file, sums)
            for stored in handle.keys():  # noqa: SIM118, a handle is no mapping
                name, part = own(stored)
                if name is None:
                    self.ignored.append(stored)
                    continue
                self._places.setdefault(name, {})[part] = handle, stored, watch
                found = handle.get_slice(stored)
                if found.get_dtype() not in DTYPES:  # first: packed weights differ in shape too
                    raise FileFormatError(
                        f"{name} in {file} is stored as {found.get_dtype()}, so the model is "
                        "quantized. Give an unquantized one, for example in bfloat16."
                    )
                require_shape(found, name, part_shape(wanted[name].shape, name, part), file)
        missing = next((n for n in wanted if n not in self._places and n not in self.tied), None)
        for name, parts in self._places.items():
            count = len(wanted[name]) if wanted[name].dim() else 1
            if None not in parts and len(parts) != count * halves(name):
                missing = f"an expert of {name}"
        if missing is not None:
            raise FileFormatError(
                f"{missing} is in none of the weight files of {model.config._name_or_path}. The "
                "folder is incomplete: download or save the model again."
            )
        handle, stored, _ = next(iter(next(iter(self._places.values())).values()))
        self.dtype = DTYPES[handle.get_slice(stored).get_dtype()]

    def tensor(self, name: str) -> Tensor:
        """Read a weight by its name in the model, on the CPU, in the dtype of its file."""
        name = name if name in self._places else self.tied[name]
        parts, steps = self._places[name], halves(name)
        if None in parts:
            return self._read(name, *parts[None])

        def whole() -> Tensor:
            # gate rows, then up rows, of one expert after the other, as transformers stacks them
            order = sorted(part for part in parts if part is not None)
            rows = [self._read(f"{name} {part}", *parts[part]) for part in order]
            starts = range(0, len(rows), steps)
            return torch.stack([torch.cat(rows[at : at + steps]) for at in starts])

        _, _, watch = next(iter(parts.values()))
        return watch.passed(name, whole)  # each part's own watch sees whether its file changed

    def _read(self, name: str, handle: Any, stored: str, watch: Watch) -> Tensor:
        from safetensors import SafetensorError

        try:
            return watch.passed(name, lambda: handle.get_tensor(stored))
        except (SafetensorError, OSError) as error:
            raise damaged(watch.file, error) from None

    def separate(self) -> list[str]:
        """Return the names in `tied` whose weight the files hold, other than its twin's."""
        there = [name for name in self.tied if name in self._places]
        return [n for n in there if not torch.equal(self.tensor(n), self.tensor(self.tied[n]))]


def read_later(
    model: PreTrainedModel,
    files: Sequence[Path],
    *,
    mapped: bool = False,
    sums: Mapping[str, str] | None = None,
) -> StoredWeights:
    """Open the files of a model on the meta device; a head that they keep apart is untied."""
    weights = StoredWeights(model, files, mapped=mapped, sums=sums)
    if weights.separate():  # two weights that the configuration ties: transformers loads both
        head: Any = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
        settle_ties(model)
        weights = StoredWeights(model, files, mapped=mapped, sums=sums)
    tell_ignored(model, weights.ignored)
    return weights


def folder(model: PreTrainedModel, folder: Path, *, mapped: bool) -> StoredWeights:
    """Open the weights that `save_pruned` wrote; `model` has their shapes and their manifest."""
    manifest: Any = model.cocurve_manifest
    try:
        files = weight_files(str(folder))
        return read_later(model, files, mapped=mapped, sums=manifest.get("weights"))
    except InputError as error:  # its index leads elsewhere
        raise FileFormatError(str(error)) from None
