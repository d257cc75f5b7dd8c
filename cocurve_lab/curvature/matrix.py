"""The co-pruning curvature H: the matrix that every later step reads.

This file needs numpy only: a stored H opens without torch, without a GPU and without the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..base.arguments import as_list, as_path, require_type
from ..base.atomic import write_atomically
from ..base.errors import InputError
from ..base.origin import ALLOWED, record_in
from ..base.schema import reading
from ..base.storage import dump_npz, dump_plain, fingerprint, load_npz, load_plain, require_settings
from ..models.kinds import KINDS
from ..models.units import Unit, UnitSet
from .groups import Groups, Saturation
from .merging import join_shards, sum_builds
from .release import FORMS, RELEASE, SHIPPED
from .settings import FULL_VOCABULARY, Facts, require_matrix, require_own_grams, require_stored

FORMAT, VERSION = "cocurve-curvature", 1
CROSS = "cross"  # the block of pairs of different kinds
BLOCKS = (KINDS[0], CROSS, *KINDS[1:])


@dataclass(frozen=True, eq=False)
class Curvature:
    """The matrix H (eq. gram), its units, and how it was built.

    Attributes:
        matrix: H [M, M] float64, symmetric, diagonal >= 0, in nats per token. 1/2 s^T H s predicts
            the KL of removing the units s (eq. quadratic).
        units: the M units, in the order of rows and columns.
        facts: the model, the text and the settings of the build (`settings.FACTS`), plain values.
        groups: the sums over groups of sequences that H comes from; None for a matrix without them.
        allowed: marks of checkpoints of other weights that it may be used on; no file has them.
    """

    matrix: np.ndarray
    units: UnitSet
    facts: Facts = field(default_factory=dict)
    groups: Groups | None = None
    allowed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if np.asarray(self.matrix).dtype.kind not in "fiu":  # complex would lose its other half
            raise InputError(
                f"H has dtype {np.asarray(self.matrix).dtype}, but its entries are real numbers. "
                "Give a float64 matrix."
            )
        matrix = np.array(self.matrix, dtype=np.float64)  # a copy, made read-only below
        object.__setattr__(self, "matrix", matrix)
        require_matrix(matrix, len(self.units))
        # exact symmetry (Alg. 1), so that the solver may read a row where the paper has a column
        matrix[:] = (matrix + matrix.T) / 2
        matrix.flags.writeable = False
        if self.groups is not None:
            require_own_grams(matrix, self.groups)

    @classmethod
    def from_groups(cls, units: UnitSet, groups: Groups, facts: Facts) -> Curvature:
        """Make H = sum of group Grams / number of positions (eq. gram)."""
        return cls(groups.matrix, units, facts, groups)

    @property
    def provenance(self) -> Facts:
        """The `facts`."""
        return self.facts

    @property
    def grouped(self) -> dict[str, np.ndarray]:
        """The arrays of `groups` by their names in a file, such as "group_grams"."""
        arrays = {} if self.groups is None else self.groups.arrays
        return {f"group_{name}": array for name, array in arrays.items()}

    @property
    def group_grams(self) -> np.ndarray | None:
        """Sums over positions of products of features, by group [G, M, M], nats."""
        return None if self.groups is None else self.groups.grams

    @property
    def group_positions(self) -> np.ndarray | None:
        """Scored positions in each group [G]."""
        return None if self.groups is None else self.groups.positions

    @property
    def group_risks(self) -> np.ndarray | None:
        """Sums over positions of the KL of removing each unit alone, by group [G, M], nats."""
        return None if self.groups is None else self.groups.risks

    @property
    def matrix_name(self) -> str:
        """What the matrix is: "H", the paper's, or the name of what was measured instead."""
        return str(self.provenance.get("surrogate", "H"))

    def require_gram(self, what: str) -> None:
        """Raise InputError, naming `what` needs a Gram matrix, unless this is an H alone."""
        if self.matrix_name != "H":
            raise InputError(
                f"{what} rests on H being a Gram matrix (Proposition gram), and this is a "
                f"{self.matrix_name} with its smallest eigenvalue at "
                f"{np.linalg.eigvalsh(self.matrix)[0]:.3g}. Use the H of the model."
            )

    # Statistics ---------------------------------------------------------------------------------

    @cached_property
    def saliency(self) -> np.ndarray:
        """Node saliency H_uu [M], nats per token; removing u alone costs about half of it."""
        return np.diagonal(self.matrix).copy()

    @cached_property
    def connectivity(self) -> np.ndarray:
        """b_u = sum over v != u of |H_uv| [M], nats per token (appendix "Mechanism Analysis")."""
        return np.abs(self.matrix).sum(axis=1) - np.abs(self.saliency)

    @cached_property
    def single_unit_risk(self) -> np.ndarray | None:
        """Measured KL [M] of removing each unit alone, R({u}), nats per token, or None.

        It is over the tokens that `risk_support` names. The teacher's top-r support misses what
        moves between it and the rest, some percent of the sum over units on the models measured;
        `BuildOptions(full_vocabulary=True)` does not.
        """
        if self.groups is None or self.groups.risks is None:
            return None
        return self.groups.risks.sum(axis=0) / self.groups.positions.sum()

    @cached_property
    def saturation(self) -> Saturation | None:
        """How sure the teacher is on the calibration text; None where the build did not count it.

        It warns where H cannot be trusted: see `Saturation.warning`.
        """
        groups = self.groups
        if (
            groups is None
            or groups.risks is None
            or groups.sure_positions is None
            or groups.sure_risks is None
        ):
            return None
        total = float(groups.risks.sum())
        share = float(groups.sure_risks.sum()) / total if total > 0 else math.nan
        return Saturation(float(groups.sure_positions.sum() / groups.positions.sum()), share)

    @property
    def risk_support(self) -> str:
        """The tokens that `single_unit_risk` is over, in words."""
        if self.provenance.get("risk_support") == FULL_VOCABULARY:
            return f"the {FULL_VOCABULARY}"
        top_r = self.provenance.get("top_r")
        return "the top-r support" if top_r is None else f"the top-{top_r} support"

    def correlation(self) -> np.ndarray:
        """Return the signed curvature correlation rho_uv = H_uv / sqrt(H_uu H_vv) [M, M].

        The diagonal is 1. Units whose removal changes nothing (H_uu = 0) correlate 0 with others.
        Those of measured interactions may lie beyond 1 and are shown as they are.
        """
        return correlate(self.matrix, 1.0 if self.matrix_name == "H" else math.inf)

    def block_means(self) -> dict[str, float]:
        """Return the mean |rho_uv| of each block: within attention, across kinds, within FFN.

        A block without pairs (a model pruned to one kind, say) is NaN.
        """
        blocks = dict.fromkeys([*BLOCKS, *self.units.kinds.tolist()])
        strength = np.abs(self.correlation())
        return {block: _mean(strength, self.pair_mask(block)) for block in blocks}

    def pair_mask(self, block: str) -> np.ndarray:
        """Return the mask of the ordered pairs u != v of a block (one of BLOCKS): bool [M, M]."""
        kinds = self.units.kinds
        if block == CROSS:
            mask = kinds[:, None] != kinds[None, :]
        else:
            mask = np.outer(kinds == block, kinds == block)
        np.fill_diagonal(mask, False)
        return mask

    @property
    def ffn_redundancy(self) -> float:
        """Mean |rho| over FFN pairs, the statistic that gates lambda (Section "Scope")."""
        return self.block_means()["ffn"]

    def spectrum(self) -> np.ndarray:
        """Return the eigenvalues of H [M], largest first, nats per token.

        A Gram matrix has none below 0.
        """
        self.require_gram("the spectrum")
        return np.linalg.eigvalsh(self.matrix)[::-1]

    def risk(self, pruned: Iterable[Unit | str | int]) -> float:
        """Predict the risk of removing units: 1/2 s^T H s (eq. quadratic), nats per token."""
        chosen = self.units.indices(pruned)
        return 0.5 * float(self.matrix[np.ix_(chosen, chosen)].sum())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of matrix and units."""
        return fingerprint(self.matrix, self.units.fingerprint)

    # Files --------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to `path`: an `.npz` archive if it has that suffix, otherwise a plain pickle.

        An interrupted write leaves no partial file. The pickle contains only containers and bytes,
        and a checksum at its end (see storage.py); `load` reads it without executing anything.
        """
        path = as_path(path, "path")
        dump = dump_npz if path.suffix == ".npz" else dump_plain
        write_atomically(path, dump(self._to_plain()))
        return path

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, expected: dict[str, Any] | None = None
    ) -> Curvature:
        """Read what `save` wrote and check it; `expected` names required values of provenance.

        Or the H that ships with a model, by its file or by the name of the model: "smollm2".

        Raises:
            FileNotFoundError: no such file.
            FileFormatError: truncated, hostile, changed since it was written, or of another format
                or version; or H is not the sum of its group Grams.
            MismatchError: a provenance field differs from `expected`; the field is named.
        """
        path = SHIPPED[path]() if isinstance(path, str) and path in SHIPPED else path
        path = as_path(path, "path")
        read = load_npz if path.suffix == ".npz" else load_plain
        content = read(path, format_name=FORMAT, version=VERSION, others=FORMS)
        with reading(path, "Build it again, or use a copy."):
            curvature = FORMS.get(content["format"], cls._from_plain)(content)
        require_settings(curvature.provenance, expected or {}, f"the curvature in {path}")
        return curvature

    @classmethod
    def _from_plain(cls, content: dict[str, Any]) -> Curvature:
        require_stored(content)
        units, groups = UnitSet.from_plain(content["units"]), Groups.named(content)
        return cls(content["matrix"], units, content["provenance"], groups)

    def _to_plain(self) -> dict[str, Any]:
        single = self.matrix.astype(np.float32)  # half the bytes where nothing is lost
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "matrix": single if np.array_equal(single, self.matrix) else self.matrix,
            "units": self.units.to_plain(),
            "provenance": self.facts,
        }
        return content | self.grouped

    @classmethod
    def merge(cls, parts: Sequence[Curvature]) -> Curvature:
        """Merge builds over disjoint sequences of one model with the same settings.

        Groups of the same number are added. A part with fewer groups than another counts as empty
        in the groups it lacks. Parts built with `BuildOptions(shard=...)` must be all shards of one
        build; see `merge_shards`.
        """
        parts = as_list(parts, "parts")
        for part in parts:
            require_type(part, Curvature, "a part")
        if any("shard" in part.provenance for part in parts):
            return merge_shards(parts)
        groups, facts = sum_builds(parts)
        return cls.from_groups(parts[0].units, groups, facts)

    @classmethod
    def from_release(cls, folder: str | os.PathLike[str]) -> Curvature:
        """Read H and its units from the authors' release: `registry.json` and `matrices/H.npy`."""
        matrix, units, facts = RELEASE().read_release(folder)
        return cls(matrix, units, facts)

    @property
    def origin(self) -> dict[str, Any]:
        """The record of the model of which H is (base/origin.py)."""
        record = record_in(self.provenance) | {"H": self.fingerprint}
        return record | {ALLOWED: self.allowed} if self.allowed else record

    def with_provenance(self, **changes: Any) -> Curvature:
        """Return the same curvature with some provenance fields changed."""
        return replace(self, facts=self.provenance | changes)

    @property
    def rows_of_unfinished(self) -> str:
        """How far an unfinished H is, such as "3 of 64 rows"; "" for a finished one."""
        facts = self.provenance
        if facts.get("complete", True):
            return ""
        return f"{facts['sequences_done']} of {facts['num_sequences']} rows"

    def __repr__(self) -> str:
        facts, kind = self.provenance, "Curvature" if self.matrix_name == "H" else self.matrix_name
        rows = f", {facts['sequences_done']} sequences" if "sequences_done" in facts else ""
        if facts.get("shard"):
            rows += " (shard {} of {})".format(*facts["shard"])
        elif self.rows_of_unfinished:
            rows = f", {self.rows_of_unfinished}"
        means = {block: mean for block, mean in self.block_means().items() if np.isfinite(mean)}
        blocks = ", ".join(f"{block} {mean:.3f}" for block, mean in means.items()) or "of no pair"
        saturated = self.saturation is not None and self.saturation.saturated
        return (
            f"{kind[0].upper()}{kind[1:]} of {facts.get('model_name', 'a model')}: "
            f"M = {len(self.units)}{rows}; trace {self.saliency.sum():.3g} nats per token; "
            f"mean |correlation| {blocks}"
            + ("; the teacher is saturated on this text (see .saturation)" if saturated else "")
        )


def merge_shards(parts: Sequence[Curvature]) -> Curvature:
    """Merge all shards of one build into the H that one process would have built, to the bit.

    The bits are the same if all shards ran on the same kind of device, with the same number of
    threads and the same `units_per_batch`. Otherwise the result is as good, but its last digits
    differ, and an event in the provenance says so.

    `parts` are curvatures built with `BuildOptions(shard=(i, n))`, one of each i, in any order.
    """
    groups, facts = join_shards(parts)
    return Curvature.from_groups(parts[0].units, groups, facts)


def correlate(matrix: np.ndarray, bound: float = 1.0) -> np.ndarray:
    """Correlations [M, M] of a Gram matrix; 0 off the diagonal where a unit's diagonal is 0."""
    scale = np.sqrt(np.clip(np.diagonal(matrix), 0.0, None))
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
    # those of a Gram matrix are beyond 1 by rounding only
    correlation = np.clip(matrix * inverse[:, None] * inverse[None, :], -bound, bound)
    np.fill_diagonal(correlation, 1.0)
    return correlation


def _mean(values: np.ndarray, mask: np.ndarray) -> float:
    return float(values[mask].mean()) if mask.any() else float("nan")
