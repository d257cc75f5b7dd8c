"""Pruning targets: a ratio, parameters or bytes left, KV cache per token, or costs of your own.

A `Budget` is what the solver needs: the cost of each unit, and how much cost must go. A `Target`
becomes a budget for one UnitSet. The last section reads quantities ("6B", "12 GiB").
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

from ..base.arguments import EXACT, as_float, as_int, as_list
from ..base.errors import InputError, NumericalError, shown
from ..models.architectures import UNIT_KINDS
from ..models.unit import Kind
from ..models.units import Unit, UnitSet

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
_CACHED: Kind = "attention"  # the kind whose units hold keys and values
_GOALS = ("parameters", "size", "kv_cache", "ratio")
_IN_BYTES = ("size", "kv_cache")
_SMALLEST_COST, _LARGEST_COST = 1e-100, 1e100  # of a Target; a score divides by a cost
_NOUNS = {
    "parameters": "parameters",
    "size": "bytes of weights in {dtype}",
    "kv_cache": "bytes of KV cache per token",
}


# Targets and budgets ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Target:
    """A goal for a plan, as an alternative to a plain ratio; give exactly one of the first four.

    Quantities may be numbers or text with a unit: "6B" or "350M" parameters, "12 GB" (10^9 bytes)
    or "12 GiB" (2^30 bytes). A model that already meets the target gets the empty plan.

    Attributes:
        parameters: the most parameters left in the whole model, embeddings included.
        size: the most bytes of weights left, in `dtype`; file headers are not counted.
        kv_cache: the most bytes of keys and values left per token, in `dtype`. FFN groups hold
            none, so they are never chosen. (transformers keeps two more numbers per token for a
            layer that lost all its heads.)
        ratio: the least share of `costs` to remove, [0, 1).
        dtype: the number format that `size` or `kv_cache` is counted in: "bfloat16", "float16",
            "float32", "float64", "float8" (or bf16, fp16, fp32, fp8, or a torch dtype).
        costs: [M] numbers, 0 or from 1e-100 to 1e100. With `ratio`, the cost that removing each
            unit saves; with `kv_cache`, the bytes per token it frees (default: `kv_cache_costs`). A
            unit of cost 0 is never chosen.

    Example:
        >>> from cocurve_lab import Target
        >>> print(Target(parameters="6B"))
        at most 6,000,000,000 parameters
        >>> print(Target(size="12 GiB", dtype="bf16"))
        at most 12,884,901,888 bytes of weights in bfloat16
    """

    parameters: str | float | None = None
    size: str | float | None = None
    kv_cache: str | float | None = None
    ratio: float | None = None
    dtype: Any = None
    costs: Iterable[float] | None = None

    def __post_init__(self) -> None:
        given = [name for name in _GOALS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InputError(
                f"a target is exactly one of {', '.join(_GOALS)}, and this one names "
                f"{' and '.join(given) or 'none'}. Give one."
            )
        for name, read in (("costs", _as_costs), ("dtype", dtype_name), ("ratio", require_ratio)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, read(getattr(self, name)))
        if (self.dtype is not None) != (self.goal in _IN_BYTES):
            raise InputError(
                f"the target is {self.goal} and dtype is {self.dtype}. Give dtype, such as "
                f"bfloat16, with {' or '.join(_IN_BYTES)}, which are in bytes, and only there."
            )
        if self.costs is not None and self.ratio is None:
            raise InputError(
                f"costs of the units do not go with {self.goal}. Give them with ratio."
            )
        if self.ratio is None:
            _ = self.limit  # reads the quantity now, not at the first solve

    @property
    def goal(self) -> str:
        """The field that states the goal: "parameters", "size", "kv_cache" or "ratio"."""
        return next(name for name in _GOALS if getattr(self, name) is not None)

    @property
    def in_parameters(self) -> bool:
        """Whether the goal is equivalent to some ratio of removable parameters."""
        return self.goal != "kv_cache" and self.costs is None

    @property
    def limit(self) -> int:
        """The most that may be left, in parameters or bytes."""
        return read_quantity(getattr(self, self.goal), self.goal)

    def budget(self, units: UnitSet) -> Budget:
        """Turn the target into unit costs and the cost that must go."""
        costs = self._costs(units)
        total = costs.sum().item()  # int or float
        if self.ratio is not None:
            return Budget(costs, target_cost(self.ratio, total), self.ratio, self)
        whole, allowed, item = total, self.limit, 1
        if self.goal != "kv_cache":
            if units.total_parameters is None:
                raise InputError(
                    f"the target ({self}) counts the whole model, whose size these units do not "
                    "know. Give a ratio, or units from enumerate_units(model)."
                )
            whole = units.total_parameters
        if self.goal == "size":
            item = ITEM_BYTES[self.dtype]  # unit costs are in parameters, so the rest is too
        needed = max(0, whole - allowed // item)
        return Budget(costs, needed, needed / total, self, whole, item)

    def shown(self, value: float) -> str:
        """Format a realized value in what the target counts."""
        if self.ratio is not None:
            return f"{value:.2%} of the costs" if self.costs is not None else f"{value:.2%}"
        return f"{math.ceil(value):,} {_NOUNS[self.goal].format(dtype=self.dtype)}"

    def __str__(self) -> str:
        if self.ratio is not None:
            return f"at least {self.shown(self.ratio)} removed"
        return f"at most {self.shown(self.limit)}"

    def to_plain(self) -> dict[str, Any]:
        """Return the fields that are set, for JSON; `Target(**fields)` reads them back."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def _costs(self, units: UnitSet) -> np.ndarray:
        if self.costs is None:
            return kv_cache_costs(units, self.dtype) if self.goal == "kv_cache" else units.costs
        costs = np.array(self.costs, np.float64)
        if len(costs) != len(units):
            raise InputError(
                f"there are {len(costs)} costs for {len(units)} units. Give one cost per unit."
            )
        # whole costs stay int64 as long as float64, in which units are scored, is exact: then sums
        # are exact too, and `Rules.reachable` can solve its subset sums
        exact = (costs == np.floor(costs)).all() and costs.sum() < EXACT
        return costs.astype(np.int64) if exact else costs


