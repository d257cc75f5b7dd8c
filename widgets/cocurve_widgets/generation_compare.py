"""GenerationCompare: text of the dense model, pruned and refitted, and KL at every token."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from traitlets import Bool, Dict, Enum, Float, Int, List, Unicode, observe

import cocurve_lab as cl
from cocurve_lab.extensions.judging.generation import (
    GrowingText,
    Question,
    encode_prompt,
    own_questions,
    token_pieces,
    uses_chat,
)
from cocurve_lab.extensions.judging.lockstep import (
    Sampling,
    first_divergence,
    forced_kl,
    generate_rows,
)

from .instrument import Drawn, counted, front, guarded, plan_code
from .session import MOST_RATIO, AnyCurvature, Cancelled, CancelToken, Session
from .traits import PlanOfUnits

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIDES = {"dense": "dense", "diagonal": "A", "pruned": "B", "refitted": "refitted"}
TRIED = 2  # questions of each ability, from which the first prompt is chosen
BATCH_SECONDS = 0.04  # between two messages with new tokens
SETTINGS = ("prompt", "max_new_tokens", "temperature", "seed", "chat")
WRITING = "writing the texts"
WAITING = "waiting for the model: something else is using it"
FORCED_TEXTS = {  # the text both models read: its code, and its name in the ribbon's title
    "dense": ("[*pair.prompt_ids, *pair.dense_ids]", "the prompt and the dense continuation"),
    "pruned": ("[*pair.prompt_ids, *pair.pruned_ids]", "the prompt and the pruned continuation"),
    "custom": ('tokenizer({!r})["input_ids"]', "your own text"),
}


@dataclass
class Run:
    """What one run was asked, and the texts that grow from it.

    Attributes:
        number: counts the runs.
        prompt, prompt_ids: the text to continue, and its tokens.
        plans: the plan of each text, by side, as far as there is one.
        texts: the texts by side.
        sampling: how they are written.
        chat: whether the prompt is asked through the chat template; None where there is none.
        stopped: whether it was stopped before the end.
        seconds: that it took.
    """

    number: int
    prompt: str
    prompt_ids: list[int]
    plans: dict[str, cl.Selection]
    texts: dict[str, GrowingText]
    sampling: Sampling
    chat: bool | None
    stopped: bool = False
    seconds: float = 0.0

    @property
    def divergence(self) -> int | None:
        """Index of the first token that differs; None where none does."""
        return first_divergence(self.texts["dense"].ids, self.texts["pruned"].ids)

    def sentence(self) -> str:
        """The status line."""
        sampling, place = self.sampling, self.divergence
        how = f"temperature {sampling.temperature:g}, seed {sampling.seed}"
        lengths = ", ".join(
            f"{SIDES[side]} {counted(len(text.ids), 'token')}" for side, text in self.texts.items()
        )
        so_far = " so far" if self.stopped else ""
        same = f"dense and B are the same{so_far}"
        parting = same if place is None else f"B diverges at token {place + 1}"
        asked = {None: "", True: "through the chat template; ", False: "not as a chat; "}
        return (
            f"{'stopped: ' if self.stopped else ''}{lengths}; {asked[self.chat]}"
            f"{how if sampling.temperature else 'greedy'}; {parting}; "
            f"written together in {self.seconds:.1f} s"
        )


class GenerationCompare(Drawn):
    """Text before and after pruning, from one prompt, one batch and one seed.

    One row of the batch is the dense model, one runs under the mask of the session's plan B, and
    one under the same mask with the gains that H gives (`cl.solve_gains`): the refitted text.
    Or, in its place, under that of A, the diagonal plan (lambda 0) of the same ratio and guards. No
    second model is made. The ribbon below shows KL(dense || B) at every token of a text that both
    read. A text ends with its turn of the chat; the reply to a question without a chat with its
    line.

    Attributes:
        ratio, interaction_strength: those of plan B. Setting one solves anew, under its guards.
        prompt, max_new_tokens, temperature, seed: settings of Generate; temperature 0 is greedy.
        selection: plan B, the session's; None for none.
        menu: the prompts to choose from. Shown without a prompt, it opens with a question that the
            dense model and B answer, and a plan of twice the ratio does not, if there is one.
        columns: beside the dense text: "refitted" for the pruned and the refitted one, "plans" for
            those of A and B.
        chat: whether prompts are asked through the chat template; None: where there is one. The
            status says which.
        live: write whenever a slider moves, and again whenever the plan changes.
        forced_text: the text of the ribbon: "dense", "pruned" or "custom" (then `custom_text`).
        texts: the written texts by side ("dense", "pruned", "refitted", or "diagonal" for plan A),
            without the prompt. Read-only.
        divergence: index of the first generated token that differs; None where none does.
        ribbon: a dict per token, {token, kl (nats per token), generated}.
        stale: "of earlier controls" where they have changed since the text was written; else "".
        busy: whether text is being written or waited for.
    """

    _esm = front("generation.js", render="render")

    prompt = Unicode().tag(sync=True)
    max_new_tokens = Int(64).tag(sync=True)
    temperature = Float(0.0).tag(sync=True)
    seed = Int(0).tag(sync=True)
    chat = Bool(None, allow_none=True).tag(sync=True)
    columns = Enum(("refitted", "plans"), "refitted").tag(sync=True)
    ratio = Float(0.2).tag(sync=True)
    interaction_strength = Float(1.0).tag(sync=True)
    live = Bool(True).tag(sync=True)
    forced_text = Enum(list(FORCED_TEXTS), "dense").tag(sync=True)
    custom_text = Unicode().tag(sync=True)
    selection = PlanOfUnits(cl.Selection, allow_none=True)

    divergence = Int(None, allow_none=True).tag(sync=True)
    ribbon: List[dict[str, Any]] = List().tag(sync=True)
    ribbon_text = Unicode().tag(sync=True)  # name of the ribbon's text
    stale = Unicode().tag(sync=True)
    busy = Bool(False).tag(sync=True)
    menu: List[dict[str, Any]] = List().tag(sync=True)
    tokens: Dict[str, Any] = Dict().tag(sync=True)  # side -> [[id, piece], ...]
    shown: Dict[str, Any] = Dict().tag(sync=True)  # prompt, plans and answer of the shown texts

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        curvature: AnyCurvature,
        *,
        session: Session | None = None,
        prompts: Sequence[str | Question] | None = None,
        selection: cl.Selection | None = None,
        **controls: Any,
    ) -> None:
        """Open the instrument on a model.

        Args:
            model, tokenizer: of any supported family, on any device.
            curvature: H of the model, or the path of its file.
            session: shared with other instruments; by default the curvature's own.
            prompts: the menu; by default the embedded model's prompts, empty for other models.
            selection: plan B; by default the session's, or that of the sliders.
            **controls: initial values of the traits.
        """
        self._require_known(controls)
        session = Session.bind(curvature, session, model, tokenizer)
        curvature = session.curvature
        self._questions = _menu_questions(session.require_model(), prompts)
        self._choosing = "prompt" not in controls
        self._kind = (
            f"generate {id(self)}"  # two instruments of a session must not cancel each other
        )
        self._token = CancelToken()
        self._newest: Run | None = None
        self._shown: Run | None = None
        self._following = False  # while the sliders are set to a plan
        super().__init__(curvature, session=session, **controls)
        self.menu = [
            {"group": q.capability, "prompt": q.prompt, "answer": q.answer} for q in self._questions
        ]
        if self.menu and not self.prompt:
            self.prompt = self._questions[0].prompt
        if selection is None and not controls.keys() & {"ratio", "interaction_strength"}:
            selection = session.selection
        if selection is None:  # an empty plan is falsy
            selection = self._solved(cl.opening_guards(curvature.units))
        self.selection = selection
        self.follow(self._hear_selection, "selection")
        self._closing.callback(self.stop)
        self.status = self.status or "no text yet: press Generate"

    def _ipython_display_(self) -> None:
        super()._ipython_display_()
        if self._newest is None:  # a reader who runs all cells finds a text, not an empty frame
            self.status, self.busy = WAITING, True
            self._token = self.session.worker.submit(self._kind, self._open, self._failed)

    def _open(self, token: CancelToken) -> None:
        """Write the first text."""
        if self._choosing and self._questions:
            with self.session.exclusive(token) as model:
                self.prompt = self._questions[self._telling(model)].prompt
        self._write(self._begin(), token)

    def _telling(self, model: PreTrainedModel) -> int:
        """The first question whose answer the dense model and B know, and twice the ratio loses."""
        plan = self.selection or self._solved(cl.opening_guards(self.curvature.units))
        plans = [cl.Selection.from_pruned(plan.units, []), plan]
        with suppress(cl.InfeasibleError):
            twice = min(MOST_RATIO, 2 * plan.requested_ratio)
            plans.append(self.session.solve(twice, self.interaction_strength, plan.guards))
        of = [question.capability for question in self._questions]
        few = (k for k, name in enumerate(of) if of[:k].count(name) < TRIED)
        tried = [k for k in few if self._questions[k].answer is not None]
        if not tried:
            return 0
        asked = [self._questions[number] for number in tried]
        right = cl.answer_accuracy(model, self._tokenizer, plans, asked, progress=False).right
        right[2:] ^= True  # the larger plan is to be wrong
        return tried[max(range(len(tried)), key=lambda k: right[:, k].tolist())]

    # Controls -----------------------------------------------------------------------------------

    @observe("selection")
    def _tell_selection(self, change: Any) -> None:
        self.session.selection = change.new  # not under our lock: other instruments take theirs
        self._following = True
        if change.new is not None:
            self.ratio = change.new.requested_ratio
            if change.new.interaction_strength is not None:
                self.interaction_strength = change.new.interaction_strength
        self._following = False
        self._plan_changed()

    @guarded
    def _hear_selection(self, change: Any) -> None:
        self.selection = change.new

    @observe("ratio", "interaction_strength")
    @guarded
    def _slide(self, _: Any) -> None:
        if self.selection is not None and not self._following:
            self.error = ""
            self.selection = self._solved(self.selection.guards)
            self._plan_changed(first=True)

    def _solved(self, guards: cl.Guards) -> cl.Selection:
        return self.session.solve(self.ratio, self.interaction_strength, guards)

    @observe("columns")
    @guarded
    def _columns_changed(self, _: Any) -> None:
        if self._newest is not None:
            self.start()

    @guarded
    def _plan_changed(self, first: bool = False) -> None:
        """Write again, or where `first` the first time, unless that plan's text is there."""
        self._judge()
        plan, newest = self.selection, self._newest
        if not self.live or plan is None or (newest is None and not first):
            return
        if newest is None or not _same_plan(newest.plans["pruned"], plan):
            self.start()

    def _question(self, prompt: str) -> Question | None:
        return next((q for q in self._questions if q.prompt == prompt), None)

    @observe(*SETTINGS)
    @guarded
    def _judge(self, _: Any = None) -> None:
        """Set `stale`.

        The text stays when plan, prompt or settings change, because writing is slow and the old
        text is worth comparing. So the page must say that it is no longer of what the controls
        show.
        """
        run = self._shown
        if run is not None:
            mine = run.prompt, run.sampling, run.chat
            same = mine == (self.prompt, self._sampling, self._asked)
            plan = self.selection is not None and _same_plan(run.plans["pruned"], self.selection)
            self.stale = "" if same and plan else "of earlier controls"

    @observe("forced_text", "custom_text")
    @guarded
    def _forced_text_changed(self, change: Any) -> None:
        chosen = self._shown is not None and change.name == "forced_text"
        if chosen or self.forced_text == "custom":
            self.error = ""
            self.session.worker.submit(
                f"ribbon {id(self)}", lambda _: self._measure_ribbon(), self.report
            )

    @guarded
    def _heard(self, widget: Any, content: Any, buffers: Any) -> None:
        for name in SETTINGS:  # sent with the press: a separate update could arrive after it
            if name in content.get("set", {}):
                setattr(self, name, content["set"][name])
        if content.get("do") == "generate":
            self.start()
        elif content.get("do") == "stop":
            self.stop()
        else:
            super()._heard(widget, content, buffers)

    # Writing ------------------------------------------------------------------------------------

    def generate(
        self, prompt: str | None = None, max_new_tokens: int | None = None
    ) -> tuple[str, str]:
        """Write both texts, as Generate does, and return (dense, pruned).

        Runs in the calling thread: interrupting the kernel stops it and keeps the text so far.

        Args:
            prompt: new value of the trait; None keeps it.
            max_new_tokens: likewise.
        """
        self.prompt = self.prompt if prompt is None else prompt
        self.max_new_tokens = max_new_tokens or self.max_new_tokens
        self.session.worker.cancel(self._kind)
        try:
            run, self._token = self._begin(), CancelToken()
            self._write(run, self._token)
        except BaseException as error:
            self._failed(error)
            raise
        return self.texts["dense"], self.texts["pruned"]

    @guarded
    def start(self) -> None:
        """Write both texts on the session's thread; a newer request replaces this one."""
        run = self._begin()
        self._token = self.session.worker.submit(
            self._kind, lambda token: self._write(run, token), self._failed
        )

    def stop(self) -> None:
        """Stop within one token and keep the text so far."""
        self._token.cancel()
        self.session.worker.cancel(self._kind)
        if self.busy and self.status == WAITING:
            self.status, self.busy = "stopped before the first token", False

    def _begin(self) -> Run:
        with self.lock:
            self.error = ""
            self._newest = run = self._asked_run()
            self.status, self.busy = WAITING, True
            return run

    def _asked_run(self) -> Run:
        """The run that the controls ask for."""
        plan, tokenizer = self.session.require_plan(), self._tokenizer
        ids = encode_prompt(self.session.require_model(), tokenizer, self.prompt, self._asked)
        dense = cl.Selection.from_pruned(plan.units, [])
        sides = {"dense": dense, "pruned": plan, "refitted": self._refitted(plan)}
        if self.columns == "plans":
            sides = {"dense": dense, "diagonal": self._diagonal(plan), "pruned": plan}
        plans = {side: found for side, found in sides.items() if found is not None}
        texts = {side: GrowingText(tokenizer, ids) for side in plans}
        number = 1 if self._newest is None else self._newest.number + 1
        return Run(number, self.prompt, ids, plans, texts, self._sampling, self._asked)

    def _diagonal(self, plan: cl.Selection) -> cl.Selection | None:
        """Plan A: lambda 0 at the ratio and guards of a plan; None where it is no other plan."""
        found = self.session.diagonal(plan.requested_ratio, plan.guards)
        other = found is not None and not _same_plan(found, plan)
        return found if other and plan.interaction_strength is not None else None

    def _refitted(self, plan: cl.Selection) -> cl.Selection | None:
        """The plan with gains for what stays (eq. comp); None where H gives none."""
        try:
            gains = cl.solve_gains(self.curvature, plan)
        except cl.CocurveError:  # measured interactions are no Gram matrix
            return None
        return plan.with_gains(gains) if gains else None

    @property
    def texts(self) -> dict[str, str]:
        """The written texts by side, without the prompt; empty before the first."""
        return {side: "".join(piece for _, piece, *_ in row) for side, row in self.tokens.items()}

    @property
    def _sampling(self) -> Sampling:
        question = self._question(self.prompt)
        line = question is not None and question.answer is not None and not self._asked
        return Sampling(self.max_new_tokens, self.temperature, self.seed, line)

    @property
    def _asked(self) -> bool | None:
        asked = uses_chat(self._tokenizer, self.chat)
        return asked if uses_chat(self._tokenizer) else None

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self.session.require_tokenizer()

    def _failed(self, error: BaseException) -> None:
        self.busy = False
        if isinstance(error, Exception) and not isinstance(error, Cancelled):
            if self.status in (WAITING, WRITING):
                self.status = "no new text"
            self.report(error)

    def _write(self, run: Run, token: CancelToken) -> None:
        try:
            with self.session.exclusive(token) as model:
                self._stream(model, run, token)
        except KeyboardInterrupt:
            run.stopped = True
            self._publish(run)
            raise
        except Cancelled:
            if run is self._newest:
                self.status, self.busy = "stopped before the first token", False
            raise
        # A newer run may have begun while this one wrote; its text must not be overwritten by ours.
        # One may also begin during the ribbon: then it owns `busy`, so we ask again.
        if run is self._newest:
            self._publish(run)
            self._measure_ribbon()
            self.busy = self.busy and run is not self._newest

    def _stream(self, model: PreTrainedModel, run: Run, token: CancelToken) -> None:
        """Write token by token, send the page batches, and stop between tokens when asked."""
        self.status = WRITING
        started = last = time.monotonic()
        sent = dict.fromkeys(run.texts, 0)
        self.send({"start": self._describe(run)})
        writing = generate_rows(
            model,
            self._tokenizer,
            run.prompt,
            list(run.plans.values()),
            run.sampling,
            chat=run.chat,
        )
        for tokens in writing:
            for text, new in zip(run.texts.values(), tokens, strict=True):
                if new is not None:
                    text.add(new)
            if token.cancelled:
                run.stopped = True
                break
            if time.monotonic() - last >= BATCH_SECONDS:
                new_ones = {
                    side: self._plain_tokens(run.texts[side])[n:] for side, n in sent.items()
                }
                self.send({"append": new_ones, "after": sent, "run": run.number})
                sent = {side: len(text.ids) for side, text in run.texts.items()}
                last = time.monotonic()
        run.seconds = time.monotonic() - started

    def _publish(self, run: Run) -> None:
        with self.lock, self.hold_sync():
            self._shown = run
            self.tokens = {side: self._plain_tokens(text) for side, text in run.texts.items()}
            self.divergence = run.divergence
            self.shown = self._describe(run)
            self._judge()
            self.status = run.sentence()

    def _describe(self, run: Run) -> dict[str, Any]:
        question = self._question(run.prompt)
        return {
            "run": run.number,
            "prompt": run.prompt,
            "plans": {s: _plan_words(plan) for s, plan in run.plans.items() if s != "dense"},
            "stopped": run.stopped,
            "answer": None if question is None else question.answer,
            "right": {s: question and question.is_right(t.text) for s, t in run.texts.items()},
        }

    def _plain_tokens(self, text: GrowingText) -> list[list[Any]]:
        """The tokens for the page: [id, text], or [id, "", name] for special ones."""
        special, name = set(self._tokenizer.all_special_ids), self._tokenizer.convert_ids_to_tokens
        tokens = zip(text.ids, text.pieces, strict=True)
        return [[t, piece, name(t)] if t in special else [t, piece] for t, piece in tokens]

    # The ribbon ---------------------------------------------------------------------------------

    def _measure_ribbon(self) -> None:
        """Measure KL at every token of the chosen text, under the plan of the shown texts."""
        run, kind = self._shown, self.forced_text
        plan = self.session.require_plan() if run is None else run.plans["pruned"]
        prompt: list[int] = []
        ids: list[int] = []
        if kind == "custom":
            ids = list(self._tokenizer(self.custom_text)["input_ids"]) if self.custom_text else []
        elif run is not None:
            prompt, ids = run.prompt_ids, [*run.prompt_ids, *run.texts[kind].ids]
        ribbon = []
        if len(ids) > 1:
            with self.session.exclusive() as model:
                values = forced_kl(model, plan, ids)
            ribbon = [
                {"token": name, "kl": float(value), "generated": bool(prompt) and i > len(prompt)}
                for i, (name, value) in enumerate(zip(self._names(ids)[1:], values, strict=True), 2)
            ]
        with self.lock, self.hold_sync():
            self.ribbon, self.ribbon_text = ribbon, FORCED_TEXTS[kind][1]

    def _names(self, ids: list[int]) -> list[str]:
        """The texts of tokens; the tokenizer's name for a token without text."""
        pieces = token_pieces(self._tokenizer, [], ids)
        own = self._tokenizer.convert_ids_to_tokens(ids)
        return [piece or name for piece, name in zip(pieces, own, strict=True)]

    # Code and files -----------------------------------------------------------------------------

    def code(self) -> str:
        """The Python that writes the shown text; before the first, the text the controls ask for.

        It needs `model`, `tokenizer` and `curvature`, those of the instrument.
        """
        run = self._shown or self._asked_run()
        prompt, chat = run.prompt, ", chat=False" if run.chat is False else ""
        forced = FORCED_TEXTS[self.forced_text][0].format(self.custom_text)
        return "\n".join(
            [
                "import cocurve_lab as cl",
                "from cocurve_lab.extensions.judging.lockstep import Sampling, forced_kl",
                "",
                f"selection = {plan_code(run.plans['pruned'], self.curvature)}",
                f"sampling = {run.sampling!r}",
                f"pair = cl.compare_text(model, tokenizer, {prompt!r}, selection, sampling{chat})",
                "print(pair.dense, pair.pruned, sep='\\n---\\n')",
                f"kl = forced_kl(model, selection, {forced})  # nats per token",
            ]
        )

    def _still_texts(self) -> str:
        """The texts one below the other."""
        rows = (
            f"<tr><th>{SIDES[side]}</th><td>{html.escape(text)}</td></tr>"
            for side, text in self.texts.items()
        )
        return f'<table style="text-align: left; white-space: pre-wrap">{"".join(rows)}</table>'

    def table(self) -> list[dict[str, Any]]:
        """The ribbon: position, text and KL (nats) of every token from the second on."""
        return [
            {
                "position": position,
                "token": bar["token"],
                "generated": bar["generated"],
                "kl_nats": bar["kl"],
            }
            for position, bar in enumerate(self.ribbon, 2)
        ]


def _menu_questions(
    model: PreTrainedModel, prompts: Sequence[str | Question] | None
) -> list[Question]:
    """The prompts given; if none, those of the embedded model where `model` is it."""
    if prompts is not None:
        return [p if isinstance(p, Question) else Question("your prompts", p) for p in prompts]
    source = model.config.name_or_path
    return own_questions(source) if source else []


def _same_plan(left: cl.Selection, right: cl.Selection) -> bool:
    """Whether two plans over the same units do the same to a model."""
    return left is right or (set(left.pruned), left.gains) == (set(right.pruned), right.gains)


def _plan_words(plan: cl.Selection) -> str:
    """A plan in a few words, for the head of its text."""
    strength = "" if plan.interaction_strength is None else f"λ {plan.interaction_strength:.3g}, "
    words = f"{strength}{100 * plan.realized_ratio:.1f} % removed, {counted(len(plan), 'unit')}"
    return words + (f", {counted(len(plan.gains), 'gain')}" if plan.gains else "")
