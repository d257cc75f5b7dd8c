"""CoCurve and its three controls: one matrix H, four ways to select from it.

`measure` builds H by single-unit ablations, which is the expensive part. If you already have H,
pass it to `adopt`; one build then serves all four.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..base.errors import FileFormatError, InfeasibleError, InputError
from ..calibration import CalibrationSet
from ..curvature.groups import Groups
from ..curvature.matrix import Curvature
from ..estimator.estimate import estimate_curvature
from ..extensions.analysis.gains import solve_gains
from ..extensions.analysis.gate import redundancy_gate
from ..extensions.analysis.variants import measured_diagonal, solve_variant
from ..models.unit import Kind
from ..models.units import UnitSet
from ..solver.guards import FREE, Guards
from ..solver.selection import Selection
from ..solver.solve import solve_greedy
from ..solver.targets import require_ratio, require_strength
from .base import Evidence, Method

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Strength = float | Literal["gate"]


@dataclass(frozen=True)
class CoCurve(Method):
    """Cost-normalized greedy on H: (1/2 H_uu + lambda sum over v in S of H_uv) / c_u (Alg. 2).

    Unlike the other methods it scores pairs, so a unit's place depends on the units removed before
    it. It reads the calibration's scored positions alone. Scores need no sum over columns, because
    whole units are ablated. Compensation (eq. comp) is off, as in the paper's selection-only
    comparison. The loop stops at the ratio, as the shared fill does; where the layer caps leave
    greedy without a unit, it raises with the share it reached.

    Attributes:
        interaction_strength: lambda >= 0; 1 is the paper's untuned default; "gate" takes the value
            the redundancy gate recommends for this H (0 or 1), also where it is undecided.
        top_r: r, size of the teacher's support; a smaller vocabulary is taken whole.
        compensate: give kept FFN groups the gains of eq. (comp), with ridge 0.2 and clip 1; they
            travel in the selection, and pruning folds them into W_down. `compare` takes them only
            where they help on held-out rows.
        measured_diagonal: solve on H with the measured KL of single units on its diagonal (see
            `variants.measured_diagonal`), on the top-r support of H; not in the paper.
    """

    interaction_strength: Strength = 1.0
    top_r: int = 256
    compensate: bool = False
    measured_diagonal: bool = False

    name = "cocurve"
    title = "CoCurve"
    only: ClassVar[Kind | None] = None

    def __post_init__(self) -> None:
        if isinstance(self.interaction_strength, str):
            if self.interaction_strength != "gate":
                raise InputError(
                    f"interaction_strength is {self.interaction_strength!r}. Give a number of at "
                    'least 0, or "gate".'
                )
        else:
            require_strength(self.interaction_strength)
        if self.top_r < 1:
            raise InputError(f"top_r is {self.top_r}. Give a support of at least one token.")
        # an option decides it, so the instance says it, not the class
        object.__setattr__(self, "repairs", self.compensate)

    def measure(
        self,
        model: PreTrainedModel,
        units: UnitSet,
        calibration: CalibrationSet,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> Evidence:
        """Build H by ablating every unit alone; nothing is drawn. See `Method.measure`."""
        return self.adopt(
            estimate_curvature(model, units, calibration, self.top_r, progress=progress)
        )

    def adopt(self, curvature: Curvature) -> Evidence:
        """Make this method's evidence of an existing H, without the model."""
        arrays = {"matrix": curvature.matrix} | curvature.grouped
        known = ("model_fingerprint", "model_dtype", "calibration_fingerprint", "top_r")
        provenance: dict[str, Any] = {key: curvature.provenance.get(key) for key in known}
        options = asdict(self) | {"top_r": provenance["top_r"]}  # of that H, not of this instance
        provenance |= {"seed": None, "options": options, "curvature": dict(curvature.provenance)}
        return Evidence(self.name, curvature.units, arrays, provenance)

    def select(
        self, evidence: Evidence, units: UnitSet, ratio: float, guards: Guards = FREE
    ) -> Selection:
        """Solve the greedy plan on H, with its predicted risk. See `Method.select`."""
        self.require_own(evidence, units)
        ratio = require_ratio(ratio)
        curvature = curvature_of(evidence)
        guards = self._narrowed(guards, ratio)
        strength = self.interaction_strength
        if strength == "gate":
            strength = _gated(curvature)
        if self.measured_diagonal:
            solved_on = measured_diagonal(curvature)
            selection = solve_variant(curvature, solved_on, ratio, float(strength), guards)
        else:
            selection = solve_greedy(curvature, ratio, float(strength), guards)
        if self.compensate:
            selection = selection.with_gains(solve_gains(curvature, selection))
        return selection

    def _narrowed(self, guards: Guards, ratio: float) -> Guards:
        """The guards with the one kind this method prunes, where it prunes only one."""
        if self.only is None:
            return guards
        if not guards.allows(self.only):
            raise InfeasibleError(
                f"{self.name} prunes {self.only} units, but the guards allow {guards.kinds}. "
                f"Allow {self.only!r}, or use another method.",
                requested_ratio=ratio,
                reachable_ratio=0.0,
            )
        return replace(guards, kinds=(self.only,))


@dataclass(frozen=True)
class Diagonal(CoCurve):
    """CoCurve at lambda = 0: 1/2 H_uu / c_u alone, the OBD selector on the same H."""

    interaction_strength: Strength = field(default=0.0, init=False)

    name = "diagonal"
    title = "Diagonal only"


@dataclass(frozen=True)
class HeadOnly(CoCurve):
    """CoCurve on attention units alone; a ratio above their share of the cost is infeasible."""

    name = "head-only"
    title = "Heads only"
    only = "attention"


@dataclass(frozen=True)
class FfnOnly(CoCurve):
    """CoCurve on FFN groups alone; a ratio above their share of the cost is infeasible."""

    name = "ffn-only"
    title = "FFN only"
    only = "ffn"


def curvature_of(evidence: Evidence) -> Curvature:
    """Restore the Curvature in an evidence of CoCurve or its controls, bit for bit."""
    matrix = evidence.arrays.get("matrix")
    if matrix is None:
        raise FileFormatError(
            f"the evidence of {evidence.method!r} holds no curvature matrix. Measure with one of "
            "cocurve, diagonal, head-only, ffn-only."
        )
    facts = evidence.provenance.get("curvature", {})
    return Curvature(matrix, evidence.units, dict(facts), Groups.named(evidence.arrays))


def _gated(curvature: Curvature) -> float:
    gate = redundancy_gate(curvature)
    if gate.recommended is None:
        raise InputError(
            f"the redundancy gate recommends no lambda for this H: {gate.reason} Give "
            "interaction_strength a number."
        )
    return gate.recommended
