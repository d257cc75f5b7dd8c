"""CurvatureMap: H as a picture to order, zoom and brush, with the units of the plan marked."""

from __future__ import annotations

from typing import Any

import numpy as np
from traitlets import Bytes, Dict, Enum, Float, List, TraitError, validate

import cocurve_lab as cl

from .instrument import Explorer, front, guarded, named_matrix
from .packing import gray_image, nodes_of, pair_rows, unit_rows
from .session import CancelToken
from .traits import UnitIndex

FEWEST = 4  # units across the smallest window
MOST_PAIRS = 10_000  # rows of a table of pairs
SHOWN = 0.995  # share of the pairs inside the color scale; a few large ones would pale the rest
STILL = 240  # cells across the picture in a saved notebook, at most
NEAT = 1000  # up to so many units the leaves are put in the best order, in about 0.1 s
FULL = 32_767  # int16 of the largest root
CONTROLS = (
    "order",
    "scale",
    "window",
    "selected_unit",
    "partner",
    "brushed",
    "table_of",
)


class CurvatureMap(Explorer):
    """H as a picture: one cell per pair of units, colored by the sign and size of their edge.

    The rows and columns can be put in another order, and the picture zoomed. Units of the session's
    plan are marked beside it. All of it is estimated from H; nothing is measured. Its arguments are
    those of `Instrument`.

    Controls (traits):
        order: of rows and columns. "layer": as the units are numbered. "saliency": largest H_uu
            first. "clustering": tied units together, by average linkage on 1 - |rho|.
            "plan": the removed units in their order, then the kept ones.
        scale: what is colored, "correlation" (rho_uv, by its square root) or "curvature" (H_uv, by
            its fourth root). Of several pairs in one pixel the strongest is drawn.
        window: the part that is shown: first column, first row, and number of units across, [3].
            The default, [0, 0, M], is all of H.
        selected_unit, partner: row and column of the chosen pair, as indices of units; None for
            none. `selected_unit` is shared with the session.
        table_of: rows of `table()`, the table and the CSV: "units", or the "pairs"
            inside the window.

    Sent to the page (traits, not to be set):
        nodes: columns of M values: kind, layer, name, saliency [nats per token], cost [parameters].
        pairs: bytes of int16 [M (M + 1) / 2], the upper triangle row by row: sign(rho_uv) times the
            square root of |rho_uv| / peak, times 32,767. Numbers in the page are read off these, to
            about three digits; `status` has the chosen pair from H itself.
        peak: largest |rho_uv|. ends: the largest |rho_uv| and |H_uv| that colors tell apart.
        roots: sqrt(H_uu) of every unit, [M]; of a unit with H_uu = 0 that of the smallest above 0.
        clustered: the order by clustering; empty until it is first asked for.
        plan: of the session's plan: order, lambda, and whether it has an order.
    """

    _esm = front("map.js", render="renderMap")

    order = Enum(("layer", "saliency", "clustering", "plan"), "layer").tag(sync=True)
    scale = Enum(("correlation", "curvature"), "correlation").tag(sync=True)
    window: List[float] = List(Float(), minlen=3, maxlen=3).tag(sync=True)
    partner = UnitIndex().tag(sync=True)
    table_of = Enum(("units", "pairs"), "units").tag(sync=True)

    nodes = Dict().tag(sync=True)
    pairs = Bytes().tag(sync=True)
    peak = Float().tag(sync=True)
    ends = Dict().tag(sync=True)
    roots: List[float] = List().tag(sync=True)
    clustered: List[int] = List().tag(sync=True)
    plan = Dict().tag(sync=True)

    def _opening(self, controls: dict[str, Any]) -> dict[str, Any]:
        return {"window": [0, 0, len(self.curvature.units)], **_payload(self.curvature), **controls}

    def _opened(self, controls: dict[str, Any]) -> None:
        super()._opened(controls)
        self._take_plan()
        self._arrange()
        self.follow(self._take_plan, "selection")
        self.observe(self._tell, ("selected_unit", "partner"))
        self.observe(self._arrange, "order")

    # Traits at the edge -------------------------------------------------------------------------

    @validate("window")
    def _inside(self, proposal: Any) -> list[float]:
        column, row, span = proposal.value
        size = len(self.curvature.units)
        if not (
            min(FEWEST, size) <= span <= size
            and 0 <= column <= size - span
            and 0 <= row <= size - span
        ):
            raise TraitError(
                f"window is {proposal.value}; it is [first column, first row, units across] and "
                f"lies inside {size} units. Use [0, 0, {size}] for all of H."
            )
        return [float(column), float(row), float(span)]

    # Order and plan -----------------------------------------------------------------------------

    @guarded
    def _arrange(self, change: Any = None) -> None:
        """Order by clustering on the session's thread, when it is first asked for."""
        if self.order == "clustering" and not self.clustered:
            self.session.worker.submit(f"clusters {id(self)}", self._cluster, self.report)

    def _cluster(self, token: CancelToken) -> None:
        found = cluster_order(self.curvature)
        token.check()
        self.clustered = found

    @guarded
    def _take_plan(self, change: Any = None) -> None:
        plan = self.session_plan()
        self.plan = (
            {}
            if plan is None
            else {
                "order": list(plan.pruned),
                "strength": plan.interaction_strength,
                "ordered": plan.ordered,
            }
        )
        self._tell()

    @guarded
    def _tell(self, change: Any = None) -> None:
        curvature, u, v = self.curvature, self.selected_unit, self.partner
        source = f"Estimated from {named_matrix(curvature)}, not measured."
        if u is None or v is None:
            self.status = source
            return
        first, second = (curvature.units[i].name for i in (u, v))
        edge, scale = curvature.matrix[u, v], np.sqrt(np.prod(curvature.saliency[[u, v]]))
        pair, name = (first, "H_uu") if u == v else (f"{first} and {second}", "H_uv")
        rho = f", rho {edge / scale:.4g}" if u != v and scale > 0 else ""
        self.status = f"{pair}: {name} {edge:.4g} nats per token{rho}. {source}"

    # Code and files -----------------------------------------------------------------------------

    def table(self) -> list[dict[str, Any]]:
        """The rows of `table_of`. Saliency, H_uv and risks are in nats per token.

        "units": one row per unit, in the order of the picture. "pairs": each pair of
        two units inside the window once, strongest first by the present scale, at most 10,000.
        """
        return self._pair_rows() if self.table_of == "pairs" else self._unit_rows()

    def places(self) -> list[int]:
        """The units in the order of the picture, as indices, [M]."""
        curvature, size = self.curvature, len(self.curvature.units)
        if self.order == "saliency":
            return [int(u) for u in np.argsort(-curvature.saliency, kind="stable")]
        if self.order == "clustering":
            if not self.clustered:
                self.clustered = cluster_order(curvature)
            return list(self.clustered)
        first = self.plan.get("order", []) if self.order == "plan" else []
        return first + sorted(set(range(size)) - set(first))

    def _unit_rows(self) -> list[dict[str, Any]]:
        steps, places = {u: k for k, u in enumerate(self.plan.get("order", []), 1)}, self.places()
        rows = unit_rows(self.nodes, places, "layer", "kind", "saliency", "cost")
        own = ({"removed_at_step": steps.get(u, ""), "brushed": u in self.brushed} for u in places)
        both = enumerate(zip(rows, own, strict=True), 1)
        return [{"place": place} | row | more for place, (row, more) in both]

    def _pair_rows(self) -> list[dict[str, Any]]:
        curvature, places = self.curvature, np.array(self.places())
        column, row, span = self.window
        columns, rows = (places[int(at) : int(np.ceil(at + span))] for at in (column, row))
        inside = np.zeros_like(curvature.matrix, dtype=bool)
        inside[np.ix_(rows, columns)] = True
        u, v = np.nonzero(np.triu(inside | inside.T, 1))
        rho = curvature.correlation()
        size = np.abs((rho if self.scale == "correlation" else curvature.matrix)[u, v])
        strongest = np.argsort(-size, kind="stable")[:MOST_PAIRS]
        return pair_rows(curvature, np.stack([u, v], 1)[strongest])

    def code(self) -> str:
        """The Python that reproduces what is on the screen; it needs `curvature`."""
        changed = self.changed(CONTROLS, window=[0, 0, len(self.curvature.units)])
        given = "".join(f"    {name}={value!r},\n" for name, value in changed.items())
        return (
            "import cocurve_lab as cl\nfrom cocurve_widgets import CurvatureMap\n\n"
            f"picture = CurvatureMap(\n    curvature,\n{given})\n"
            + self.plan_line("picture")
            + "picture\n"
        )

    def state(self) -> dict[str, Any]:
        """The initial state of the front end, for a page without a kernel (`kernel` is False)."""
        if not self.clustered:
            self.clustered = cluster_order(self.curvature)
        return self.public_traits() | {"kernel": False, "error": ""}

    def _still_picture(self) -> str:
        """The strengths of all pairs as a PNG, dark where strong; blocks of units where many."""
        curvature, places = self.curvature, self.places()
        rho = np.abs(curvature.correlation())[np.ix_(places, places)]
        np.fill_diagonal(rho, 0.0)
        size = -(-len(places) // STILL)
        edges = np.arange(0, len(places), size)
        rho = np.maximum.reduceat(np.maximum.reduceat(rho, edges, axis=0), edges, axis=1)
        shades = np.sqrt(np.clip(rho / self.ends["correlation"], 0.0, 1.0))
        pixels = np.kron((255 * (1 - shades)).astype(np.uint8), np.ones((2, 2), np.uint8))
        return gray_image(pixels, "|rho| of all pairs of units")

    def close(self) -> None:
        if self._followed:  # else the constructor failed: there is nothing to stop
            self.session.worker.cancel(f"clusters {id(self)}")
        super().close()


def cluster_order(curvature: cl.Curvature) -> list[int]:
    """Units so that tied ones stand together: the leaves of average linkage on 1 - |rho|.

    Up to 1,000 units the branches are turned so that neighbors are as near as they can be
    (`scipy.cluster.hierarchy.optimal_leaf_ordering`). M = 1,920 takes about half a second.

    Args:
        curvature: H [M, M].

    Returns:
        The indices of all M units.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage, optimal_leaf_ordering

    size = len(curvature.units)
    if size < 3:
        return list(range(size))
    # |rho| of measured interactions may exceed 1
    apart = np.clip(1.0 - np.abs(curvature.correlation()[np.triu_indices(size, 1)]), 0.0, None)
    tree = linkage(apart, "average")
    if size <= NEAT:
        tree = optimal_leaf_ordering(tree, apart)
    return [int(u) for u in leaves_list(tree)]


# Sent to the page -------------------------------------------------------------------------------


def _payload(curvature: cl.Curvature) -> dict[str, Any]:
    size, saliency = len(curvature.units), curvature.saliency
    least = saliency[saliency > 0].min(initial=np.inf)
    roots = np.sqrt(np.where(saliency > 0, saliency, least if np.isfinite(least) else 1.0))
    upper = ~np.tri(size, k=-1, dtype=bool)
    values = curvature.matrix[upper]
    sizes = np.abs(values)
    sizes /= np.outer(roots, roots)[upper]  # in place: these are long, and the cell waits for them
    peak = float(sizes.max(initial=0.0)) or 1.0
    quantized = np.rint(np.sqrt(sizes / peak) * np.sign(values) * FULL).astype("<i2")
    pairs = ~np.eye(size, dtype=bool)[upper]
    ends = {"correlation": sizes[pairs], "curvature": np.abs(values[pairs])}
    return {
        "nodes": nodes_of(curvature),
        "pairs": quantized.tobytes(),
        "peak": peak,
        "ends": {name: _end(found) for name, found in ends.items()},
        "roots": roots.tolist(),
    }


def _end(sizes: np.ndarray) -> float:
    """The end of a color scale: the SHOWN quantile of the sizes, and above 0."""
    if not sizes.size:
        return 1.0
    return float(np.quantile(sizes, SHOWN)) or float(sizes.max()) or 1.0