@dataclass(frozen=True, eq=False)
class Budget:
    """The unit costs [M], int64 or float64, and the cost `needed` that must go, for one UnitSet.

    Attributes:
        share: `needed` as a share of all costs; above 1 where no plan can reach it.
        target: the target it came from; None for a plain ratio.
        whole: the cost before anything is removed, where the target says what may be left.
        item: what the target counts, such as bytes, in one unit of cost.
    """

    costs: np.ndarray
    needed: float
    share: float
    target: Target | None = None
    whole: float | None = None
    item: int = 1

    def value(self, removed: float) -> float:
        """Convert a removed cost to what the target counts: the amount left, or the share gone."""
        if self.whole is None:
            return float(removed / (self.costs.sum() or 1))  # an emptied model has no costs
        return (self.whole - removed) * self.item

    def shown(self, removed: float) -> str:
        """Format `value`, rounded so that asking for the printed value asks for no more."""
        if self.target is None or self.whole is None:
            return f"{math.floor(self.value(removed) * 1e4) / 100:.2f}%"
        return self.target.shown(self.value(removed))

    def reached(self, pruned: Iterable[int]) -> bool:
        """Whether a plan of these units removes what was asked: the post-condition of a solve.

        It adds up again in Python, apart from the sums that made the plan.
        """
        costs = self.costs.tolist()  # Python ints or floats
        removed, total = sum(costs[u] for u in pruned), sum(costs)
        # sums of floats in another order differ by rounding; whole numbers have none
        slack = 1e-12 * total if self.costs.dtype == np.float64 else 0
        # the share is checked too, in case `needed` itself was computed wrongly; a NaN is no plan
        share = removed / total if total else 0.0  # a model pruned to nothing has no costs
        return removed >= self.needed - slack and share >= self.share * (1 - 1e-9)

    def require_reached(self, pruned: Sequence[int]) -> None:
        """Raise NumericalError unless the plan of these units removes what was asked for."""
        if not self.reached(pruned):
            removed = self.costs[list(pruned)].sum().item()
            raise NumericalError(
                f"a plan was asked for {self.share:.6%} of the costs and comes to {removed:g} of "
                f"{self.costs.sum():g}, so it is not returned. Give costs of like size."
            )


