"""BridgeExplorer: the graph of H, saliency against connectivity, and the bridges in plans."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from ipywidgets import DOMWidget
from traitlets import Bytes, Dict, Enum, Int

import cocurve_lab as cl
from cocurve_lab.curvature.matrix import BLOCKS

from .instrument import Explorer, front, guarded, named_matrix
from .packing import nodes_of, plain, unit_rows
from .traits import Some, Within

MOST_EDGES = 10_000  # sent to the page once; the filters choose among these
PARTNERS = 5
FEW = 24  # edges that pass the default threshold: more cannot be followed by eye
RATIO = 0.2  # of the compared plans, until the session has one


class BridgeExplorer(Explorer):
    """The graph of H: strong edges between units, and the bridges that a diagonal method removes.

    Left, a graph with fixed places (layer across, kind and index down) and the signed correlations
    rho_uv as edges. Right, saliency H_uu against connectivity b_u with the bridge region. Below,
    the bridges and their fate in each plan. All of it is estimated from H; nothing is measured.
    Its arguments are those of `Instrument`.

    Controls (traits):
        threshold: smallest |rho_uv| of a shown edge, [0, 1]; by default about 24 edges pass.
        edges_of: "all" units, or only those with an end among the listed "bridges". By default
            the bridges, unless a threshold is given or no unit is listed.
        sign: "both", "positive" (worse together) or "negative" (losses partly cancel).
        blocks: blocks of shown edges, a subset of ["attention", "cross", "ffn"].
        saliency_quantile, connectivity_quantile: bounds of "low" and "high", [0, 1]; see
            `cl.bridge_units`.
        selected_unit: index of the chosen unit, shared with the session; None for none.

    Sent to the page (traits, not to be set):
        nodes: columns of M values: kind, layer, index, name, saliency and connectivity [nats per
            token], residual (None where it is undefined).
        edge_ends, edge_correlation: the strongest edges by falling |rho|, at most 10,000, as bytes
            of uint32 [E, 2] and float32 [E]. edge_total counts all pairs with H_uv != 0.
        partners, partner_correlation: the 5 partners of largest |H_uv| of each unit, as bytes of
            uint32 [M, 5] and float32 [M, 5]; a unit in its own row means "no more partners".
        bridges: indices, thresholds and note of `cl.bridge_units`, and the flow of each: the sums
            of its positive and negative H_uv by layer, [bridges, layers], nats per token.
        plans: ratio; runs, the removals of greedy at lambda 0 ("diagonal") and 1 ("edge_aware"),
            each with the removed share after it; present and ordered, of the session's plan. The
            page compares the two at that ratio, or at the nearest one where they treat the bridges
            differently.
    """

    _esm = front("bridge.js", render="renderBridge")

    threshold = Within(0.0, min=0, max=1).tag(sync=True)
    edges_of = Enum(("all", "bridges"), "all").tag(sync=True)
    sign = Enum(("both", "positive", "negative"), "both").tag(sync=True)
    blocks = Some(BLOCKS).tag(sync=True)
    saliency_quantile = Within(0.5, min=0, max=1).tag(sync=True)
    connectivity_quantile = Within(0.5, min=0, max=1).tag(sync=True)

    nodes = Dict().tag(sync=True)
    edge_ends = Bytes().tag(sync=True)
    edge_correlation = Bytes().tag(sync=True)
    edge_total = Int().tag(sync=True)
    partners = Bytes().tag(sync=True)
    partner_correlation = Bytes().tag(sync=True)
    bridges = Dict().tag(sync=True)
    plans = Dict().tag(sync=True)

    def _opening(self, controls: dict[str, Any]) -> dict[str, Any]:
        self._ends, self._rho = _strongest_edges(self.curvature)
        partners, rho = _partners(self.curvature)
        residual = [plain(value) for value in cl.bridge_units(self.curvature).residual.tolist()]
        sent = {
            "nodes": nodes_of(self.curvature) | {"residual": residual},
            "edge_ends": self._ends.tobytes(),
            "edge_correlation": self._rho.astype(np.float32).tobytes(),
            "edge_total": int(np.count_nonzero(np.triu(self.curvature.matrix, 1))),
            "partners": partners.astype(np.uint32).tobytes(),
            "partner_correlation": rho.astype(np.float32).tobytes(),
        }
        return sent | controls

    def _opened(self, controls: dict[str, Any]) -> None:
        super()._opened(controls)
        self._find_bridges()
        if "threshold" not in controls:
            listed = self.bridges["indices"]
            if "edges_of" not in controls and listed:
                self.edges_of = "bridges"
            near = np.isin(self._ends, listed).any(axis=1) | (self.edges_of == "all")
            rho = self._rho[near]
            # the |rho| that FEW edges reach, rounded down to 0.001; 0 with fewer edges
            self.threshold = math.floor(1e3 * abs(rho[FEW - 1])) / 1e3 if len(rho) >= FEW else 0.0
        self.follow(self._compare_plans, "selection")
        self.observe(self._find_bridges, ("saliency_quantile", "connectivity_quantile"))
        self.status = f"Estimated from {named_matrix(self.curvature)}, not measured."

    # Bridges and plans --------------------------------------------------------------------------

    @guarded
    def _find_bridges(self, change: Any = None) -> None:
        found = cl.bridge_units(self.curvature, self.saliency_quantile, self.connectivity_quantile)
        self.bridges = {
            "indices": list(found.indices),
            "saliency_threshold": found.saliency_threshold,
            "connectivity_threshold": found.connectivity_threshold,
            "ranked": found.ranked,
            "note": found.note,
            "correlation": plain(found.saliency_connectivity_correlation),
            "flow": _flow(self.curvature, list(found.indices)),
        }
        self._compare_plans()

    @guarded
    def _compare_plans(self, change: Any = None) -> None:
        """Set `plans`: the session's plan, and the runs it is compared with, under its guards."""
        self.error = ""
        plan = self.session.selection
        ratio, guards = RATIO, cl.opening_guards(self.curvature.units)
        if plan is not None:
            ratio, guards = plan.requested_ratio, plan.guards
        runs = {
            "diagonal": self._run(ratio, 0.0, guards),
            "edge_aware": self._run(ratio, 1.0, guards),
        }
        self.plans = {
            "ratio": ratio,
            "runs": runs,
            "present": None if plan is None else list(plan.pruned),
            "ordered": plan is None or plan.ordered,
        }

    def _run(self, ratio: float, strength: float, guards: cl.Guards) -> dict[str, list[Any]]:
        """The removals of greedy in order, and the removed share after each."""
        run = self.session.run(ratio, strength, guards)
        costs = self.curvature.units.costs
        share = np.cumsum(costs[list(run.pruned)]) / costs.sum()
        return {"order": list(run.pruned), "share": share.tolist()}

    # What is shown ------------------------------------------------------------------------------

    def table(self) -> list[dict[str, Any]]:
        """One row per unit; saliency and connectivity are in nats per token."""
        columns = ("saliency", "connectivity", "residual")
        rows = unit_rows(self.nodes, range(len(self.curvature.units)), *columns)
        listed, present = self.bridges["indices"], self.plans["present"] or []
        own = ({"bridge": u in listed, "removed": u in present} for u in range(len(rows)))
        return [row | more for row, more in zip(rows, own, strict=True)]

    def _graph(self) -> Any:
        """The strongest edges as a networkx graph, each node with `bridge` and `removed`."""
        graph = cl.edge_graph(self.curvature, top_k=MOST_EDGES)
        for values, row in zip(graph.nodes.values(), self.table(), strict=True):
            values |= {"bridge": row["bridge"], "removed": row["removed"]}
        return graph

    def code(self) -> str:
        """The Python of the graph and the bridges on the screen; it needs `curvature`."""
        quantiles = f"{self.saliency_quantile!r}, {self.connectivity_quantile!r}"
        return (
            "import cocurve_lab as cl\n\n"
            f"graph = cl.edge_graph(curvature, threshold={self.threshold!r}, top_k={MOST_EDGES})\n"
            f"bridges = cl.bridge_units(curvature, {quantiles})\n"
        )

    def state(self) -> dict[str, Any]:
        """The initial state of the front end, for a page without a kernel (`kernel` is False)."""
        usual = DOMWidget.class_traits(sync=True)
        names = [n for n in self.traits(sync=True) if n not in usual and not n.startswith("_")]
        return {name: getattr(self, name) for name in names} | {"kernel": False, "error": ""}


