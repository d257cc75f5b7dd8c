"""Targets people think in: parameters or bytes left, KV cache per token, costs of one's own.

The solver knows costs and how much of them must go; a `Target` is turned into that (a `Budget`) for
one UnitSet, and says of a plan what it realised in the unit the target was given in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import InputError
from ..models.architectures import describe
from ..models.units import Unit, UnitSet, require_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a plan must reach, other than a ratio of removable parameters; one of the first four.

    Text takes a unit: "6B", "350M" parameters; "12 GB" (10^9 bytes) or "12 GiB" (2^30). A model
    that meets the target as it is gives the empty plan.

    Attributes:
        parameters: at most so many parameters left in the whole model, embeddings included.
        size: at most so many bytes of weights left, in `dtype`; file headers are not counted.
        kv_cache: at most so many bytes of keys and values left per token, in `dtype`. FFN groups
            hold none, so they are never chosen. (transformers keeps two more numbers per token for
            a layer that lost all its heads.)
        ratio: at least this share of `costs` removed, [0, 1).
        dtype: what `size` or `kv_cache` counts in: "bfloat16", "float16", "float32", "float64",
            "float8" (or bf16, fp16, fp32, fp8, or a torch dtype).
        costs: [M] finite numbers >= 0: with `ratio`, what each unit's removal counts; with
            `kv_cache`, the bytes per token it frees (default: `kv_cache_costs`). A unit of cost 0
            is never chosen.

    Raises:
        InputError: not exactly one target, a missing dtype, or a quantity that cannot be read.
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
                f"a Target names one of {', '.join(_GOALS)}; this one names "
                f"{' and '.join(given) or 'none'}. Give exactly one."
            )
        if self.costs is not None:
            object.__setattr__(self, "costs", _as_numbers(self.costs))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        self._require_fitting_parts()
        if self.ratio is None:
            _ = self.limit  # reads the quantity now, not at the first solve
        elif not 0 <= self.ratio < 1:
            raise InputError(f"ratio is {self.ratio}; it is the share to remove, in [0, 1).")

    def _require_fitting_parts(self) -> None:
        in_bytes = self.size is not None or (self.kv_cache is not None and self.costs is None)
        if in_bytes and self.dtype is None:
            raise InputError(f'{self.goal} is in bytes: say of what, for example dtype="bfloat16".')
        if self.dtype is not None and not in_bytes:
            raise InputError(f"dtype {self.dtype} has no part in this target. Leave it away.")
        if self.costs is not None and self.goal not in ("ratio", "kv_cache"):
            raise InputError(f"costs do not go with {self.goal}. Use them with ratio or kv_cache.")

    @property
    def goal(self) -> str:
        """Which of parameters, size, kv_cache and ratio it names."""
        return next(name for name in _GOALS if getattr(self, name) is not None)

    @property
    def in_parameters(self) -> bool:
        """Whether it is a ratio of removable parameters in other words."""
        return self.goal in ("parameters", "size") or (self.goal == "ratio" and self.costs is None)

    @cached_property
    def limit(self) -> Quantity:
        """The most that may be left: parameters, or bytes."""
        read = read_count if self.goal == "parameters" else read_bytes
        return read(getattr(self, self.goal), self.goal)

    def budget(self, units: UnitSet) -> Budget:
        """What each unit counts, and how much of it must go.

        Raises:
            InputError: the size of the model, its head dimension, or the number of costs does not
                serve; says which.
        """
        costs = self._costs(units)
        if self.ratio is not None:
            needed = needed_cost(self.ratio, costs.sum().item())
            return Budget(costs, needed, float(self.ratio), self)
        whole = self._whole(units, costs)
        allowed = self.limit.amount
        if self.goal == "size":
            allowed //= ITEM_BYTES[self.dtype]
        needed = max(0, whole - allowed)
        return Budget(costs, needed, needed / costs.sum().item(), self, whole)

    def realized(self, units: UnitSet, pruned: Iterable[int]) -> float:
        """What a plan leaves (parameters, bytes, bytes per token), or the share it removes."""
        budget = self.budget(units)
        return budget.value(budget.costs[list(pruned)].sum().item())

    def shown(self, value: float) -> str:
        """A realised value in the unit the target was given in, never shown too small."""
        if self.ratio is not None:
            return f"{value:.2%} of the costs" if self.costs is not None else f"{value:.2%}"
        return f"{self.limit.shown(value)} {_NOUNS[self.goal].format(dtype=self.dtype)}"

    def __str__(self) -> str:
        if self.ratio is not None:
            return f"at least {self.shown(self.ratio)} removed"
        return f"at most {self.shown(self.limit.amount)}"

    def to_plain(self) -> dict[str, Any]:
        """The fields that are set, for JSON; `Target(**fields)` reads them back."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in fields.items() if value is not None}

    def _costs(self, units: UnitSet) -> np.ndarray:
        if self.costs is None:
            return kv_cache_costs(units, self.dtype) if self.goal == "kv_cache" else units.costs
        costs = np.array(self.costs)
        if len(costs) != len(units):
            raise InputError(f"there are {len(costs)} costs for {len(units)} units. Give one each.")
        whole = costs.astype(np.int64) if (costs == np.floor(costs)).all() else costs
        return whole if costs.sum() < 2**53 else costs.astype(np.float64)

    def _whole(self, units: UnitSet, costs: np.ndarray) -> float:
        """What the model has before anything is removed."""
        if self.goal == "kv_cache":
            return float(costs.sum()) if costs.dtype == np.float64 else int(costs.sum())
        if units.total_parameters is None:
            raise InputError(
                f"{self} counts the whole model, whose size this UnitSet does not know (a release "
                "without its model). Give a ratio, or units from enumerate_units(model)."
            )
        return units.total_parameters


