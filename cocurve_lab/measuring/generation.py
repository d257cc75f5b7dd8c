"""Text before and after pruning: prompts, greedy continuations, and whether a reply is right."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..calibration import CalibrationSet
from ..errors import InputError
from ..models.loading import demo_folder, is_demo
from ..models.runtime import exclusive

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def continue_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, max_new_tokens: int = 32
) -> str:
    """Greedy continuation of a prompt, up to the end token; without the prompt itself.

    Args:
        model: dense, ablated or pruned.
        tokenizer: its tokenizer.
        text: the prompt.
        max_new_tokens: at most this many tokens.
    """
    encoded = tokenizer(text, return_tensors="pt").to(model.device)
    generate: Any = model.generate  # a mixin the type checker cannot see through
    with exclusive(model):
        output = generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            repetition_penalty=1.0,  # some checkpoints ship another one
            pad_token_id=tokenizer.eos_token_id,
        )
    prompt = encoded["input_ids"][0].tolist()
    return "".join(token_pieces(tokenizer, prompt, output[0, len(prompt) :].tolist()))


def token_pieces(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], ids: Sequence[int]
) -> list[str]:
    """The text that each token of a continuation adds; joined, the text of the continuation.

    Args:
        tokenizer: the model's.
        prompt_ids: ids before the continuation; the last one decides about a leading space.
        ids: ids of the continuation [n].

    Returns:
        n strings; empty for special tokens, and for all but the last token of one character.
    """
    growing = GrowingText(tokenizer, prompt_ids)
    return [growing.add(token) for token in ids]


class GrowingText:
    """A continuation decoded token by token.

    Attributes:
        ids: the tokens so far.
        pieces: the text each of them added.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before = list(prompt_ids[-1:])
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self._length = len(self._decode())

    def add(self, token: int) -> str:
        """Append a token and return the text it adds."""
        self.ids.append(token)
        text = self._decode()
        self.pieces.append(text[self._length :])
        self._length = max(self._length, len(text))
        return self.pieces[-1]

    @property
    def text(self) -> str:
        """The continuation so far."""
        return "".join(self.pieces)

    def _decode(self) -> str:
        text = self._tokenizer.decode(
            [*self._before, *self.ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,  # it would change text that already stands
        )
        return str(text).rstrip("\ufffd")  # a character of several tokens appears with the last


# Prompts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A prompt whose right continuation is known.

    Attributes:
        capability: what it asks for, "arithmetic" and so on.
        prompt: the text to continue.
        answer: the right reply; None where there is none.
    """

    capability: str
    prompt: str
    answer: str | None = None

    def is_right(self, reply: str) -> bool | None:
        """Whether a reply up to its first "." or line end is the answer; None without an answer."""
        if self.answer is None:
            return None
        return re.split(r"[.\n]", reply.lstrip(" "))[0].strip() == self.answer


def demo_questions(per_capability: int = 8) -> list[Question]:
    """Test prompts of the embedded model, the same number of each capability.

    Raises:
        InputError: the prompts are not there (a partial checkout), or a number below 1.
    """
    if per_capability < 1:
        raise InputError(f"per_capability is {per_capability}; ask for at least one prompt.")
    found = []
    for file in sorted((demo_folder().parent / "prompts").glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines()[:per_capability]:
            record = json.loads(line)
            found.append(Question(record["family"], record["prompt"], record["answer"]))
    if not found:
        raise InputError(
            f"there are no prompts in {demo_folder().parent / 'prompts'}. Clone the repository "
            "whole, or write them again with `python data/world.py`."
        )
    return found


def example_prompts(
    model_id: str | os.PathLike[str], text: CalibrationSet, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Prompts to continue: one per capability of the embedded model, else held-out beginnings."""
    if not is_demo(model_id):
        return [str(tokenizer.decode(row[:24])) for row in text.input_ids[:3]]
    return [question.prompt for question in demo_questions(1)]
