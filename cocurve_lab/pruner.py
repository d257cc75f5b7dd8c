"""Physical removal: the rows and columns of pruned units are deleted, the rest is kept bit for bit.

The head dimension is never inferred again, layers keep their own widths, and a layer may lose all
its attention or all its FFN.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .architectures import KINDS, Architecture, Kind, describe
from .calibration import CalibrationSet
from .errors import EquivalenceError, FileFormatError, InputError
from .estimator import measuring, require_rows_fit
from .loading import MANIFEST, embedding_weight, fingerprint_tensor, model_device, model_dtype
from .masking import ablate
from .replay import LayerCall, capture_calls, first_output
from .selection import Selection
from .units import enumerate_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT, VERSION = "cocurve-pruned", 1
TOLERANCE = 1e-3  # max absolute logit difference in float32 (appendix "Structured Units")


class EmptyAttention(nn.Module):
    """Stands in for an attention block that lost every head: writes only the output bias, if any.

    It still notes one number per token in the KV cache, because transformers reads the length of
    the past from the cache of a layer.
    """

    def __init__(self, attention: Any, output: nn.Linear) -> None:
        super().__init__()
        self.head_dim = attention.head_dim
        self.num_key_value_groups = attention.num_key_value_groups
        self.layer_idx = attention.layer_idx
        self.o_proj = output  # [hidden, 0]; holds the bias

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        rows, length, _hidden = hidden_states.shape
        if past_key_values is not None:
            note = hidden_states.new_zeros(rows, 1, length, 1)
            past_key_values.update(note, note, self.layer_idx)
        return self.o_proj(hidden_states[..., :0]), None


def prune(
    model: PreTrainedModel,
    selection: Selection,
    *,
    inplace: bool = False,
    verify: CalibrationSet | None = None,
) -> PreTrainedModel:
    """Delete the weights of a plan's units (appendix "Structured Units").

    Args:
        model: the dense model the units were enumerated on.
        selection: the plan; gains are folded into the kept columns of W_down.
        inplace: change `model` itself (for models that do not fit twice); else a new model is built
            by slicing, which never copies what is cut away.
        verify: text to check the result on (two rows); the masked reference is recorded before
            anything is cut.

    Returns:
        The pruned model, with `cocurve_manifest` describing its widths.

    Raises:
        MismatchError: the model's units are not the selection's; nothing was changed.
        EquivalenceError: verification failed.
    """
    architecture = describe(model)
    selection.require_units(enumerate_units(model, selection.units.ffn_groups or 16))
    reference = None
    if verify is not None:
        reference = _Reference.record(model, selection, verify.rows(0, min(2, len(verify))))
    replacements = _sliced_modules(architecture, selection)
    if inplace:
        for parent, name, module in replacements:
            setattr(parent, name, module)
        pruned = model
    else:
        # deepcopy takes a module found in its memo for already copied: cut weights are not touched
        memo = {id(getattr(parent, name)): module for parent, name, module in replacements}
        pruned = copy.deepcopy(model, memo)
    _settle_heads(describe(pruned))
    pruned.cocurve_manifest = _manifest(describe(pruned), selection)  # type: ignore[assignment]
    if reference is not None:
        reference.require_equal(pruned)
    return pruned


def _sliced_modules(
    architecture: Architecture, selection: Selection
) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, attribute, new module) of every projection that loses rows or columns."""
    replacements: list[tuple[nn.Module, str, nn.Module]] = []
    for layer in range(len(architecture.layers)):
        for kind in KINDS:
            columns, gains = _kept_columns(architecture, selection, layer, kind)
            if len(columns) == architecture.width(layer, kind) and gains is None:
                continue
            block = architecture.block(layer, kind)
            output = architecture.output_projection(layer, kind)
            sliced = _slice_linear(output, columns=columns, gains=gains)
            if kind == "attention" and len(columns) == 0:
                empty = EmptyAttention(block, sliced)
                replacements.append(
                    (architecture.layers[layer], architecture.family.attention, empty)
                )
                continue
            replacements.append((block, architecture.output_name(kind), sliced))
            for projection, rows in _kept_rows(architecture, layer, kind, columns).items():
                replacements.append(
                    (block, projection, _slice_linear(getattr(block, projection), rows=rows))
                )
    return replacements


