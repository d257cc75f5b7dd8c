"""Which capability a plan costs: exact match and answer likelihood of many plans, by capability."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.stats import binomtest
from tqdm.auto import tqdm

from ..architectures import describe
from ..errors import InputError
from ..generation import Question
from ..loading import fingerprint_model, model_dtype
from ..masking import column_scales, resolve
from ..plan_memory import Kind, PlanMemory
from ..risk import standard_error
from ..runtime import measuring
from ..selection import Selection
from ..storage import fingerprint
from .replies import Case, ReplyEngine
from .tables import Row, Table

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
KIND = Kind("cocurve-answers", 1, "replies")  # right, log-likelihood, decoded of each question
ALL = "all"  # the row over every capability together
_QUESTIONS = 32  # between two writes of a checkpoint


@dataclass(frozen=True)
class AnswerOptions:
    """How replies are judged.

    Attributes:
        max_new_tokens: a reply ends here at the latest, as in `continue_text`.
        batch_tokens: tokens per forward; halved when memory runs out.
        checkpoint: file to resume from and write to; it remembers plans measured earlier.
    """

    max_new_tokens: int = 32
    batch_tokens: int = 8192
    checkpoint: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if min(self.max_new_tokens, self.batch_tokens) < 1:
            raise InputError(
                f"max_new_tokens is {self.max_new_tokens} and batch_tokens {self.batch_tokens}; "
                "both count tokens and are at least 1."
            )


@dataclass(frozen=True, eq=False)
class AnswerTable:
    """Right or wrong, plan by question; made by `answer_accuracy`.

    Attributes:
        selections: the plans, in the order asked for.
        questions: those with a known answer, in the order asked.
        right: [plans, questions] bool, whether the greedy reply is right (`Question.is_right`).
        log_likelihood: [plans, questions] float64, log probability of the answer after the prompt,
            summed over its tokens, nats per answer; it moves before the reply does.
        answer_tokens: [questions] int64, how many tokens that is.
        decoded: [plans, questions] bool, where one pass left the reply open and decoding went on.
        left_out: questions without a known answer.
    """

    selections: tuple[Selection, ...]
    questions: tuple[Question, ...]
    right: np.ndarray
    log_likelihood: np.ndarray
    answer_tokens: np.ndarray
    decoded: np.ndarray
    left_out: int = 0

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The capabilities asked for, in order of appearance."""
        return tuple(dict.fromkeys(question.capability for question in self.questions))

    def of(self, capability: str) -> np.ndarray:
        """Which questions [questions] belong to a capability; "all" is every one."""
        return np.array([capability in (ALL, question.capability) for question in self.questions])

    def by_capability(self) -> Table:
        """One row per plan and capability ("all" last), with standard errors over questions.

        `accuracy_low` and `accuracy_high` are the 95 % Wilson interval: where every reply is right
        the standard error is 0, which says too much.
        """
        rows: Table = []
        for plan, selection in enumerate(self.selections):
            for capability in (*self.capabilities, ALL):
                mine = self.of(capability)
                right, likelihood = self.right[plan, mine], self.log_likelihood[plan, mine]
                low, high = wilson(int(right.sum()), len(right))
                rows.append(
                    {
                        "plan": plan,
                        "realized_ratio": selection.realized_ratio,
                        "interaction_strength": selection.interaction_strength,
                        "capability": capability,
                        "questions": len(right),
                        "accuracy": float(right.mean()),
                        "accuracy_error": _error(right),
                        "accuracy_low": low,
                        "accuracy_high": high,
                        "log_likelihood": float(likelihood.mean()),
                        "log_likelihood_error": _error(likelihood),
                    }
                )
        return rows

    def paired(self, plan: int, other: int) -> Table:
        """Differences plan - other on the same questions, one row per capability ("all" last).

        `lost` counts questions that only `other` gets right, `gained` those that only `plan` does;
        `p_value` is McNemar's exact test that both are equally likely.
        """
        return [self._pair(plan, other, name) for name in (*self.capabilities, ALL)]

    def _pair(self, plan: int, other: int, capability: str) -> Row:
        mine = self.of(capability)
        right, reference = self.right[plan, mine], self.right[other, mine]
        accuracy = right.astype(float) - reference
        likelihood = self.log_likelihood[plan, mine] - self.log_likelihood[other, mine]
        lost, gained = int((accuracy < 0).sum()), int((accuracy > 0).sum())
        return {
            "capability": capability,
            "questions": len(right),
            "accuracy": float(accuracy.mean()),
            "accuracy_error": _error(accuracy),
            "lost": lost,
            "gained": gained,
            "p_value": float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0,
            "log_likelihood": float(likelihood.mean()),
            "log_likelihood_error": _error(likelihood),
        }

    def __len__(self) -> int:
        return len(self.selections)

    def __repr__(self) -> str:
        return (
            f"AnswerTable({len(self)} plans x {len(self.questions)} questions of "
            f"{', '.join(self.capabilities)}; {self.left_out} without an answer left out)"
        )


