"""Greedy replies of many plans to many questions: right or wrong, and how likely the answer is.

One pass over prompt and answer decides nearly every case: the model's own choices either spell the
answer, or leave it at a known token. Greedy decoding goes on only where the text is still open
(another way to spell the answer in tokens), so that the verdict is that of a whole greedy reply.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..architectures import Architecture
from ..errors import InputError, NumericalError
from ..generation import Question, token_pieces
from ..loading import model_device
from ..lockstep import encode_prompt, end_tokens
from ..masking import Scales, scaled, stack_rows
from ..replay import widen
from ..runtime import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
_LOGIT_BYTES = 256 << 20  # full-vocabulary logits held at a time


@dataclass(frozen=True)
class Case:
    """A question in tokens."""

    question: Question
    prompt: list[int]
    answer: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)

    @classmethod
    def encode(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: Question
    ) -> Case:
        answer = question.answer or ""
        if not answer or not question.is_right(f"{answer}."):
            raise InputError(
                f"no reply can be the answer {answer!r}: a reply is judged up to its first full "
                "stop or line end, without white space around it. Give such an answer."
            )
        prompt = encode_prompt(model, tokenizer, question.prompt)
        spaced = answer if question.prompt[-1].isspace() else f" {answer}"
        joint = encode_prompt(model, tokenizer, question.prompt + spaced)
        ids = joint[len(prompt) :]
        if joint[: len(prompt)] != prompt or not ids:  # the two would merge into other tokens
            ids = list(tokenizer(spaced, add_special_tokens=False)["input_ids"])
        return cls(question, prompt, ids)


@dataclass
class Reply:
    """One plan's reply to one question, as far as it is known."""

    plan: int
    column: int  # of the question in the part that is measured
    case: Case
    ids: list[int] = field(default_factory=list)


