"""Edge variants of H: the paper's ablations of the edges, in one place.

They are those of appendix "Extended Ablations". A variant changes the matrix that is solved on. The
predicted risk of the plan always comes from the full signed H.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ...base.arguments import require_choice, require_type
from ...base.errors import InputError
from ...curvature.matrix import BLOCKS, Curvature
from ...solver.guards import FREE, Guards
from ...solver.selection import Selection
from ...solver.solve import solve_greedy

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
    require_choice(structure, Structure, "structure")
    require_choice(reach, Reach, "reach")
    require_choice(sign, Sign, "sign")
    matrix = np.where(
        _kept_edges(curvature, structure, reach), _with_sign(curvature.matrix, sign), 0.0
    )
    np.fill_diagonal(matrix, curvature.saliency if keep_diagonal else 0.0)
    choices = {"structure": structure, "reach": reach, "sign": sign}
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
    scale = np.sqrt(np.clip(np.diagonal(matrix), 0.0, None))
    bound = np.outer(scale, scale)
    signs = {
        "signed": matrix,
        "clipped": np.maximum(matrix, 0.0),
        "absolute": np.abs(matrix),
        "correlation_clipped": np.clip(matrix, -bound, bound),
    }
    return signs[sign]


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
