"""The exceptions of the lab: one base class, and a kind for each thing a caller may want to catch.

Every message says the fact, the offending value, and the next step, in that order.
"""

from __future__ import annotations


class CocurveError(Exception):
    """Base class of every error this package raises on purpose."""


class InputError(CocurveError, ValueError):
    """An argument has a value the called function cannot use."""


class ArchitectureError(CocurveError):
    """The model is of a family, or in a state, that the lab cannot take apart."""


class MismatchError(CocurveError):
    """Two things that must belong together do not (model and selection, checkpoint and build)."""


class FileFormatError(CocurveError):
    """A file is truncated, hostile, of another version, or not what it should be."""


class NumericalError(CocurveError):
    """A model or a matrix gave numbers that cannot be used (NaN, infinity, a negative square)."""


class EquivalenceError(CocurveError):
    """The physically pruned model does not compute what the masked model computes."""


class WorkerError(CocurveError):
    """The workers of a distributed build could not start, or none of them is left."""


class InfeasibleError(CocurveError):
    """No plan, or no greedy plan, removes what was asked for under the given guards.

    Attributes:
        requested_ratio: the share of removable cost asked for, in [0, 1).
        reachable_ratio: the largest share any plan can remove under the guards.
        stalled_ratio: the share at which greedy stopped; None where no plan could do it at all.
    """

    def __init__(
        self,
        message: str,
        *,
        requested_ratio: float,
        reachable_ratio: float,
        stalled_ratio: float | None = None,
    ) -> None:
        super().__init__(message)
        self.requested_ratio = requested_ratio
        self.reachable_ratio = reachable_ratio
        self.stalled_ratio = stalled_ratio
