"""What the plans on the screen break, measured on the session's thread while somebody looks.

A moved slider passes plans that nobody wants measured, so the work waits until the hand rests. Then
it goes in small steps: two rows of text give a first KL, a few questions the first right answers,
more rows and questions the rest. The next move stops it, within a pass of the model too. Values are
kept by plan and row, so a plan that comes back is known at once and goes on where it stopped.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import cocurve_lab as cl
from cocurve_lab.measuring.plan_memory import answers_file, plans_file
from cocurve_lab.models.architectures import describe

from .packing import plan_mark
from .session import CancelToken, MeasuredPlan, Session, mean_and_error, text_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cocurve_lab.measuring.answers import Asker
    from cocurve_lab.measuring.generation import Question
    from cocurve_lab.measuring.risk import Meter

REST = 0.15  # seconds without a move before anything is measured
ALL = 1_000_000
STAGES = ((2, 2), (8, 5), (32, ALL), (ALL, ALL))  # rows, then questions per ability, up to here
QUESTIONS = 10  # asked in one step
Step = Callable[["PreTrainedModel"], None]
Difference = tuple[float, float, int]  # nats per token, its standard error, rows


class Damage:
    """KL and right answers of a few plans, coarse at first and then refined.

    Args:
        session: has the model and the thread. Plans measured to the end are added to it.
        held_out: text for the KL, which played no part in H.
        questions: with known answers, for the right answers by ability; none counts none.
        changed: called on any thread whenever there is something new to show.
        failed: called with the error, should there be one.
        cache: folder where measured plans and their answers are kept, shared with the studies;
            None keeps none.

    Attributes:
        text: name of the text in `MeasuredPlan.text`.
        asked: number of questions by ability.
        prompt: text whose next token is predicted under each plan; empty for none.
        dense: the empty plan, which the dense model's right answers are kept under.
    """

    def __init__(
        self,
        session: Session,
        held_out: cl.CalibrationSet,
        questions: Sequence[Question],
        changed: Callable[[], None],
        failed: Callable[[Exception], None],
        *,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        session.require_model()
        held_out = held_out.require_disjoint(session.curvature)
        if questions:
            session.require_tokenizer()
        self.session, self.held_out, self._cache = session, held_out, cache
        self._changed, self._failed = changed, failed
        self.text = text_name(held_out)
        self.dense = cl.Selection.from_pruned(session.curvature.units, [])
        self._questions = tuple(questions)
        self._names = [q.capability for q in questions if q.answer is not None]
        self._turns = _in_turn(self._names)
        self.asked = dict(Counter(self._names))
        self._meter: Meter | None = None
        self._asker: Asker | None = None
        self._when: dict[str, float] = {}  # plan -> time of its last value
        self._next: dict[tuple[str, str], np.ndarray] = {}  # prompt, plan -> next token [V]
        self._plans: dict[str, cl.Selection] = {}
        self._parts: dict[str, cl.Selection] = {}
        self.prompt = ""
        self._seen: tuple[MeasuredPlan, ...] = ()
        self._records: dict[str, MeasuredPlan] = {}  # of `_seen`, those on this text
        self._until = 0.0
        self._kind = f"damage {id(self)}"

    # What is known ------------------------------------------------------------------------------

    def of(self, plan: cl.Selection) -> MeasuredPlan | None:
        """What is known of a plan on this text: measured here, or kept in the session.

        The KL is the mean over the rows so far (nats per token), its standard error NaN for one
        row; right answers are of the questions asked so far. None where no row is measured.
        """
        values, right = self._by_row(plan), self._answers(plan)
        values, kept = values[~np.isnan(values)], self._kept(plan)
        if kept is not None and (kept.rows or 0) >= len(values):
            return replace(kept, abilities=right or kept.abilities)
        if not len(values):
            return None
        when, rows = self._when.get(plan.fingerprint), tuple(values.tolist())
        known = *mean_and_error(values), self.text, right, len(rows), when
        return MeasuredPlan(plan, *known, by_row=rows)

    def paired(self, plan: cl.Selection, other: cl.Selection) -> Difference | None:
        """KL of `plan` less that of `other`, its standard error, and the rows both know.

        Row by row: text that is hard for one plan is hard for the other, which cancels.
        """
        return _mean(self._by_row(plan) - self._by_row(other))

    def edge(self, u: cl.Selection, v: cl.Selection, both: cl.Selection) -> Difference | None:
        """KL of two units removed together less that of each alone, its error, and the rows."""
        return _mean(self._by_row(both) - self._by_row(u) - self._by_row(v))

    def next_tokens(self, plans: Sequence[cl.Selection], most: int = 5) -> list[dict[str, Any]]:
        """The likeliest tokens of the dense model after the prompt, and the first of each plan.

        A row has the token as text, and its probability under the dense model and each plan; None
        where a plan is not measured yet. Empty before the first pass.
        """
        found = [self._next.get((self.prompt, p.fingerprint)) for p in (self.dense, *plans)]
        if found[0] is None:
            return []
        first = [int(values.argmax()) for values in found if values is not None]
        ids = dict.fromkeys([*np.argsort(-found[0], kind="stable")[:most].tolist(), *first])
        decode = self.session.require_tokenizer().decode
        return [
            {"token": decode([i]), "shares": [None if v is None else float(v[i]) for v in found]}
            for i in ids
        ]

    def shown(
        self, a: cl.Selection | None, b: cl.Selection | None, pair: Sequence[cl.Selection]
    ) -> dict[str, Any]:
        """Everything known of the dense model, A, B and a pair of units, for the page."""
        plans = [plan for plan in (a, b) if plan is not None]
        known = [self.of(plan) for plan in (self.dense, *plans, *pair)]
        shown: dict[str, Any] = {
            "text": self.text,
            "rows": len(self.held_out),
            "asked": self.asked,
            "busy": self.busy,
            "measured": [plain(record) for record in known if record is not None],
        }
        if pair:
            shown["edge"] = _plain_difference(self.edge(*pair), [pair[-1]])
        if a is not None and b is not None:
            shown["paired"] = _plain_difference(self.paired(b, a), plans)
            if self.session.tokenizer is not None:
                marks = [plan_mark(plan.pruned) for plan in plans]
                rows = self.next_tokens(plans)
                shown["next"] = {"plans": marks, "prompt": self.prompt, "rows": rows}
        return shown

    @property
    def busy(self) -> bool:
        """Whether something is being measured, or soon will be."""
        return self.session.worker.busy(self._kind) and self._next_step() is not None

    def _by_row(self, plan: cl.Selection) -> np.ndarray:
        """KL by row of the text, NaN where it is not measured."""
        if not len(plan):
            return np.zeros(len(self.held_out))  # it changes nothing
        known = {} if self._meter is None else self._meter.memory.values
        found = known.get(plan.fingerprint)
        return np.full(len(self.held_out), np.nan) if found is None else found[:, 0].copy()

    def _answers(self, plan: cl.Selection) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for name, right in zip(self._names, self._right(plan), strict=True):
            if not np.isnan(right):
                before = found.get(name, (0, 0))
                found[name] = before[0] + int(right), before[1] + 1
        return found

    def _right(self, plan: cl.Selection) -> np.ndarray:
        """1 or 0 by question, whether the plan was right; NaN where it was not asked."""
        known = {} if self._asker is None else self._asker.memory.values
        found = known.get(plan.fingerprint)
        return np.full(len(self._names), np.nan) if found is None else found[:, 0]

    def _kept(self, plan: cl.Selection) -> MeasuredPlan | None:
        """The session's record of a plan on this text."""
        if self._seen is not self.session.measured:  # a tuple that is replaced, never changed
            self._seen = self.session.measured
            mine = (m for m in self._seen if m.text == self.text)
            self._records = {m.selection.fingerprint: m for m in mine}
        return self._records.get(plan.fingerprint)

    # The work -----------------------------------------------------------------------------------

    def show(
        self, plans: Sequence[cl.Selection], parts: Sequence[cl.Selection] = (), prompt: str = ""
    ) -> None:
        """Measure these plans from now on, and no others.

        Args:
            plans: their KL, right answers, and next token after the prompt.
            parts: plans whose KL alone is wanted.
            prompt: the text to continue; empty for none.
        """
        with self.session.lock:
            wanted = [{plan.fingerprint: plan for plan in given} for given in (plans, parts)]
            before = self._plans.keys(), self._parts.keys(), self.prompt
            if (wanted[0].keys(), wanted[1].keys(), prompt) == before and self.busy:
                return
            self._plans, self._parts = wanted
            self.prompt = prompt
            self._until = time.monotonic() + REST
            if self._next_step() is None:
                self.stop()
            else:
                self._submit()
        self._changed()

    def stop(self) -> None:
        """Stop measuring; what is measured stays."""
        self.session.worker.cancel(self._kind)

    def _submit(self) -> None:
        self.session.worker.submit(self._kind, self._work, self._fail)

    def _fail(self, error: Exception) -> None:
        self._plans, self._parts = {}, {}  # until the next move: the same step would fail again
        self._failed(error)
        self._changed()

    def _work(self, token: CancelToken) -> None:
        token.rest(self._until - time.monotonic())
        with self.session.exclusive(token) as model, _stoppable(model, token):
            if self._meter is None or self._meter.model is not model:
                self._begin(model)
            step = self._next_step()
            if step is not None:
                step(model)
        with self.session.lock:
            if token.cancelled:  # the hand has moved on
                return
            if self._next_step() is None:
                self._keep()
            else:
                self._submit()  # behind whatever else waits: one step at a time is fair
        self._changed()

    def _begin(self, model: PreTrainedModel) -> None:
        from cocurve_lab.measuring.answers import AnswerOptions, Asker
        from cocurve_lab.measuring.risk import Meter

        place = plans_file(self._cache, model, self.held_out)
        self._meter = Meter(model, self.held_out, checkpoint=place)
        self._next = {}
        if self._names:
            tokenizer, questions = self.session.require_tokenizer(), self._questions
            options = AnswerOptions(checkpoint=answers_file(self._cache, model, questions))
            self._asker = Asker(model, tokenizer, questions, options)

    def _next_step(self) -> Step | None:
        """The first of the stages that some plan has not passed; None when all is measured."""
        plans, asked = [*self._plans.values(), *self._parts.values()], self._asked()
        for rows, questions in STAGES:
            for row in range(min(rows, len(self.held_out))):
                if lacking := [plan for plan in plans if self._lacks_row(plan, row)]:
                    return partial(self._measure_row, row, lacking)
            if self.prompt and any((self.prompt, p.fingerprint) not in self._next for p in asked):
                return self._predict
            for number, rank in self._turns:
                if rank < questions and any(self._lacks_answer(p, number) for p in asked):
                    return partial(self._ask, number, questions)
        return None

    def _lacks_row(self, plan: cl.Selection, row: int) -> bool:
        kept = self._kept(plan)
        if not len(plan) or (kept is not None and kept.rows == len(self.held_out)):
            return False
        return bool(np.isnan(self._by_row(plan)[row]))

    def _asked(self) -> list[cl.Selection]:
        return [self.dense, *self._plans.values()] if self._plans else []

    def _lacks_answer(self, plan: cl.Selection, number: int) -> bool:
        kept, name = self._kept(plan), self._names[number]
        if kept is not None and kept.abilities.get(name, (0, 0))[1] == self.asked[name]:
            return False
        return bool(np.isnan(self._right(plan)[number]))

    def _measure_row(self, row: int, plans: list[cl.Selection], model: PreTrainedModel) -> None:
        assert self._meter is not None
        self._meter.measure(plans, [row])
        self._stamp(plans)

    def _ask(self, first: int, most: int, model: PreTrainedModel) -> None:
        """Ask the plans that lack it this question, and with it the next few of the stage."""
        assert self._asker is not None
        plans = [plan for plan in self._asked() if self._lacks_answer(plan, first)]
        mine = (n for n, rank in self._turns if rank < most)
        open_ = [n for n in mine if any(self._lacks_answer(plan, n) for plan in plans)]
        self._asker.ask(plans, open_[:QUESTIONS])
        self._stamp(plans)

    def _predict(self, model: PreTrainedModel) -> None:
        """Predict the next token of the prompt under the dense model and all plans."""
        from cocurve_lab.measuring.lockstep import next_token_probabilities

        plans, tokenizer = self._asked(), self.session.require_tokenizer()
        found = next_token_probabilities(model, tokenizer, plans, self.prompt)
        marks = [(self.prompt, plan.fingerprint) for plan in plans]
        self._next = dict(zip(marks, found, strict=True))

    def _stamp(self, plans: Iterable[cl.Selection]) -> None:
        self._when.update({plan.fingerprint: time.time() for plan in plans})

    def _keep(self) -> None:
        """Tell the session of the plans that are measured to the end."""
        fresh = []
        for plan in self._plans.values():
            found, kept = self.of(plan), self._kept(plan)
            if found is None or not found.rows:
                continue
            if kept is None or (kept.rows, kept.abilities) != (found.rows, found.abilities):
                fresh.append(found)
        if fresh:
            self.session.add_measured(*fresh)