def wilson(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Ends of Wilson's interval for a share; z = 1.96 is 95 %."""
    share, spread = successes / count, z * z / count
    middle = share + spread / 2
    reach = z * np.sqrt(share * (1 - share) / count + spread / (4 * count))
    return float((middle - reach) / (1 + spread)), float((middle + reach) / (1 + spread))


def answer_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    selections: Sequence[Selection],
    questions: Sequence[Question],
    *,
    options: AnswerOptions = AnswerOptions(),
    progress: bool = True,
) -> AnswerTable:
    """Whether each plan's greedy reply to each question is right, and how likely the answer is.

    The verdict is that of `continue_text` and `Question.is_right` (the reply up to its first "." or
    line end, stripped, is the answer), up to floating-point ties between batches. The likelihood is
    of one spelling: the answer after a space, or at once after a prompt that ends in white space.

    Args:
        model: the dense model.
        tokenizer: its tokenizer.
        selections: plans over the model's units; an empty plan is the dense model.
        questions: those whose `answer` is None are left out and counted.
        options: reply length, batch size, checkpoint.
        progress: show a progress bar with ETA.

    Raises:
        InputError: no plan, no question with an answer, an answer no reply can match, or a prompt
            that does not fit the model.
        MismatchError: a selection is for other units, or the checkpoint of another model or text.
        NumericalError: NaN logits.
    """
    if not selections:
        raise InputError("answer_accuracy got no plan. Give at least one Selection.")
    known = tuple(question for question in questions if question.answer is not None)
    if not known:
        raise InputError(
            f"none of the {len(questions)} questions has an answer. Give Question(..., answer=...)."
        )
    architecture = describe(model)
    cases = [Case.encode(model, tokenizer, question) for question in known]
    plans = {plan.fingerprint: plan for plan in selections}
    scales = {mark: column_scales(architecture, *resolve(model, p)) for mark, p in plans.items()}
    memory = PlanMemory.open(
        KIND,
        options.checkpoint,
        (len(cases), 3),
        lambda: _settings(model, cases, options.max_new_tokens),
    )
    engine = ReplyEngine(
        architecture, tokenizer, cases, options.max_new_tokens, options.batch_tokens
    )
    order = sorted(range(len(cases)), key=lambda q: cases[q].length)  # so little is padded
    bar = tqdm(desc=f"replies of {len(plans)} plans", unit="reply", disable=not progress)
    bar.total = len(plans) * len(cases)
    with measuring(model, torch.get_num_threads()), bar:
        for start in range(0, len(order), _QUESTIONS):
            part = order[start : start + _QUESTIONS]
            missing = memory.absent(plans, part)
            if missing:
                memory.add(missing, part, engine.measure([scales[m] for m in missing], part))
            bar.update(len(plans) * len(part))
    found = np.array([memory.values[plan.fingerprint] for plan in selections])
    return AnswerTable(
        tuple(selections),
        known,
        found[..., 0] == 1,
        found[..., 1],
        np.array([len(case.answer) for case in cases]),
        found[..., 2] == 1,
        len(questions) - len(known),
    )


def _settings(model: PreTrainedModel, cases: list[Case], max_new_tokens: int) -> dict[str, Any]:
    texts = [[case.prompt, case.answer, case.question.answer] for case in cases]
    return {
        "model_fingerprint": fingerprint_model(model),
        "model_dtype": model_dtype(model),
        "questions_fingerprint": fingerprint(texts),
        "max_new_tokens": max_new_tokens,
    }


def _error(values: np.ndarray) -> float:
    return float(standard_error(np.asarray(values, dtype=float)[None])[0])
