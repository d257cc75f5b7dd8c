"""Calibration text: rows of tokens, and the positions whose predictions are scored.

Rows are documents joined by the end token and cut to equal length, so every row is full. One long
document needs no end token. A row begins as the tokenizer begins a text, with `<bos>` if it adds
one. No label is used: position t scores the distribution of token t + 1, so positions lie in
[0, T - 2].
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .base.arguments import as_int, require_choice
from .base.errors import InputError, MismatchError
from .base.storage import fingerprint
from .base.text_windows import WINDOW, record, share_seen, windows
from .curvature.release import ROWS
from .models.identity import vocabulary_mark
from .models.sources import TEXTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# 10 million characters cost the demo model's tokenizer 15 s and about 2 GB
LONGEST_TEXT = 10_000_000
Recipe = Literal["plain", "release"]  # the latter is in extensions/release
LONGEST_ROW = 2048  # the paper's row length; a row of 128k tokens would only waste memory


# Rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Rows of token ids and their scored positions: C and T(x) of eq. (risk).

    Attributes:
        input_ids: [N, T] int64 on the CPU, without padding (but for `recipe="release"`).
        positions: [N, P] int64 in [0, T - 2]; "all" is accepted, and stored as a tensor.
        source: where the text came from.
        seed: the seed that positions and document order were drawn with; None for explicit rows.
        vocabulary: the mark of the tokenizer (models/identity.py); None where it is not known.
        unseen: the caller's word that H and plans without a record of their text have not seen this
            one; see `assume_unseen`.
    """

    input_ids: Tensor
    positions: Tensor | Literal["all"] = "all"
    source: str = "explicit"
    seed: int | None = None
    unseen: bool = False
    vocabulary: str | None = None

    def __post_init__(self) -> None:
        ids = _integers(self.input_ids, "input_ids")
        rows, length = ids.shape
        if rows < 1 or length < 2 or int(ids.min()) < 0:
            lowest = f" with token id {int(ids.min())}" if ids.numel() else ""
            raise InputError(
                f"input_ids is {rows} rows of {length} tokens{lowest}. Give at least one row of "
                "two tokens, without padding; token ids are not negative."
            )
        positions = self.positions
        if isinstance(positions, str) and positions == "all":
            positions = torch.arange(length - 1).expand(rows, -1)
        positions = _integers(positions, "positions")
        if positions.shape[0] != rows or positions.shape[1] < 1:
            raise InputError(
                f"positions has shape {tuple(positions.shape)}. Give [{rows}, P] with P >= 1."
            )
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high > length - 2:
            raise InputError(
                f"positions range from {low} to {high}, but position t scores token t + 1. Give "
                f"positions in [0, {length - 2}] for rows of {length} tokens."
            )
        repeats = (positions.sort(dim=1).values.diff(dim=1) == 0).any(dim=1)
        if bool(repeats.any()):
            raise InputError(
                f"row {int(repeats.nonzero()[0])} scores a position twice, which would count it "
                "twice. Give each position once."
            )
        # the class is frozen; from here on both are int64 tensors on the CPU
        object.__setattr__(self, "input_ids", ids)
        object.__setattr__(self, "positions", positions)

    # Sources --------------------------------------------------------------------------------------

    @classmethod
    def from_texts(
        cls,
        texts: Iterable[str],
        tokenizer: PreTrainedTokenizerBase,
        num_sequences: int = 128,
        seq_len: int | None = None,
        positions_per_sequence: int | Literal["all"] = 64,
        seed: int = 0,
        source: str = "texts",
        eos: str | int | None = None,
        bos: str | int | None = None,
        recipe: Recipe = "plain",
    ) -> CalibrationSet:
        """Pack documents into rows and draw positions; the seed decides both.

        Args:
            texts: documents. A list is shuffled by the seed; a stream is taken as it comes.
            tokenizer: a Hugging Face tokenizer.
            num_sequences: N, the number of rows.
            seq_len: T, tokens per row; None means min(2048, the tokenizer's context).
            positions_per_sequence: P scored positions per row, drawn uniformly without
                replacement. "all" scores every position, which costs almost nothing more and gives
                a better H.
            seed: for document order and positions.
            source: a name for the provenance.
            eos: the token that ends a document, as the text or id of one token; None takes the
                tokenizer's. It may have none if one document fills all rows.
            bos: the token that begins every row; None begins rows as the tokenizer begins a text
                (many add none), and "" with nothing. `source` then names it.
            recipe: "release" makes the rows and draws the positions of the authors' release (their
                seed is 42): documents under 32 words or that look like multiple choice are left
                out, and a row that held end tokens is padded with them; padding is not scored, and
                "all" scores as many positions as the shortest row has. Two things may differ:
                their script packs by Llama 3.1's tokenizer unless told another, and their held-out
                rows go on within the last document.
        """
        require_choice(recipe, Recipe, "recipe")
        start = text_start(tokenizer, bos)
        length = _row_length(tokenizer, seq_len, len(start))
        num_sequences, seed = as_int(num_sequences, "num_sequences", 1), as_int(seed, "seed")
        documents: Iterable[str] = [texts] if isinstance(texts, str) else texts
        if isinstance(documents, (list, tuple)):
            documents = random.Random(seed).sample(documents, len(documents))
        end = tokenizer.eos_token_id if eos is None else _token(tokenizer, eos, "eos")
        source = f"{source}, the release's recipe" if recipe == "release" else source
        if start:
            source = f"{source}, each row after {tokenizer.decode(start)}"
        if recipe == "release":
            ids, sizes = ROWS().pack(documents, tokenizer, num_sequences, length, start, end)
            positions = ROWS().draw(sizes, positions_per_sequence, seed)
        else:
            ids = _pack(documents, tokenizer, num_sequences, length, start, end)
            positions = draw_positions(num_sequences, length, positions_per_sequence, seed)
        return cls(ids, positions, source, seed, vocabulary=vocabulary_mark(tokenizer))

    @classmethod
    def from_file(
        cls, path: Any, tokenizer: PreTrainedTokenizerBase, **options: Any
    ) -> CalibrationSet:
        """Read documents from a file (extensions/texts); `options` are those of `from_texts`.

        Several files with their shares of the text, {"a.jsonl": 0.5, "b.txt": 0.5}, are mixed.
        """
        texts, source = TEXTS().texts_of(path, tokenizer, options.get("seed", 0))
        return cls.from_texts(texts, tokenizer, **{"source": source} | options)

    # Parts ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def seq_len(self) -> int:
        """T, the tokens per row."""
        return int(self.input_ids.shape[1])

    @property
    def positions_per_sequence(self) -> int:
        """P, the scored positions per row."""
        return int(self.scored.shape[1])

    @property
    def scored(self) -> Tensor:
        """`positions` as the tensor [N, P] that it always is after construction."""
        assert isinstance(self.positions, Tensor)
        return self.positions

    def rows(self, start: int, stop: int) -> CalibrationSet:
        """Return the rows `start:stop` as a new set."""
        ids, positions = self.input_ids[start:stop], self.scored[start:stop]
        return replace(self, input_ids=ids, positions=positions)

    def split(self, *, held_out: int = 0, test: int = 0) -> tuple[CalibrationSet, ...]:
        """Split into disjoint parts: calibration, held-out, test. A part of 0 rows is omitted.

        Parts are runs of neighboring rows, so a document may be cut in two where a part ends.
        `held_out` and `test` are numbers of rows; calibration gets the rest.
        """
        held_out, test = as_int(held_out, "held_out"), as_int(test, "test")
        remain = len(self) - held_out - test
        if remain < 1:
            raise InputError(
                f"splitting {len(self)} rows into {held_out} held out and {test} test leaves "
                f"{remain} for calibration. Ask for more sequences, or smaller parts."
            )
        bounds = [(0, remain), (remain, remain + held_out), (remain + held_out, len(self))]
        parts = tuple(self.rows(a, b) for a, b in bounds if b > a)
        for i, part in enumerate(parts):
            for other in parts[:i]:
                part.require_disjoint(other)
        return parts

    @cached_property
    def row_fingerprints(self) -> list[str]:
        """SHA-256 of each row's tokens [N]."""
        return [fingerprint(row.numpy()) for row in self.input_ids]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens and positions."""
        return fingerprint(self.input_ids.numpy(), self.scored.numpy())

    @cached_property
    def text_windows(self) -> str:
        """The record of the text (base/text_windows.py); overlap between sets is found by it."""
        return record(windows(self.input_ids.numpy()))

    def assume_unseen(self) -> CalibrationSet:
        """Say that H and plans which do not record their text have not seen this one."""
        return replace(self, unseen=True)

    def require_disjoint(self, other: Any) -> CalibrationSet:
        """Return this set, with the share of it that `other` has seen, if any, in its source.

        Raises:
            MismatchError: `other`, a set, H or plan, has seen too much of this text
                (base/text_windows.py), or does not record its text.
        """
        facts: dict[str, Any] = getattr(other, "provenance", {})
        known: str | None = getattr(other, "text_windows", facts.get("text_windows"))
        whole = other.row_fingerprints if isinstance(other, CalibrationSet) else None
        theirs = facts.get("row_fingerprints", []) if whole is None else whole
        shared = set(self.row_fingerprints) & set(theirs)
        if shared:
            row = next(i for i, mark in enumerate(self.row_fingerprints) if mark in shared)
            raise MismatchError(
                f"{len(shared)} rows are in both sets (the first is row {row}), so a measurement "
                "on them is not held out. Use text that H was not built on."
            )
        if known is None:
            if theirs:  # the H that ships with a model records its rows alone
                return self._noting("compared with the rows of H as wholes only")
            if not self.unseen:
                raise MismatchError(
                    "the text of an H or a plan is not recorded, so whether it has seen the rows "
                    f"from {self.source} is unknown. If you know that it has not, pass "
                    "rows.assume_unseen()."
                )
            return self._noting("assumed to be unseen")
        share, seen = share_seen(windows(self.input_ids.numpy()), known)
        if seen:
            raise MismatchError(
                f"{share:.1%} of the windows of {WINDOW} tokens, or most of a row, of the rows "
                f"from {self.source} are in the other text, so a measurement on them is not held "
                "out. Use text that H was not built on."
            )
        return self._noting(f"{share:.2%} of it seen before") if share else self

    def _noting(self, fact: str) -> CalibrationSet:
        return self if fact in self.source else replace(self, source=f"{self.source} ({fact})")

    def __repr__(self) -> str:
        scored = self.positions_per_sequence
        every = " (all)" if scored == self.seq_len - 1 else ""
        return (
            f"CalibrationSet({len(self)} rows x {self.seq_len} tokens, {scored} scored "
            f"per row{every}, from {self.source})"
        )


# Packing ------------------------------------------------------------------------------------------


def draw_positions(rows: int, length: int, per_row: int | Literal["all"], seed: int) -> Tensor:
    """Draw positions [N, P] int64 uniformly without replacement from [0, T - 2], ascending."""
    if per_row == "all":
        return torch.arange(length - 1).repeat(rows, 1)
    per_row = as_int(per_row, "positions_per_sequence")
    if not 1 <= per_row <= length - 1:
        raise InputError(
            f"positions_per_sequence is {per_row}, but a row of {length} tokens has {length - 1} "
            f'positions with a next token. Give 1 to {length - 1}, or "all".'
        )
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randperm(length - 1, generator=generator)[:per_row] for _ in range(rows)]
    return torch.stack(draws).sort(dim=1).values


class TooLittle(InputError):
    """The text ended before the rows were full."""


def _row_length(tokenizer: PreTrainedTokenizerBase, seq_len: int | None, start: int) -> int:
    if seq_len is None:
        return int(min(LONGEST_ROW, tokenizer.model_max_length))
    seq_len = as_int(seq_len, "seq_len")
    if seq_len < max(2, start + 1):
        raise InputError(
            f"seq_len is {seq_len}. Give at least {max(2, start + 1)}: position t scores token "
            f"t + 1, and the tokens before the text are {start}."
        )
    return seq_len


def text_start(tokenizer: PreTrainedTokenizerBase, bos: str | int | None = None) -> list[int]:
    """Return the ids before each row, window, prompt, question and task, such as `<bos>`.

    None: as the tokenizer begins a text (many add nothing); "": nothing; else one token.
    """
    if bos is not None:
        return [] if bos == "" else [_token(tokenizer, bos, "bos")]
    whole, bare = list(tokenizer("a")["input_ids"]), bare_ids(tokenizer, "a")
    starts = range(len(whole) - len(bare) + 1)
    fits = [at for at in starts if whole[at : at + len(bare)] == bare]
    return whole[: max(fits, default=0)]


def bare_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text alone, with nothing before or after it."""
    # not verbose: a text longer than the context is no reason to warn, it is cut or checked
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _token(tokenizer: PreTrainedTokenizerBase, chosen: str | int, name: str) -> int:
    """Return the id of the token that an argument names by its text or id."""
    known = tokenizer.get_vocab()
    found = known.get(chosen) if isinstance(chosen, str) else chosen
    if found is None or found not in known.values():
        raise InputError(
            f"{name} is {chosen!r}, which is not a token of the tokenizer. Give the text or the id "
            "of one token, such as '</s>' or 2."
        )
    return found


