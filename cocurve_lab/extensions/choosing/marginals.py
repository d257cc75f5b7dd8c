"""How the KL of a plan changes with each unit, to first order: one backward pass for all units.

At the dense model this gradient is 0, which is why H exists. At a plan it is not, and it ranks the
units that the plan could still lose, and those that it should not have lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...calibration import CalibrationSet
from ...estimator.support import widen
from ...measuring.logits import pieces, require_numbers
from ...models.architectures import Architecture, describe
from ...models.identity import model_device
from ...models.kinds import KINDS
from ...models.masking import Scales, column_scales, resolve, scaled
from ...models.runtime import measuring, require_one_device
from ...solver.selection import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def marginals(
    model: PreTrainedModel, plan: Selection, text: CalibrationSet, rows: Iterable[int]
) -> np.ndarray:
    """Return -dKL / d(mask of u), the harm of u's absence near a plan, to first order.

    Args:
        model: the dense model, in memory.
        plan: a plan over the model's units; its gains apply.
        text: rows and scored positions.
        rows: places of the rows to average over.

    Returns:
        [M] float64, nats per token. For a unit that the plan keeps it is what removing it would
        add, for one that it prunes what restoring it would save.
    """
    require_one_device(model)
    architecture = describe(model)
    architecture.require_columns("the gradient of a plan's KL")
    scales = column_scales(architecture, *resolve(model, plan))
    for layer in range(len(architecture.layers)):
        for kind in KINDS:
            if width := architecture.width(layer, kind):
                scales.setdefault((layer, kind), torch.ones(width))
    places = list(rows)
    sums = {key: torch.zeros_like(scale) for key, scale in scales.items()}
    with measuring(model, torch.get_num_threads()), differentiable(model):
        for number in places:
            for key, slope in _slopes(architecture, scales, text, number).items():
                sums[key] += slope
    found = [-sums[unit.layer, unit.kind][unit.start : unit.stop].sum() for unit in plan.units]
    return torch.stack(found).double().numpy() / len(places)


def _slopes(
    architecture: Architecture, scales: Scales, text: CalibrationSet, number: int
) -> Scales:
    """The derivative of a row's mean KL by every column's mask, on the CPU in float32."""
    device = model_device(architecture.model)
    ids = text.input_ids[number : number + 1].to(device)
    positions = text.scored[number].to(device)
    with torch.no_grad():
        teacher = architecture.last_hidden(ids)[0, positions]
    masks = {key: scale.to(device).requires_grad_() for key, scale in scales.items()}
    with scaled(architecture, masks):
        hidden = architecture.last_hidden(ids)[0, positions]
    direction = _direction(architecture, teacher, hidden.detach()) / len(positions)
    slopes = torch.autograd.grad(hidden, list(masks.values()), direction)
    return {key: slope.float().cpu() for key, slope in zip(masks, slopes, strict=True)}


def _direction(architecture: Architecture, teacher: Tensor, hidden: Tensor) -> Tensor:
    """The derivative of the summed KL by final hidden states [P, d], in pieces of the positions."""
    hidden = hidden.requires_grad_()
    found = torch.zeros_like(hidden)
    for part in pieces(len(hidden), 16 * architecture.vocabulary):
        dense = torch.log_softmax(widen(architecture.logits(teacher[part])), dim=-1)
        student = torch.log_softmax(widen(architecture.logits(hidden[part])), dim=-1)
        kl = (dense.exp() * (dense - student)).sum()
        require_numbers(bool(kl.isfinite()), "a row")
        found += torch.autograd.grad(kl, hidden)[0]
    return found


@contextmanager
def differentiable(model: PreTrainedModel) -> Iterator[None]:
    """Allow gradients inside `measuring`, of activations but not of weights."""
    asking = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in asking:
            weight.requires_grad_(False)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for weight in asking:
            weight.requires_grad_(True)