@dataclass
class ReplyEngine:
    """Judges replies, many plans and questions per forward."""

    architecture: Architecture
    tokenizer: PreTrainedTokenizerBase
    cases: list[Case]
    max_new_tokens: int
    batch_tokens: int

    def __post_init__(self) -> None:
        self.ends = end_tokens(self.architecture.model)
        self.verdicts: dict[tuple[Question, tuple[int, ...], bool], bool | None] = {}

    def measure(self, plans: list[Scales], part: list[int]) -> np.ndarray:
        """[plans, len(part), 3]: right, log-likelihood of the answer, decoded."""
        found = np.zeros((len(plans), len(part), 3))
        replies = [
            Reply(plan, column, self.cases[number])
            for column, number in enumerate(part)
            for plan in range(len(plans))
        ]
        forced = [reply.case.answer for reply in replies]
        open_replies = []
        for reply, chosen, likelihood in self._forward(plans, replies, forced):
            first = next(
                (i for i, t in enumerate(reply.case.answer) if chosen[i] != t), len(chosen) - 1
            )
            reply.ids = chosen[: first + 1]
            verdict = self._verdict(reply)
            found[reply.plan, reply.column] = (bool(verdict), likelihood, verdict is None)
            open_replies += [reply] if verdict is None else []
        while open_replies:
            still = []
            for reply, chosen, _ in self._forward(
                plans, open_replies, [r.ids for r in open_replies]
            ):
                reply.ids = [*reply.ids, chosen[-1]]
                verdict = self._verdict(reply)
                found[reply.plan, reply.column, 0] = bool(verdict)
                still += [reply] if verdict is None else []
            open_replies = still
        return found

    def _verdict(self, reply: Reply) -> bool | None:
        """Right, wrong, or None where what has been said could still become either."""
        ids = reply.ids[: self.max_new_tokens]
        stop = next((i for i, token in enumerate(ids) if token in self.ends), None)
        ended = stop is not None or len(ids) == self.max_new_tokens
        spoken = tuple(ids[:stop])
        key = (reply.case.question, spoken, ended)
        if key not in self.verdicts:
            said = "".join(token_pieces(self.tokenizer, reply.case.prompt, spoken))
            self.verdicts[key] = judge(reply.case.question, said, ended)
        return self.verdicts[key]

    def _forward(
        self, plans: list[Scales], replies: list[Reply], forced: list[list[int]]
    ) -> Iterator[tuple[Reply, list[int], float]]:
        """After prompt and forced tokens: the likeliest token at each step [n + 1], and the log
        probability of the forced ones."""
        start = 0
        while start < len(replies):
            left = zip(replies[start:], forced[start:], strict=True)
            length = max(len(reply.case.prompt) + len(ids) for reply, ids in left)
            stop = start + max(1, self.batch_tokens // length)
            try:
                batch = self._batch(plans, replies[start:stop], forced[start:stop])
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if stop - start == 1:
                    raise InputError(
                        f"memory runs out with one reply of {length} tokens per forward. Use "
                        "shorter prompts, bfloat16 weights, or a larger device."
                    ) from None
                self.batch_tokens //= 2
                log.warning("out of memory: %d tokens per forward from here", self.batch_tokens)
                continue
            yield from zip(replies[start:stop], *batch, strict=True)
            start = stop

    def _batch(
        self, plans: list[Scales], replies: list[Reply], forced: list[list[int]]
    ) -> tuple[list[list[int]], list[float]]:
        device = model_device(self.architecture.model)
        rows = [
            torch.tensor([*r.case.prompt, *ids]) for r, ids in zip(replies, forced, strict=True)
        ]
        # padding lies on the right, where no position that is read can see it
        ids = pad_sequence(rows, batch_first=True).to(device)
        masks = stack_rows(self.architecture, [plans[reply.plan] for reply in replies])
        with scaled(self.architecture, masks):
            hidden = self.architecture.decoder(input_ids=ids, use_cache=False)[0]
        counts = [len(given) + 1 for given in forced]
        read = torch.cat(
            [
                hidden[b, len(r.case.prompt) - 1 :][:n]
                for b, (r, n) in enumerate(zip(replies, counts, strict=True))
            ]
        )
        labels = torch.tensor([token for given in forced for token in [*given, 0]], device=device)
        tokens, logs = self._read(read, labels)
        parts = zip(tokens.split(counts), logs.split(counts), strict=True)
        pairs = [(token.tolist(), float(value[:-1].sum())) for token, value in parts]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def _read(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Likeliest token [K] and log probability of the label [K] float64 from hidden [K, d]."""
        step = max(1, _LOGIT_BYTES // (8 * self.architecture.vocabulary))
        tokens, logs = [], []
        for start in range(0, len(hidden), step):
            logits = widen(self.architecture.logits(hidden[start : start + step]))
            if bool(logits.isnan().any()):
                raise NumericalError(
                    "the model gives NaN logits, dense or under a plan. Half precision may "
                    "overflow: try bfloat16 or float32."
                )
            wanted = logits.gather(-1, labels[start : start + step, None]).squeeze(-1)
            tokens.append(logits.argmax(dim=-1).cpu())
            logs.append((wanted - torch.logsumexp(logits, dim=-1)).double().cpu())
        return torch.cat(tokens), torch.cat(logs)


def judge(question: Question, said: str, ended: bool) -> bool | None:
    """Whether a reply is right, from what has been said so far.

    Args:
        question: with a known answer.
        said: the reply up to here.
        ended: whether nothing will follow.

    Returns:
        True or False where no further text can change it, else None.
    """
    spoken, answer = said.lstrip(" "), question.answer or ""
    if ended or "." in spoken or "\n" in spoken:
        return bool(question.is_right(said))
    spoken = spoken.lstrip()
    rest = spoken[len(answer) :]
    hopeful = answer.startswith(spoken) or (spoken.startswith(answer) and not rest.strip())
    return None if hopeful else False