def _pack(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    rows: int,
    length: int,
    start: list[int],
    end: int | None,
) -> Tensor:
    """Join documents, each before `end`, and cut the first tokens into rows [rows, length].

    Each row begins with `start`. Documents are taken one by one, so the rest of a stream can be
    read later.
    """
    needed, stream = rows * (length - len(start)), iter(documents)
    tokens: list[int] = []
    while len(tokens) < needed:
        text = next(stream, None)
        if text is None:
            raise TooLittle(
                f"the text has {len(tokens)} tokens, but {rows} rows of {length} need {needed}. "
                "Give more text, fewer rows, or shorter ones."
            )
        if not require_tokenizable(text).strip():
            continue
        if tokens and end is None:
            raise InputError(
                f"the first document has {len(tokens)} of the {needed} tokens, and the tokenizer "
                "has no end token to join another with. Name one with eos= (--eos on the command "
                "line), or give one longer document."
            )
        ids = bare_ids(tokenizer, text)
        tokens += ids if end is None else [*ids, end]
    cut = torch.tensor(tokens[:needed]).view(rows, -1)
    return torch.cat([torch.tensor([start], dtype=torch.int64).expand(rows, -1), cut], dim=1)


def require_tokenizable(text: Any) -> str:
    """Return a text that a tokenizer can take; InputError for any other value."""
    if not isinstance(text, str):
        raise InputError(f"a document is {type(text).__name__} {text!r:.40}. Give strings.")
    if len(text) > LONGEST_TEXT:
        raise InputError(
            f"a text of {len(text):,} characters begins with {text[:40]!r}; a tokenizer takes it "
            "whole, and its memory may end the process. Split it into documents of at most "
            f"{LONGEST_TEXT:,} characters."
        )
    return text


def _integers(values: Any, name: str) -> Tensor:
    """Return a matrix of integers as int64 on the CPU."""
    found = torch.as_tensor(values)
    integers = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if found.dim() != 2 or not integers:
        raise InputError(
            f"{name} is {found.dtype} of shape {tuple(found.shape)}. Give a matrix of integers."
        )
    return found.long().cpu().contiguous()
