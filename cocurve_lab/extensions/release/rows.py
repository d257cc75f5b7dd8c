"""Rows of text as the authors' scripts make them, for H on the paper's own recipe.

Documents under 32 words, or that look like multiple choice, are left out. Each chunk of a row's
length becomes text again, so a row that held end tokens is shorter, and is padded with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from ...calibration import TooLittle, bare_ids, draw_positions, require_tokenizable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEWEST_WORDS, AUTHORS_SEED = 32, 42
CHOICES = (" A.", " A)", "\nA.", "\nA)", "CHOICES:", "OPTION A")


def pack(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    rows: int,
    length: int,
    start: list[int],
    end: int | None,
) -> tuple[Tensor, list[int]]:
    """Cut rows as the authors' release does; return them and the tokens of each before padding.

    Each chunk of `length` tokens, with the end tokens in it, becomes text without special tokens,
    which is read again after `start`.
    """
    stream, tokens, found = _released(documents), list[int](), list[list[int]]()
    while len(found) < rows:
        while len(tokens) < length:
            text = next(stream, None)
            if text is None:
                raise TooLittle(
                    f"the text has {len(found) * length + len(tokens)} tokens after the release's "
                    f"recipe, but {rows} rows of {length} need {rows * length}. Give more text, "
                    "fewer rows, or shorter ones."
                )
            tokens += bare_ids(tokenizer, text) + ([] if end is None else [end])
        text = str(tokenizer.decode(tokens[:length], skip_special_tokens=True)).strip()
        del tokens[:length]
        if text:
            found.append([*start, *bare_ids(tokenizer, text)][:length])
    ids = torch.full((rows, length), end or 0)
    for row, own in zip(ids, found, strict=True):
        row[: len(own)] = torch.tensor(own)
    return ids, [len(own) for own in found]


def draw(sizes: list[int], per_row: int | Literal["all"], seed: int) -> Tensor:
    """Draw positions [N, P] as the authors' release does, each row with a seed of its own."""
    drawn = draw_positions(len(sizes), min(sizes), per_row, seed)
    for n, size in enumerate(sizes if per_row != "all" else []):
        chosen = np.random.default_rng(seed + n).choice(size - 1, drawn.shape[1], replace=False)
        drawn[n] = torch.from_numpy(np.sort(chosen))
    return drawn


def _released(documents: Iterable[str]) -> Iterator[str]:
    """Yield what the authors' release keeps of documents, with its white space."""
    for text in documents:
        text = re.sub(r"[ \t]+", " ", require_tokenizable(text).replace("\u00a0", " "))
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
        chosen = any(mark in text.upper() for mark in CHOICES)
        if len(text.split()) >= FEWEST_WORDS and not chosen:
            yield text