@dataclass(frozen=True, eq=False)
class Budget:
    """A target for one UnitSet.

    Attributes:
        costs: [M] int64 or float64, what each removal counts; layer caps count in it too.
        needed: the sum of it that must be removed.
        share: that as a share of all costs; above 1 where no plan can reach it.
        target: the target it came from; None for a plain ratio.
        whole: what there is before anything is removed, where the target says what may be left.
    """

    costs: np.ndarray
    needed: float
    share: float
    target: Target | None = None
    whole: float = 0

    def value(self, removed: float) -> float:
        """What removing this much of `costs` comes to: what is left, or the share removed."""
        if self.target is None or self.target.ratio is not None:
            return float(removed / self.costs.sum())
        left = self.whole - removed
        return left * ITEM_BYTES[self.target.dtype] if self.target.size is not None else left

    def shown(self, removed: float) -> str:
        """`value` in words, rounded so that asking for the printed value asks for no more."""
        if self.target is None or self.target.ratio is not None:
            return f"{math.floor(self.value(removed) * 1e4) / 100:.2f}%"
        return self.target.shown(self.value(removed))

    def bounds(self, removed: float) -> tuple[str, str]:
        """Going beyond this removal in words, and asking for no more than it."""
        words = self.shown(removed)
        if self.target is None or self.target.ratio is not None:
            return f"removes more than {words}", f"at most {words}"
        return f"leaves less than {words}", f"{words} or more"


def require_ratio(ratio: float) -> None:
    """Raise InputError unless ratio lies in [0, 1)."""
    if isinstance(ratio, Target):
        raise InputError(
            f"ratio is a Target ({ratio}), which only solve_greedy takes. Give a ratio; for one of "
            "parameters or bytes it is the requested_ratio of the solved plan."
        )
    if not 0 <= ratio < 1:
        raise InputError(
            f"ratio is {ratio}; it is the share of removable parameters to remove and lies in "
            "[0, 1)."
        )


def needed_cost(ratio: float, total: float) -> float:
    """Cost a plan of this ratio must reach, of costs that sum to `total`.

    A hair below ratio x total: 0.3 x total computed in floating point may land above an exactly
    reachable cost and would then demand one unit too many.
    """
    return ratio * total * (1 - 1e-12)


def target_cost(units: UnitSet, ratio: float) -> float:
    """Cost a plan of this ratio must reach, in parameters; see `needed_cost`."""
    return needed_cost(ratio, units.total_cost)


def ratio_budget(units: UnitSet, ratio: float) -> Budget:
    """The budget of a plain ratio of removable parameters, as `Target.budget` is of a target.

    Raises:
        InputError: as `require_ratio`.
    """
    require_ratio(ratio)
    return Budget(units.costs, target_cost(units, ratio), float(ratio))


def kv_cache_costs(units: UnitSet, dtype: Any, model: PreTrainedModel | None = None) -> np.ndarray:
    """Bytes of keys and values per token that go with each unit [M], int64; FFN groups have 0.

    A KV head, whatever the number of query heads on it, caches one key and one value of head_dim
    numbers. A layer with a sliding window does so up to its window only. Without the model head_dim
    follows from costs and columns, where the FFN is gated.

    Args:
        units: the UnitSet.
        dtype: of the cache, as for `Target`.
        model: the model of these units, for families whose costs do not tell.

    Raises:
        InputError: no attention units, or costs that fit no head_dim.
        MismatchError: the units are not the model's.
    """
    item = ITEM_BYTES[dtype_name(dtype)]
    if "attention" not in units.kinds:
        raise InputError("there are no attention units, so nothing holds a KV cache to reduce.")
    cached = _derived(units) if model is None else _of_model(units, model)
    return np.array([2 * item * numbers for numbers in cached], np.int64)


def _of_model(units: UnitSet, model: PreTrainedModel) -> list[int]:
    """Width of the keys of each unit: its columns over the query heads per KV head."""
    require_units(model, units)
    architecture = describe(model)
    return [
        0 if u.kind == "ffn" else (u.stop - u.start) // architecture.queries_per_group(u.layer)
        for u in units
    ]


