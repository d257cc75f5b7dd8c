"""The equivalence check: the pruned model must compute what the masked model computes.

Appendix "Structured Units", "Mask boundary and equivalence".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..base.errors import EquivalenceError
from ..calibration import CalibrationSet
from ..models.architectures import Architecture, describe
from ..models.identity import (
    embedding_weight,
    fingerprint_tensor,
    model_device,
)
from ..models.layer_calls import LayerCall, capture_calls
from ..models.layers import present
from ..models.masking import Scales, column_scales, resolve, scaled
from ..models.runtime import measuring, require_measurable
from ..models.unit import fold_gains
from ..models.weights import reader_of, without_weights
from ..solver.selection import Selection
from .slicing import cut_model, kept_columns, tensor_cuts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-3  # max absolute logit difference in float32 (appendix "Structured Units")


@dataclass(frozen=True)
class Equivalence:
    """The result of an equivalence check.

    Attributes:
        max_abs_difference: largest |difference| of masked and pruned logits. For half precision, of
            layer outputs in float32, relative to the layer's largest output where that is above 1.
    """

    max_abs_difference: float
    sequences: int
    tokens: int
    dtype: str

    def __str__(self) -> str:
        how = f"max abs logit difference, {self.dtype}"
        if self.dtype in ("float16", "bfloat16"):
            how = f"{self.dtype}, layer by layer in float32"
        return (
            f"masked = pruned to {self.max_abs_difference:.1e} on {self.sequences} sequences "
            f"({self.tokens} tokens, {how}; weights equal)"
        )


def check_equivalence(
    model: PreTrainedModel,
    pruned: PreTrainedModel,
    selection: Selection,
    calibration: CalibrationSet,
) -> Equivalence:
    """Check that the pruned model computes what the masked model computes.

    The kept weights are compared bit for bit. In float32 and float64, all logits are compared, on
    the first two rows. In half precision, raw logits differ by rounding alone; there,
    layers are compared one by one in float32 on the same inputs.

    Raises:
        EquivalenceError: a difference is above 1e-3, a weight changed, or the model was refitted.
    """
    manifest: Any = getattr(pruned, "cocurve_manifest", None) or {}
    if manifest.get("repair") is not None:
        raise EquivalenceError(
            "a refitted model does not compute what the masked model computes. Check "
            "cl.prune(model, selection); measure the refitted model."
        )
    text = calibration.rows(0, min(2, len(calibration)))
    return Reference.record(describe(model), selection, text).require_equal(describe(pruned))


@dataclass(frozen=True)
class Reference:
    """The masked model's computation on some rows, recorded before anything is cut.

    Attributes:
        logits: but for half precision, masked logits, one [T, V] per row, on the CPU.
        layers: for half precision, per row and layer: the call, and the masked layer's output on
            it, both in float32.
        weights: the fingerprint of every parameter that the pruned model must have.
    """

    text: CalibrationSet
    dtype: torch.dtype
    logits: list[Tensor]
    layers: list[list[tuple[LayerCall, Tensor]]]
    weights: dict[str, str]

    @classmethod
    def record(
        cls, architecture: Architecture, selection: Selection, text: CalibrationSet
    ) -> Reference:
        """Run the masked model on `text`, and keep what it computes."""
        model = architecture.model
        require_measurable(model, text)
        dtype = embedding_weight(model).dtype
        removed, gains = resolve(architecture, selection)
        masks = column_scales(architecture, removed, gains)
        with measuring(model, torch.get_num_threads()):
            weights = _expected_weights(architecture, selection)
            if dtype not in (torch.float16, torch.bfloat16):
                with scaled(architecture, masks):
                    return cls(text, dtype, list(_logits(model, text)), [], weights)
            # Gains are not applied by masks to single layers but folded into the weight and rounded
            # once, as the pruner does. Otherwise the check would measure that rounding.
            plain = column_scales(architecture, removed)
            layers = []
            for row in text.input_ids:
                with scaled(architecture, masks):
                    _, calls = capture_calls(architecture, row[None].to(model_device(model)))
                layers.append(_masked_layers(architecture, selection, plain, calls))
            return cls(text, dtype, [], layers, weights)

    def require_equal(self, pruned: Architecture) -> Equivalence:
        """Compare the pruned model with the masked one; raise EquivalenceError if they differ."""
        model = pruned.model
        self._require_bits(model)
        require_measurable(model, self.text)
        with measuring(model, torch.get_num_threads()):
            judged = self._worst_layer(pruned) if self.layers else self._worst_logit(model)
        if not judged <= TOLERANCE:  # the negation also catches NaN
            raise EquivalenceError(
                f"masked and pruned {'layer outputs' if self.layers else 'logits'} differ by "
                f"{judged:.3g} on {len(self.text)} sequences, above {TOLERANCE:g}. The pruned "
                "model does not belong to this plan and model. Prune again; if the difference "
                "persists, report the model's name."
            )
        name = str(self.dtype).removeprefix("torch.")
        return Equivalence(judged, len(self.text), self.text.input_ids.numel(), name)

    def _require_bits(self, pruned: PreTrainedModel) -> None:
        read = reader_of(pruned)
        found = {name: fingerprint_tensor(read(name)) for name, _ in pruned.named_parameters()}
        for name in sorted(self.weights.keys() | found.keys()):
            if self.weights.get(name) != found.get(name):
                raise EquivalenceError(
                    f"{name} is not the slice of the dense weight it should be: the pruned model "
                    "was changed after pruning, or belongs to another plan. Prune again."
                )

    def _worst_logit(self, model: PreTrainedModel) -> float:
        rows = zip(_logits(model, self.text), self.logits, strict=True)
        return float(torch.stack([(pruned - masked).abs().max() for pruned, masked in rows]).max())

    def _worst_layer(self, architecture: Architecture) -> float:
        """Return the largest difference of layer outputs, relative where outputs exceed 1."""
        worst = 0.0
        for row in self.layers:
            for layer, (call, expected) in enumerate(row):
                with float32_layer(architecture, layer) as module:
                    hidden = call.hidden.to(next(module.parameters()).device)
                    found = call.run(module, hidden).cpu()
                scale = max(1.0, float(expected.abs().max()))
                worst = max(worst, float((found - expected).abs().max()) / scale)
        return worst


def _logits(model: PreTrainedModel, text: CalibrationSet) -> Iterator[Tensor]:
    """Yield the logits [T, V] of each row, on the CPU: those of an 8B take half a gigabyte."""
    device = model_device(model)
    for row in text.input_ids:
        yield model(input_ids=row[None].to(device), use_cache=False).logits[0].cpu()


def _masked_layers(
    architecture: Architecture, selection: Selection, masks: Scales, calls: list[LayerCall]
) -> list[tuple[LayerCall, Tensor]]:
    """Return each layer's call in the masked model, and the masked output on it, in float32."""
    dtype = embedding_weight(architecture.model).dtype
    alone = replace(selection, pruned=(), terms=None)  # its gains
    recorded = []
    for layer, call in enumerate(calls):
        wide = upcast(call)
        _, gains = kept_columns(architecture, alone, layer, "ffn")
        with float32_layer(architecture, layer) as module:
            if gains is not None:
                weight = architecture.output_weight(layer, "ffn").data
                weight.copy_(fold_gains(weight.to(dtype), gains))
            with scaled(architecture, masks):
                output = wide.run(module, wide.hidden)
        # on the CPU: all layers of an 8B would take gigabytes on the device
        recorded.append((replace(wide, hidden=wide.hidden.cpu()), output.cpu()))
    return recorded


