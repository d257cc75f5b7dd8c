"""Products in bfloat16 of what an ablation shifts, for float32 models on processors fast at them.

A linear layer maps states x to W x = W x_0 + W (x - x_0), and the teacher pass has x_0 and W x_0 in
float32. Only the last product is rounded: W, the shift and the result, each by at most 2^-8 of
itself. So the error of H is a share of H, however weak the unit. Rounding x instead would add noise
of the size of the whole state to each ablation, more than a weak unit shifts. The share is larger
where a norm scales up what an ablation leaves of a write: a whole attention block of OLMo2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...base.errors import InputError
from ...models.architectures import Architecture, describe, is_packed, weight_of, widths
from ...models.identity import model_device, model_dtype
from ...models.layer_calls import replaced_forward
from ...models.layers import weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class ShiftProducts:
    """A context in which the linear layers of a decoder multiply in bfloat16.

    A pass through the whole decoder is the teacher's: it runs as ever and is recorded. Layers that
    run by themselves compute what differs from it.
    """

    def __init__(self, architecture: Architecture) -> None:
        require_products(architecture.model)
        if not has_fast_products(model_device(architecture.model).type):
            log.warning(
                "this processor has no fast bfloat16 products: bfloat16_products makes the build "
                "slower. Leave it out here."
            )
        self.decoder = architecture.decoder
        self.weights = {each: weight_of(each).bfloat16() for each in architecture.all_projections}
        self._known: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # x_0 and W x_0
        self._recording = False

    def __enter__(self) -> None:
        self._inside = ExitStack()
        for begin, hook in (
            (True, self.decoder.register_forward_pre_hook),
            (False, self.decoder.register_forward_hook),
        ):
            self._inside.callback(hook(partial(self._record, begin)).remove)
        for module in self.weights:
            forward = partial(self._product, module, module.forward)
            self._inside.enter_context(replaced_forward(module, forward))

    def __exit__(self, *_: object) -> None:
        self._inside.close()
        self._known.clear()

    def _record(self, begin: bool, *_: Any) -> None:
        self._recording = begin

    def _product(self, module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return W x [B, T, out] of x [B, T, in]."""
        if self._recording:
            y = forward(x)
            self._known[module] = x, y
            return y
        x_0, y_0 = self._known[module]
        # only the scored positions, in the last layer, or [B * T, in], in the FFN of OPT
        if x.dim() < 3 or x.shape[1] != x_0.shape[1]:
            return forward(x)
        return F.linear((x - x_0).bfloat16(), self.weights[module]).to(y_0.dtype).add_(y_0)


def products_bytes(architecture: Architecture, length: int) -> int:
    """Return the bytes of the copies of weights and of what is kept of a pass, at most."""
    shapes = [widths(projection) for projection in architecture.all_projections]
    return sum(2 * outs * ins + 4 * length * (outs + ins) for outs, ins in shapes)


def require_products(model: PreTrainedModel) -> None:
    """Raise InputError unless the model's weights are in memory, in float32."""
    found = model_dtype(model)
    if any(map(is_packed, describe(model).all_projections)):
        found = "packed"
    elif weights_of(model).devices:
        found = "streamed"
    if found != "float32":
        raise InputError(
            f"bfloat16_products is for float32 weights in memory, but this model's are {found}. "
            'Load it with dtype="float32" and without stream, or leave the option out.'
        )


def has_fast_products(device_kind: str) -> bool:
    """Return whether bfloat16 products are faster than float32 on the device that is here."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every torch
    # instructions of x86, its matrix unit, instructions of ARM
    return device_kind != "cpu" or any(map(known.get, ("avx512_bf16", "amx_bf16", "bf16")))
