"""GenerationCompare: dense and pruned text side by side, and the KL at every token of a text."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
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
from cocurve_lab.measuring.lockstep import Sampling, first_divergence, forced_kl, generate_lockstep

from .instrument import KIT, Instrument, counted, front, guarded, plan_code
from .session import Cancelled, CancelToken, Session

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIDES = ("dense", "pruned")
BATCH_SECONDS = 0.04  # between two messages with new tokens
SETTINGS = ("prompt", "max_new_tokens", "temperature", "seed", "chat")
WRITING = "writing both texts"
WAITING = "waiting for the model: something else is using it"
FORCED_TEXTS = {  # the text both models read: its code, and its name in the ribbon's title
    "dense": ("[*pair.prompt_ids, *pair.dense_ids]", "the prompt and the dense continuation"),
    "pruned": ("[*pair.prompt_ids, *pair.pruned_ids]", "the prompt and the pruned continuation"),
    "custom": ('tokenizer({!r})["input_ids"]', "your own text"),
}


@dataclass(frozen=True)
class Request:
    """The settings of one press of Generate; `number` counts the presses.

    `chat` is whether the prompt is asked through the chat template; None where there is none.
    """

    number: int
    prompt: str
    prompt_ids: list[int]
    selection: cl.Selection
    sampling: Sampling
    chat: bool | None


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
            f"{side} {counted(len(self.texts[side].ids), 'token')}" for side in SIDES
        )
        so_far = " so far" if self.stopped else ""
        same = f"the texts are the same{so_far}"
        parting = same if place is None else f"they part at token {place + 1}"
        asked = {None: "", True: "through the chat template; ", False: "not as a chat; "}
        return (
            f"{'stopped: ' if self.stopped else ''}{lengths}; {asked[self.request.chat]}"
            f"{how if sampling.temperature else 'greedy'}; {parting}; "
            f"written together in {self.seconds:.1f} s"
        )


class GenerationCompare(Instrument, anywidget.AnyWidget):
    """Text before and after pruning, from one prompt, one batch and one seed.

    Row 0 of the batch is the dense model, row 1 runs under the plan's mask; no second model is
    made. The ribbon below shows KL(dense || pruned) at every token of a text that both models read.

    Attributes:
        prompt, max_new_tokens, temperature, seed: settings of Generate; temperature 0 is greedy.
        selection: the session's plan; None for none.
        choice: index of the chosen menu entry; None for a prompt of your own.
        chat: whether prompts are asked through the chat template; None: where there is one. The
            status says which.
        live: write again whenever the plan changes.
        forced_text: the text of the ribbon: "dense", "pruned" or "custom" (then `custom_text`).
        dense_text, pruned_text: the texts, without the prompt.
        divergence: index of the first generated token that differs; None where none does.
        ribbon: a dict per token, {token, kl (nats per token), generated}.
        stale: where the controls have changed since the text was written, which of them; else "".
        busy: whether text is being written or waited for.
    """

    _esm = front(*KIT, "generation.js")
    _css = front("instrument.css")

    prompt = Unicode().tag(sync=True)
    max_new_tokens = Int(64).tag(sync=True)
    temperature = Float(0.0).tag(sync=True)
    seed = Int(0).tag(sync=True)
    choice = Int(None, allow_none=True).tag(sync=True)
    chat = Bool(None, allow_none=True).tag(sync=True)
    live = Bool(False).tag(sync=True)
    forced_text = Enum(list(FORCED_TEXTS), "dense").tag(sync=True)
    custom_text = Unicode().tag(sync=True)
    selection = Instance(cl.Selection, allow_none=True)

    dense_text = Unicode().tag(sync=True)
    pruned_text = Unicode().tag(sync=True)
    divergence = Int(None, allow_none=True).tag(sync=True)
    ribbon: List[dict[str, Any]] = List().tag(sync=True)
    ribbon_text = Unicode().tag(sync=True)  # name of the ribbon's text
    stale = Unicode().tag(sync=True)
    busy = Bool(False).tag(sync=True)
    menu: List[dict[str, Any]] = List().tag(sync=True)
    tokens: Dict[str, Any] = Dict().tag(sync=True)  # side -> [[id, piece], ...]
    shown: Dict[str, Any] = Dict().tag(sync=True)  # prompt, plan and answer of the shown texts

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
            selection: the plan; by default the session's, or ratio 0.2 at lambda 1 if it has none.
            **controls: initial values of the traits.
        """
        self._require_known(controls)
        session = Session.bind(curvature, session, model, tokenizer)
        self._questions = _menu_questions(session.require_model(), prompts)
        self._number = 0
        self._token = CancelToken()
        self._written: Written | None = None
        super().__init__(session, **controls)
        self.menu = [
            {"group": q.capability, "prompt": q.prompt, "answer": q.answer} for q in self._questions
        ]
        if self.menu and not self.prompt:
            self.choice = self.choice or 0
        plan = session.selection if selection is None else selection  # an empty plan is falsy
        if plan is None:
            plan = cl.solve_greedy(curvature, 0.2, 1.0, cl.opening_guards(curvature.units))
        self.selection = plan
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
        self._plan_changed()

    def _hear_selection(self, change: Any) -> None:
        try:
            self.selection = change.new
        except cl.CocurveError as error:
            self.report(error)

    @guarded
    def _plan_changed(self) -> None:
        self._judge()
        if self.live and self.selection is not None and self._number:
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
        settings = (self.max_new_tokens, self.temperature, self.seed)
        if self.selection is None or not _same_plan(request.selection, self.selection):
            self.stale = "text of another plan"
        elif request.prompt != self.prompt:
            self.stale = "text of another prompt"
        else:
            other = astuple(request.sampling) != settings or request.chat != self._asked
            self.stale = "text of other settings" if other else ""

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
            self._number = request.number
            self.status, self.busy = WAITING, True
            return request

    def _request(self, number: int) -> Request:
        if self.selection is None:
            raise cl.InputError("there is no plan to compare with. Set selection.")
        sampling = Sampling(self.max_new_tokens, self.temperature, self.seed)
        model, chat = self.session.require_model(), self._asked
        prompt_ids = encode_prompt(model, self._tokenizer, self.prompt, chat)
        return Request(number, self.prompt, prompt_ids, self.selection, sampling, chat)

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
        growing = {side: GrowingText(self._tokenizer, request.prompt_ids) for side in SIDES}
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
        sent = [0, 0]
        self.send({"start": self._describe(written)})
        inputs = (model, self._tokenizer, request.prompt, request.selection, request.sampling)
        for pair in generate_lockstep(*inputs, chat=request.chat):
            for side, new in zip(SIDES, pair, strict=True):
                if new is not None:
                    texts[side].add(new)
            if token.cancelled:
                written.stopped = True
                break
            if time.monotonic() - last >= BATCH_SECONDS:
                sent, last = self._send_new(written, sent), time.monotonic()
        written.seconds = time.monotonic() - started

    def _send_new(self, written: Written, sent: list[int]) -> list[int]:
        """Send the tokens after the first `sent` of each side; return how many are sent by now."""
        new = {
            s: _plain_tokens(written.texts[s], self._tokenizer)[n:]
            for s, n in zip(SIDES, sent, strict=True)
        }
        self.send({"append": new, "after": sent, "run": written.request.number})
        return [len(written.texts[side].ids) for side in SIDES]

    def _publish(self, written: Written) -> None:
        with self.lock, self.hold_sync():
            self._written = written
            self.dense_text, self.pruned_text = (written.texts[side].text for side in SIDES)
            self.tokens = {
                side: _plain_tokens(written.texts[side], self._tokenizer) for side in SIDES
            }
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
            "plan": _plan_words(request.selection),
            "stopped": written.stopped,
            "answer": None if question is None else question.answer,
            "right": {s: question and question.is_right(written.texts[s].text) for s in SIDES},
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
        """The two texts side by side."""
        texts = self.dense_text, self.pruned_text
        if not any(texts):
            return ""
        return as_html(SIDES, [[*map(html.escape, texts)]], [True, True])

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
    """A plan in a few words, for the head of its column."""
    units = counted(len(plan.units), "unit")
    words = f"{len(plan)} of {units} off, {100 * plan.realized_ratio:.1f} % of their cost"
    if plan.interaction_strength is not None:
        words += f", lambda {plan.interaction_strength:g}"
    return words + (f", {counted(len(plan.gains), 'gain')}" if plan.gains else "")
