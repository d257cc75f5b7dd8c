"""Saving and loading a pruned model: safetensors, configuration, manifest and model card."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..base.arguments import as_path
from ..base.atomic import replacing_folder
from ..base.errors import FileFormatError, InputError
from ..base.files import require_regular_files
from ..base.storage import fingerprint, seal_json
from ..models.architectures import UNIT_KINDS, Architecture, describe
from ..models.families import MULTIMODAL
from ..models.identity import (
    MANIFEST,
    READ,
    TERMS,
    file_sums,
    fingerprint_tensor,
    is_pruned,
    model_dtype,
    weight_marks,
)
from ..models.layers import STORE, WeightSource, attach
from ..models.loading import auto_class, keep_score_cap, pick_device, read_dtype
from ..models.runtime import transient_bars
from ..models.sources import OPENING
from ..models.weights import tied_names, without_weights
from .folder import PUBLISHING, CardFacts, dense_configuration, rejecting
from .manifest import (
    VERSION,
    manifest_elsewhere,
    manifest_on,
    read_manifest,
    weights_now,
    widths_in,
    widths_of,
)
from .slicing import block_cuts, block_modules, settle_heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WRITTEN = (  # names a save may write; only a folder without any other may be replaced
    *READ,
    MANIFEST,
    *TERMS,
    "README.md",
    "additional_chat_templates",
    "model.safetensors",
    "model-?????-of-?????.safetensors",
)


# Saving -------------------------------------------------------------------------------------------


def save_pruned(
    pruned: PreTrainedModel,
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    evaluation: CardFacts | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a pruned model: safetensors, configuration, manifest, and a model card.

    It is written in the dtype of the checkpoint that it was loaded from, where this holds every
    weight; else in its own, which it prints.

    Llama, Mistral, Qwen2 and 3, Phi3 and Gemma 1 to 3 load in transformers without this library: as
    a stock model if all layers have the same widths, otherwise with `trust_remote_code=True`, by
    the short modeling file beside the weights. Other families need `load_pruned`. The card and the
    manifest's "loads_with" say which case it is. The folder is written completely or not at all.

    Args:
        pruned: what `prune` returned, or transformers loaded of a saved folder, also trained since.
        folder: a folder that does not exist or is empty, unless `overwrite`. Links are followed.
        tokenizer: the dense model's, to save in the folder too.
        evaluation: the measurements for the card, which states no others.
        overwrite: replace a folder that holds an earlier pruned model and nothing else.
    """
    manifest = manifest_on(pruned)
    if manifest is None:
        raise InputError(
            "this model carries no manifest, so it was not made by prune. Prune it, then save it; "
            "a stock model that was trained elsewhere saves itself: save_pretrained(folder)."
        )
    folder = as_path(folder, "folder")
    size = sum(weight.nbytes for weight in pruned.parameters())
    with new_folder(folder, overwrite=overwrite, size=size) as temporary:
        marks = weight_marks(pruned)
        manifest = manifest | weights_now(pruned, manifest, marks)
        saved, weights = _in_stored_dtype(pruned)
        if weights is not None:
            marks = [[name, fingerprint_tensor(weights[name])] for name in sorted(weights)]
            manifest["weights_fingerprint"] = fingerprint(marks)
            weights = {name: weights[name] for name in weights.keys() - tied_names(pruned).keys()}
        with transient_bars():
            # under the names in the model, which the modeling file needs of a multimodal one
            own = {"save_original_format": False} if saved.config.model_type in MULTIMODAL else {}
            saved.save_pretrained(temporary, state_dict=weights, **own)
        write_beside(describe(saved), temporary, manifest, marks, tokenizer, evaluation)
    return folder


