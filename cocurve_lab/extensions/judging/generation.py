"""Greedy continuations of prompts, and questions with known answers to try a plan on."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.arguments import as_int, require_type
from ...base.errors import InputError
from ...calibration import CalibrationSet, bare_ids, require_tokenizable, text_start
from ...models.identity import demo_folder, is_demo, vocabulary_mark
from ...models.logits import require_numbers
from ...models.runtime import context_of, measuring, require_known_ids
from ...models.sources import source_named
from ..texts.documents import written_chat
from ..texts.records import read_objects

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Continuations ----------------------------------------------------------------------------------


def continue_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    max_new_tokens: int = 32,
    *,
    chat: bool | None = None,
) -> str:
    """Continue a prompt greedily, up to the end token; the prompt itself is not returned.

    Args:
        model: a dense, ablated or pruned model.
        tokenizer: its tokenizer.
        text: the prompt.
        max_new_tokens: the most new tokens.
        chat: whether the prompt is asked as a turn of a chat, see `encode_prompt`.
    """
    max_new_tokens = as_int(max_new_tokens, "max_new_tokens", 1)
    prompt = encode_prompt(model, tokenizer, text, chat)
    input_ids = torch.tensor([prompt], device=model.device)
    generate: Any = model.generate  # from a mixin whose types the checker cannot resolve
    with measuring(model, torch.get_num_threads()):
        output = generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            repetition_penalty=1.0,  # some checkpoints set another one
            pad_token_id=tokenizer.eos_token_id,
            tokenizer=tokenizer,  # for stop_strings, which some checkpoints set
            logits_processor=[_require_finite],
        )
    return "".join(token_pieces(tokenizer, prompt, output[0, len(prompt) :].tolist()))


def _require_finite(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Pass the logits [1, V] of the next token on, unless half precision overflowed."""
    require_numbers(bool(torch.isfinite(logits).any()), "the prompt")
    return logits


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


def last_logits(model: Any, ids: Tensor, cache: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Run a model on ids [B, T] that follow a cache, and return what the next step needs.

    Args:
        model: of transformers.
        ids: the new tokens of each text.
        cache: the second value of the step before; empty at the start.

    Returns:
        The logits [B, vocabulary] behind the last id, and the new cache under the name that this
        transformers has for it (`cache` from 5.24 on, `past_key_values` before).
    """
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache)
    name = "cache" if "cache" in output else "past_key_values"
    return output.logits[:, -1], {name: output[name]}


# Prompts ----------------------------------------------------------------------------------------


def encode_prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    chat: bool | None = None,
) -> list[int]:
    """Return the token ids of a prompt; all prompts of the lab are encoded here.

    Args:
        model, tokenizer: the model that will read it, and its tokenizer.
        prompt: the text.
        chat: True asks it as the user's turn in the tokenizer's chat template, False continues it
            as it is; None asks where the tokenizer has a template.
    """
    context = context_of(model)
    require_type(prompt, str, "the prompt")
    if not require_tokenizable(prompt).strip():
        raise InputError("the prompt is empty. Write a few words to continue.")
    if uses_chat(tokenizer, chat):
        turn = [{"role": "user", "content": prompt}]
        prompt = written_chat(tokenizer, turn, "Give chat=False", answer=True)
        ids = bare_ids(tokenizer, prompt)
    else:
        ids = text_start(tokenizer) + bare_ids(tokenizer, prompt)
    if not ids:
        raise InputError(f"the prompt {prompt!r} has no tokens. Write a few words to continue.")
    require_known_ids(model, max(ids), vocabulary_mark(tokenizer), "prompt")
    if len(ids) >= context:
        raise InputError(
            f"the prompt has {len(ids)} tokens, the model's context {int(context)}. "
            "Leave room for at least one more."
        )
    return ids


def uses_chat(tokenizer: PreTrainedTokenizerBase, chat: bool | None = None) -> bool:
    """Whether prompts are asked through the chat template; see `encode_prompt`."""
    known = bool(getattr(tokenizer, "chat_template", None))
    if chat and not known:
        raise InputError("chat is True, but the tokenizer has no chat template. Give chat=False.")
    return known if chat is None else chat


@dataclass(frozen=True)
class Question:
    """A prompt with its right continuation, if it has one.

    Attributes:
        capability: the capability it tests, such as "arithmetic".
        prompt: the text to continue.
        answer: the right reply; None if there is none.
        within: whether a reply is also right that has the answer among other words, in any case:
            "The capital of France is Paris."
    """

    capability: str
    prompt: str
    answer: str | None = None
    within: bool = False

    def is_right(self, reply: str) -> bool | None:
        """Judge a reply by its text up to the first "." or line end; None without an answer."""
        if self.answer is None:
            return None
        said = re.split(r"[.\n]", reply.lstrip(" "))[0].strip()
        if self.within:
            words = rf"(?<!\w){re.escape(self.answer)}(?!\w)"
            return re.search(words, said, re.IGNORECASE) is not None
        return said == self.answer


def demo_questions(per_capability: int = 8) -> list[Question]:
    """Read test prompts of the embedded model, the same number for each capability."""
    return read_questions(demo_folder().parent / "prompts", per_capability)


def own_questions(model_id: str | os.PathLike[str], per_capability: int = 8) -> list[Question]:
    """Return questions made for a model: the embedded one, or one of a source; else none."""
    if is_demo(model_id):
        return demo_questions(per_capability)
    source = source_named(model_id)
    return [] if source is None else read_questions(source.questions(), per_capability)


def read_questions(
    place: str | os.PathLike[str], per_capability: int | None = None
) -> list[Question]:
    """Read questions: records with the texts "family", "prompt" and "answer".

    With `"within": true`, a reply is also right that has the answer among other words.

    Args:
        place: a file of records, such as .jsonl (extensions/texts), or a folder of .jsonl files.
        per_capability: the most questions of each family, the first ones; None takes all.
    """
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
    family, prompt, answer = values
    return Question(family, prompt, answer, record.get("within") is True)


def example_prompts(
    model_id: str | os.PathLike[str],
    text: CalibrationSet | None,
    tokenizer: PreTrainedTokenizerBase,
) -> list[str]:
    """Return prompts to continue: a model's own questions, one per capability, or row beginnings.

    Args:
        model_id: name or folder of the model.
        text: held-out rows; the first 24 tokens of three rows are the prompts of models without
            questions of their own, which need them.
        tokenizer: the tokenizer of the model.
    """
    own = [question.prompt for question in own_questions(model_id, 1)]
    if not own and text is None:
        raise InputError(f"{model_id} has no questions of its own, and text is None. Give rows.")
    rows = () if text is None else text.input_ids[:3, :24]
    return own or [str(tokenizer.decode(row)) for row in rows]
