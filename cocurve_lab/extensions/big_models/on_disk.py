"""Pruning onto disk: weights are read, cut and written one after the other.

The memory that this takes is that of the largest weight, whatever the size of the model. The folder
is the one that `save_pruned` would write.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...base.arguments import as_path
from ...base.origin import LOADED
from ...base.progress import Progress, open_bar
from ...models.architectures import Architecture, describe
from ...models.identity import (
    DEMO,
    Marks,
    fingerprint_tensor,
    is_demo,
    is_pruned,
    tensor_marks,
)
from ...models.layers import attach, present
from ...models.loading import place_of, read_dtype, shapes_only
from ...models.weights import DTYPES, reader_of, tied_names, without_weights
from ...pruner.manifest import Origin, manifest_of
from ...pruner.saving import new_folder, open_pruned, write_beside
from ...pruner.slicing import cut_model, tensor_cuts
from ...solver.selection import Selection
from ..opening.files import require_floats, require_used_scales, weight_files
from ..opening.places import require_generation, require_no_adapter, require_place
from ..repairing.projection_inputs import present_blocks
from .stored import read_later

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHARD = "50GB"  # as save_pretrained
_WEIGHT = "weight"  # the one tensor in a file of a changed weight
_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # of dtypes in files


Cuts = Mapping[str, Callable[[Tensor], Tensor]]  # what stays of a weight, by its name
# keeps the weights of a layer of the dense and of the pruned model in memory inside its block
Present = Callable[[int], AbstractContextManager[None]]
# changes weights of a pruned model on the meta device where a layer is present; gives the record
Refit = Callable[[Any, Present], dict[str, Any]]


def open_model(
    model_id: str | os.PathLike[str] = DEMO,
    *,
    dtype: torch.dtype | str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Open a model whose weights stay on disk. It is on the meta device and cannot run.

    Args:
        model_id: "demo", a folder, or a hub id, whose files are downloaded if they are not here.
        dtype: by default float32 for the embedded model, else the checkpoint's own, on any device.
        **options: where the hub is asked: revision, token, cache_dir, local_files_only.

    Returns:
        The model. `reader_of` tells how to read its weights.
    """
    place = str(place_of(model_id))
    if is_pruned(place):
        pruned: Any = open_pruned(place)
        return pruned if dtype is None else pruned.to(read_dtype(dtype))
    require_place(model_id if place == str(model_id) else place)
    require_no_adapter(place, **options)
    model: Any = shapes_only(place, **options)
    require_floats(place, model)
    if not Path(place).is_dir():  # before its files are downloaded
        require_used_scales(place, model, **options)
    return stored_model(model, place, None if dtype is None else read_dtype(dtype), **options)


def stored_model(
    model: Any, place: str, dtype: torch.dtype | None, **options: Any
) -> PreTrainedModel:
    """Let the weights of a model on the meta device be read from the files of a place.

    `options` say where the hub is asked; `dtype` is by default as for `open_model`.
    """
    from transformers import GenerationConfig

    weights = read_later(model, weight_files(place, **options))
    default = torch.float32 if is_demo(place) else model.config.dtype or weights.dtype
    with suppress(OSError):  # there is none: the one made of the configuration stays
        model.generation_config = GenerationConfig.from_pretrained(place, **options)
    require_generation(model.generation_config, place)
    model = model.to(default if dtype is None else dtype)
    attach(model, weights)
    return model.eval().requires_grad_(False)


