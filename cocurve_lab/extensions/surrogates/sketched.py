"""H with a sketch of shifts beside it, and the surrogates of the sketch: pair and additive KL."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ...base.errors import CocurveError, InputError
from ...curvature.matrix import Curvature
from .additive import AdditiveKL
from .pair_kl import PAIR_KL, pair_kl_sums
from .shifts import Shifts, shifts_path

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class SketchedCurvature(Curvature):
    """A Curvature with a sketch of the shifts that its build measured; made by `with_shifts`.

    Attributes:
        shift_source: the sketch, or the file it is read from when it is first asked for.
    """

    shift_source: Shifts | Path | None = None

    @property
    def shifts(self) -> Shifts | None:
        """The sketch of the shifts."""
        return self._read

    @cached_property
    def _read(self) -> Shifts | None:
        source = self.shift_source
        found = Shifts.load(source, self.fingerprint) if isinstance(source, Path) else source
        most = 2**16 if self.group_grams is None else len(self.group_grams)
        if found is not None and found.groups.max(initial=0) >= most:  # there is a Gram of each
            raise InputError(
                f"the sketch has a position of group {found.groups.max()}, but H has {most} groups "
                "of sequences. Take both from one build."
            )
        return found

    def pair_kl(self, part: str = "all") -> Curvature:
        """Return the pair KL Q [M, M], a drop-in for H, from the sketch of shifts (pair_kl.py).

        Q_uu / 2 is the KL of removing u alone, and Q_uv the cost of the pair beyond its units, both
        on the sketch's tokens, at the positions of `part` ("all", "fit" or "price"). Solver,
        slider, graph and error bars take it. Gains, spectrum and the gate need a Gram matrix and
        refuse it.
        """
        shifts: Shifts = self.require_shifts().of(part)
        sums = pair_kl_sums(shifts, int(shifts.groups.max()) + 1)
        facts = {
            "surrogate": PAIR_KL,
            "surrogate_of": self.fingerprint,
            "sketch": list(shifts.probabilities.shape),
            "sketch_part": part,
        }
        made = Curvature.from_groups(self.units, *sums, self.provenance | facts)
        return with_shifts(made, self.shifts)

    def additive(self) -> AdditiveKL:
        """Return the additive KL of sets of units; InputError without a sketch."""
        return AdditiveKL(self)


def with_shifts(curvature: Curvature, source: Shifts | Path | None) -> SketchedCurvature:
    """Return the same curvature with a sketch of shifts, or the file of one."""
    if isinstance(source, Shifts) and len(source.values) != len(curvature.units):
        raise InputError(
            f"there are {len(curvature.units)} units, but {source}. Take both from one build."
        )
    known = {field.name: getattr(curvature, field.name) for field in fields(Curvature)}
    return SketchedCurvature(**known, shift_source=source)


# Where the core asks ------------------------------------------------------------------------------


def beside(curvature: Curvature, path: Path) -> Curvature:
    """Return a curvature that was read from `path`, with the sketch that lies beside it."""
    file = shifts_path(path)
    return with_shifts(curvature, file) if file.exists() else curvature


def keep(curvature: Curvature, path: Path) -> None:
    """Write the sketch of the H that goes to `path`; that of an H it replaces is removed."""
    file = shifts_path(path)
    try:
        if curvature.shifts is None:
            file.unlink(missing_ok=True)
        else:
            curvature.shifts.save(file, curvature.fingerprint)
    except (CocurveError, OSError) as error:  # H itself is worth more
        log.warning("%s is not written (%s). H is saved without its shifts.", file, error)


def joined(merged: Curvature, parts: Sequence[Curvature], *, in_order: bool) -> Curvature:
    """Return a merged H with the sketches of its parts, if all of them have one."""
    found = [part.shifts for part in parts]
    if any(shifts is None for shifts in found):
        return merged
    return with_shifts(merged, Shifts.joined(found, in_order=in_order))


class Prices:
    """The surrogates of the shifts on the part "price", for many plans of one curvature."""

    def __init__(self, curvature: Curvature) -> None:
        self.shifts: Shifts = curvature.require_shifts().of("price")
        self.additive = with_shifts(curvature, self.shifts).additive()
        self.known: dict[frozenset[int], tuple[float, float]] = {}  # an instrument asks often

    def of(self, chosen: Sequence[int]) -> tuple[float, float]:
        """Return 1/2 s^T Q s and F(S) of a plan."""
        mark = frozenset(chosen)
        if mark not in self.known:
            self.known[mark] = self._pair_kl(list(chosen)), self.additive.predict(chosen)
        return self.known[mark]

    def _pair_kl(self, chosen: list[int]) -> float:
        # Q of these units alone: the whole matrix takes the square of their share of all units
        one = np.zeros_like(self.shifts.groups)
        part = replace(self.shifts, values=self.shifts.values[chosen], groups=one)
        return float(pair_kl_sums(part, 1)[0].sum() / 2 / len(part))