# Sent to the page -------------------------------------------------------------------------------


def _strongest_edges(curvature: cl.Curvature) -> tuple[np.ndarray, np.ndarray]:
    """Ends [E, 2] and rho [E] of the strongest edges, by falling |rho|."""
    edges = cl.edge_graph(curvature, top_k=MOST_EDGES).edges(data="correlation")
    rows = sorted(edges, key=lambda edge: (-abs(edge[2]), edge[0], edge[1]))
    ends = np.array([row[:2] for row in rows], np.uint32).reshape(-1, 2)
    # rounded to what is sent: else threshold and count could differ between page and kernel
    return ends, np.array([row[2] for row in rows], np.float32).astype(np.float64)


def _flow(curvature: cl.Curvature, units: list[int]) -> dict[str, list[list[float]]]:
    """Sums of positive and of negative edges of some units by layer, [units, layers]."""
    rows = curvature.matrix[units].copy()
    rows[np.arange(len(units)), units] = 0.0
    layers = np.eye(curvature.units.num_layers)[curvature.units.layers]  # [M, layers]
    signs = {"positive": np.maximum(rows, 0.0), "negative": np.minimum(rows, 0.0)}
    return {sign: (part @ layers).tolist() for sign, part in signs.items()}


def _partners(curvature: cl.Curvature) -> tuple[np.ndarray, np.ndarray]:
    """The PARTNERS units of largest |H_uv| of each unit and their rho, both [M, PARTNERS]."""
    size = len(curvature.units)
    strength = np.abs(curvature.matrix)
    np.fill_diagonal(strength, 0.0)
    best = np.argsort(-strength, axis=1, kind="stable")[:, :PARTNERS]
    own = np.arange(size)[:, None]
    order = np.repeat(own, PARTNERS, axis=1)  # the unit itself: no more partners
    order[:, : best.shape[1]] = np.where(strength[own, best] > 0, best, own)
    return order, curvature.correlation()[own, order]