def plain(record: MeasuredPlan) -> dict[str, Any]:
    """A measured plan as the page receives it."""
    return {
        "strength": record.selection.interaction_strength,
        "ratio": record.selection.requested_ratio,
        "realized": record.selection.realized_ratio,
        "risk": record.risk,
        "error": None if np.isnan(record.standard_error) else record.standard_error,
        "text": record.text,
        "plan": plan_mark(record.selection.pruned),
        "abilities": dict(record.abilities),
        "rows": record.rows,
        "at": record.measured_at,
        "by_row": [float(f"{kl:.5g}") for kl in record.by_row],
        "replies": list(record.replies),
        "edge": None
        if record.edge is None
        else {
            "units": list(record.selection.pruned),
            "difference": record.edge[0],
            "error": record.edge[1],
        },
    }


def _plain_difference(
    found: Difference | None, plans: Sequence[cl.Selection]
) -> dict[str, Any] | None:
    """A difference for the page, with the marks of the plans that it is of."""
    if found is None:
        return None
    value, error, rows = found
    marks = [plan_mark(plan.pruned) for plan in plans]
    error_or_none = None if np.isnan(error) else error
    return {"plans": marks, "difference": value, "error": error_or_none, "rows": rows}


def _in_turn(names: Iterable[str]) -> list[tuple[int, int]]:
    """(place, rank): the first question of every ability, the second of every ability, ..."""
    seen: Counter[str] = Counter()
    found = []
    for place, name in enumerate(names):
        found.append((place, seen[name]))
        seen[name] += 1
    return sorted(found, key=lambda pair: pair[1])


def _mean(values: np.ndarray) -> Difference | None:
    """Mean over the rows that are not NaN, its standard error, and their number; None for none."""
    known = values[~np.isnan(values)]
    return (*mean_and_error(known), len(known)) if len(known) else None


@contextmanager
def _stoppable(model: PreTrainedModel, token: CancelToken) -> Iterator[None]:
    """Within the block a pass of the model ends at its next layer once the job is cancelled.

    A pass of a large model takes seconds, which the next move should not wait for.
    """

    def check(*_: Any) -> None:
        token.check()

    hooks = [layer.register_forward_pre_hook(check) for layer in describe(model).layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
