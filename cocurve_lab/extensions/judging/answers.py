"""Right answers of many plans, by capability: exact match, and the likelihood of the answer.

Judging a greedy reply needs one pass for most questions, not one per token. The pass reads the
prompt with the known answer after it. The likeliest token at each position shows how the reply
begins, up to its first token that is not the answer's. That often decides the verdict; otherwise
the reply is decoded further, token by token, from a cache of keys and values.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...base.arguments import require_type
from ...base.errors import InputError
from ...base.progress import open_bar
from ...base.storage import fingerprint
from ...calibration import bare_ids
from ...estimator.support import widen
from ...measuring.plan_memory import FileKind, PlanMemory, model_settings
from ...measuring.results import Tabular, mean_and_error
from ...models.architectures import Architecture, describe
from ...models.identity import model_device
from ...models.logits import log_likelihood, pieces, require_numbers, too_large, unless_too_large
from ...models.masking import Scales, plan_scales, scaled, stack_rows
from ...models.runtime import measuring
from ...solver.selection import Selection
from .generation import Question, encode_prompt, last_logits, token_pieces, uses_chat
from .lockstep import end_tokens

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
T = TypeVar("T")
KIND = FileKind("cocurve-answers", 1, "replies")  # columns: right, log-likelihood, decoded
ALL = "all"  # stands for all capabilities together
_QUESTIONS = 32  # questions between two writes of a checkpoint


# Tables -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerOptions:
    """Options of `answer_accuracy`.

    Attributes:
        max_new_tokens: the most tokens of a reply, as in `continue_text`.
        batch_tokens: tokens per forward pass; halved when memory runs out.
        checkpoint: file to resume from and write to; it remembers plans measured earlier.
        chat: whether questions are asked through the chat template, as in `continue_text`.
    """

    max_new_tokens: int = 32
    batch_tokens: int = 8192
    checkpoint: str | os.PathLike[str] | None = None
    chat: bool | None = None


@dataclass(frozen=True, eq=False, repr=False)
class AnswerTable(Tabular):
    """Replies judged right or wrong, by plan and question; made by `answer_accuracy`.

    Attributes:
        selections: the plans, in the given order.
        questions: those with a known answer, in the given order.
        right: [plans, questions] bool, whether the greedy reply is right (`Question.is_right`).
        log_likelihood: [plans, questions] float64, log probability of the answer after the prompt,
            summed over its tokens, nats per answer. It falls before the reply changes.
        decoded: [plans, questions] bool, whether one pass did not decide and the reply was decoded.
        left_out: number of questions without a known answer.
    """

    selections: tuple[Selection, ...]
    questions: tuple[Question, ...]
    right: np.ndarray
    log_likelihood: np.ndarray
    decoded: np.ndarray
    left_out: int = 0

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The capabilities of the questions, in order of appearance."""
        return tuple(dict.fromkeys(question.capability for question in self.questions))

    def of(self, capability: str) -> np.ndarray:
        """Return the mask [questions] of a capability; of "all", every question."""
        return np.array([capability in (ALL, question.capability) for question in self.questions])

    @property
    def table(self) -> DataFrame:
        """One row per plan and capability ("all" last), with errors over questions.

        `accuracy_low` and `accuracy_high` are the ends of the 95 % Wilson interval. Use them where
        every reply is right: the standard error there is 0, which claims too much.
        """
        from pandas import DataFrame

        rows = []
        for plan, selection in enumerate(self.selections):
            for capability in (*self.capabilities, ALL):
                mine = self.of(capability)
                right = self.right[plan, mine]
                bounds = binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
                row = {
                    "plan": plan,
                    "realized_ratio": selection.realized_ratio,
                    "interaction_strength": selection.interaction_strength,
                    "capability": capability,
                    "questions": len(right),
                    **_mean("accuracy", right),
                    "accuracy_low": float(bounds.low),
                    "accuracy_high": float(bounds.high),
                    **_mean("log_likelihood", self.log_likelihood[plan, mine]),
                }
                rows.append(row)
        return DataFrame(rows)

    def paired(self, plan: int, other: int) -> DataFrame:
        """Return differences plan - other on the same questions, a row per capability ("all" last).

        `lost` counts the questions that only plan number `other` answers right, `gained` those that
        only `plan` does. `p_value` is that of McNemar's exact test that both are equally likely.
        """
        from pandas import DataFrame

        rows = []
        for capability in (*self.capabilities, ALL):
            mine = self.of(capability)
            accuracy = self.right[plan, mine].astype(float) - self.right[other, mine]
            likelihood = self.log_likelihood[plan, mine] - self.log_likelihood[other, mine]
            lost, gained = int((accuracy < 0).sum()), int((accuracy > 0).sum())
            row = {
                "capability": capability,
                "questions": len(accuracy),
                **_mean("accuracy", accuracy),
                "lost": lost,
                "gained": gained,
                "p_value": float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0,
                **_mean("log_likelihood", likelihood),
            }
            rows.append(row)
        return DataFrame(rows)

    def __len__(self) -> int:
        return len(self.selections)