# Ratios and lambda ------------------------------------------------------------------------------


def require_ratio(ratio: float | Target) -> float:
    """Return a ratio of any number type as a Python float; raise InputError outside of [0, 1)."""
    share = as_float(ratio, "ratio")
    if not 0 <= share < 1:
        raise InputError(
            f"ratio is {shown(ratio)}, and a share of the removable parameters is in [0, 1). Give "
            "0.2 for 20 %."
        )
    return share


def require_strength(interaction_strength: float) -> float:
    """Return a lambda of any number type as a Python float; raise InputError unless it is >= 0."""
    strength = as_float(interaction_strength, "interaction_strength")
    if not 0 <= strength < math.inf:
        raise InputError(
            f"interaction_strength is {shown(interaction_strength)}; lambda is finite and at least "
            "0. Give 0 to ignore the edges, 1 to take them in full."
        )
    return strength


def target_cost(ratio: float, total: float) -> float:
    """Return the cost that a plan of this ratio must reach; `total` is that of all units."""
    # a hair below ratio x total: in floating point 0.3 x total may land above a cost that is
    # exactly reachable, and would then demand one unit too many
    return ratio * total * (1 - 1e-12)


def as_budget(units: UnitSet, ratio: float | Target | Budget) -> Budget:
    """Return the budget of a target, or of a ratio of removable parameters; checks the ratio."""
    if isinstance(ratio, Target):
        return ratio.budget(units)
    if isinstance(ratio, Budget):
        return ratio
    ratio = require_ratio(ratio)
    return Budget(units.costs, target_cost(ratio, units.total_cost), ratio)


# KV cache and operations -------------------------------------------------------------------------


