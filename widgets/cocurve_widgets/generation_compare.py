"""GenerationCompare: text of the dense model and of plans A and B, and KL at every token."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anywidget
from traitlets import Bool, Dict, Enum, Float, Instance, Int, List, Unicode, observe, validate

import cocurve_lab as cl
from cocurve_lab.base.tables import as_html
from cocurve_lab.measuring.generation import (
    GrowingText,
    Question,
    encode_prompt,
    own_questions,
    token_pieces,
    uses_chat,
)
from cocurve_lab.measuring.lockstep import Sampling, first_divergence, forced_kl, generate_rows

from .instrument import KIT, Instrument, counted, front, guarded, plan_code
from .session import Cancelled, CancelToken, Session

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIDES = {"dense": "dense", "diagonal": "A", "pruned": "B"}
BATCH_SECONDS = 0.04  # between two messages with new tokens
SETTINGS = ("prompt", "max_new_tokens", "temperature", "seed", "chat")
WRITING = "writing the texts"
WAITING = "waiting for the model: something else is using it"
FORCED_TEXTS = {  # the text both models read: its code, and its name in the ribbon's title
    "dense": ("[*pair.prompt_ids, *pair.dense_ids]", "the prompt and the dense continuation"),
    "pruned": ("[*pair.prompt_ids, *pair.pruned_ids]", "the prompt and the pruned continuation"),
    "custom": ('tokenizer({!r})["input_ids"]', "your own text"),
}


@dataclass(frozen=True)
class Request:
    """The settings of one run; `number` counts the runs.

    `diagonal` is plan A, None where it is no other plan. `chat` is whether the prompt is asked
    through the chat template; None where there is none.
    """

    number: int
    prompt: str
    prompt_ids: list[int]
    selection: cl.Selection
    diagonal: cl.Selection | None
    sampling: Sampling
    chat: bool | None

    @property
    def plans(self) -> dict[str, cl.Selection]:
        """The plan of each text."""
        dense = cl.Selection.from_pruned(self.selection.units, [])
        plans = {"dense": dense, "diagonal": self.diagonal, "pruned": self.selection}
        return {side: plan for side, plan in plans.items() if plan is not None}


@dataclass
class Written:
    """The result of a request: a growing text per side, and the seconds it took."""

    request: Request
    texts: dict[str, GrowingText]
    stopped: bool = False
    seconds: float = 0.0

    @property
    def divergence(self) -> int | None:
        """Index of the first token that differs; None where none does."""
        return first_divergence(self.texts["dense"].ids, self.texts["pruned"].ids)

    @property
    def sampling(self) -> Sampling:
        """The sampling that writes these texts again; a stopped text is shorter than asked for."""
        if not self.stopped:
            return self.request.sampling
        length = max(1, *(len(text.ids) for text in self.texts.values()))
        return replace(self.request.sampling, max_new_tokens=length)

    def sentence(self) -> str:
        """The status line."""
        sampling, place = self.request.sampling, self.divergence
        how = f"temperature {sampling.temperature:g}, seed {sampling.seed}"
        lengths = ", ".join(
            f"{SIDES[side]} {counted(len(text.ids), 'token')}" for side, text in self.texts.items()
        )
        so_far = " so far" if self.stopped else ""
        same = f"dense and B are the same{so_far}"
        parting = same if place is None else f"B diverges at token {place + 1}"
        asked = {None: "", True: "through the chat template; ", False: "not as a chat; "}
        return (
            f"{'stopped: ' if self.stopped else ''}{lengths}; {asked[self.request.chat]}"
            f"{how if sampling.temperature else 'greedy'}; {parting}; "
            f"written together in {self.seconds:.1f} s"
        )


class GenerationCompare(Instrument, anywidget.AnyWidget):
    """Text before and after pruning, from one prompt, one batch and one seed.

    One row of the batch is the dense model, one runs under the mask of A, the diagonal plan
    (lambda 0) of the same ratio and guards, one under that of B, the session's plan; no second
    model is made. The ribbon below shows KL(dense || B) at every token of a text that both read.
    A text ends with its turn of the chat; the reply to a question without a chat with its line.

    Attributes:
        ratio, interaction_strength: those of plan B. Setting one solves anew, under its guards.
        prompt, max_new_tokens, temperature, seed: settings of Generate; temperature 0 is greedy.
        selection: plan B, the session's; None for none.
        choice: index of the chosen menu entry; None for a prompt of your own.
        chat: whether prompts are asked through the chat template; None: where there is one. The
            status says which.
        live: write whenever a slider moves, and again whenever the plan changes.
        forced_text: the text of the ribbon: "dense", "pruned" or "custom" (then `custom_text`).
        dense_text, diagonal_text, pruned_text: the texts, without the prompt; that of A is empty
            where A is no other plan.
        divergence: index of the first generated token that differs; None where none does.
        ribbon: a dict per token, {token, kl (nats per token), generated}.
        stale: where the controls have changed since the text was written, which of them; else "".
        busy: whether text is being written or waited for.
    """

    _esm = front(
        *(*KIT, "axis.js", "compare.js", "measured.js", "guess.js", "chart.js", "generation.js")
    )
    _css = front("instrument.css")

    prompt = Unicode().tag(sync=True)
    max_new_tokens = Int(64).tag(sync=True)
    temperature = Float(0.0).tag(sync=True)
    seed = Int(0).tag(sync=True)
    choice = Int(None, allow_none=True).tag(sync=True)
    chat = Bool(None, allow_none=True).tag(sync=True)
    ratio = Float(0.2).tag(sync=True)
    interaction_strength = Float(1.0).tag(sync=True)
    live = Bool(True).tag(sync=True)
    forced_text = Enum(list(FORCED_TEXTS), "dense").tag(sync=True)
    custom_text = Unicode().tag(sync=True)
    selection = Instance(cl.Selection, allow_none=True)

    dense_text = Unicode().tag(sync=True)
    diagonal_text = Unicode().tag(sync=True)
    pruned_text = Unicode().tag(sync=True)
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
        curvature: cl.Curvature,
        *,
        session: Session | None = None,
        prompts: Sequence[str | Question] | None = None,
        selection: cl.Selection | None = None,
        **controls: Any,
    ) -> None:
        """Open the instrument on a model.

        Args:
            model, tokenizer, curvature: of one model, of any supported family, on any device.
            session: shared with other instruments; by default the curvature's own.
            prompts: the menu; by default the embedded model's prompts, empty for other models.
            selection: plan B; by default the session's, or that of the sliders.
            **controls: initial values of the traits.
        """
        self._require_known(controls)
        session = Session.bind(curvature, session, model, tokenizer)
        self._questions = _menu_questions(session.require_model(), prompts)
        self._number = 0
        self._token = CancelToken()
        self._written: Written | None = None
        self._latest: cl.Selection | None = None  # plan B of the newest run
        self._following = False  # while the sliders are set to a plan
        super().__init__(session, **controls)
        self.menu = [
            {"group": q.capability, "prompt": q.prompt, "answer": q.answer} for q in self._questions
        ]
        if self.menu and not self.prompt:
            self.choice = self.choice or 0
        if selection is None and not controls.keys() & {"ratio", "interaction_strength"}:
            selection = session.selection
        if selection is None:  # an empty plan is falsy
            selection = self._solved(cl.opening_guards(curvature.units))
        self.selection = selection
        self.follow(self._hear_selection, "selection")
        self.on_msg(self._on_message)
        self.status = self.status or "no text yet: press Generate"

    # Controls -----------------------------------------------------------------------------------

    @validate("selection")
    def _require_fitting(self, proposal: Any) -> cl.Selection | None:
        plan: cl.Selection | None = proposal.value
        if plan is not None:
            units = self.session.curvature.units
            plan.units.require_same(units, mine="the plan", theirs="the curvature")
        return plan

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

    def _hear_selection(self, change: Any) -> None:
        try:
            self.selection = change.new
        except cl.CocurveError as error:
            self.report(error)

    @observe("ratio", "interaction_strength")
    @guarded
    def _slide(self, _: Any) -> None:
        if self.selection is not None and not self._following:
            self.error = ""
            self.selection = self._solved(self.selection.guards)
            self._plan_changed(first=True)

    def _solved(self, guards: cl.Guards) -> cl.Selection:
        sliders = self.ratio, self.interaction_strength
        return cl.solve_greedy(self.session.curvature, *sliders, guards)

    @guarded
    def _plan_changed(self, first: bool = False) -> None:
        """Write again, or where `first` the first time, unless that plan's text is there."""
        self._judge()
        plan, latest = self.selection, self._latest
        if not self.live or plan is None or (latest is None and not first):
            return
        if latest is None or not _same_plan(latest, plan):
            self.start()

    @observe("choice")
    @guarded
    def _take_choice(self, change: Any) -> None:
        if change.new is None:
            return
        if not 0 <= change.new < len(self._questions):
            self.choice = None
            count = len(self._questions)
            raise cl.InputError(f"choice is {change.new}. Choose one from 0 to {count - 1}.")
        self.prompt = self._questions[change.new].prompt

    @observe(*SETTINGS)
    @guarded
    def _settings_changed(self, change: Any) -> None:
        if change.name == "prompt":
            question = self._question(self.prompt)
            self.choice = None if question is None else self._questions.index(question)
        self._judge()

    def _question(self, prompt: str) -> Question | None:
        return next((q for q in self._questions if q.prompt == prompt), None)

    def _judge(self) -> None:
        """Set `stale`.

        The text stays when plan, prompt or settings change, because writing is slow and the old
        text is worth comparing. So the page must say that it is no longer of what the controls
        show.
        """
        if self._written is None:
            return
        request = self._written.request
        if self.selection is None or not _same_plan(request.selection, self.selection):
            self.stale = "text of another plan"
        elif request.prompt != self.prompt:
            self.stale = "text of another prompt"
        else:
            now = self._sampling, self._asked
            self.stale = "text of other settings" if (request.sampling, request.chat) != now else ""

    @observe("forced_text", "custom_text")
    @guarded
    def _forced_text_changed(self, change: Any) -> None:
        custom = self.forced_text == "custom"
        if self._written is None and not custom:
            return
        if change.name == "forced_text" or custom:
            self.error = ""
            self.session.worker.submit(
                f"ribbon {id(self)}", lambda _: self._measure_ribbon(), self.report
            )

    @guarded
    def _on_message(self, _: Any, content: dict[str, Any], __: Any) -> None:
        for name in SETTINGS:  # sent with the press: a separate update could arrive after it
            if name in content.get("set", {}):
                setattr(self, name, content["set"][name])
        if content.get("do") == "generate":
            self.start()
        elif content.get("do") == "stop":
            self.stop()
        else:
            self._answer(self, content, [])

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
            request, self._token = self._begin(), CancelToken()
            self._run(request, self._token)
        except Exception as error:
            self._failed(error)
            raise
        except KeyboardInterrupt:
            self.busy = False
            raise
        return self.dense_text, self.pruned_text

    def start(self) -> None:
        """Write both texts on the session's thread; a newer request replaces this one."""
        try:
            request = self._begin()
        except Exception as error:
            self._failed(error)
            return
        self._token = self.session.worker.submit(
            self._kind, lambda token: self._run(request, token), self._failed
        )

    def stop(self) -> None:
        """Stop within one token and keep the text so far."""
        self._token.cancel()
        self.session.worker.cancel(self._kind)
        if self.busy and self.status == WAITING:
            self.status, self.busy = "stopped before the first token", False

    def close(self) -> None:
        """Stop writing, leave the session and the page."""
        if self._followed:  # else the constructor failed: there is nothing to stop
            self._token.cancel()
            self.session.worker.cancel(self._kind)
        super().close()

    @property
    def _kind(self) -> str:
        return f"generate {id(self)}"  # two instruments of a session must not cancel each other

    def _begin(self) -> Request:
        with self.lock:
            self.error = ""
            request = self._request(self._number + 1)
            self._number, self._latest = request.number, request.selection
            self.status, self.busy = WAITING, True
            return request

    def _request(self, number: int) -> Request:
        if self.selection is None:
            raise cl.InputError("there is no plan to compare with. Set selection.")
        model, chat = self.session.require_model(), self._asked
        ids = encode_prompt(model, self._tokenizer, self.prompt, chat)
        plans = self.selection, self._diagonal(self.selection)
        return Request(number, self.prompt, ids, *plans, self._sampling, chat)

    def _diagonal(self, plan: cl.Selection) -> cl.Selection | None:
        """Plan A: lambda 0 at the ratio and guards of a plan; None where it is no other plan."""
        if plan.interaction_strength is None:
            return None
        try:
            found = cl.solve_greedy(self.session.curvature, plan.requested_ratio, 0.0, plan.guards)
        except cl.InfeasibleError:
            return None
        return None if _same_plan(found, plan) else found

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

    def _failed(self, error: Exception) -> None:
        self.busy = False
        if isinstance(error, Cancelled):
            return
        if self.status in (WAITING, WRITING):
            self.status = "no new text"
        self.report(error)

    def _run(self, request: Request, token: CancelToken) -> None:
        ids = request.prompt_ids
        growing = {side: GrowingText(self._tokenizer, ids) for side in request.plans}
        written = Written(request, growing)
        try:
            with self.session.exclusive(token) as model:
                self._stream(model, written, token)
        except KeyboardInterrupt:
            written.stopped = True
            self._publish(written)
            raise
        except Cancelled:
            if request.number == self._number:
                self.status, self.busy = "stopped before the first token", False
            raise
        # A newer request may have come while this one wrote; its text must not be overwritten by
        # ours. One may also come during the ribbon: then it owns `busy`, so we ask again.
        if request.number == self._number:
            self._publish(written)
            self._measure_ribbon()
            self.busy = self.busy and request.number != self._number

    def _stream(self, model: PreTrainedModel, written: Written, token: CancelToken) -> None:
        """Write token by token, send the page batches, and stop between tokens when asked."""
        request, texts = written.request, written.texts
        self.status = WRITING
        started = last = time.monotonic()
        sent = dict.fromkeys(texts, 0)
        self.send({"start": self._describe(written)})
        plans = list(request.plans.values())
        inputs = (model, self._tokenizer, request.prompt, plans, request.sampling)
        for tokens in generate_rows(*inputs, chat=request.chat):
            for text, new in zip(texts.values(), tokens, strict=True):
                if new is not None:
                    text.add(new)
            if token.cancelled:
                written.stopped = True
                break
            if time.monotonic() - last >= BATCH_SECONDS:
                sent, last = self._send_new(written, sent), time.monotonic()
        written.seconds = time.monotonic() - started

    def _send_new(self, written: Written, sent: dict[str, int]) -> dict[str, int]:
        """Send the tokens after the first `sent` of each side; return how many are sent by now."""
        texts = written.texts
        new = {s: _plain_tokens(texts[s], self._tokenizer)[n:] for s, n in sent.items()}
        self.send({"append": new, "after": sent, "run": written.request.number})
        return {side: len(text.ids) for side, text in texts.items()}

    def _publish(self, written: Written) -> None:
        with self.lock, self.hold_sync():
            self._written = written
            texts = written.texts
            for side in SIDES:
                setattr(self, f"{side}_text", texts[side].text if side in texts else "")
            self.tokens = {s: _plain_tokens(text, self._tokenizer) for s, text in texts.items()}
            self.divergence = written.divergence
            self.shown = self._describe(written)
            self._judge()
            self.status = written.sentence()

    def _describe(self, written: Written) -> dict[str, Any]:
        request = written.request
        question = self._question(request.prompt)
        return {
            "run": request.number,
            "prompt": request.prompt,
            "plans": {s: _plan_words(plan) for s, plan in request.plans.items() if s != "dense"},
            "stopped": written.stopped,
            "answer": None if question is None else question.answer,
            "right": {s: question and question.is_right(t.text) for s, t in written.texts.items()},
        }

    # The ribbon ---------------------------------------------------------------------------------

    def _measure_ribbon(self) -> None:
        """Measure KL at every token of the chosen text, under the plan of the shown texts."""
        written, kind = self._written, self.forced_text
        plan = self.selection if written is None else written.request.selection
        if plan is None:
            raise cl.InputError("there is no plan to measure. Set selection.")
        prompt: list[int] = (
            [] if kind == "custom" or written is None else written.request.prompt_ids
        )
        if kind == "custom":
            ids = list(self._tokenizer(self.custom_text)["input_ids"]) if self.custom_text else []
        else:
            ids = [] if written is None else [*prompt, *written.texts[kind].ids]
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
        written = self._written
        request = self._request(0) if written is None else written.request
        sampling = request.sampling if written is None else written.sampling
        prompt, chat = request.prompt, ", chat=False" if request.chat is False else ""
        forced = FORCED_TEXTS[self.forced_text][0].format(self.custom_text)
        return "\n".join(
            [
                "import cocurve_lab as cl",
                "from cocurve_lab.measuring.lockstep import Sampling, forced_kl",
                "",
                f"selection = {plan_code(request.selection, self.session.curvature)}",
                f"sampling = {sampling!r}",
                f"pair = cl.compare_text(model, tokenizer, {prompt!r}, selection, sampling{chat})",
                "print(pair.dense, pair.pruned, sep='\\n---\\n')",
                f"kl = forced_kl(model, selection, {forced})  # nats per token",
            ]
        )

    def _still_picture(self) -> str:
        """The texts one below the other."""
        if self._written is None:
            return ""
        texts = self._written.texts.items()
        rows = [[SIDES[side], html.escape(text.text)] for side, text in texts]
        return as_html(["", "text"], rows, [True, True])

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


def _plain_tokens(text: GrowingText, tokenizer: PreTrainedTokenizerBase) -> list[list[Any]]:
    """The tokens for the page: [id, text], or [id, "", name] for special ones."""
    special = set(tokenizer.all_special_ids)
    return [
        [token, piece, tokenizer.convert_ids_to_tokens(token)]
        if token in special
        else [token, piece]
        for token, piece in zip(text.ids, text.pieces, strict=True)
    ]


def _menu_questions(
    model: PreTrainedModel, prompts: Sequence[str | Question] | None
) -> list[Question]:
    """The prompts given; if none, those of the embedded model where `model` is it."""
    if prompts is not None:
        own = (p if isinstance(p, Question) else Question("your prompts", p) for p in prompts)
        return list(own)
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