# The measurement --------------------------------------------------------------------------------


def answer_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    selections: Sequence[Selection],
    questions: Sequence[Question],
    *,
    options: AnswerOptions = AnswerOptions(),
    progress: bool = True,
) -> AnswerTable:
    """Judge each plan's greedy reply to each question, and measure how likely the answer is.

    The verdict is that of `continue_text` and `Question.is_right` (the reply up to its first "." or
    line end, stripped, is the answer), except for floating-point ties between batches. The
    likelihood is of one spelling: the answer after a space, or directly after a prompt that ends in
    white space.

    Args:
        model: the dense model.
        tokenizer: its tokenizer.
        selections: plans over the model's units; an empty plan is the dense model.
        questions: the questions; those whose `answer` is None are omitted and counted.
        options: reply length, batch size, checkpoint.
        progress: show a progress bar with ETA.
    """
    if not selections:
        raise InputError("answer_accuracy got no plan. Give at least one Selection.")
    for selection in selections:
        require_type(selection, Selection, "a plan")
    asker = Asker(model, tokenizer, questions, options)
    found = asker.ask(selections, progress=progress)
    return AnswerTable(
        tuple(selections),
        asker.questions,
        found[..., 0] == 1,
        found[..., 1],
        found[..., 2] == 1,
        len(questions) - len(asker.questions),
    )


class Asker:
    """Asks plans questions, each plan each question once.

    `answer_accuracy` makes one for a single call. An instrument that asks a few questions at a time
    keeps one, so that the model is identified once.

    Args:
        model, tokenizer, questions, options: as for `answer_accuracy`.

    Attributes:
        questions: those with a known answer, in the given order.
        memory: right (1 or 0), log-likelihood of the answer (nats), decoded (1 or 0) of each plan
            by question; on disk if there is a checkpoint.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        questions: Sequence[Question],
        options: AnswerOptions = AnswerOptions(),
    ) -> None:
        self.model = model
        self.questions = tuple(question for question in questions if question.answer is not None)
        if not self.questions:
            raise InputError(
                f"none of the {len(questions)} questions has an answer. Give "
                "Question(..., answer=...)."
            )
        architecture, length = describe(model), options.max_new_tokens
        cases = [
            Case.encode(model, tokenizer, question, options.chat) for question in self.questions
        ]
        texts = [
            [case.prompt, case.answer, case.question.answer, *[True] * case.question.within]
            for case in cases
        ]
        self.memory = PlanMemory.open(
            KIND,
            options.checkpoint,
            (len(cases), 3),
            lambda: (
                model_settings(model)
                | {"questions_fingerprint": fingerprint(texts), "max_new_tokens": length}
            ),
        )
        self.cases = cases
        self.engine = ReplyEngine(architecture, tokenizer, cases, length, options.batch_tokens)

    def ask(
        self,
        plans: Sequence[Selection],
        numbers: Sequence[int] | None = None,
        progress: bool = False,
    ) -> np.ndarray:
        """Ask plans some questions, or read what was answered before.

        Args:
            plans: plans over the model's units; an empty plan is the dense model.
            numbers: places in `questions`; None takes all.
            progress: show a progress bar with ETA.

        Returns:
            The columns of `memory`, [plans, numbers, 3] float64.
        """
        model, memory, cases = self.model, self.memory, self.cases
        wanted = list(range(len(cases)) if numbers is None else numbers)
        named = {plan.fingerprint: plan for plan in plans}
        scales = {mark: plan_scales(self.engine.architecture, plan) for mark, plan in named.items()}
        order = sorted(wanted, key=lambda q: cases[q].length)  # so that little is padded
        total, label = len(named) * len(order), f"replies of {len(named)} plans"
        bar = open_bar(progress, total=total, desc=label, unit="reply")
        with measuring(model, torch.get_num_threads()), bar:
            for start in range(0, len(order), _QUESTIONS):
                part = order[start : start + _QUESTIONS]
                missing = memory.absent(named, part)
                if missing:
                    found = self.engine.measure([scales[mark] for mark in missing], part)
                    memory.add(missing, part, found)
                bar.update(len(named) * len(part))
        return np.array([memory.values[plan.fingerprint][wanted] for plan in plans])


def _mean(name: str, values: np.ndarray) -> dict[str, float]:
    """The mean over questions, and its standard error."""
    mean, error = mean_and_error(values.astype(float))
    return {name: mean, f"{name}_error": error}


# Replies ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A question in tokens: its prompt and its answer."""

    question: Question
    prompt: list[int]
    answer: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)

    @classmethod
    def encode(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        question: Question,
        chat: bool | None = None,
    ) -> Case:
        """Encode a question."""
        answer = question.answer or ""
        if not answer or not question.is_right(f"{answer}."):
            raise InputError(
                f"no reply can match the answer {answer!r}: a reply is judged up to its first full "
                "stop or line end, without white space around it. Give an answer of that form."
            )
        prompt = encode_prompt(model, tokenizer, question.prompt, chat)
        if uses_chat(tokenizer, chat):  # the template ends where the reply begins
            return cls(question, prompt, bare_ids(tokenizer, answer))
        spaced = answer if question.prompt[-1].isspace() else f" {answer}"
        joint = encode_prompt(model, tokenizer, question.prompt + spaced, chat)
        ids = joint[len(prompt) :]
        # where prompt and answer would merge into other tokens, the answer is encoded by itself
        if joint[: len(prompt)] != prompt or not ids:
            ids = bare_ids(tokenizer, spaced)
        return cls(question, prompt, ids)


