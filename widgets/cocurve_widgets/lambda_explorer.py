"""LambdaExplorer: drag the weight of the edges and see the pruning plan change.

By hand, a click on the map removes a unit or restores it, which makes plan A yours, or adds it to a
pair. A pair is measured three times: each unit alone, then both. Its edge is what the two cost
together less what they cost alone; H holds a prediction of it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from traitlets import Bool, Dict, Enum, Float, Instance, Int, List, TraitError, Unicode, validate

import cocurve_lab as cl
from cocurve_lab.extensions.writing import brief
from cocurve_lab.solver.guards import reachable_ratio

from .damage import Damage, plain_record
from .first_screen import as_sentence, kept_first_screen
from .instrument import Explorer, front, guarded, plan_code
from .packing import nodes_of, pack_problem, unit_rows
from .session import MOST_RATIO, AnyCurvature, CancelToken, Session
from .traits import PlanOfUnits, Some, Within, require_unit

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cocurve_lab.extensions.judging.generation import Question

PLAIN_TEXT = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
GUARDS = ("layer_cap", "layer_cap_factor", "protect_first", "protect_last", "kinds")
CONTROLS = ("interaction_strength", "ratio", *GUARDS)


class LambdaExplorer(Explorer):
    """The pruning plan, solved again while lambda, the ratio or a guard is dragged.

    Up to 1,200 units the browser solves on the H it received. The kernel solves, too, for all other
    views. Its answer decides; `agrees` says whether the two plans are the same. With more units the
    kernel solves alone.

    Args:
        curvature: H [M, M], or the path of its file.
        session: shared with other instruments; by default the curvature's own.
        model, tokenizer: optional; added to the session, for instruments that measure.
        held_out: text that played no part in H. With it and a model, plans A and B are measured
            while one drags (see `live` and damage.py); None measures nothing by itself.
        questions: with known answers, for the right answers by ability.
        cache: folder of measured plans and answers, shared with the studies; None keeps none.
        **controls: initial values of the traits.

    Attributes:
        interaction_strength: lambda in [0, 1].
        ratio: share of removable cost to remove, [0, 0.6].
        layer_cap: largest share of a layer's cost that may be removed, (0, 1]; None for no cap.
        layer_cap_factor: the cap as a multiple of the ratio; None for no cap.
        protect_first, protect_last: number of layers at either end that stay whole; as at first,
            those of `opening_guards`.
        kinds: kinds that may be pruned, of ["attention", "ffn"].
        mode: what a click on the map does: "remove" removes the unit or restores it, which makes
            plan A "your plan"; "pair" adds it to `pair`; "mark" only marks it.
        pair: indices of at most two units, whose edge is shown and measured.
        prompt: sentence whose next word is predicted by the dense model, A and B; empty for none.
        pinned: plan A (a Selection), which the present plan B is compared with; None, as at first,
            compares with the diagonal plan (lambda 0) of the present ratio and guards.
        live: whether A and B are measured by themselves, where there is a model and text.
        damage: measures them (a Damage); `damage.of(plan)` is what is known of a plan. None without
            a model and text.
        selection: the plan (a Selection); None while no plan is possible.
        flips: the lambdas at which the plan changes, for the ratio and guards; of an earlier
            setting while `flips_stale`.
        flips_stale: whether `flips` is still being computed.
        agrees: whether the browser's plan was the kernel's; None before the first answer.
    """

    _esm = front("lambda.js", render="renderLambda")

    interaction_strength = Within(1.0, min=0, max=1).tag(sync=True)
    ratio = Within(0.2, min=0, max=MOST_RATIO).tag(sync=True)
    layer_cap = Within(None, min=1e-6, max=1, allow_none=True).tag(sync=True)
    layer_cap_factor = Within(None, min=1e-6, max=100, allow_none=True).tag(sync=True)
    protect_first = Int(0, min=0).tag(sync=True)
    protect_last = Int(0, min=0).tag(sync=True)
    kinds = Some(cl.KINDS, least=1).tag(sync=True)
    mode = Enum(("remove", "pair", "mark"), "remove").tag(sync=True)
    pair: List[int] = List(Int()).tag(sync=True)
    prompt = Unicode().tag(sync=True)
    pinned = PlanOfUnits(cl.Selection, allow_none=True)
    selection = Instance(cl.Selection, allow_none=True)
    flips = List(Float()).tag(sync=True)
    flips_stale = Bool(True).tag(sync=True)
    agrees = Bool(None, allow_none=True).tag(sync=True)
    live = Bool(True).tag(sync=True)
    _problem = Dict().tag(sync=True)
    _view = Dict().tag(sync=True)
    _asked: List[Any] = List().tag(sync=True)  # the controls that the kernel has heard of
    _changes: List[Any] = List().tag(sync=True)  # per flip, the units that join or leave
    _marks = Dict().tag(sync=True)  # the gate, and measured plans
    _pin = Dict().tag(sync=True)  # plan A for the page; empty for the diagonal plan
    _damage = Dict().tag(sync=True)  # what is known so far of the dense model, A and B
    _first = Dict().tag(sync=True)  # sentences, marks of KL and gaps, as first_screen.py keeps them

    def __init__(
        self,
        curvature: AnyCurvature,
        *,
        session: Session | None = None,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        held_out: cl.CalibrationSet | None = None,
        questions: Sequence[Question] = (),
        cache: str | os.PathLike[str] | None = None,
        **controls: Any,
    ) -> None:
        self._require_known(controls)
        session = Session.bind(curvature, session, model, tokenizer)
        curvature = session.curvature
        self._solved: tuple[Any, ...] | None = None
        self._guarded: tuple[Any, ...] | None = None
        self._adopting = False
        self._own: cl.Selection | None = None  # the plan that was made by clicks
        self._seconds = 0.0
        ends = cl.opening_guards(curvature.units)
        start: dict[str, Any] = {
            "protect_first": ends.protect_first,
            "protect_last": ends.protect_last,
            "_first": kept_first_screen(curvature),
        }
        self.damage: Damage | None = None
        if held_out is not None:
            if session.tokenizer is not None:
                begun = session.tokenizer.decode(held_out.input_ids[0][:24], **PLAIN_TEXT)
                asked = [as_sentence(question) for question in questions[:1]]
                kept = [one["text"] for one in start["_first"].get("sentences", [])]
                start["prompt"] = [*kept, *asked, str(begun).strip()][0]
            self.damage = Damage(
                session, held_out, questions, self._show_damage, self.report, cache=cache
            )
        problem = pack_problem(curvature)
        super().__init__(curvature, session=session, _problem=problem, **(start | controls))
        other = f"the gate speaks of H, not of {self.matrix_name}"
        gate = cl.redundancy_gate(curvature) if curvature.matrix_name == "H" else None
        self._gate = {
            "strength": gate.verdict if gate else None,
            "reason": gate.reason if gate else other,
        }
        self._closing.callback(session.worker.cancel, f"flips {id(self)}")
        if self.damage is not None:
            self._closing.callback(self.damage.stop)
        self._mark()
        self.observe(self._changed, CONTROLS)
        self.observe(self._show_pin, "pinned")
        self.observe(self._hear_pin, "_pin")
        self.observe(self._watch, ("live", "pair", "prompt"))
        self.follow(self._adopt, "selection")
        self.follow(self._mark, "measured")
        if not set(controls) & set(CONTROLS) and session.selection is not None:
            self._adopt({"new": session.selection})
        self._changed()

    # Controls -----------------------------------------------------------------------------------

    @validate("pair")
    def _valid_pair(self, proposal: Any) -> list[int]:
        units = [require_unit(self.curvature, unit, "pair holds") for unit in proposal.value]
        if len(units) > 2 or len(set(units)) < len(units):
            raise TraitError(f"pair is {units}. Give at most two different units.")
        return units

    @property
    def guards(self) -> cl.Guards:
        """The guards as set."""
        return _guards_of(*(getattr(self, name) for name in GUARDS))

    # A against B --------------------------------------------------------------------------------

    @guarded
    def _watch(self, _: Any = None) -> None:
        """Have A and B measured, once the hand rests."""
        if self.damage is None:
            return
        if self.live:
            prompt = self.prompt.strip() if self.session.tokenizer is not None else ""
            both = [plan for plan in (self._plan_a(), self.selection) if plan is not None]
            self.damage.show(both, self._pair_plans(), prompt)
        else:
            self.damage.stop()

    @guarded
    def _show_damage(self) -> None:
        """Tell the page what is known of the dense model, A and B on the held-out text."""
        if self.damage is None or self.comm is None:  # closed
            return
        self._damage = self.damage.shown(self._plan_a(), self.selection, self._pair_plans())

    def _pair_plans(self) -> list[cl.Selection]:
        """Either unit of the pair alone, then both; empty without two units."""
        parts = [self.pair[:1], self.pair[1:], self.pair] if len(self.pair) == 2 else []
        return [cl.Selection.from_pruned(self.curvature.units, u, self.curvature) for u in parts]

    def _plan_a(self) -> cl.Selection | None:
        if self.pinned is None:
            return self.session.diagonal(self.ratio, self.guards)
        return self.pinned

    @guarded
    def _show_pin(self, _: Any = None) -> None:
        plan = self.pinned
        order = None if plan is None else list(plan.pruned)
        # what the page has set itself is not sent back: a second click may be on its way
        if plan is None or not self._problem["matrix"] or self._pin.get("order") != order:
            self._pin = {} if plan is None else self._as_pin(plan)
        self._watch()

    def _as_pin(self, plan: cl.Selection) -> dict[str, Any]:
        """Plan A as the page has it."""
        controls = self._controls_of(plan)
        return {
            **(self._order_and_parts(plan) or {}),
            "strength": plan.interaction_strength,
            "ratio": plan.requested_ratio,
            "controls": dict(zip(CONTROLS, controls, strict=True)) if controls else None,
            "hand": plan is self._own,
        }

    @guarded
    def _hear_pin(self, _: Any = None) -> None:
        """Make what the page pinned plan A."""
        pin, plan = self._pin, None
        if pin:
            if self.pinned is not None and list(self.pinned.pruned) == pin["order"]:
                return
            plan = cl.Selection.from_pruned(self.curvature.units, pin["order"], self.curvature)
            if made := pin["controls"]:
                guards = _guards_of(*(made[name] for name in GUARDS))
                plan = self.session.solve(made["ratio"], made["interaction_strength"], guards)
            self._own = plan if pin["hand"] else None
        self.pinned = plan

    # Solving ------------------------------------------------------------------------------------

    @guarded
    def _changed(self, _: Any = None) -> None:
        values = (getattr(self, name) for name in CONTROLS)
        key = tuple(tuple(v) if isinstance(v, list) else v for v in values)
        if key == self._solved:  # several traits set at once notify one by one
            return
        self._solved = key
        renew = self._guarded != key[1:]
        if renew:
            self._guarded = key[1:]
            self.flips_stale = True
        self._asked = list(key)  # the page waits for the kernel as long as it knows the controls
        self._find_plan()
        if renew:
            self.session.worker.submit(f"flips {id(self)}", self._find_flips, self.report)

    def _find_plan(self) -> None:
        """Solve, and tell the page and the session of the plan."""
        begun = time.perf_counter()
        plan, error = None, ""
        try:
            plan = self.session.solve(self.ratio, self.interaction_strength, self.guards)
        except cl.InfeasibleError as problem:
            error = str(problem)
        with self.hold_sync():
            self.error = error
            self._seconds = time.perf_counter() - begun
            self._view = {
                "key": list(self._solved or ()),
                "order": [],
                "feasible": plan is not None,
                **(self._order_and_parts(plan) or {}),
                "a": self._order_and_parts(self.session.diagonal(self.ratio, self.guards)),
                "reachable": reachable_ratio(self.curvature.units, self.guards, self.ratio),
            }
            self.selection = plan
            self.status = self._sentence()
            # A plan adopted from the session is not told back to it: another view made it, and the
            # echo would replace that object by our copy and set the views off once more.
            if plan is not None and not self._adopting:
                self.session.selection = plan
        self._watch()

    def _order_and_parts(self, plan: cl.Selection | None) -> dict[str, Any] | None:
        """A plan as the page has it: its order, and the parts of its prediction."""
        if plan is None:
            return None
        order = list(plan.pruned)
        node = float(self.curvature.saliency[order].sum() / 2)
        return {"order": order, "node": node, "edge": self.curvature.risk(order) - node}

    def _find_flips(self, token: CancelToken) -> None:
        """Compute the exact path on the session's thread, unless the controls move on first."""
        key = self._guarded
        # A path can take a second, and a dragged slider moves many times in one. The pause lets
        # the next step replace this job before it has cost anything.
        token.rest(0.15)
        try:
            path = cl.lambda_path(self.curvature, self.ratio, self.guards)
        except cl.InfeasibleError:
            path = None
        with self.lock:  # ratio or guards may have changed meanwhile; then the path is of no use
            if key != self._guarded or token.cancelled or path is None:
                return
            plans = [segment.selection for segment in path.segments]
            sets = [set() if plan is None else set(plan.pruned) for plan in plans]
            with self.hold_sync():
                self.flips = list(path.breakpoints)
                self._changes = [sorted(a ^ b) for a, b in itertools.pairwise(sets)]
                self.flips_stale = False

    def _sentence(self) -> str:
        plan = self.selection
        took = f"solved in {1000 * self._seconds:.1f} ms by the kernel"
        if plan is None:
            return f"No plan at this ratio under these guards; {took}."
        measured = [m for m in self.session.measured if m.selection.fingerprint == plan.fingerprint]
        kl = ", KL not measured" if self.damage is None else ""  # else its panel says so
        if measured:
            kl = f", measured KL {measured[0].risk:.4g} on {measured[0].text}"
        risk = self.curvature.risk(plan.pruned)
        return f"Predicted risk {brief(risk, 4)} nats per token{kl}; {took}."

    # Other views --------------------------------------------------------------------------------

    @guarded
    def _adopt(self, change: Any) -> None:
        """Show a plan chosen elsewhere by setting the controls that make it."""
        plan = change["new"]
        if plan is None or plan is self.selection:
            return
        self._adopting = True
        try:
            if self._controls_of(plan) is None:
                self.status = f"Another view shows a plan that these controls cannot make: {plan!r}"
            else:
                self._take(plan)
        finally:
            self._adopting = False

    def _controls_of(self, plan: cl.Selection) -> tuple[Any, ...] | None:
        """The values of CONTROLS that make a plan; None where none do."""
        strength, guards = plan.interaction_strength, plan.guards
        made = strength is not None and plan.ordered and plan.by_ratio and 0 <= strength <= 1
        made = made and plan.made.matrix == self.curvature.matrix_name
        if not made or plan.requested_ratio > MOST_RATIO:
            return None
        caps = guards.layer_cap, guards.layer_cap_factor
        ends = guards.protect_first, guards.protect_last
        kinds = [kind for kind in cl.KINDS if guards.allows(kind)]
        return strength, plan.requested_ratio, *caps, *ends, kinds

    def _take(self, plan: cl.Selection) -> None:
        """Set the controls that make a plan."""
        with self.hold_trait_notifications():
            for name, value in zip(CONTROLS, self._controls_of(plan) or (), strict=True):
                setattr(self, name, value)

    @guarded
    def _mark(self, _: Any = None) -> None:
        records = self.session.measured
        fresh = [r for r in records if r.measured_at is not None]
        # a plan that was kept on several texts is shown on the last of them
        kept = {r.selection.fingerprint: r for r in records if r.measured_at is None}
        self._marks = {
            "gate": self._gate,
            "measured": [plain_record(record) for record in (*kept.values(), *fresh)],
        }
        if self._solved:
            self.status = self._sentence()

    @guarded
    def _heard(self, widget: Any, content: Any, buffers: Any) -> None:
        """Answer the front end: a row of H, or a file."""
        if "row" in content:
            u = int(content["row"])
            self.send({"row": u}, [self.curvature.matrix[u].astype("<f8").tobytes()])
        else:
            super()._heard(widget, content, buffers)

    # Code and files -----------------------------------------------------------------------------

    def code(self) -> str:
        """The Python that makes the plan on the screen; it needs `curvature`."""
        plan = self.selection
        made = "None  # out of reach" if plan is None else plan_code(plan, self.curvature)
        return f"import cocurve_lab as cl\n\nselection = {made}\n"

    def table(self) -> list[dict[str, Any]]:
        """One row per unit: cost, saliency and connectivity (nats per token), and removal step."""
        order = () if self.selection is None else self.selection.pruned
        steps, every = {u: k for k, u in enumerate(order)}, range(len(self.curvature.units))
        columns = ("layer", "kind", "cost", "saliency", "connectivity")
        rows = unit_rows(nodes_of(self.curvature), every, *columns)
        own = ({"pruned": u in steps, "step": steps.get(u, "")} for u in every)
        return [row | more for row, more in zip(rows, own, strict=True)]

    def state(self) -> dict[str, Any]:
        """The initial state of the front end, for a page without a kernel."""
        shown = ("mode", "pair", "selected_unit", "brushed", "status", "error")
        names = (*CONTROLS, *shown, "model_name", "matrix_name", "_marks", "_pin", "_first")
        problem = pack_problem(self.curvature, most_units=len(self.curvature.units))
        return {name: getattr(self, name) for name in names} | {
            "_problem": problem,
            "kernel": False,
        }


def _guards_of(
    cap: float | None, factor: float | None, first: int, last: int, kinds: Sequence[str]
) -> cl.Guards:
    """Guards from the values of GUARDS."""
    only = tuple(kinds) if len(kinds) < len(cl.KINDS) else None
    return cl.Guards(cap, factor, first, last, only)
