"""Keeping a pruned model: safetensors, configuration, and a manifest of its widths."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .architectures import KINDS, Architecture, Kind, describe
from .errors import FileFormatError, InputError
from .loading import MANIFEST, model_dtype, pick_device
from .selection import Selection
from .slicing import EmptyAttention, kept_rows, settle_heads, slice_linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT, VERSION = "cocurve-pruned", 1


def save_pruned(
    pruned: PreTrainedModel, folder: str | os.PathLike[str], *, overwrite: bool = False
) -> Path:
    """Write a pruned model: safetensors, configuration, and a manifest of its widths.

    The folder appears whole or not at all.

    Args:
        pruned: what `prune` returned.
        folder: where; must not exist yet, or be empty, unless `overwrite`.
        overwrite: replace a folder that holds an earlier pruned model.

    Raises:
        InputError: the model was not made by `prune`, or the folder is taken.
    """
    manifest = getattr(pruned, "cocurve_manifest", None)
    if manifest is None:
        raise InputError(
            "this model carries no manifest: it was not made by prune. Prune it, then save."
        )
    folder = Path(folder)
    taken = folder.is_file() or (folder.exists() and any(folder.iterdir()))
    if taken and not (overwrite and (folder / MANIFEST).exists()):
        raise InputError(
            f"{folder} exists and is not empty. Choose another folder, or overwrite=True to "
            "replace an earlier pruned model there."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        pruned.save_pretrained(temporary)
        manifest = manifest | {"dtype": model_dtype(pruned)}  # it may have been converted since
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        temporary.chmod(0o755)
        if folder.exists():  # set aside, not deleted, until the new one is in place
            old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old."))
            folder.rename(old / folder.name)
            temporary.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def load_pruned(
    folder: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Read what `save_pruned` wrote; nothing of the cut weights is ever allocated.

    Args:
        folder: the folder.
        device: default CUDA if usable, else CPU.
        dtype: default as saved.

    Raises:
        FileFormatError: no manifest, another version, weights missing, or of a wrong shape (named).
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = Path(folder)
    manifest = _read_manifest(folder)
    config = AutoConfig.from_pretrained(folder)
    stored = getattr(torch, manifest["dtype"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=stored)
    _narrow(describe(model), manifest["layers"])
    weights = _read_weights(folder)
    _require_shapes(model, weights, folder)
    if dtype is not None:  # weights alone: rotary frequencies stay in float32
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
        model.config.dtype = dtype
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    _rebuild_buffers(model)
    settle_heads(describe(model))
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.cocurve_manifest = manifest
    model.to(device=pick_device(device))
    return model.eval().requires_grad_(False)


def manifest_of(architecture: Architecture, selection: Selection) -> dict[str, Any]:
    """What `load_pruned` needs (widths, dtype) and what a reader wants to know (plan, ratios)."""
    layers = [
        {
            "attention_columns": architecture.width(layer, "attention"),
            "key_value_heads": architecture.num_groups(layer),
            "ffn_columns": architecture.width(layer, "ffn"),
        }
        for layer in range(len(architecture.layers))
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": model_dtype(architecture.model),
        "layers": layers,
        "requested_ratio": selection.requested_ratio,
        "realized_ratio": selection.realized_ratio,
        "params_removed_fraction": selection.params_removed_fraction,
        "interaction_strength": selection.interaction_strength,
        "predicted_risk": selection.predicted_risk,
        "pruned_units": [selection.units.units[i].name for i in selection.pruned],
        "gains": {selection.units.units[i].name: gain for i, gain in selection.gains.items()},
        "selection_fingerprint": selection.fingerprint,
        "curvature_fingerprint": selection.curvature_fingerprint,
    }


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.exists():
        raise FileFormatError(
            f"{folder} has no {MANIFEST}: it is not a model saved by save_pruned. A dense model "
            "loads with load_model."
        )
    try:
        manifest = json.loads(path.read_text())
        found = (manifest["format"], manifest["version"])
        for widths in manifest["layers"]:
            int(widths["attention_columns"]), int(widths["ffn_columns"])
        if not isinstance(getattr(torch, manifest["dtype"], None), torch.dtype):
            raise ValueError(f"unknown dtype {manifest['dtype']!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise FileFormatError(
            f"{path} is damaged ({type(error).__name__}: {error}). Save the model again."
        ) from None
    if found != (FORMAT, VERSION):
        raise FileFormatError(
            f"{path} is {found[0]!r} version {found[1]}; this code reads {FORMAT!r} version "
            f"{VERSION}. Load it with the release that wrote it."
        )
    return manifest


def _narrow(architecture: Architecture, layers: list[dict[str, int]]) -> None:
    """Give a meta-device model the widths of a manifest."""
    if len(layers) != len(architecture.layers):
        raise FileFormatError(
            f"the manifest describes {len(layers)} layers, the configuration "
            f"{len(architecture.layers)}. Save the model again."
        )
    for layer, widths in enumerate(layers):
        for kind in KINDS:
            wanted, dense = widths[f"{kind}_columns"], architecture.width(layer, kind)
            step = 1
            if kind == "attention":
                step = architecture.head_dim(layer) * architecture.queries_per_group(layer)
            if not 0 <= wanted <= dense or wanted % step:
                raise FileFormatError(
                    f"the manifest gives layer {layer} {wanted} {kind} columns; this configuration "
                    f"has up to {dense} in steps of {step}. Save the model again."
                )
            _narrow_block(architecture, layer, kind, torch.arange(wanted))


def _narrow_block(architecture: Architecture, layer: int, kind: Kind, columns: Tensor) -> None:
    block = architecture.block(layer, kind)
    output = architecture.output_projection(layer, kind)
    if len(columns) == output.in_features:
        return
    # the first columns stand for the kept ones: only shapes matter on the meta device
    rows = kept_rows(architecture, layer, kind, columns)
    sliced = slice_linear(output, columns=columns.to("meta"))
    if kind == "attention" and len(columns) == 0:
        empty = EmptyAttention(block, sliced)
        setattr(architecture.layers[layer], architecture.family.attention, empty)
        return
    setattr(block, architecture.output_name(kind), sliced)
    for projection, kept in rows.items():
        setattr(block, projection, slice_linear(getattr(block, projection), rows=kept.to("meta")))


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileFormatError(f"{folder} holds no .safetensors file. Save the model again.")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise FileFormatError(
                f"{file} cannot be read ({error}). Save the model again."
            ) from None
    return weights


def _require_shapes(model: PreTrainedModel, weights: dict[str, Tensor], folder: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = (
        set(getattr(model, "_tied_weights_keys", None) or ())
        if model.config.tie_word_embeddings
        else set()
    )
    for name, shape in wanted.items():
        found = tuple(weights[name].shape) if name in weights else None
        if found != shape and not (found is None and name in tied):
            raise FileFormatError(
                f"{name} in {folder} has shape {found}, the manifest says {shape}. The folder "
                "mixes two models; save it again."
            )
    extra = next((name for name in weights if name not in wanted), None)
    if extra is not None:
        raise FileFormatError(
            f"{folder} holds {extra}, which this model does not have. Save it again."
        )


def _rebuild_buffers(model: PreTrainedModel) -> None:
    """Recompute buffers that are not saved (rotary frequencies) from the configuration."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                setattr(parent, name, type(child)(config=model.config))