def prune_to_folder(
    model: PreTrainedModel,
    selection: Selection,
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = False,
    refit: Refit | None = None,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """Write the pruned model into a folder, as `save_pruned(prune(model, selection), folder)` does.

    Use `prune(model, selection, out=folder)`, which checks that the plan is the model's.

    Args:
        model: in memory, streamed, or from `open_model`; it is not changed.
        selection: a plan of this model.
        folder, tokenizer: as for `save_pruned`.
        progress: whether to show how many weights are written, and how.
        refit: changes some of the weights before they are written; None leaves all as cut.
        check: is called with what was written before it becomes the folder, and may raise.
    """
    folder = as_path(folder, "folder")
    dense = describe(model)
    dense.require_columns(
        "prune(out=)", "Prune in memory, and save_pruned.", "which files keep apart"
    )
    cuts = tensor_cuts(dense, selection)
    shapes = replace(dense, model=without_weights(model))
    small = cut_model(shapes, selection, inplace=True)
    pruned: PreTrainedModel = small.model
    kept = dict(pruned.state_dict())
    for name in tied_names(pruned):
        del kept[name]
    size = sum(weight.nbytes for weight in kept.values())
    if refit is not None:  # what it changes is on the disk twice for a while
        size += sum(small.output_weight(*block).nbytes for block in present_blocks(small))
    with new_folder(folder, overwrite=False, size=size) as temporary:
        apart, repair = temporary / "refitted", None
        if refit is not None:
            apart.mkdir()
            repair = refit(pruned, partial(_layer_present, dense, small, cuts, apart))
        weights = _Weights(model, cuts, apart)
        pruned.save_pretrained(temporary, state_dict={})  # its configurations, and no weights
        with open_bar(progress, total=len(kept), desc="pruning", unit="weight") as bar:
            _write_weights(small, kept, temporary, weights.kept, bar)
        before, after = weights.marks(pruned)
        origin = Origin.of(model, selection, before)
        manifest = manifest_of(small, selection, origin, after)
        if refit is not None:
            shutil.rmtree(apart)
            manifest |= {"repair": repair, "weights_since_pruning": "refitted"}
        write_beside(small, temporary, manifest, after, tokenizer)
        if check is not None:
            check(temporary)
    return folder


@contextmanager
def _layer_present(
    dense: Architecture, pruned: Architecture, cuts: Cuts, apart: Path, layer: int
) -> Iterator[None]:
    """Bring what stays of a layer's weights into the pruned model inside the block.

    Those that were changed there are written into the folder `apart`.
    """
    small = pruned.layers[layer]
    prefix = f"{dense.stack}.{layer}."
    absent = dict(small.named_parameters())

    def kept(name: str) -> Tensor:
        weight = dense.layers[layer].get_parameter(name).detach()
        cut = cuts.get(prefix + name)
        return weight if cut is None else cut(weight)

    with present(dense, layer):
        try:
            for name in absent:
                _put(small, name, kept(name).clone())
            yield
            for name, weight in small.named_parameters():
                if not torch.equal(weight, kept(name)):
                    save_file(
                        {_WEIGHT: weight.cpu().contiguous()}, apart / f"{prefix}{name}.safetensors"
                    )
        finally:
            for name, weight in absent.items():
                _put(small, name, weight)


def _put(module: nn.Module, name: str, weight: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(path), attribute, nn.Parameter(weight, requires_grad=False))


class _Weights:
    """The weights of a model as they are read and cut, each once, with their fingerprints."""

    def __init__(self, model: PreTrainedModel, cuts: Cuts, apart: Path) -> None:
        self._model, self._cuts, self._read = model, cuts, reader_of(model)
        self._apart = apart  # has those that a refit changed
        self._before: dict[str, dict[str, str]] = {}
        self._after: dict[str, str] = {}

    def kept(self, name: str) -> Tensor:
        """What stays of a weight."""
        dense = self._read(name)
        self._before[name] = tensor_marks(dense)
        self._after[name] = self._before[name][LOADED]
        refitted = self._apart / f"{name}.safetensors"
        if refitted.exists():
            kept = load_file(refitted)[_WEIGHT]
        elif name in self._cuts:
            kept = self._cuts[name](dense)
        else:
            return dense
        self._after[name] = fingerprint_tensor(kept)
        return kept

    def marks(self, pruned: PreTrainedModel) -> tuple[Marks, list[list[str]]]:
        """Return the marks of the dense model, and the `weight_marks` of the pruned one at the end.

        Weights that are gone, or tied to another, are read now.
        """
        for name in self._model.state_dict():
            if name not in self._before:
                self._before[name] = tensor_marks(self._read(name))
        for name, same in tied_names(pruned).items():
            self._after[name] = self._after[same]
        return self._before, [[name, mark] for name, mark in sorted(self._after.items())]


# Files --------------------------------------------------------------------------------------------


def _write_weights(
    pruned: Architecture,
    kept: Mapping[str, Tensor],
    folder: Path,
    read: Callable[[str], Tensor],
    bar: Any,
) -> None:
    """Write weights as safetensors, split into files and indexed as transformers does."""
    from huggingface_hub import split_torch_state_dict_into_shards

    own = {}
    for name in kept:
        saved = name
        for inside, part in pruned.family.saved_names:
            saved = saved.replace(part, inside)
        own[saved] = name
    shapes = {saved: kept[name] for saved, name in own.items()}
    split = split_torch_state_dict_into_shards(
        shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD
    )

    def counted(saved: str) -> Tensor:
        bar.update()
        return read(own[saved])

    for file, names in split.filename_to_tensors.items():
        _write_safetensors(folder / file, {name: shapes[name] for name in names}, counted)
    if split.is_sharded:
        facts = {"total_parameters": pruned.model.num_parameters(), **split.metadata}
        index = {"metadata": facts, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_safetensors(
    path: Path, shapes: Mapping[str, Tensor], read: Callable[[str], Tensor]
) -> None:
    """Write one file. The library needs all tensors in memory; here each is read in turn."""
    # the library's order: wider dtypes first, so that every tensor is aligned
    names = sorted(shapes, key=lambda name: (-shapes[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + shapes[name].nbytes
        header[name] = {
            "dtype": _NAMES[shapes[name].dtype],
            "shape": list(shapes[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = read(name)
            assert (tensor.shape, tensor.dtype) == (shapes[name].shape, shapes[name].dtype)
            # as bytes, because numpy has no bfloat16
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
