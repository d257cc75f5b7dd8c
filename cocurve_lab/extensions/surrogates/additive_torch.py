"""The additive KL with torch: the solve of additive.py on a GPU.

This departs from the paper, as that file says.
"""

from __future__ import annotations

from copy import copy
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ...base.arguments import require_choice
from ...curvature.matrix import Curvature
from ...models.loading import pick_device
from ...models.runtime import full_precision
from .additive import LEAST_CHANGE, AdditiveKL, State
from .shifts import Part, Shifts

Precision = Literal["float32", "float64"]
_BLOCK_BYTES = 1 << 28  # of the float64 temporaries of a block of positions


class TorchAdditiveKL(AdditiveKL):
    """The additive KL whose marginals and plans are computed by torch; `predict` stays numpy's.

    The plan is that of `Curvature.additive().solve`, unless two units are so nearly equal that
    rounding decides. On a CPU numpy is several times as fast.

    Args:
        curvature: H [M, M] with a sketch of shifts [M, S, K].
        device: None takes the GPU if there is one, else the CPU.
        dtype: of the likelihood ratios less 1, and of p_S; logarithms and sums over positions are
            float64.
        memory: the most bytes of likelihood ratios to keep on the device; it takes M S K numbers to
            keep all. What does not fit is computed from the float16 shifts at every step.
    """

    def __init__(
        self,
        curvature: Curvature,
        device: str | torch.device | None = None,
        dtype: Precision = "float32",
        memory: int = 4 << 30,
    ) -> None:
        super().__init__(curvature)
        require_choice(dtype, Precision, "dtype")
        self.device, self.memory = pick_device(device), memory
        self.dtype: torch.dtype = getattr(torch, dtype)

    def _start(self, part: Part) -> State:
        return _TorchState(self.shifts.of(part), self.device, self.dtype, self.memory)


class _TorchState:
    """The additive KL with some units removed, in blocks of positions."""

    def __init__(
        self, shifts: Shifts, device: torch.device, dtype: torch.dtype, memory: int
    ) -> None:
        units, self.positions, tokens = shifts.values.shape
        size = max(1, _BLOCK_BYTES // (8 * units * tokens))
        first, teacher = shifts.start, shifts.teacher
        self.blocks: list[_Block] = []
        for start in range(0, self.positions, size):
            places = slice(start, start + size)
            values, other = shifts.values[:, places], None if teacher is None else teacher[places]
            memory -= values.size * dtype.itemsize
            self.blocks.append(
                _Block(values, first[places], other, device, dtype, keep=memory >= 0)
            )
        self.singles = -self._mean([block.logs.sum(0) for block in self.blocks])

    def __copy__(self) -> _TorchState:
        made = object.__new__(_TorchState)
        made.__dict__ = self.__dict__ | {"blocks": [copy(block) for block in self.blocks]}
        return made

    def marginals(self) -> np.ndarray:
        """F(S + u) - F(S) [M]: the mean of log E_{p_S}[r_u] - E_{p_0}[log r_u]."""
        with full_precision():
            return self._mean([block.marginals() for block in self.blocks])

    def add(self, unit: int) -> None:
        """Remove a unit: p_S r_u, normalized."""
        for block in self.blocks:
            block.add(unit)

    def _mean(self, sums: list[Tensor]) -> np.ndarray:
        total: np.ndarray = torch.stack(sums).sum(0).cpu().numpy()
        return total / self.positions


class _Block:
    """Some of the positions.

    Attributes:
        values: d [M, s, K] float16, on the CPU.
        weights: p_S [s, K].
        logs: E_{p_0}[log r_u] [s, M] float64, which is minus the KL of u alone at a position.
        kept: r_u - 1 = p_u / p - 1 [s, M, K], or None where they are computed at every step; p is
            where the shifts start, p_0 unless units were removed beforehand.
    """

    def __init__(
        self,
        values: np.ndarray,
        start: np.ndarray,
        teacher: np.ndarray | None,
        device: torch.device,
        dtype: torch.dtype,
        *,
        keep: bool,
    ) -> None:
        self.values, self.dtype = values, dtype
        self.p = _normalized(start, device)
        self.teacher = None if teacher is None else _normalized(teacher, device)
        self.weights = self.p.to(dtype)
        changes, self.logs = self._changes(values)
        self.kept = changes if keep else None

    def _changes(self, values: np.ndarray) -> tuple[Tensor, Tensor]:
        """r_u - 1 [s, m, K] and `logs` [s, m] of some units, as `likelihood_ratios` has them."""
        # a copy, because torch does not take arrays that cannot be written to
        d = torch.tensor(values).to(self.p.device).transpose(0, 1).double()
        p = self.p[:, None]
        d -= (p * d).sum(-1, keepdim=True)  # E_{p_0}[d] = 0, so the KL is log E_{p_0}[exp d]
        top = d.amax(-1, keepdim=True)
        ratios = (d - top).exp_()
        mean = (p * ratios).sum(-1, keepdim=True)
        kl = (mean.log() + top)[..., 0].clamp_min(0)
        if self.teacher is not None:
            kl = kl + ((self.p - self.teacher)[:, None] * d).sum(-1)
        return (ratios / mean - 1).to(self.dtype), -kl

    def marginals(self) -> Tensor:
        """F(S + u) - F(S) [M] float64, summed over the positions."""
        changes = self._changes(self.values)[0] if self.kept is None else self.kept
        means = torch.bmm(changes, self.weights[..., None])[..., 0]  # E_{p_S}[r_u - 1] [s, M]
        return (means.double().clamp_min(LEAST_CHANGE).log1p() - self.logs).sum(0)

    def add(self, unit: int) -> None:
        """Remove a unit at these positions."""
        one = slice(unit, unit + 1)
        kept = self._changes(self.values[one])[0] if self.kept is None else self.kept[:, one]
        weights = self.weights.double() * (1 + kept[:, 0].double())
        self.weights = (weights / weights.sum(-1, keepdim=True)).to(self.dtype)


def _normalized(probabilities: np.ndarray, device: torch.device) -> Tensor:
    p = torch.tensor(probabilities, dtype=torch.float64, device=device)
    return p / p.sum(-1, keepdim=True)