def _in_stored_dtype(pruned: Any) -> tuple[Any, dict[str, torch.Tensor] | None]:
    """A model as its checkpoint stores it: without weights, and these in the checkpoint's dtype.

    The model itself, and None, if that dtype is as wide, or cannot hold each weight; the latter is
    said.
    """
    stored: Any = getattr(pruned, "cocurve_dtype", None)
    known = stored in (torch.float32, torch.bfloat16, torch.float16)
    if not known or stored.itemsize >= pruned.dtype.itemsize:
        return pruned, None
    weights = pruned.state_dict()
    if any(not torch.equal(w, w.to(stored).to(w.dtype)) for w in weights.values()):
        print(
            f"Saved in {model_dtype(pruned)}: {str(stored).removeprefix('torch.')}, in which the "
            "checkpoint was stored, cannot hold weights that gains, a refit or training changed. "
            "Convert the model first to round them: model.to(...).",
            flush=True,
        )
        return pruned, None
    return without_weights(pruned).to(stored), {n: w.to(stored) for n, w in weights.items()}


@contextmanager
def new_folder(folder: Path, *, overwrite: bool, size: int) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder`; NoRoomError without `size` bytes left."""
    place = folder.resolve()  # a link stays; the folder that it leads to is replaced
    _require_free(place, overwrite=overwrite)
    with replacing_folder(place, size=size) as temporary:
        yield temporary


def write_beside(
    pruned: Architecture,
    folder: Path,
    manifest: dict[str, Any],
    marks: list[list[str]],
    tokenizer: PreTrainedTokenizerBase | None,
    evaluation: CardFacts | None = None,
) -> None:
    """Write the files beside the weights: tokenizer, configuration, manifest and card.

    Only shapes of `pruned` are read. `manifest` and `marks` are those of its weights as they are
    now.
    """
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    layers = widths_of(pruned)
    manifest = manifest | {
        "version": VERSION,
        "layers": layers,
        "dtype": model_dtype(pruned.model),  # it may have been converted since
        "parameters": pruned.model.num_parameters(),
        "loads_with": PUBLISHING().write_configuration(pruned, layers, folder),
        "weights": dict(marks),
        "accepted": [],
    }
    content = seal_json(manifest | {"files": file_sums(folder)})
    (folder / MANIFEST).write_bytes(json.dumps(content, indent=1).encode())
    facts = evaluation or CardFacts()
    PUBLISHING().write_card(folder, manifest, facts, has_tokenizer=tokenizer is not None)


# Loading ------------------------------------------------------------------------------------------


def load_pruned(
    folder: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    stream: bool = False,
    torch_dtype: torch.dtype | str | None = None,
) -> PreTrainedModel:
    """Load what `save_pruned` wrote, in eval mode and without gradients.

    Or what a trainer saved of it: widths are then read from config.json. No code from the folder is
    run. A damaged folder raises FileFormatError.

    Args:
        folder: the folder.
        device: by default CUDA if torch can use it, else the CPU.
        dtype: by default, or as "auto", as saved.
        stream: leave the layers in the files, as in `load_model`.
        torch_dtype: what dtype was called before.
    """
    folder, target = as_path(folder, "folder"), pick_device(device)
    dtype = torch_dtype if dtype is None else dtype
    wanted = None if dtype in (None, "auto") else read_dtype(dtype)
    model, stored = _open(folder, mapped=not stream)
    if wanted is not None:  # only the weights; rotary frequencies stay in float32
        for weight in model.parameters():
            weight.data = weight.data.to(wanted)
        model.config.dtype = wanted
    return bring_weights(model, stored, target, stream=stream)


def bring_weights(
    model: PreTrainedModel, stored: WeightSource, device: torch.device, *, stream: bool
) -> PreTrainedModel:
    """Bring the weights of a model on the meta device to a device; with `stream`, all but layers.

    They come from `stored`, in the dtypes of the model.
    """
    dtypes = {name: weight.dtype for name, weight in model.state_dict().items()}

    def read(name: str) -> torch.Tensor:
        return stored.tensor(name).to(dtypes[name])

    left = STORE().leave(model, read, device) if stream else []
    apart = {*tied_names(model), *left}
    # only these are moved, because a layer that is not there cannot be
    weights = {name: read(name).to(device) for name in dtypes if name not in apart}
    # not strict, because a tied head is not in the files; all others are
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    keep_score_cap(model)
    _rebuild_buffers(model)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model.eval().requires_grad_(False)


def open_pruned(folder: str | os.PathLike[str]) -> PreTrainedModel:
    """Open what `save_pruned` wrote on the meta device, and leave its weights on disk.

    `models.weights.reader_of` reads them.
    """
    model, source = _open(as_path(folder, "folder"))
    attach(model, source)
    return model


def _open(folder: Path, *, mapped: bool = False) -> tuple[Any, WeightSource]:
    """Return a saved model on the meta device, and its weights; as for `WeightStore.folder`."""
    from transformers import GenerationConfig

    pruned = empty_pruned(folder)
    settle_heads(pruned)
    model = pruned.model
    settings = folder / "generation_config.json"
    if settings.exists():
        with rejecting(f"{settings} cannot be read"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
        OPENING().require_generation(model.generation_config, folder)
    source = STORE().folder(model, folder, mapped=mapped)
    return model.eval().requires_grad_(False), source


def empty_pruned(folder: str | os.PathLike[str]) -> Architecture:
    """Make a saved pruned model on the meta device: its shapes, without reading its weights."""
    folder = as_path(folder, "folder")
    require_regular_files(folder)
    OPENING().require_no_adapter(folder)
    known = (folder / MANIFEST).exists() or not is_pruned(folder)
    manifest, config = read_manifest(folder) if known else {}, dense_configuration(folder)
    dtype = read_dtype(manifest.get("dtype") or config.dtype or torch.float32)
    with (
        rejecting(f"{folder / 'config.json'} describes no model that can be built"),
        torch.device("meta"),
    ):
        model: Any = auto_class(config).from_config(config, dtype=dtype)
    pruned = describe(model)
    _narrow(pruned, manifest["layers"] if known else widths_in(folder, pruned))
    model.cocurve_manifest = manifest or manifest_elsewhere(pruned)
    model.cocurve_dtype = dtype
    return pruned


def _require_free(folder: Path, *, overwrite: bool) -> None:
    if folder.is_file() or folder == Path.cwd():
        raise InputError(
            f"{folder} is a file or the working directory, which a save would replace. Choose "
            "another folder."
        )
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if names and not (overwrite and MANIFEST in names):
        raise InputError(
            f"{folder} exists and is not empty. Choose another folder, or, if it holds an earlier "
            "pruned model, pass overwrite=True to replace it."
        )
    other = [name for name in names if not any(fnmatch.fnmatch(name, own) for own in _WRITTEN)]
    if other:
        raise InputError(
            f"{folder} also holds {', '.join(other)}, not written by save_pruned, which "
            "overwriting would delete. Move that away, or choose another folder."
        )


def _narrow(architecture: Architecture, layers: list[dict[str, int]]) -> None:
    """Cut a dense model on the meta device to the widths of a manifest."""
    if len(layers) != len(architecture.layers):
        raise FileFormatError(
            f"the manifest describes {len(layers)} layers, but the configuration "
            f"{len(architecture.layers)}. Save the model again."
        )
    for layer, widths in enumerate(layers):
        for kind in architecture.kinds(layer):
            if f"{kind}_columns" not in widths:
                raise FileFormatError(
                    f"the manifest gives layer {layer} no {kind}_columns. Save the model again."
                )
            wanted, dense = widths[f"{kind}_columns"], architecture.width(layer, kind)
            step = UNIT_KINDS[kind].step(architecture, layer)
            if not 0 <= wanted <= dense or wanted % step:
                raise FileFormatError(
                    f"the manifest gives layer {layer} {wanted} {kind} columns, but the "
                    f"configuration allows 0 to {dense} in steps of {step}. Save the model again."
                )
            # any columns would do, because the meta device has shapes only
            cuts = block_cuts(architecture, layer, kind, torch.arange(wanted))
            for parent, name, module in block_modules(architecture, layer, kind, cuts):
                setattr(parent, name, module)


def _rebuild_buffers(model: PreTrainedModel) -> None:
    """Recompute the buffers that no file holds: rotary frequencies, Gemma's embedding scale."""
    module: Any
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
                setattr(module, name, torch.empty_like(buffer, dtype=dtype, device="cpu"))
                module._is_hf_initialized = False
    weight: Any
    for weight in model.state_dict(keep_vars=True).values():
        weight._is_hf_initialized = True  # transformers leaves these as they are
    model.initialize_weights()