def _kept_columns(
    architecture: Architecture, selection: Selection, layer: int, kind: Kind
) -> tuple[Tensor, Tensor | None]:
    """Kept input columns [W'] of an output projection, and their gains [W'] where any is not 1."""
    width = architecture.width(layer, kind)
    keep, gains = torch.ones(width, dtype=torch.bool), torch.ones(width, dtype=torch.float64)
    for index, unit in enumerate(selection.units):
        if (unit.layer, unit.kind) == (layer, kind):
            if selection.indicator[index]:
                keep[unit.start : unit.stop] = False
            gains[unit.start : unit.stop] = selection.gains.get(index, 1.0)
    kept = gains[keep]
    return keep.nonzero().flatten(), None if bool((kept == 1).all()) else kept


def _kept_rows(
    architecture: Architecture, layer: int, kind: Kind, columns: Tensor
) -> dict[str, Tensor]:
    """Kept rows of each input projection, given the kept columns of the output projection."""
    block = architecture.block(layer, kind)
    keep = {
        name: torch.zeros(getattr(block, name).out_features, dtype=torch.bool)
        for name in architecture.input_projections(kind)
    }
    step = 1
    if kind == "attention":
        step = architecture.head_dim(layer) * architecture.queries_per_group(layer)
    for start in columns[::step].tolist():
        for rows in architecture.unit_rows(layer, kind, start, start + step):
            keep[rows.projection][rows.start : rows.stop] = True
    return {name: mask.nonzero().flatten() for name, mask in keep.items()}


def _slice_linear(
    linear: nn.Linear,
    *,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    gains: Tensor | None = None,
) -> nn.Linear:
    """A new linear layer with some rows (outputs, with their biases) or columns (inputs)."""
    weight: Tensor = linear.weight.detach()
    bias: Tensor | None = linear.bias
    if rows is not None:
        rows = rows.to(weight.device)
        weight, bias = weight[rows], None if bias is None else bias.detach()[rows]
    if columns is not None:
        weight = weight[:, columns.to(weight.device)]
    if gains is not None:
        weight = _fold(weight, gains)
    return _linear(weight.clone(), None if bias is None else bias.detach().clone(), linear)


def _fold(weight: Tensor, gains: Tensor) -> Tensor:
    """Columns of W_down times their gains, rounded once to the weight's dtype."""
    return (weight.double() * gains.to(weight.device)).to(weight.dtype)


def _linear(weight: Tensor, bias: Tensor | None, like: nn.Linear) -> nn.Linear:
    # made on the meta device: initialising weights that are replaced at once would be wasted work
    with torch.device("meta"):
        module = nn.Linear(1, 1, bias=bias is not None)
    module.out_features, module.in_features = weight.shape
    module.weight = nn.Parameter(weight, requires_grad=like.weight.requires_grad)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=like.weight.requires_grad)
    return module.train(like.training)


def _settle_heads(architecture: Architecture) -> None:
    """Tell each attention block its own head counts; head_dim stays what it was."""
    config = architecture.model.config
    config.head_dim = architecture.head_dim(0)  # else loaders infer it from hidden / heads
    for layer in range(len(architecture.layers)):
        block = architecture.block(layer, "attention")
        if isinstance(block, EmptyAttention):
            continue
        groups = architecture.num_groups(layer)
        heads = groups * architecture.queries_per_group(layer)
        if hasattr(block, "num_key_value_heads"):
            block.num_key_value_heads = groups
        if hasattr(block, "num_heads"):
            block.num_heads = heads
        if len(architecture.family.qkv) == 1 and block.config.num_attention_heads != heads:
            block.config = copy.copy(config)  # fused blocks cut q, k and v by the configured counts
            block.config.num_attention_heads = heads
            block.config.num_key_value_heads = groups


# Equivalence ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Equivalence:
    """What a check measured.

    Attributes:
        max_abs_difference: largest |logit| difference masked against pruned. For half precision it
            is the largest layer output difference with both computed in float32.
        sequences, tokens: how much text was compared.
        dtype: the models' dtype.
        raw_difference: half precision only: largest difference of the half-precision logits,
            reported and not judged.
        logit_spacing: half precision only: distance between neighbouring numbers at the largest
            logit.
    """

    max_abs_difference: float
    sequences: int
    tokens: int
    dtype: str
    raw_difference: float | None = None
    logit_spacing: float | None = None

    def __str__(self) -> str:
        head = f"masked = pruned to {self.max_abs_difference:.1e} on {self.sequences} sequences"
        if self.raw_difference is None:
            return f"{head} ({self.tokens} tokens, max abs logit difference, {self.dtype})"
        return (
            f"{head} ({self.tokens} tokens, layer by layer in float32; kept weights bitwise equal; "
            f"raw {self.dtype} logits differ by {self.raw_difference:.1e}, their spacing is "
            f"{self.logit_spacing:.1e})"
        )


