"""The co-pruning curvature H: the one matrix everything after the build stands on.

Numpy only: a stored matrix opens on a machine without torch, without a GPU and without the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FileFormatError, InputError, NumericalError
from ..models.units import UnitSet
from ..storage import (
    dump_npz,
    dump_plain,
    fingerprint,
    load_npz,
    load_plain,
    require_settings,
    write_atomically,
)
from .merging import join_shards, sum_builds
from .release import read_release

FORMAT, VERSION = "cocurve-curvature", 1
BLOCKS = ("attention", "cross", "ffn")


@dataclass(frozen=True, eq=False)
class Curvature:
    """The matrix H of eq. (gram), its units, and how it came about.

    Attributes:
        matrix: H [M, M] float64, symmetric, diagonal >= 0, in nats per token: 1/2 s^T H s predicts
            the KL of removing the units s (eq. quadratic).
        units: the UnitSet the rows and columns follow.
        provenance: how it was built (model, calibration, top_r, ...), plain values only.
        group_grams: [G, M, M] float64 sums of feature outer products, one per group of sequences;
            None for matrices that came without them.
        group_positions: [G] int64, scored positions in each group.
        group_risks: [G, M] float64 sums over positions of the measured KL of removing one unit,
            on the teacher's top-r support.

    Raises:
        NumericalError: H is not finite, not symmetric, or has a negative diagonal.
        InputError: shapes do not fit the units.
    """

    matrix: np.ndarray
    units: UnitSet
    provenance: dict[str, Any] = field(default_factory=dict)
    group_grams: np.ndarray | None = None
    group_positions: np.ndarray | None = None
    group_risks: np.ndarray | None = None

    def __post_init__(self) -> None:
        matrix = np.array(self.matrix, dtype=np.float64)
        object.__setattr__(self, "matrix", matrix)
        _require_curvature(matrix, len(self.units))
        matrix[:] = (matrix + matrix.T) / 2  # exact symmetry, so rows and columns are the same bits
        matrix.flags.writeable = False
        size = len(self.units)
        shapes = {"group_grams": (size, size), "group_risks": (size,), "group_positions": ()}
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array is not None and array.shape[1:] != shape:
                raise InputError(
                    f"{name} has shape {array.shape}, but {size} units need [groups, *{shape}]. "
                    "Take groups and units from one build."
                )
        groups = {
            name: len(getattr(self, name)) for name in shapes if getattr(self, name) is not None
        }
        if len(set(groups.values())) > 1:
            raise InputError(f"numbers of groups differ: {groups}. Take them from one build.")

    @property
    def is_preview(self) -> bool:
        """Whether H is from random probes: infinitesimal and noisy, to look at while H is built."""
        return self.provenance.get("method") == "probe"

    def note(self, view: str = "instrument") -> str:
        """What a preview of H is worth, to show beside it; empty on any other H: `preview_note`."""
        return preview_note(self, view)

    # Statistics ---------------------------------------------------------------------------------

    @cached_property
    def saliency(self) -> np.ndarray:
        """Node saliency d_u = H_uu [M], nats per token; removing u alone costs about half of it."""
        return np.diagonal(self.matrix).copy()

    @cached_property
    def connectivity(self) -> np.ndarray:
        """b_u = sum over v != u of |H_uv| [M], nats per token (appendix "Mechanism Analysis")."""
        return np.abs(self.matrix).sum(axis=1) - np.abs(self.saliency)

    @cached_property
    def single_unit_risk(self) -> np.ndarray | None:
        """Measured KL [M] of removing each unit alone, on the top-r support, nats per token."""
        if self.group_risks is None or self.group_positions is None:
            return None
        return self.group_risks.sum(axis=0) / self.group_positions.sum()

    def correlation(self) -> np.ndarray:
        """Signed curvature correlation rho_uv = H_uv / sqrt(H_uu H_vv) [M, M], unit diagonal.

        Units whose removal changes nothing (H_uu = 0) correlate 0 with every other unit.
        """
        return self._correlation.copy()

    @cached_property
    def _correlation(self) -> np.ndarray:
        return _correlate(self.matrix)

    def block_means(self) -> dict[str, float]:
        """Mean |rho_uv| off the diagonal within attention, across kinds ("cross"), within FFN.

        A block with no pair (a model pruned to one kind, say) is NaN.
        """
        return {block: _mean(np.abs(self._correlation), self.pair_mask(block)) for block in BLOCKS}

    def pair_mask(self, block: str) -> np.ndarray:
        """Which ordered pairs u != v belong to a block (one of BLOCKS): bool [M, M]."""
        if block not in BLOCKS:
            raise InputError(f"unknown block {block!r}. Choose one of {', '.join(BLOCKS)}.")
        attention = self.units.kinds == "attention"
        same = attention if block == "attention" else ~attention
        mask = (
            np.outer(same, same) if block != "cross" else attention[:, None] != attention[None, :]
        )
        np.fill_diagonal(mask, False)
        return mask

    @property
    def ffn_redundancy(self) -> float:
        """Mean |rho| over FFN pairs, the statistic that gates lambda (Section "Scope")."""
        return self.block_means()["ffn"]

    @cached_property
    def ffn_redundancy_noise_floor(self) -> float | None:
        """What sampling alone puts into `ffn_redundancy`: mean |error| of its rho.

        From two halves of the groups: (rho_a - rho_b) / 2 has the sampling error of the whole where
        the halves are equally long (it is too large where they are not). None without at least two
        groups. Where every true rho is 0 it is what `ffn_redundancy` reads, the sqrt(2 / (pi n)) of
        independent positions, without assuming they are independent; as |rho| grows it falls
        below that, by about 1 - rho^2.
        """
        halves = self._halves()
        if halves is None:
            return None
        return _mean(np.abs(halves[0] - halves[1]) / 2, self.pair_mask("ffn"))

    @cached_property
    def ffn_redundancy_corrected(self) -> float | None:
        """`ffn_redundancy` without the upward bias of |.|: each half is signed by the other.

        Unbiased where the true rho is 0; otherwise low by at most the chance of a wrong sign.
        """
        halves = self._halves()
        if halves is None:
            return None
        a, b = halves
        return _mean((np.sign(a) * b + np.sign(b) * a) / 2, self.pair_mask("ffn"))

    def _halves(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Correlations of two disjoint halves of the calibration, or None without groups."""
        if self.group_grams is None or self.group_positions is None:
            return None
        filled = np.flatnonzero(self.group_positions)
        if len(filled) < 2:
            return None
        even, odd = (self.group_grams[part].sum(axis=0) for part in (filled[::2], filled[1::2]))
        return _correlate(even), _correlate(odd)

    def spectrum(self) -> np.ndarray:
        """Eigenvalues of H [M], largest first, nats per token; a Gram matrix has none below 0."""
        return np.linalg.eigvalsh(self.matrix)[::-1]

    def risk(self, pruned: Sequence[int]) -> float:
        """1/2 s^T H s of a set of unit indices, nats per token (eq. quadratic)."""
        chosen = list(pruned)
        return 0.5 * float(self.matrix[np.ix_(chosen, chosen)].sum())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of matrix and units."""
        return fingerprint(self.matrix, self.units.fingerprint)

    # Files --------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to `path`, whole or not at all: a plain pickle, or `.npz` by its suffix.

        The pickle holds only containers and bytes (see storage.py); `load` reads it without
        executing anything.
        """
        path = Path(path)
        dump = dump_npz if path.suffix == ".npz" else dump_plain
        write_atomically(path, dump(self._to_plain()))
        return path

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, expected: dict[str, Any] | None = None
    ) -> Curvature:
        """Read a saved curvature and check it again.

        Args:
            path: a file `save` wrote (`.npz` by suffix, else pickle).
            expected: provenance values it must have (as from `build_settings`).

        Raises:
            FileNotFoundError: no such file.
            FileFormatError: truncated, hostile, or another format or version.
            MismatchError: a provenance field differs from `expected`; names the field.
            NumericalError: the matrix is not symmetric, not finite, or has a negative diagonal.
        """
        path = Path(path)
        read = load_npz if path.suffix == ".npz" else load_plain
        content = read(path, format_name=FORMAT, version=VERSION)
        try:
            curvature = cls(
                content["matrix"],
                UnitSet.from_plain(content["units"]),
                dict(content["provenance"]),
                content.get("group_grams"),
                content.get("group_positions"),
                content.get("group_risks"),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FileFormatError(
                f"{path} lacks a part of a curvature ({error}). Build it again."
            ) from None
        require_settings(curvature.provenance, expected or {}, f"the curvature in {path}")
        return curvature

    def _to_plain(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "matrix": self.matrix,
            "units": self.units.to_plain(),
            "provenance": self.provenance,
        }
        for name in ("group_grams", "group_positions", "group_risks"):
            if getattr(self, name) is not None:
                content[name] = getattr(self, name)
        return content

    @classmethod
    def from_groups(
        cls,
        units: UnitSet,
        group_grams: np.ndarray,
        group_positions: np.ndarray,
        group_risks: np.ndarray | None,
        provenance: dict[str, Any],
    ) -> Curvature:
        """H = sum of group Grams / number of positions (eq. gram), added in group order.

        Args:
            units: M units.
            group_grams: [G, M, M] float64, sums over positions.
            group_positions: [G] int64.
            group_risks: [G, M] float64, sums over positions; None where no unit was removed.
            provenance: how the sums came about.

        Raises:
            InputError: no position in any group.
        """
        total = int(group_positions.sum())
        if total == 0:
            raise InputError("no scored position yet: at least one sequence must be done.")
        matrix = group_grams.sum(axis=0) / total
        return cls(matrix, units, provenance, group_grams, group_positions, group_risks)

    @classmethod
    def merge(cls, parts: Sequence[Curvature]) -> Curvature:
        """One curvature from builds over disjoint sequences of the same model and settings.

        Groups of the same number are added, so shards that own whole groups give the bits of one
        build. A part of fewer sequences than groups has fewer groups; the missing ones are empty.
        Parts built with `BuildOptions(shard=...)` must be all shards of one build (merging.py).

        Raises:
            MismatchError: units or settings differ (named), or a sequence occurs in two builds.
            InputError: nothing to merge, a part came without group Grams, or shards are missing.
        """
        if any("shard" in part.provenance for part in parts):
            return merge_shards(parts)
        return cls.from_groups(*sum_builds(parts))

    @classmethod
    def from_release(cls, folder: str | os.PathLike[str]) -> Curvature:
        """Read the authors' released layout: `registry.json` and `matrices/H.npy`.

        Raises:
            FileNotFoundError: one of the two files is missing.
            FileFormatError: H.npy is a Git LFS pointer, or a file does not have the layout.
        """
        return cls(*read_release(folder))

    def with_provenance(self, **changes: Any) -> Curvature:
        """The same curvature with some provenance fields changed."""
        return replace(self, provenance=self.provenance | changes)

    def __repr__(self) -> str:
        name = self.provenance.get("model_name", "a model")
        done = self.provenance.get("sequences_done")
        rows = "" if done is None else f", {done} sequences"
        partial = "" if self.provenance.get("complete", True) else " (interrupted)"
        if "shard" in self.provenance:
            partial = " (shard {} of {})".format(*self.provenance["shard"])
        means = {key: value for key, value in self.block_means().items() if np.isfinite(value)}
        blocks = ", ".join(f"{key} {value:.3f}" for key, value in means.items()) or "of no pair"
        kind = "Preview of the curvature" if self.is_preview else "Curvature"
        return (
            f"{kind} of {name}: M = {len(self.units)}{rows}{partial}; trace "
            f"{self.saliency.sum():.3g} nats per token; mean |correlation| {blocks}"
        )


def merge_shards(parts: Sequence[Curvature]) -> Curvature:
    """Put all shards of one build together: to the bit what one process would have built.

    That holds for shards of one kind of device, with one number of threads and one
    `units_per_batch`. Where these differ the result is as good, but its last digits are its own,
    and an event in the provenance says so.

    Args:
        parts: curvatures built with `BuildOptions(shard=(i, n))`, one of each i, in any order.

    Raises:
        InputError: a part is not a shard, is not finished, or shards are missing (which).
        MismatchError: a setting differs (named), or a shard is there twice.
    """
    return Curvature.from_groups(*join_shards(parts))


def _require_curvature(matrix: np.ndarray, size: int) -> None:
    if matrix.shape != (size, size):
        raise InputError(
            f"H has shape {matrix.shape}, but there are {size} units. Give one row and one column "
            "per unit."
        )
    if not np.isfinite(matrix).all():
        u, v = np.argwhere(~np.isfinite(matrix))[0]
        raise NumericalError(
            f"H[{u}, {v}] is {matrix[u, v]}. Rebuild; half precision may overflow."
        )
    scale = float(np.abs(matrix).max(initial=0.0))
    # float32 Grams are symmetric to rounding of their largest entry, and no further
    gap = float(np.abs(matrix - matrix.T).max(initial=0.0))
    if gap > 1e-5 * scale:
        raise NumericalError(
            f"H is not symmetric: largest |H_uv - H_vu| is {gap:.3g} against entries up to "
            f"{scale:.3g}. It is not a Gram matrix; check its source."
        )
    lowest = float(np.diagonal(matrix).min(initial=0.0))
    if lowest < -1e-9 * scale:
        raise NumericalError(
            f"H has a negative diagonal entry {lowest:.3g}, impossible for a Gram matrix "
            "(Proposition gram). Check its source."
        )


def _correlate(matrix: np.ndarray) -> np.ndarray:
    scale = np.sqrt(np.clip(np.diagonal(matrix), 0.0, None))
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
    correlation = np.clip(matrix * inverse[:, None] * inverse[None, :], -1.0, 1.0)
    np.fill_diagonal(correlation, 1.0)
    return correlation


def _mean(values: np.ndarray, mask: np.ndarray) -> float:
    return float(values[mask].mean()) if mask.any() else float("nan")


TRUSTED_STRENGTH = (
    0.5  # the largest lambda at which the edges of a preview choose plans worth a look
)


def preview_note(curvature: Curvature, view: str = "instrument") -> str:
    """What a preview of H is worth, in three sentences; empty where H is not a preview.

    States the number of probes, their rank among the M units, and the mean |correlation| that pure
    probe noise reads (`probes`, `rank` and `noise_floor` of the provenance); says of a number that
    is not there, or not finite, that it is not recorded.

    Args:
        curvature: H [M, M]; `Curvature.is_preview` decides.
        view: what shows it and must be made again on the real H: "instrument" or "picture".
    """
    if not curvature.is_preview:
        return ""
    known = curvature.provenance
    probes, rank = _number(known.get("probes")), _number(known.get("rank"))
    floor = _number(known.get("noise_floor"))
    count = "random probes, their number not recorded," if probes is None else f"{probes:g} probes"
    of = "rank not recorded" if rank is None else f"rank {rank:g} of {len(curvature.units)}"
    noise = (
        "its noise floor not recorded"
        if floor is None
        else f"where noise alone reads a mean |correlation| of {floor:.2g}"
    )
    return (
        f"Preview: H from {count} ({of}), {noise}. It comes from gradients, for infinitesimal "
        f"changes and not for removals; lambda above {TRUSTED_STRENGTH:g} is not to be trusted and "
        f"the gate says nothing. Build H by ablations and make the {view} again."
    )


def _number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    known = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if known else None  # type: ignore[arg-type]