@dataclass
class Reply:
    """One plan's reply to one question.

    Attributes:
        plan: index of the plan.
        column: index of the question in the part that is measured.
        case: the question.
        ids: tokens that the next pass reads after the prompt: the answer, then the reply so far.
        right: the verdict; None while further text may change it.
    """

    plan: int
    column: int
    case: Case
    ids: list[int]
    right: bool | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and of `ids`."""
        return len(self.case.prompt) + len(self.ids)


@dataclass
class ReplyEngine:
    """Judges replies, with many plans and questions per forward pass.

    Attributes:
        batch_tokens: tokens per forward pass; halved for good when memory runs out.
    """

    architecture: Architecture
    tokenizer: PreTrainedTokenizerBase
    cases: list[Case]
    max_new_tokens: int
    batch_tokens: int

    def __post_init__(self) -> None:
        self.ends = end_tokens(self.architecture.model)

    def measure(self, plans: list[Scales], part: list[int]) -> np.ndarray:
        """Measure some questions under each plan: right, log-likelihood of the answer, decoded.

        Args:
            plans: the masks of each plan.
            part: numbers of the questions.

        Returns:
            [plans, len(part), 3] float64.
        """
        found = np.zeros((len(plans), len(part), 3))
        replies = [
            Reply(plan, column, self.cases[number], self.cases[number].answer)
            for column, number in enumerate(part)
            for plan in range(len(plans))
        ]
        undecided = []
        for reply, (chosen, likelihood) in self._forward(self._read_answers, plans, replies):
            # while the choices are the answer's tokens, the tokens read are the reply itself, and
            # the first choice that differs is its next token; later ones follow text never said
            answer = enumerate(reply.ids)
            first = next((i for i, token in answer if chosen[i] != token), len(reply.ids))
            reply.ids = chosen[: first + 1]
            reply.right = self._verdict(reply)
            found[reply.plan, reply.column] = (bool(reply.right), likelihood, reply.right is None)
            undecided += [reply] if reply.right is None else []
        for reply, right in self._forward(self._decode, plans, undecided):
            found[reply.plan, reply.column, 0] = right
        return found

    def _verdict(self, reply: Reply) -> bool | None:
        """Right or wrong, or None if the reply so far may still become either."""
        ids = reply.ids[: self.max_new_tokens]
        stop = next((i for i, token in enumerate(ids) if token in self.ends), None)
        ended = stop is not None or len(ids) == self.max_new_tokens
        said = "".join(token_pieces(self.tokenizer, reply.case.prompt, ids[:stop]))
        return judge(reply.case.question, said, ended)

    def _forward(
        self,
        run: Callable[[list[Scales], list[Reply]], list[T]],
        plans: list[Scales],
        replies: list[Reply],
    ) -> Iterator[tuple[Reply, T]]:
        """What `run` finds for each reply, in batches that memory holds, the longest first."""
        replies, start = sorted(replies, key=lambda reply: -reply.length), 0
        while start < len(replies):
            length = replies[start].length
            batch = replies[start : start + max(1, self.batch_tokens // length)]
            found = unless_too_large(run, plans, batch)
            if found is None:
                if len(batch) == 1:
                    raise too_large(f"one reply of {length} tokens")
                self.batch_tokens //= 2  # for good: what did not fit once would not fit later
                log.warning("out of memory: %d tokens per pass from here on", self.batch_tokens)
                continue
            yield from zip(batch, found, strict=True)
            start += len(batch)

    def _decode(self, plans: list[Scales], replies: list[Reply]) -> list[bool]:
        """Decode replies token by token, until each is known to be right or wrong."""
        for _, group in groupby(replies, key=lambda reply: reply.length):
            alike = list(group)  # of one length, so that nothing is padded
            steps = self._steps(plans, alike)
            while any(reply.right is None for reply in alike):
                for reply, token in zip(alike, next(steps), strict=True):
                    if reply.right is None:
                        reply.ids = [*reply.ids, token]
                        reply.right = self._verdict(reply)
        return [bool(reply.right) for reply in replies]

    def _steps(self, plans: list[Scales], replies: list[Reply]) -> Iterator[list[int]]:
        """The likeliest next token of each reply, one step after the other."""
        model: Any = self.architecture.model
        texts = [[*reply.case.prompt, *reply.ids] for reply in replies]
        ids = torch.tensor(texts, device=model_device(model))
        cache: dict[str, Any] = {}
        masks = stack_rows(self.architecture, [plans[reply.plan] for reply in replies])
        while True:
            with scaled(self.architecture, masks):
                logits, cache = last_logits(model, ids, cache)
            require_numbers(not bool(logits.isnan().any()), "a reply")
            chosen = logits.argmax(dim=-1)
            yield chosen.tolist()
            ids = chosen[:, None]

    def _read_answers(
        self, plans: list[Scales], replies: list[Reply]
    ) -> list[tuple[list[int], float]]:
        """The likeliest token after each of [prompt, *ids], and the log probability of ids."""
        device = model_device(self.architecture.model)
        rows = [torch.tensor([*reply.case.prompt, *reply.ids]) for reply in replies]
        # padding is on the right and attention is causal: no position that is read can see it, so
        # the pass needs no attention mask
        ids = pad_sequence(rows, batch_first=True).to(device)
        masks = stack_rows(self.architecture, [plans[reply.plan] for reply in replies])
        with scaled(self.architecture, masks):
            hidden = self.architecture.last_hidden(ids)
        counts = [len(reply.ids) + 1 for reply in replies]
        starts = [len(reply.case.prompt) - 1 for reply in replies]
        spans = zip(hidden, starts, counts, strict=True)
        read = torch.cat([states[start : start + count] for states, start, count in spans])
        labels = torch.tensor([token for reply in replies for token in [*reply.ids, 0]])
        tokens, logs = self._read(read, labels.to(device))
        parts = zip(tokens.split(counts), logs.split(counts), strict=True)
        return [(token.tolist(), float(value[:-1].sum())) for token, value in parts]

    def _read(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Likeliest token [K] and log probability of the label [K], float64, from hidden [K, d]."""
        tokens, logs = [], []
        for part in pieces(len(hidden), 8 * self.architecture.vocabulary):
            logits = widen(self.architecture.logits(hidden[part]))
            require_numbers(not bool(logits.isnan().any()), "a reply")
            tokens.append(logits.argmax(dim=-1).cpu())
            logs.append(log_likelihood(logits, labels[part]).double().cpu())
        return torch.cat(tokens), torch.cat(logs)


def judge(question: Question, said: str, ended: bool) -> bool | None:
    """Judge a reply from its beginning.

    Args:
        question: a question with a known answer.
        said: the reply so far.
        ended: whether the reply is complete.

    Returns:
        True or False if no further text can change the verdict, otherwise None.
    """
    spoken, answer = said.lstrip(" "), question.answer or ""
    if ended or "." in spoken or "\n" in spoken:
        return bool(question.is_right(said))
    if question.within:  # a letter more: an answer at the very end may be half a word
        return question.is_right(f"{said}x") or None
    spoken = spoken.lstrip()
    # still open: the reply is a beginning of the answer, or the answer with only white space after
    rest = spoken[len(answer) :]
    hopeful = answer.startswith(spoken) or (spoken.startswith(answer) and not rest.strip())
    return None if hopeful else False