def kv_cache_costs(units: UnitSet, dtype: Any) -> np.ndarray:
    """Return the bytes of keys and values per token that each unit holds [M] int64; 0 for FFN.

    A KV head caches one key and one value of head_dim numbers per token, however many query heads
    share it. A layer with a sliding window does so only up to its window. head_dim is derived from
    the costs and column counts of the units.

    Args:
        dtype: the number format of the cache, as for `Target`.
    """
    item = ITEM_BYTES[dtype_name(dtype)]
    if _CACHED not in units.kinds:
        raise InputError(
            "there are no attention units, so there is no KV cache to reduce. Give units of both "
            "kinds, or another target."
        )
    ffn = next((unit for unit in units if UNIT_KINDS[unit.kind].grouped), None)
    sizes = [] if ffn is None else _hidden_sizes(ffn.cost // (ffn.stop - ffn.start))
    widths = [_head_dim(unit, sizes) if unit.kind == _CACHED else 0 for unit in units]
    return np.array([2 * item * width for width in widths], np.int64)


def flop_costs(units: UnitSet, context: int) -> np.ndarray:
    """Return the floating-point operations per token that each unit takes [M] int64.

    Two per parameter, and in attention 4 per column for each of the `context` tokens that a token
    attends to: the scores, and the sum of values (Kaplan et al., 2020). Norms, softmax and
    activations are left out. For `Target(ratio=..., costs=...)`.
    """
    context = as_int(context, "context", 1)
    widths = [u.stop - u.start if u.kind == _CACHED else 0 for u in units]
    return 2 * units.costs + 4 * context * np.array(widths, np.int64)


def _hidden_sizes(channel: int) -> list[int]:
    """Return the hidden sizes that explain the cost of one FFN channel, gated forms first."""
    # a gated channel costs 3 x hidden, plus 2 with biases; an ungated one 2 x hidden, plus 1
    forms = ((3, 0), (3, 2), (2, 1), (2, 0))
    return [
        (channel - more) // per
        for per, more in forms
        if channel > more and (channel - more) % per == 0
    ]


def _head_dim(unit: Unit, sizes: Iterable[int]) -> int:
    """head_dim of one KV head; raises InputError if no candidate explains the unit's cost."""
    width = unit.stop - unit.start  # rows of q, and columns of the output projection
    # q and the output have `width` rows of `hidden` numbers, k and v have head_dim. Biases of q, k
    # and v (Qwen2) add width + 2 head_dim numbers, norms of q and k (OLMo2) width + head_dim
    for hidden, (of_width, of_head) in product(sizes, ((0, 0), (1, 2), (1, 1))):
        left = unit.cost - (2 * hidden + of_width) * width
        head, rest = divmod(left, 2 * hidden + of_head)
        if rest == 0 and head > 0 and width % head == 0:
            return head
    raise InputError(
        f"the cost {unit.cost:,} of {unit} fits no head_dim, so the size of its cache is not "
        "known. Give another target, such as a ratio."
    )


def _as_costs(costs: Iterable[float]) -> tuple[float, ...]:
    """Costs of any number type as Python ints, or as Python floats if one is not an integer."""
    given = as_list(costs, "costs")
    floats = [as_float(cost, f"costs[{place}]") for place, cost in enumerate(given)]
    odd = [n for n in floats if n != 0 and not _SMALLEST_COST <= n <= _LARGEST_COST]
    if odd or not any(floats) or any(isinstance(cost, (bool, np.bool_)) for cost in given):
        raise InputError(
            f"costs are {shown(given)}. Give one number per unit, 0 or from {_SMALLEST_COST:g} to "
            f"{_LARGEST_COST:g}, beyond which sums and scores leave float64, and not all 0."
        )
    whole = all(isinstance(cost, (int, np.integer)) for cost in given)
    return tuple(map(int, given)) if whole else tuple(floats)


# Quantities in text -----------------------------------------------------------------------------

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8"}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTES = {"": 1, "b": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for end, base in (("b", 1000), ("ib", 1024))
}
_NUMBER = re.compile(r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([a-z]*)")


def read_quantity(value: Any, goal: str) -> int:
    """Read parameters (6e9, "6B", "6,738,415,616") or, of the other goals, bytes.

    Bytes are 1024, "12 GB" (10^9) or "12 GiB" (2^30); "12 G" is ambiguous, and so an InputError.
    """
    table = _COUNTS if goal == "parameters" else _BYTES
    # Python neither prints nor reads a number of thousands of digits
    huge = isinstance(value, int) and value.bit_length() > 1000
    text = "" if huge else str(value).strip().lower()
    found = _NUMBER.fullmatch(text) if len(text) < 400 else None
    factor = table.get(found[2], 0) if found else 0
    amount = int(Fraction(found[1].replace(",", "")) * factor) if found else 0
    if not 0 < amount < 1e300:  # beyond that no float could show it
        raise InputError(
            f"{goal} is {shown(value)}, which is not a positive quantity. Write a number and one "
            f"of {', '.join(filter(None, table))}."
        )
    return amount


def dtype_name(dtype: Any) -> str:
    """Return the key of ITEM_BYTES for a name, a short name (bf16) or a torch dtype."""
    # quantized formats are refused: they carry scales, so the bits per weight would mislead
    name = str(dtype).removeprefix("torch.")
    name = _SHORT.get(name, "float8" if name.startswith("float8") else name)
    if name not in ITEM_BYTES:
        raise InputError(f"dtype is {str(dtype)!r}; choose from {', '.join(ITEM_BYTES)}.")
    return name
