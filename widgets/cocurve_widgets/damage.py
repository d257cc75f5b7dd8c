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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import cocurve_lab as cl
from cocurve_lab.extensions.judging.kept import answers_file, plans_file
from cocurve_lab.measuring.results import mean_and_error
from cocurve_lab.models.architectures import describe, here

from .packing import plain, plan_mark
from .session import CancelToken, MeasuredPlan, Session, count_right, text_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cocurve_lab.extensions.judging.answers import Asker
    from cocurve_lab.extensions.judging.generation import Question
    from cocurve_lab.measuring.risk import Meter

REST = 0.15  # seconds without a move before anything is measured
ALL = 1_000_000
STAGES = ((2, 2), (8, 5), (32, ALL), (ALL, ALL))  # rows, then questions per ability, up to here
QUESTIONS = 10  # asked in one step


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
        # (rank, place): the first question of every ability, the second of every ability, ...
        self._turns = sorted((self._names[:k].count(x), k) for k, x in enumerate(self._names))
        self.asked = dict(Counter(self._names))
        self._meter: Meter | None = None
        self._asker: Asker | None = None
        self._when: dict[str, float] = {}  # plan -> time of its last value
        self._next: dict[tuple[str, str], np.ndarray] = {}  # prompt, plan -> next token [V]
        self._plans: dict[str, cl.Selection] = {}  # the dense model first
        self._parts: dict[str, cl.Selection] = {}
        self.prompt = ""
        self._kind = f"damage {id(self)}"

    # What is known ------------------------------------------------------------------------------

    def of(self, plan: cl.Selection) -> MeasuredPlan | None:
        """What is known of a plan on this text: measured here, or kept in the session.

        The KL is the mean over the rows so far (nats per token), its standard error NaN for one
        row; right answers are of the questions asked so far. None where no row is measured.
        """
        values, kept = self._by_row(plan), self._kept(plan)
        right = count_right(self._names, _known(self._asker, plan, len(self._names)))
        values = values[~np.isnan(values)]
        if kept is not None and (kept.rows or 0) >= len(values):
            return kept if right in ({}, kept.abilities) else replace(kept, abilities=right)
        if not len(values):
            return None
        when = self._when.get(plan.fingerprint)
        return MeasuredPlan.of_rows(plan, values, self.text, abilities=right, measured_at=when)

    def next_tokens(self, plans: Sequence[cl.Selection], most: int = 5) -> list[dict[str, Any]]:
        """The likeliest tokens after the prompt, of the dense model and of each plan.

        A row has the token as text, and its probability under the dense model and each plan; None
        where a plan is not measured yet. Empty before the first pass.
        """
        found = [self._next.get((self.prompt, p.fingerprint)) for p in (self.dense, *plans)]
        if found[0] is None:
            return []
        best = [np.argsort(-x, kind="stable")[:most].tolist() for x in found if x is not None]
        ids = dict.fromkeys(k for likeliest in best for k in likeliest)
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
            "measured": [plain_record(record) for record in known if record is not None],
        }
        if pair:
            one, other, both = map(self._by_row, pair)
            shown["edge"] = _difference(both - one - other, [pair[-1]])
        if a is not None and b is not None:
            # row by row: text that is hard for one plan is hard for the other, which cancels
            shown["paired"] = _difference(self._by_row(b) - self._by_row(a), plans)
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
        return _known(self._meter, plan, len(self.held_out))

    def _kept(self, plan: cl.Selection) -> MeasuredPlan | None:
        """The session's record of a plan on this text."""
        mine = (m for m in self.session.measured if m.text == self.text)
        return next((m for m in mine if m.selection.fingerprint == plan.fingerprint), None)

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
            asked = [self.dense, *plans] if plans else []
            wanted = [{plan.fingerprint: plan for plan in given} for given in (asked, parts)]
            before = self._plans.keys(), self._parts.keys(), self.prompt
            if (wanted[0].keys(), wanted[1].keys(), prompt) == before and self.busy:
                return
            self._plans, self._parts = wanted
            self.prompt = prompt
            if self._next_step() is None:
                self.stop()
            else:
                self._submit(REST)
        self._changed()

    def stop(self) -> None:
        """Stop measuring; what is measured stays."""
        self.session.worker.cancel(self._kind)

    def _submit(self, rest: float = 0.0) -> None:
        self.session.worker.submit(self._kind, partial(self._work, rest), self._fail)

    def _fail(self, error: Exception) -> None:
        self._plans, self._parts = {}, {}  # until the next move: the same step would fail again
        self._failed(error)
        self._changed()

    def _work(self, rest: float, token: CancelToken) -> None:
        token.rest(rest)
        with self.session.exclusive(token) as model, _stoppable(model, token):
            if self._meter is None or self._meter.model is not model:
                self._begin(model)
            if step := self._next_step():
                step()
        with self.session.lock:
            if token.cancelled:  # the hand has moved on
                return
            if self._next_step() is None:
                self._keep()
            else:
                self._submit()  # behind whatever else waits: one step at a time is fair
        self._changed()

    def _begin(self, model: PreTrainedModel) -> None:
        from cocurve_lab.extensions.judging.answers import AnswerOptions, Asker
        from cocurve_lab.measuring.risk import Meter

        place = plans_file(self._cache, model, self.held_out)
        self._meter = Meter(model, self.held_out, checkpoint=place)
        self._next = {}
        if self._names:
            tokenizer, questions = self.session.require_tokenizer(), self._questions
            options = AnswerOptions(checkpoint=answers_file(self._cache, model, questions))
            self._asker = Asker(model, tokenizer, questions, options)

    def _next_step(self) -> Callable[[], None] | None:
        """The first of the stages that some plan has not passed; None when all is measured."""
        plans = self._plans.values()
        lacking = [(plan, *self._lacks(plan)) for plan in (*plans, *self._parts.values())]
        rows = [(plan, of_rows) for plan, of_rows, _ in lacking]
        answers = [(plan, of_questions) for plan, _, of_questions in lacking[: len(plans)]]
        for most_rows, most in STAGES:
            if found := _first_lacking(rows, range(len(self.held_out))[:most_rows]):
                return partial(self._measure, found[0], rows=found[1][:1])
            if self.prompt and any((self.prompt, p.fingerprint) not in self._next for p in plans):
                return self._predict
            if found := _first_lacking(answers, [n for rank, n in self._turns if rank < most]):
                return partial(self._measure, found[0], questions=found[1][:QUESTIONS])
        return None

    def _lacks(self, plan: cl.Selection) -> tuple[np.ndarray, np.ndarray]:
        """Which rows and which questions are neither measured here nor kept in the session."""
        rows = np.isnan(self._by_row(plan))
        questions = np.isnan(_known(self._asker, plan, len(self._names)))
        if kept := self._kept(plan):
            counts = {name: asked for name, (_, asked) in kept.abilities.items()}
            rows &= kept.rows != len(self.held_out)
            questions &= np.array([counts.get(x) != self.asked[x] for x in self._names], bool)
        return rows, questions

    def _measure(
        self, plans: list[cl.Selection], rows: Sequence[int] = (), questions: Sequence[int] = ()
    ) -> None:
        if rows and self._meter is not None:
            self._meter.measure(plans, rows)
        if questions and self._asker is not None:
            self._asker.ask(plans, questions)
        self._when.update({plan.fingerprint: time.time() for plan in plans})

    def _predict(self) -> None:
        """Predict the next token of the prompt under the dense model and all plans."""
        from cocurve_lab.extensions.judging.lockstep import next_token_probabilities

        assert self._meter is not None
        plans, prompt = list(self._plans.values()), self.prompt  # the next move changes both
        tokenizer = self.session.require_tokenizer()
        found = next_token_probabilities(self._meter.model, tokenizer, plans, prompt, chat=False)
        marks = [(prompt, plan.fingerprint) for plan in plans]
        self._next = dict(zip(marks, found, strict=True))

    def _keep(self) -> None:
        """Tell the session of the plans that are measured to the end."""
        plans = [plan for plan in self._plans.values() if plan is not self.dense]
        known = [(self.of(plan), self._kept(plan)) for plan in plans]
        fresh = [found for found, kept in known if found and found is not kept]
        if fresh:
            self.session.add_measured(*fresh)


