"""Edge variants of H: the paper's ablations of the edges, in one place.

They are those of appendix "Extended Ablations" and of Table "Joint co-pruning vs. single-module
pruning". A variant changes the matrix that is solved on. The predicted risk of the plan always
comes from the full signed H.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ..base.arguments import require_choice, require_type
from ..base.errors import InfeasibleError, InputError
from ..curvature.matrix import BLOCKS, Curvature
from ..models.kinds import KINDS
from .greedy import Greedy
from .guards import FREE, Guards, Rules
from .selection import Selection
from .solve import solve_greedy
from .targets import require_strength

Structure = Literal["full", "diagonal", "within_module", "attention", "cross", "ffn"]
Reach = Literal["all", "adjacent", "within_layer"]
Sign = Literal["signed", "clipped", "absolute", "correlation_clipped"]

_FURTHEST = {"adjacent": 1, "within_layer": 0}  # most layers between the two ends of an edge


# Variants of H ----------------------------------------------------------------------------------


def edge_variant(
    curvature: Curvature,
    structure: Structure = "full",
    reach: Reach = "all",
    sign: Sign = "signed",
    keep_diagonal: bool = True,
) -> Curvature:
    """Drop or change some edges of H (appendix "Extended Ablations", (i) to (iii)).

    An edge is an entry H_uv, u != v. The three choices are independent and combine: an edge is kept
    if `structure` and `reach` both keep it. `sign` is applied to the full H first.

    Args:
        curvature: H [M, M] float64, nats per token.
        structure: "full"; "diagonal" (no edge: the lambda = 0 selector); "within_module" (the
            paper's "no attn-FFN": both ends of one kind, in any layers; for one layer and kind add
            reach="within_layer"); "attention", "cross" and "ffn" keep that block alone.
        reach: "all"; "adjacent": layers differ by at most 1; "within_layer": same layer.
        sign: "signed"; "clipped": max(H_uv, 0); "absolute": |H_uv|; "correlation_clipped": rho_uv
            clipped to [-1, 1] ("Scope of Applicability", 32B: none exceeds 1), so |H_uv| is at
            most sqrt(H_uu H_vv). The last changes a Gram matrix by rounding only; it matters for
            matrices that are not one.
        keep_diagonal: False also zeroes the diagonal, as the paper's collapsing "block only" rows
            do. A unit without edges in the block then looks free to remove.

    Returns:
        A Curvature over the same units, which may be indefinite, without group Grams or risks. Its
        provenance lists the variants it went through and the fingerprint of the H before them.
    """
    require_type(curvature, Curvature, "curvature")
    choices = {"structure": structure, "reach": reach, "sign": sign}
    for (name, value), known in zip(choices.items(), (Structure, Reach, Sign), strict=True):
        require_choice(value, known, name)
    matrix = np.where(
        _kept_edges(curvature, structure, reach), _with_sign(curvature.matrix, sign), 0.0
    )
    np.fill_diagonal(matrix, curvature.saliency if keep_diagonal else 0.0)
    return _variant(curvature, matrix, choices | {"keep_diagonal": bool(keep_diagonal)})


def measured_diagonal(curvature: Curvature) -> Curvature:
    """Replace the diagonal of H by the measured costs 2 R(u) and keep its correlations.

    1/2 H_uu is the quadratic prediction of R(u), the KL of removing u alone. Where the teacher is
    sure of its token it falls far short for some units. The build measures R(u) anyway, on the
    tokens of `Curvature.risk_support`. Here

        H'_uv = rho_uv * 2 sqrt(R(u) R(v)),    so 1/2 H'_uu = R(u).

    This scales rows and columns of H, so H' is a Gram matrix too. Solve on it with `solve_variant`,
    which predicts risks with H itself. It is not in the paper.
    """
    risk = curvature.single_unit_risk
    if risk is None:
        raise InputError("this H has no measured risks of single units. Build it by ablations.")
    # by rounding, a measured KL of almost 0 may be below 0
    root = np.sqrt(2 * np.clip(risk, 0.0, None))
    matrix = curvature.correlation() * np.outer(root, root)
    np.fill_diagonal(matrix, root**2)
    return _variant(curvature, matrix, {"diagonal": "measured"})


def _variant(curvature: Curvature, matrix: np.ndarray, settings: dict[str, Any]) -> Curvature:
    """A matrix made from H, whose provenance lists what was done to it."""
    before = curvature.provenance.get("edge_variants", [])
    origin = curvature.provenance.get("variant_of", curvature.fingerprint)
    provenance = {"edge_variants": [*before, settings], "variant_of": origin}
    return Curvature(matrix, curvature.units, curvature.provenance | provenance)


def _kept_edges(curvature: Curvature, structure: str, reach: str) -> np.ndarray:
    """Mask of the ordered pairs u != v that a structure and a reach both keep: bool [M, M]."""
    kinds, layers = curvature.units.kinds, curvature.units.layers
    near = np.abs(layers[:, None] - layers[None, :]) <= _FURTHEST.get(reach, np.inf)
    if structure in BLOCKS:
        return near & curvature.pair_mask(structure)
    if structure == "within_module":
        return near & (kinds[:, None] == kinds[None, :])
    return near & (structure == "full")


def _with_sign(matrix: np.ndarray, sign: str) -> np.ndarray:
    """The entries of H [M, M] after sign handling; the caller puts the diagonal back."""
    if sign == "clipped":
        return np.maximum(matrix, 0.0)
    if sign == "absolute":
        return np.abs(matrix)
    if sign == "correlation_clipped":
        scale = np.sqrt(np.clip(np.diagonal(matrix), 0.0, None))
        bound = np.outer(scale, scale)
        return np.clip(matrix, -bound, bound)
    return matrix


def solve_variant(
    curvature: Curvature,
    variant: Curvature,
    ratio: float,
    interaction_strength: float = 1.0,
    guards: Guards = FREE,
) -> Selection:
    """Solve on a variant and predict with the full H: the plan of one ablation row.

    Node and edge terms [k] (hence predicted risk, marginals and objective, nats per token) and the
    fingerprint are those of the full H, so the marginals are not the ones that greedy compared.
    """
    curvature.units.require_same(variant.units, mine="the curvature", theirs="the variant")
    return solve_greedy(variant, ratio, interaction_strength, guards).predicted_by(curvature)


def plain_greedy(
    curvature: Curvature,
    ratio: float,
    interaction_strength: float = 1.0,
    guards: Guards = FREE,
) -> Selection:
    """Solve by greedy on the marginal itself, not per parameter: Alg. 2 without dividing by c_u.

    This is `solve_greedy` for the ablation of cost normalization; its arguments and errors are the
    same. With equal costs the two agree.
    """
    strength = require_strength(interaction_strength)
    return Greedy(curvature, Rules(curvature.units, guards, ratio), per_cost=False).solve(strength)


# The table of ablations ---------------------------------------------------------------------------

# axis, name of the row, arguments of edge_variant; the first row of an axis is the method itself
_VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("structure", "full H", {}),
    ("structure", "diagonal", {"structure": "diagonal"}),
    ("structure", "within module", {"structure": "within_module"}),
    *(("structure", f"{block} block", {"structure": block}) for block in BLOCKS),
    *(
        ("structure", f"{block} block, no diagonal", {"structure": block, "keep_diagonal": False})
        for block in BLOCKS
    ),
    ("reach", "all layers", {}),
    ("reach", "adjacent layers", {"reach": "adjacent"}),
    ("reach", "within layer", {"reach": "within_layer"}),
    ("sign", "signed", {}),
    ("sign", "clipped", {"sign": "clipped"}),
    ("sign", "absolute", {"sign": "absolute"}),
    ("sign", "correlation clipped", {"sign": "correlation_clipped"}),
)


def structure_table(
    curvature: Curvature,
    ratio: float,
    interaction_strength: float = 1.0,
    guards: Guards = FREE,
) -> list[dict[str, Any]]:
    """Solve every row of the edge ablations, ready for `measure_plans` ("Extended Ablations").

    The axes are edge structure, reach, sign, the kinds that may be pruned (joint, head-only,
    FFN-only) and the greedy rule (per cost, plain). The first row of each axis is the same plan,
    that of the method; `measure_plans` measures equal plans once.

    The kinds axis restricts `guards.kinds`; it is omitted if they name only one kind.

    Returns:
        One dict per row: "axis", "name", "selection" (its predicted risk is under the full H) and
        "note". If a row has no plan (head-only at a high ratio, say), "selection" is None and
        "note" gives the reason; otherwise "note" is empty.
    """
    settings = (ratio, interaction_strength)
    solve_greedy(curvature, *settings, guards)  # raises where even the method has no plan
    rows = [
        _row(axis, name, solve_variant, curvature, edge_variant(curvature, **v), *settings, guards)
        for axis, name, v in _VARIANTS
    ]
    if set(guards.kinds) >= set(KINDS):
        for name, kinds in (("joint", KINDS), ("head-only", KINDS[:1]), ("FFN-only", KINDS[1:])):
            only = replace(guards, kinds=kinds)
            rows.append(_row("kinds", name, solve_greedy, curvature, *settings, only))
    rows.append(_row("rule", "per cost", solve_greedy, curvature, *settings, guards))
    rows.append(_row("rule", "plain", plain_greedy, curvature, *settings, guards))
    return rows


def _row(axis: str, name: str, solve: Callable[..., Selection], *arguments: Any) -> dict[str, Any]:
    """One row of the table; if no plan is reached, the reason becomes its note."""
    try:
        selection, note = solve(*arguments), ""
    except InfeasibleError as error:
        selection, note = None, str(error)
    return {"axis": axis, "name": name, "selection": selection, "note": note}
