"""Greedy continuations of prompts, and questions with known answers to try a plan on."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.arguments import as_int
from ..base.errors import InputError
from ..base.records import read_objects
from ..calibration import CalibrationSet, require_tokenizable
from ..models.loading import demo_folder, is_demo
from ..models.runtime import exclusive

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Continuations ----------------------------------------------------------------------------------


def continue_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, max_new_tokens: int = 32
) -> str:
    """Continue a prompt greedily, up to the end token; the prompt itself is not returned.

    Args:
        model: a dense, ablated or pruned model.
        tokenizer: its tokenizer.
        text: the prompt.
        max_new_tokens: the most new tokens.
    """
    max_new_tokens = as_int(max_new_tokens, "max_new_tokens", 1)
    encoded = tokenizer(require_tokenizable(text), return_tensors="pt").to(model.device)
    generate: Any = model.generate  # from a mixin whose types the checker cannot resolve
    with exclusive(model):
        output = generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            repetition_penalty=1.0,  # some checkpoints set another one
            pad_token_id=tokenizer.eos_token_id,
        )
    prompt = encoded["input_ids"][0].tolist()
    return "".join(token_pieces(tokenizer, prompt, output[0, len(prompt) :].tolist()))


def token_pieces(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], ids: Sequence[int]
) -> list[str]:
    """Return the text that each token of a continuation adds; joined, they are the continuation.

    Special tokens add nothing. A character of several tokens appears with the last of them.

    Args:
        tokenizer: the tokenizer of the model.
        prompt_ids: ids before the continuation; the last one decides whether it starts with a
            space.
        ids: ids of the continuation [n].
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
        self._before = list(prompt_ids[-1:])  # one token before: without it a space may be lost
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self._length = len(self._decode())

    def add(self, token: int) -> str:
        """Append a token and return the text that it adds."""
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
            clean_up_tokenization_spaces=False,  # it would change text that was already returned
        )
        # an unfinished character decodes to U+FFFD; it appears with its last token
        return str(text).rstrip("\ufffd")


# Prompts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A prompt with its right continuation, if it has one.

    Attributes:
        capability: the capability it tests, such as "arithmetic".
        prompt: the text to continue.
        answer: the right reply; None if there is none.
    """

    capability: str
    prompt: str
    answer: str | None = None

    def is_right(self, reply: str) -> bool | None:
        """Judge a reply by its text up to the first "." or line end; None without an answer."""
        if self.answer is None:
            return None
        return re.split(r"[.\n]", reply.lstrip(" "))[0].strip() == self.answer


def demo_questions(per_capability: int = 8) -> list[Question]:
    """Read test prompts of the embedded model, the same number for each capability."""
    folder = demo_folder().parent / "prompts"
    if not list(folder.glob("*.jsonl")):
        raise InputError(
            f"there are no prompts in {folder}. Clone the whole repository, or write them again "
            "with `python data/world.py`."
        )
    return read_questions(folder, per_capability)


def read_questions(
    place: str | os.PathLike[str], per_capability: int | None = None
) -> list[Question]:
    """Read questions: records with the texts "family", "prompt" and "answer".

    Args:
        place: a file of records, such as .jsonl (`base/records.py`), or a folder of .jsonl files.
        per_capability: the most questions of each family, the first ones; None takes all.
    """
    if per_capability is not None and per_capability < 1:
        raise InputError(f"per_capability is {per_capability}. Ask for at least 1 prompt.")
    path = Path(place)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    found: list[Question] = []
    counts: Counter[str] = Counter()
    for file in files:
        for number, record in enumerate(read_objects(file), start=1):
            question = _question(record, f"record {number} of {file}")
            counts[question.capability] += 1
            if per_capability is None or counts[question.capability] <= per_capability:
                found.append(question)
    if not found:
        raise InputError(f"{path} holds no question. Give a .jsonl file, or a folder of them.")
    return found


def _question(record: dict[str, Any], where: str) -> Question:
    names = ("family", "prompt", "answer")
    values: list[Any] = [record.get(name) for name in names]
    if not all(isinstance(value, str) and value for value in values):
        raise InputError(f"{where} is no question. Give an object with the texts {names}.")
    return Question(*values)


def example_prompts(
    model_id: str | os.PathLike[str], text: CalibrationSet, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Return prompts to continue: one per capability for the demo model, else row beginnings.

    Args:
        model_id: name or folder of the model.
        text: held-out rows; the first 24 tokens of three rows are the prompts of other models.
        tokenizer: the tokenizer of the model.
    """
    if not is_demo(model_id):
        return [str(tokenizer.decode(row[:24])) for row in text.input_ids[:3]]
    return [question.prompt for question in demo_questions(1)]