def plain_record(record: MeasuredPlan) -> dict[str, Any]:
    """A measured plan as the page receives it."""
    plan, edge = record.selection, record.edge
    units = list(plan.pruned)
    return {
        "strength": plan.interaction_strength,
        "ratio": plan.requested_ratio,
        "realized": plan.realized_ratio,
        "risk": record.risk,
        "error": plain(record.standard_error),
        "text": record.text,
        "plan": plan_mark(units),
        "abilities": dict(record.abilities),
        "rows": record.rows,
        "at": record.measured_at,
        "by_row": [float(f"{kl:.5g}") for kl in record.by_row],
        "edge": edge and {"units": units, "difference": edge[0], "error": edge[1]},
    }


def _difference(by_row: np.ndarray, plans: Sequence[cl.Selection]) -> dict[str, Any] | None:
    """The mean of a difference of KL over the rows that are known, for the page; None for none."""
    known = by_row[~np.isnan(by_row)]
    if not len(known):
        return None
    value, error = mean_and_error(known)
    return {
        "plans": [plan_mark(plan.pruned) for plan in plans],
        "difference": value,
        "error": plain(error),
        "rows": len(known),
    }


def _known(measured: Meter | Asker | None, plan: cl.Selection, count: int) -> np.ndarray:
    """The first value of a plan by row or question; NaN where there is none yet."""
    found = None if measured is None else measured.memory.values.get(plan.fingerprint)
    return np.full(count, np.nan) if found is None else found[:, 0]


def _first_lacking(
    lacking: list[tuple[cl.Selection, np.ndarray]], places: Sequence[int]
) -> tuple[list[cl.Selection], list[int]] | None:
    """The plans that lack the first of the places that any lacks, and which places these lack."""
    for first in places:
        mine = [(plan, lacks) for plan, lacks in lacking if lacks[first]]
        if mine:
            return [p for p, _ in mine], [k for k in places if any(lacks[k] for _, lacks in mine)]
    return None


@contextmanager
def _stoppable(model: PreTrainedModel, token: CancelToken) -> Iterator[None]:
    """Within the block a pass of the model ends at its next layer once the job is cancelled.

    A pass of a large model takes seconds, which the next move should not wait for. Passes on other
    threads go on.
    """
    stop = here(lambda *_: token.check())
    with ExitStack() as hooks:
        for layer in describe(model).layers:
            hooks.enter_context(layer.register_forward_pre_hook(stop))
        yield