def _expected_weights(architecture: Architecture, selection: Selection) -> dict[str, str]:
    """Return the fingerprints, by name, of all parameters that the pruned model must have."""
    cuts, read = tensor_cuts(architecture, selection), reader_of(architecture.model)
    shapes = replace(architecture, model=without_weights(architecture.model))
    pruned = cut_model(shapes, selection, inplace=True).model
    return {
        name: fingerprint_tensor(cuts[name](read(name)) if name in cuts else read(name))
        for name, _ in pruned.named_parameters()
    }


@contextmanager
def float32_layer(architecture: Architecture, layer: int) -> Iterator[nn.Module]:
    """Convert one layer to float32 inside the block; its own weights then return bit for bit."""
    module = architecture.layers[layer]
    with present(architecture, layer):
        stored = {parameter: parameter.data for parameter in module.parameters()}
        try:
            for parameter in stored:
                parameter.data = parameter.data.float()
            yield module
        finally:
            for parameter, own in stored.items():
                parameter.data = own


def upcast(call: LayerCall) -> LayerCall:
    """Return the same call of the layer alone, with every floating-point tensor in float32."""

    def up(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.float()
        return tuple(map(up, value)) if isinstance(value, tuple) else value

    kwargs = {name: up(value) for name, value in call.kwargs.items()}
    return LayerCall(up(call.hidden), up(call.args), kwargs)