def check_equivalence(
    model: PreTrainedModel,
    pruned: PreTrainedModel,
    selection: Selection,
    calibration: CalibrationSet,
    *,
    sequences: int = 2,
) -> Equivalence:
    """Check that the pruned model computes what the masked model computes.

    float32 (and float64) models compare all logits. Half-precision models are compared layer by
    layer in float32 on the same inputs, and the kept slices bit for bit: their raw logits differ by
    rounding alone, so that difference is reported beside the spacing of the largest logit.

    Args:
        model: the dense model.
        pruned: what `prune` returned.
        selection: the plan.
        calibration: text; the first `sequences` rows are used.
        sequences: rows to compare.

    Returns:
        What was measured.

    Raises:
        EquivalenceError: a difference above 1e-3, or a kept weight that changed; says where.
        MismatchError: the selection is for other units.
    """
    if sequences < 1:
        raise InputError(f"sequences is {sequences}; compare at least one.")
    text = calibration.rows(0, min(sequences, len(calibration)))
    return _Reference.record(model, selection, text).require_equal(pruned)


@dataclass(frozen=True)
class _Reference:
    """What the masked model computes on some rows, recorded before anything is cut.

    Attributes:
        text: the rows.
        dtype: the model's dtype.
        logits: masked logits [N, T, V].
        layers: half precision only: per row and layer its call, and the masked layer's output on
            it, both in float32.
        weights: half precision only: fingerprint of every parameter the pruned model must have.
    """

    text: CalibrationSet
    dtype: torch.dtype
    logits: Tensor
    layers: list[list[tuple[LayerCall, Tensor]]]
    weights: dict[str, str]

    @classmethod
    def record(
        cls, model: PreTrainedModel, selection: Selection, text: CalibrationSet
    ) -> _Reference:
        require_rows_fit(model, text)
        dtype = embedding_weight(model).dtype
        with measuring(model, torch.get_num_threads()):
            with ablate(model, selection):
                logits = _logits(model, text)
            if dtype not in (torch.float16, torch.bfloat16):
                return cls(text, dtype, logits, [], {})
            architecture = describe(model)
            layers = [_masked_layers(architecture, selection, row) for row in text.input_ids]
            return cls(text, dtype, logits, layers, _expected_weights(architecture, selection))

    def require_equal(self, pruned: PreTrainedModel) -> Equivalence:
        architecture = describe(pruned)
        name = str(self.dtype).removeprefix("torch.")
        with measuring(pruned, torch.get_num_threads()):
            raw = float((_logits(pruned, self.text) - self.logits).abs().max())
            judged = self._worst_layer(architecture) if self.layers else raw
        if self.weights:
            self._require_bits(pruned)
        if not judged <= TOLERANCE:  # the negation also catches NaN
            what = "layer outputs" if self.layers else "logits"
            raise EquivalenceError(
                f"masked and pruned {what} differ by {judged:.3g} on {len(self.text)} sequences, "
                f"above {TOLERANCE:g}. The pruned model is not this plan of this model; prune "
                "again, and if it persists report the model's name."
            )
        half = (raw, self._spacing()) if self.layers else (None, None)
        return Equivalence(judged, len(self.text), self.text.input_ids.numel(), name, *half)

    def _require_bits(self, pruned: PreTrainedModel) -> None:
        """Half precision: every parameter is, bit for bit, the slice it should be."""
        found = {name: fingerprint_tensor(weight) for name, weight in pruned.named_parameters()}
        for name in sorted(self.weights.keys() | found.keys()):
            if self.weights.get(name) != found.get(name):
                raise EquivalenceError(
                    f"{name} is not the slice of the dense weight it should be. The pruned model "
                    "was changed after pruning, or belongs to another plan; prune again."
                )

    def _worst_layer(self, architecture: Architecture) -> float:
        """Largest layer output difference, relative to the layer's largest output where above 1."""
        worst = 0.0
        for row in self.layers:
            for layer, (call, expected) in enumerate(row):
                with _float32_layer(architecture.layers[layer]) as module:
                    found = first_output(module(call.hidden, *call.args, **call.kwargs))
                scale = max(1.0, float(expected.abs().max()))
                worst = max(worst, float((found - expected).abs().max()) / scale)
        return worst

    def _spacing(self) -> float:
        """Distance to the next number of the model's dtype at the largest logit."""
        largest = self.logits.abs().max().to(self.dtype)
        beyond = torch.nextafter(largest, torch.tensor(float("inf"), dtype=self.dtype))
        return float(beyond - largest)


