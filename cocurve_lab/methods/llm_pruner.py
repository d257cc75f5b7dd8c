"""LLM-Pruner (Ma et al., 2023): first-order Taylor importance with a diagonal Fisher term.

With w a weight, g the gradient of the mean loss and g_n that of row n (N rows, nats per token), a
weight's importance is

    param_mix     |w g - 1/2 w^2 sum_n g_n^2 / N|     (default; the paper's description)
    param_first   |w g|
    param_second  |w^2 sum_n g_n^2 / N|

the absolute value taken weight by weight, then summed.

Units: the sum over everything that goes with the unit: its rows of q, k and v (gate and up) and its
columns of W_O (W_down). Biases do not count, as published. With grouped queries the rows and
columns are those of the consecutive query heads that the unit removes. The published code sums the
scores of query heads {g, g + n_kv, ...} for key/value head g and then removes {gG ... gG + G - 1};
for one head per group the two agree.

Allocation: the same share of every block. The published layer range (4 to 29 of 32, with a ratio
raised by hand to compensate) is left to guards here.

Selection only: the LoRA fine-tuning after pruning is omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.arguments import require_choice
from ..base.progress import Bar
from ..models.architectures import Architecture, is_transposed
from ..models.identity import model_device
from ..models.kinds import KINDS
from ..models.runtime import measuring
from ..models.unit import Kind
from ..models.units import Unit, UnitSet
from .base import Scored, Subject
from .inputs import layer_passes, require_passes

Taylor = Literal["param_mix", "param_first", "param_second"]
Projection = tuple[int, Kind, str]  # layer, kind, attribute


@dataclass(frozen=True)
class LlmPruner(Scored):
    """LLM-Pruner; formula, units, allocation and differences are in the module's docstring.

    Attributes:
        taylor: "param_mix", "param_first" or "param_second".
        layers_per_pass: layers whose gradients are gathered at a time, each pass running all rows
            forward and back. Two float32 buffers per weight of those layers: 4 layers of an 8B
            take 7 GB. The scores do not depend on it.
    """

    taylor: Taylor = "param_mix"
    layers_per_pass: int = 4

    name = "llm-pruner"
    title = "LLM-Pruner"
    needs_gradients = True

    def __post_init__(self) -> None:
        require_choice(self.taylor, Taylor, "taylor")
        require_passes(self.layers_per_pass)

    def scores(self, subject: Subject) -> np.ndarray:
        """Sum the importance of every unit's weights.

        Rows go through one by one, because their gradients are squared one by one. `backward()` is
        not called, so gradients a caller has stored stay as they are.
        """
        architecture = subject.architecture
        units, calibration = subject.units, subject.calibration
        architecture.require_unpacked()
        scores = np.zeros(len(units))
        for layers in layer_passes(architecture, self.layers_per_pass):
            projections = _projections(architecture, units, layers)
            title = f"Gradients, layers {layers[0]}-{layers[-1]}"
            rows = Bar(calibration.input_ids, desc=title, unit="row", disable=not subject.progress)
            sums, squares = _gradients(architecture, projections, rows)
            saliences = {
                key: self._salience(weight, sums[key], squares[key], len(calibration))
                for key, weight in projections.items()
            }
            for key in saliences:  # as [out, in], whatever the layer stores
                if is_transposed(architecture.projection(*key)):
                    saliences[key] = saliences[key].T
            for index, unit in enumerate(units):
                if unit.layer in layers:
                    scores[index] = _unit_score(architecture, unit, saliences)
        return scores

    def _salience(self, weight: Tensor, total: Tensor, squares: Tensor, rows: int) -> Tensor:
        """Importance of every weight, from sums over rows of its gradient and of the square."""
        w = weight.detach().to(total.dtype)
        first, second = w * (total / rows), w * w * (squares / rows)
        if self.taylor == "param_first":
            return first.abs()
        return second if self.taylor == "param_second" else (first - 0.5 * second).abs()


def _projections(
    architecture: Architecture, units: UnitSet, layers: Sequence[int]
) -> dict[Projection, nn.Parameter]:
    """Weights of all projections of blocks that have units."""
    present = {(unit.layer, unit.kind) for unit in units}
    return {
        (layer, kind, name): architecture.projection(layer, kind, name).weight
        for layer in layers
        for kind in KINDS
        if (layer, kind) in present
        for name in (*architecture.input_projections(layer, kind), architecture.output_name(kind))
    }


def _gradients(
    architecture: Architecture, weights: dict[Projection, nn.Parameter], rows: Iterable[Tensor]
) -> tuple[dict[Projection, Tensor], dict[Projection, Tensor]]:
    """Sums over rows of each weight's gradient and of its square, float32 or better."""
    model = architecture.model
    sums = {
        key: torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for key, weight in weights.items()
    }
    squares = {key: torch.zeros_like(total) for key, total in sums.items()}
    if not weights:
        return sums, squares
    with measuring(model, torch.get_num_threads()), _differentiable(model, weights.values()):
        for ids in rows:
            gradients = torch.autograd.grad(_loss(model, ids), list(weights.values()))
            for key, gradient in zip(weights, gradients, strict=True):
                wide = gradient.to(sums[key].dtype)
                sums[key] += wide
                squares[key].addcmul_(wide, wide)
    return sums, squares


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean negative log-likelihood of the tokens 1 ... T - 1 of one row [T], nats per token."""
    ids = ids.to(model_device(model))  # type: ignore[arg-type]
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), ids[1:])


@contextmanager
def _differentiable(model: nn.Module, weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Gradients for these weights alone; `requires_grad` is put back on leaving."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


def _unit_score(
    architecture: Architecture, unit: Unit, saliences: dict[Projection, Tensor]
) -> float:
    """Sum over the unit's rows of the input projections and its columns of the output one."""
    layer, kind = unit.layer, unit.kind
    output = saliences[layer, kind, architecture.output_name(kind)]
    parts = [output[:, unit.start : unit.stop]]
    for rows in architecture.unit_rows(layer, kind, unit.start, unit.stop):
        parts.append(saliences[layer, kind, rows.projection][rows.start : rows.stop])
    return sum(float(part.double().sum()) for part in parts)
