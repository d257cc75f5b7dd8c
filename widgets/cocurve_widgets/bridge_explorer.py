"""BridgeExplorer: the graph of H, saliency against connectivity, and the bridges in plans."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from traitlets import Bool, Bytes, Dict, Enum, Int

import cocurve_lab as cl
from cocurve_lab.curvature.matrix import BLOCKS

from .instrument import Explorer, counted, front, guarded, named_matrix
from .packing import nodes_of, pair_rows, plain, unit_rows
from .traits import Some, Within

MOST_EDGES = 10_000  # sent to the page once; the filters choose among these
PARTNERS = 5
FEW = 24  # edges that pass the default threshold: more cannot be followed by eye
RATIO = 0.2  # of the compared plans, until the session has one
# tried for the compared plans, where they treat the bridges alike at the ratio asked for
RATIOS = tuple(n / 20 for n in range(1, 13))
FILTERS = ("threshold", "edges_of", "sign", "blocks", "ego")
CONTROLS = (
    *FILTERS,
    "compared_ratio",
    "saliency_quantile",
    "connectivity_quantile",
    "selected_unit",
    "brushed",
    "table_of",
)


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
        ego: show only the selected unit, its edges and its neighbors.
        compared_ratio: ratio of the two compared plans, [0, 0.6]; None takes the session plan's
            (0.2 without one) or, where the two treat the listed units alike there, the nearest
            ratio of 5, 10, ... 60 % where they do not.
        saliency_quantile, connectivity_quantile: bounds of "low" and "high", [0, 1]; see
            `cl.bridge_units`.
        selected_unit: index of the chosen unit, shared with the session; None for none.
        table_of: rows of `table()`, the table and the CSV: the shown "edges", "units" or "bridges".

    Sent to the page (traits, not to be set):
        nodes: columns of M values: kind, layer, index, name, saliency and connectivity [nats per
            token], residual (None where it is undefined).
        edge_ends, edge_correlation: the strongest edges by falling |rho|, at most 10,000, as bytes
            of uint32 [E, 2] and float32 [E]. edge_total counts all pairs with H_uv != 0.
        partners, partner_correlation: the 5 partners of largest |H_uv| of each unit, as bytes of
            uint32 [M, 5] and float32 [M, 5]; a unit in its own row means "no more partners".
        bridges: indices, thresholds and note of `cl.bridge_units`, and the flow of each: the sums
            of its positive and negative H_uv by layer, [bridges, layers], nats per token.
        plans: the compared removal orders: ratio, diagonal, edge_aware, present, ordered, problem,
            and note, which says how the ratio was chosen.
    """

    _esm = front("bridge.js", render="renderBridge")

    threshold = Within(0, 1, 0.0).tag(sync=True)
    edges_of = Enum(("all", "bridges"), "all").tag(sync=True)
    compared_ratio = Within(0, RATIOS[-1], None, allow_none=True).tag(sync=True)
    sign = Enum(("both", "positive", "negative"), "both").tag(sync=True)
    blocks = Some(BLOCKS).tag(sync=True)
    ego = Bool(False).tag(sync=True)
    saliency_quantile = Within(0, 1, 0.5).tag(sync=True)
    connectivity_quantile = Within(0, 1, 0.5).tag(sync=True)
    table_of = Enum(("edges", "units", "bridges"), "edges").tag(sync=True)

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
        self._solved: tuple[Any, dict[str, Any]] | None = None
        self._seconds = 0.0
        self._source = f"Estimated from {named_matrix(self.curvature)}, not measured"
        return _payload(self.curvature, self._ends, self._rho) | controls

    def _opened(self, controls: dict[str, Any]) -> None:
        super()._opened(controls)
        self._find_bridges()
        if "threshold" not in controls:
            listed = self.bridges["indices"]
            if "edges_of" not in controls and listed:
                self.edges_of = "bridges"
            near = self._touches(listed) if self.edges_of == "bridges" else slice(None)
            rho = self._rho[near]
            # the |rho| that FEW edges reach, rounded down to 0.001; 0 with fewer edges
            self.threshold = math.floor(1e3 * abs(rho[FEW - 1])) / 1e3 if len(rho) >= FEW else 0.0
        self.follow(self._compare_plans, "selection")
        self.observe(self._find_bridges, ("saliency_quantile", "connectivity_quantile"))
        self.observe(self._compare_plans, "compared_ratio")
        self.observe(self._tell, (*FILTERS, "selected_unit"))
        self._tell()

    # Bridges and plans --------------------------------------------------------------------------

    @guarded
    def _find_bridges(self, change: Any = None) -> None:
        start = time.perf_counter()
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
        self._seconds = time.perf_counter() - start
        self._compare_plans()

    @guarded
    def _compare_plans(self, change: Any = None) -> None:
        """Set `plans`: the session's plan, and the two it is compared with, under its guards."""
        start = time.perf_counter()
        plan = self.session_plan()
        ratio, guards = RATIO, cl.opening_guards(self.curvature.units)
        if plan is not None:
            ratio, guards = plan.requested_ratio, plan.guards
        if self.compared_ratio is not None:
            ratio = self.compared_ratio
        self._guards = guards
        key = (ratio, guards, self.compared_ratio is None, tuple(self.bridges["indices"]))
        if self._solved is None or self._solved[0] != key:
            self._solved = (key, self._compared(ratio, guards))
            self._seconds += time.perf_counter() - start
        self.plans = {
            **self._solved[1],
            "present": None if plan is None else list(plan.pruned),
            "ordered": plan is None or plan.ordered,
        }
        self._tell()

    def _compared(self, asked: float, guards: cl.Guards) -> dict[str, Any]:
        """The two compared plans, at a ratio that shows a difference where there is one."""
        listed = set(self.bridges["indices"])
        first = self._two_orders(asked, guards)
        if self.compared_ratio is not None or not listed:
            return first
        nearest = {r: (r != asked, round(abs(r - asked), 9), r) for r in (asked, *RATIOS)}
        for ratio in sorted(nearest, key=nearest.__getitem__):
            found = first if ratio == asked else self._two_orders(ratio, guards)
            one, other = found["diagonal"], found["edge_aware"]
            if one is None or other is None or not (set(one) ^ set(other)) & listed:
                continue
            if ratio != asked:
                found["note"] = (
                    f"At ratio {asked:.3g} the two plans treat these units alike. They are "
                    f"compared at {ratio:.3g}, the nearest ratio tried where they do not."
                )
            return found
        first["note"] = (
            "At every ratio tried, up to 60 %, the diagonal and the edge-aware plan treat these "
            "units alike."
        )
        return first

    def _two_orders(self, ratio: float, guards: cl.Guards) -> dict[str, Any]:
        found: dict[str, Any] = {"ratio": ratio, "problem": "", "note": ""}
        for name, strength in (("diagonal", 0.0), ("edge_aware", 1.0)):
            try:
                plan = self.session.solve(ratio, strength, guards)
                found[name] = list(plan.pruned)
            except cl.CocurveError as error:  # out of reach under these guards; the page shows it
                found |= {name: None, "problem": str(error)}
        return found

    @guarded
    def _tell(self, change: Any = None) -> None:
        shown, sent = int(self._shown().sum()), len(self._rho)
        weakest = abs(self._rho[-1]) if sent else 0.0
        where = f"{counted(self.edge_total, 'edge')} (|correlation| >= {self.threshold:.3g})"
        if self.edge_total > sent and self.threshold <= weakest:
            where = (
                f"the {sent:,} strongest of {counted(self.edge_total, 'edge')} (>= {weakest:.3g})"
            )
        self.status = (
            f"Shown: {shown:,} of {where}, {counted(len(self.bridges['indices']), 'unit')} listed. "
            f"{self._source}; bridges and plans at ratio {self.plans['ratio']:.3g} under "
            f"{self._guards} took {1e3 * self._seconds:.0f} ms."
        )

    # What is shown ------------------------------------------------------------------------------

    def _shown(self) -> np.ndarray:
        """The mask of sent edges that pass threshold, sign, blocks and ego view: bool [E]."""
        u, v = self._ends.T
        shown: np.ndarray = np.abs(self._rho) >= self.threshold
        if self.sign != "both":
            shown &= (self._rho > 0) == (self.sign == "positive")
        attention = self.curvature.units.kinds == "attention"
        heads = attention[u].astype(int) + attention[v]
        wanted = [self.blocks.count(block) > 0 for block in ("ffn", "cross", "attention")]
        shown &= np.array(wanted)[heads]
        if self.ego and self.selected_unit is not None:
            shown &= (u == self.selected_unit) | (v == self.selected_unit)
        elif self.edges_of == "bridges":
            shown &= self._touches(self.bridges["indices"])
        return shown

    def _touches(self, units: Iterable[int]) -> np.ndarray:
        """The mask of sent edges with an end among some units: bool [E]."""
        found: np.ndarray = np.isin(self._ends, list(units))
        return found[:, 0] | found[:, 1]

    def table(self) -> list[dict[str, Any]]:
        """The rows of `table_of`: one per shown edge, unit, or listed bridge.

        H_uv, saliency and connectivity are in nats per token.
        """
        if self.table_of == "edges":
            return pair_rows(self.curvature, self._ends[self._shown()])
        everyone = range(len(self.curvature.units))
        chosen = everyone if self.table_of == "units" else self.bridges["indices"]
        return [self._unit_row(unit) for unit in chosen]

    def _unit_row(self, unit: int) -> dict[str, Any]:
        (row,) = unit_rows(self.nodes, [unit], "saliency", "connectivity", "residual")
        return row | {
            "bridge": unit in self.bridges["indices"],
            "diagonal_plan": fate(unit, self.plans["diagonal"]),
            "edge_aware_plan": fate(unit, self.plans["edge_aware"]),
            "present_plan": fate(unit, self.plans["present"], self.plans["ordered"]),
        }

    def _graph(self) -> Any:
        """The shown edges as a networkx graph, each node with `bridge` and `removed`."""
        graph = cl.edge_graph(self.curvature, top_k=MOST_EDGES)
        graph.remove_edges_from(self._ends[~self._shown()].tolist())
        if self.ego and self.selected_unit is not None:
            near = {self.selected_unit, *graph[self.selected_unit]}
            graph.remove_nodes_from([unit for unit in graph if unit not in near])
        removed = self.plans["present"] or []
        for unit, values in graph.nodes(data=True):
            values |= {"bridge": unit in self.bridges["indices"], "removed": unit in removed}
        return graph

    def code(self) -> str:
        """The Python that reproduces what is on the screen; it needs `curvature`."""
        values = {"threshold": self.threshold} | self.changed(CONTROLS)
        given = "".join(f"    {name}={value!r},\n" for name, value in values.items())
        quantiles = f"{self.saliency_quantile!r}, {self.connectivity_quantile!r}"
        return (
            "import cocurve_lab as cl\nfrom cocurve_widgets import BridgeExplorer\n\n"
            f"graph = cl.edge_graph(curvature, threshold={self.threshold!r}, top_k={MOST_EDGES})\n"
            f"bridges = cl.bridge_units(curvature, {quantiles})\n"
            f"explorer = BridgeExplorer(\n    curvature,\n{given})\n"
            f"{self.plan_line('explorer')}explorer\n"
        )

    def state(self) -> dict[str, Any]:
        """The initial state of the front end, for a page without a kernel (`kernel` is False)."""
        return self.public_traits() | {"kernel": False, "status": f"{self._source}.", "error": ""}


def fate(unit: int, removed: list[int] | None, ordered: bool = True) -> str:
    """The fate of a unit in a removal order, in words; None is a plan that does not exist."""
    if removed is None:
        return "no plan"
    if unit not in removed:
        return "kept"
    return f"removed at step {removed.index(unit) + 1}" if ordered else "removed"


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


def _payload(curvature: cl.Curvature, ends: np.ndarray, rho: np.ndarray) -> dict[str, Any]:
    partners, partner_rho = _partners(curvature)
    residual = [plain(value) for value in cl.bridge_units(curvature).residual.tolist()]
    return {
        "nodes": nodes_of(curvature) | {"residual": residual},
        "edge_ends": ends.tobytes(),
        "edge_correlation": rho.astype(np.float32).tobytes(),
        "edge_total": int(np.count_nonzero(np.triu(curvature.matrix, 1))),
        "partners": partners.astype(np.uint32).tobytes(),
        "partner_correlation": partner_rho.astype(np.float32).tobytes(),
    }


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
