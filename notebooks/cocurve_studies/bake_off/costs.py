"""What a contender's work costs: passes of a row through the model, and seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from cocurve_lab.models.architectures import Architecture
from cocurve_lab.models.layer_calls import first_output
from cocurve_lab.models.units import UnitSet


@dataclass
class Cost:
    """Work done so far.

    Attributes:
        evaluations: forward passes of one row through all layers; some of the layers count as that
            part of a pass. Backward passes and the language model's head do not count.
        seconds: wall clock.
    """

    evaluations: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.evaluations + other.evaluations, self.seconds + other.seconds)


@contextmanager
def counted(architecture: Architecture, row_length: int) -> Iterator[Cost]:
    """Count what runs inside, in this model and in copies of it, pruned or not.

    `row_length` tokens make one row. The Cost is filled on leaving.
    """
    kinds, lock, tokens = {type(layer) for layer in architecture.layers}, threading.Lock(), [0]

    def count(module: nn.Module, _: Any, output: Any) -> None:
        if type(module) in kinds:
            with lock:  # workers of a build run side by side
                tokens[0] += first_output(output).shape[:-1].numel()

    cost, begun = Cost(), time.monotonic()
    # for all modules, because a copy does not have the hooks set on the original's layers later
    hook = register_module_forward_hook(count)
    try:
        yield cost
    finally:
        hook.remove()
        cost.evaluations = tokens[0] / (len(architecture.layers) * row_length)
        cost.seconds = time.monotonic() - begun


def build_evaluations(units: UnitSet, layers: int, rows: int) -> float:
    """Count the forward passes of H: the teacher, and for each unit the layers from its own on.

    That is slightly too much: within its own layer a unit's ablation starts at the projection.
    """
    return rows * (1 + sum(layers - unit.layer for unit in units) / layers)
