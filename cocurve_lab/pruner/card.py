"""The facts on a model card that no manifest records. The card itself: extensions/publishing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..base.errors import InputError, MismatchError


@dataclass(frozen=True)
class CardFacts:
    """Facts about a pruned model beyond its plan; None where one is not known.

    Attributes:
        base_model: the dense model's hub id; None takes the name the model was loaded under.
        license: the hub's license id of the dense model, which usually binds the pruned one too.
        kl: measured KL(dense || pruned) in nats per token, on text that H was not built on
            (`pruning_risk`, or `measure_plans(...).mean`).
        kl_error: the standard error of `kl`, in nats per token.
        kl_text: a description of that text: source, sequences, length, scored positions.
        dense_perplexity, pruned_perplexity: a `Perplexity` each, on one text with one protocol.
    """

    base_model: str | None = None
    license: str | None = None
    kl: float | None = None
    kl_error: float | None = None
    kl_text: str | None = None
    dense_perplexity: Any = None
    pruned_perplexity: Any = None

    def __post_init__(self) -> None:
        if self.kl is None and (self.kl_error is not None or self.kl_text is not None):
            raise InputError("kl_error or kl_text is given without kl. Give the measured kl too.")
        for name, value in (("kl", self.kl), ("kl_error", self.kl_error)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} is {value}. Give nats per token, zero or more.")
        dense, pruned = self.dense_perplexity, self.pruned_perplexity
        if dense is not None and pruned is not None and dense.protocol != pruned.protocol:
            raise MismatchError(
                f"the perplexities have different protocols. Dense: {dense.protocol} Pruned: "
                f"{pruned.protocol} Measure both models on one text with one protocol."
            )