def _derived(units: UnitSet) -> list[int]:
    ffn = next((unit for unit in units if unit.kind == "ffn"), None)
    sizes = [] if ffn is None else _hidden_sizes(ffn.cost // (ffn.stop - ffn.start))
    return [0 if unit.kind == "ffn" else _head_dim(unit, sizes) for unit in units]


def _hidden_sizes(channel: int) -> list[int]:
    """Hidden sizes that fit what an FFN channel costs: gated ones, then ones without a gate.

    A gated channel costs 3 x hidden, and 2 more with biases; one without a gate 2 x hidden, and 1
    more with its bias.
    """
    forms = ((3, 0), (3, 2), (2, 1), (2, 0))
    return [(channel - more) // per for per, more in forms if (channel - more) % per == 0]


def _head_dim(unit: Unit, sizes: Iterable[int]) -> int:
    """head_dim of one KV head: q and output have `width` rows each, k and v head_dim."""
    width = unit.stop - unit.start
    heads = [width // queries for queries in range(1, width + 1) if width % queries == 0]
    for hidden, head in product(sizes, heads):
        plain = 2 * hidden * (width + head)
        biases, norms = width + 2 * head, width + head  # on q, k and v (Qwen2); of q and k (OLMo2)
        if hidden and unit.cost - plain in (0, biases, norms):
            return head
    raise InputError(
        f"the cost {unit.cost:,} of {unit} fits no head_dim, so what it caches is not known. Give "
        "Target(kv_cache=..., costs=kv_cache_costs(units, dtype, model))."
    )


def _as_numbers(costs: Iterable[float]) -> tuple[float, ...]:
    array = np.array(list(costs))
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise InputError("costs is not a list of numbers. Give one number per unit.")
    bad = np.flatnonzero(~np.isfinite(array) | (array < 0))
    if len(bad):
        raise InputError(f"costs[{bad[0]}] is {array[bad[0]]}; a cost is finite and at least 0.")
    if not array.any():
        raise InputError("all costs are 0, so no removal counts. Give a positive one.")
    return tuple(array.tolist())


_GOALS = ("parameters", "size", "kv_cache", "ratio")
_NOUNS = {
    "parameters": "parameters",
    "size": "of weights in {dtype}",
    "kv_cache": "of KV cache per token",
}


ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8"}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTES = {"": 1, "b": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for end, base in (("b", 1000), ("ib", 1024))
}
_NUMBER = re.compile(r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)")


class Quantity(NamedTuple):
    """An amount, whole, and the unit it was written in: its factor and its spelling.

    `whole` is the spelling of the unit of factor 1: " B", or none for things that are counted.
    """

    amount: int
    factor: int
    suffix: str
    whole: str

    def shown(self, amount: float) -> str:
        """Another amount in this unit, rounded up to three decimals; far below it, whole."""
        if 100 * amount < self.factor:
            return f"{math.ceil(amount):,}{self.whole}"
        number = math.ceil(Fraction(amount) / self.factor * 1000) / 1000
        return f"{number:,.3f}".rstrip("0").rstrip(".") + (self.suffix or self.whole)


def read_count(value: Any, what: str) -> Quantity:
    """Read a number of things: 6e9, "6B", "350M", "6,738,415,616".

    Raises:
        InputError: not a positive number with a unit of k, M, B or T; names `what`.
    """
    return _read(value, what, _COUNTS, 'k, M, B or T, as in "6B"', "")


def read_bytes(value: Any, what: str) -> Quantity:
    """Read a number of bytes: 1024, "12 GB" (10^9), "12 GiB" (2^30).

    Raises:
        InputError: not a positive number with a unit; "12 G" is one of two things and is refused.
    """
    return _read(value, what, _BYTES, "B, kB, MB, GB (10^9) or KiB, MiB, GiB (2^30)", " ")


def dtype_name(dtype: Any) -> str:
    """The key of ITEM_BYTES for a name, a short name (bf16) or a torch dtype.

    Raises:
        InputError: another dtype. Quantised formats carry scales, so bits alone would mislead.
    """
    name = str(dtype).removeprefix("torch.")
    name = _SHORT.get(name, "float8" if name.startswith("float8") else name)
    if name not in ITEM_BYTES:
        raise InputError(f"dtype is {str(dtype)!r}; choose from {', '.join(ITEM_BYTES)}.")
    return name


def _read(value: Any, what: str, table: dict[str, int], units: str, gap: str) -> Quantity:
    text = str(value).strip()
    if isinstance(value, float) and value.is_integer():
        text = str(int(value))  # 1e-05 and 1e+20 are spelt in ways people do not write
    found = _NUMBER.fullmatch(text.lower())
    factor = table.get(found[2]) if found else None
    amount = int(Fraction(found[1].replace(",", "")) * factor) if found and factor else 0
    if not found or not factor or amount <= 0:
        raise InputError(
            f"{what} is {value!r}, which is no positive quantity. Write a number and one of "
            f"{units}."
        )
    suffix = text[len(text) - len(found[2]) :] if found[2] else ""
    return Quantity(amount, factor, gap + suffix if suffix else "", " B" if gap else "")