def _logits(model: PreTrainedModel, text: CalibrationSet) -> Tensor:
    device = model_device(model)
    rows = [
        model(input_ids=row[None].to(device), use_cache=False).logits.cpu()
        for row in text.input_ids
    ]
    logits = torch.cat(rows)
    return logits if logits.dtype == torch.float64 else logits.float()


def _masked_layers(
    architecture: Architecture, selection: Selection, row: Tensor
) -> list[tuple[LayerCall, Tensor]]:
    """Each layer's call in the masked model and its masked output on it, in float32."""
    model = architecture.model
    with ablate(model, selection):
        _, calls = capture_calls(architecture, row[None].to(model_device(model)))
    masks = replace(selection, gains={})  # gains are folded, and rounded, as the pruner does
    recorded = []
    for layer, call in enumerate(calls):
        wide = _upcast(call)
        _, gains = _kept_columns(architecture, _gains_alone(selection), layer, "ffn")
        with _float32_layer(architecture.layers[layer]) as module:
            if gains is not None:
                output = architecture.output_projection(layer, "ffn")
                half = output.weight.to(embedding_weight(model).dtype)
                output.weight.data = _fold(half, gains).float()
            with ablate(model, masks):
                recorded.append(
                    (wide, first_output(module(wide.hidden, *wide.args, **wide.kwargs)))
                )
    return recorded


def _gains_alone(selection: Selection) -> Selection:
    """The gains of a plan alone, nothing pruned."""
    return replace(selection, pruned=(), node_terms=None, edge_terms=None)


def _expected_weights(architecture: Architecture, selection: Selection) -> dict[str, str]:
    """Fingerprints of all parameters the pruned model must have, by name."""
    names = {id(module): name for name, module in architecture.model.named_modules()}
    sliced = {
        f"{names[id(parent)]}.{attribute}": module
        for parent, attribute, module in _sliced_modules(architecture, selection)
    }
    weights = {
        name: fingerprint_tensor(weight)
        for name, weight in architecture.model.named_parameters()
        if not any(name.startswith(f"{cut}.") for cut in sliced)
    }
    for prefix, module in sliced.items():
        for name, weight in module.named_parameters():
            weights[f"{prefix}.{name}"] = fingerprint_tensor(weight)
    return weights


@contextmanager
def _float32_layer(module: nn.Module) -> Iterator[nn.Module]:
    """One layer computed in float32; its half-precision weights come back bit for bit."""
    stored = {name: parameter.data for name, parameter in module.named_parameters()}
    try:
        for parameter in module.parameters():
            parameter.data = parameter.data.float()
        yield module
    finally:
        for name, parameter in module.named_parameters():
            parameter.data = stored[name]


def _upcast(call: LayerCall) -> LayerCall:
    def up(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.float()
        return tuple(up(item) for item in value) if isinstance(value, tuple) else value

    kwargs = {name: up(value) for name, value in call.kwargs.items()}
    return LayerCall(up(call.hidden), up(call.args), kwargs)


# Files ------------------------------------------------------------------------------------------


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
        if folder.exists():
            shutil.rmtree(folder)
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
        device: default CPU.
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
    _settle_heads(describe(model))
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.cocurve_manifest = manifest
    model.to(device=device or "cpu")
    return model.eval().requires_grad_(False)


def _manifest(architecture: Architecture, selection: Selection) -> dict[str, Any]:
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
            f"{len(architecture.layers)}."
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
    rows = _kept_rows(architecture, layer, kind, columns)
    sliced = _slice_linear(output, columns=columns.to("meta"))
    if kind == "attention" and len(columns) == 0:
        empty = EmptyAttention(block, sliced)
        setattr(architecture.layers[layer], architecture.family.attention, empty)
        return
    setattr(block, architecture.output_name(kind), sliced)
    for projection, kept in rows.items():
        setattr(block, projection, _slice_linear(getattr(block, projection), rows=kept.to("meta")))


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
