"""Logits over the whole vocabulary: read in pieces, checked for NaN, scored against labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..base.errors import InputError, NumericalError
from .runtime import is_out_of_memory

T = TypeVar("T")
LOGIT_BYTES = 256 << 20  # bytes of full-vocabulary logits held at a time


def pieces(positions: int, bytes_each: int) -> Iterator[slice]:
    """Yield slices of positions, so many that their logits take at most LOGIT_BYTES."""
    step = max(1, LOGIT_BYTES // bytes_each)
    for start in range(0, positions, step):
        yield slice(start, start + step)


def log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log probability [..., P] of labels [..., P] under logits [..., P, V], in nats."""
    wanted = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return wanted - torch.logsumexp(logits, dim=-1)


def require_numbers(finite: bool | np.bool_, place: str) -> None:
    """Raise NumericalError unless what was measured at a place of the text is finite."""
    if not finite:
        raise NumericalError(
            f"{place} gives NaN or infinite logits. Half precision may overflow: try bfloat16 or "
            "float32."
        )


def unless_too_large(run: Callable[..., T], *arguments: Any) -> T | None:
    """Return what `run` returns, or None if memory runs out."""
    try:
        return run(*arguments)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    return None  # the caller tries again: while the error lives, so do the tensors of the pass


def too_large(what: str) -> InputError:
    """Make the error for a pass that does not fit in memory and cannot be halved."""
    return InputError(
        f"memory runs out with {what} per forward pass. Use shorter texts, bfloat16 weights, or a "
        "larger device."
    )
