"""The co-pruning graph: units as nodes, signed curvature as edges, and its bridge units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import networkx as nx
import numpy as np
from scipy.stats import rankdata

from ..base.arguments import as_float, as_int, require_choice, require_type
from ..base.errors import InputError
from .matrix import Curvature

Connectivity = Literal["sum", "relative"]
FEW = 5  # if fewer units than this pass both thresholds, units are ranked instead


# The graph --------------------------------------------------------------------------------------


def edge_graph(
    curvature: Curvature, threshold: float | None = None, top_k: int | None = None
) -> nx.Graph:
    """Make the graph of the co-pruning curvature; every attribute is a plain Python value.

    Args:
        curvature: H [M, M].
        threshold: keep edges with |rho_uv| >= threshold, in [0, 1]; None keeps all.
        top_k: keep the k edges of largest |rho_uv| in the whole graph (of those above the
            threshold, if both are given); ties go to the lowest (u, v). None keeps all.

    Returns:
        Nodes 0 to M - 1 with name, kind, layer, index, cost (parameters), saliency H_uu and
        connectivity b_u (nats per token). Edges with `curvature` H_uv (nats per token) and
        `correlation` rho_uv, both signed. A pair with H_uv = 0 is never an edge.
    """
    require_type(curvature, Curvature, "curvature")
    threshold = None if threshold is None else as_float(threshold, "threshold")
    top_k = None if top_k is None else as_int(top_k, "top_k")
    if threshold is not None and not 0 <= threshold <= 1:
        raise InputError(
            f"threshold is {threshold}, but it bounds |correlation|. Give one in [0, 1]."
        )
    correlations = curvature.correlation()
    strength = np.triu(np.abs(correlations), 1).ravel()
    found = np.triu(curvature.matrix != 0, 1).ravel() & (strength >= (threshold or 0.0))
    keep = np.flatnonzero(found)  # by u, then v
    if top_k is not None:
        # a stable sort, so that ties go to the lowest (u, v)
        keep = keep[np.argsort(-strength[keep], kind="stable")[:top_k]]
    first, second = np.divmod(keep, len(curvature.units))
    graph = nx.Graph()
    saliency, connectivity = curvature.saliency.tolist(), curvature.connectivity.tolist()
    for number, unit in enumerate(curvature.units):
        graph.add_node(
            number,
            name=unit.name,
            kind=unit.kind,
            layer=unit.layer,
            index=unit.index,
            cost=unit.cost,
            saliency=saliency[number],
            connectivity=connectivity[number],
        )
    edges, correlated = curvature.matrix.flat[keep], correlations.flat[keep]
    pairs = zip(first.tolist(), second.tolist(), edges.tolist(), correlated.tolist(), strict=True)
    graph.add_edges_from(
        (u, v, {"curvature": edge, "correlation": correlation}) for u, v, edge, correlation in pairs
    )
    return graph


# Bridge units -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bridges:
    """Bridge units: low saliency, high connectivity; iterates over unit indices.

    Attributes:
        indices: the bridge units; ascending, or by falling residual if `ranked`.
        saliency_threshold: the largest H_uu that counts as low, nats per token.
        connectivity_threshold: the smallest connectivity that counts as high, in the unit of the
            measure used.
        residual: [M] log connectivity minus its least-squares line on log saliency; NaN for units
            with no saliency or no connectivity.
        ranked: whether too few units passed both thresholds, so that those of largest residual are
            given instead.
        note: how the units were found, in a sentence.
        saliency_connectivity_correlation: Pearson correlation over all units (the paper reports
            0.63); NaN if one of the two is constant.
        saliency_connectivity_rank_correlation: Spearman correlation, likewise.
    """

    indices: tuple[int, ...]
    saliency_threshold: float
    connectivity_threshold: float
    residual: np.ndarray
    ranked: bool
    note: str
    saliency_connectivity_correlation: float
    saliency_connectivity_rank_correlation: float

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        return f"Bridges: {len(self)} of {len(self.residual)} units. {self.note}"


def bridge_units(
    curvature: Curvature,
    saliency_quantile: float = 0.5,
    connectivity_quantile: float = 0.5,
    connectivity: Connectivity = "sum",
) -> Bridges:
    """Find the units that are cheap to remove alone but tied to many others.

    See appendix "Mechanism Analysis". The paper gives no thresholds (its 8B has 87 of 768 units;
    its example lies in the bottom 31 % of saliency and the top 10 % of connectivity). Here H_uu is
    at most its median and connectivity at least its median. If fewer than five units pass, these
    thresholds say little about the model. Then the five units that are most connected for their
    saliency are given (largest positive residual of log connectivity on log saliency), and
    `ranked` is True.

    Args:
        curvature: H [M, M].
        saliency_quantile: the quantile of H_uu up to which saliency is low, [0, 1].
        connectivity_quantile: the quantile from which connectivity is high, [0, 1].
        connectivity: "sum" is b_u = sum over v != u of |H_uv|, nats per token, which grows with
            sqrt(H_uu) by construction; "relative" is the sum over v != u of |rho_uv|, which has no
            unit.
    """
    require_type(curvature, Curvature, "curvature")
    for name, value in (
        ("saliency_quantile", saliency_quantile),
        ("connectivity_quantile", connectivity_quantile),
    ):
        if not 0 <= value <= 1:
            raise InputError(f"{name} is {value}, but a quantile lies in [0, 1]. Give one there.")
    require_choice(connectivity, Connectivity, "connectivity")
    saliency, degree = curvature.saliency, curvature.connectivity
    if connectivity == "relative":
        degree = np.abs(curvature.correlation()).sum(axis=1) - 1
    low, high = np.quantile(saliency, saliency_quantile), np.quantile(degree, connectivity_quantile)
    residual = _residual(saliency, degree)
    found = np.flatnonzero((saliency <= low) & (degree >= high))
    note = (
        f"Saliency at most its {saliency_quantile:g} quantile, {connectivity} connectivity at "
        f"least its {connectivity_quantile:g} quantile."
    )
    ranked = len(found) < FEW
    if ranked:
        note = (
            f"Only {len(found)} units have low saliency and high {connectivity} connectivity, so "
            "these are the most connected for their saliency (log-log residual)."
        )
        order = np.argsort(np.where(np.isnan(residual), np.inf, -residual), kind="stable")[:FEW]
        found = order[residual[order] > 1e-9]  # for units on the line rounding decides the sign
    return Bridges(
        indices=tuple(found.tolist()),
        saliency_threshold=float(low),
        connectivity_threshold=float(high),
        residual=residual,
        ranked=ranked,
        note=note,
        saliency_connectivity_correlation=_pearson(saliency, degree),
        saliency_connectivity_rank_correlation=_pearson(rankdata(saliency), rankdata(degree)),
    )


def _residual(saliency: np.ndarray, degree: np.ndarray) -> np.ndarray:
    """Least-squares residual [M] of log degree on log saliency; NaN where a log is undefined."""
    residual = np.full(len(saliency), np.nan)
    live = (saliency > 0) & (degree > 0)
    if live.any():
        x, y = np.log(saliency[live]), np.log(degree[live])
        x, y = x - x.mean(), y - y.mean()
        spread = float(x @ x)
        residual[live] = y - (float(x @ y) / spread if spread > 0 else 0.0) * x
    return residual


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else float("nan")
