"""Calibration text: packed rows of tokens and the positions whose predictions are scored.

Rows are documents joined by the end token and cut to equal length, always full. No label is used:
position t scores the distribution of token t + 1, so positions lie in [0, T - 2].
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from .errors import InputError, MismatchError
from .models.loading import demo_folder, is_demo
from .storage import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_ROW = 2048  # the paper's row length; contexts of 128k would only waste memory


class HasProvenance(Protocol):
    """What says where it came from: a `Curvature`."""

    @property
    def provenance(self) -> dict[str, Any]: ...


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Rows of token ids and scored positions: C and T(x) of eq. (risk).

    Attributes:
        input_ids: [N, T] int64, no padding.
        positions: [N, P] int64 in [0, T - 2], or "all" for every one of them.
        source: where the text came from.
        seed: the seed positions (and document order) were drawn with; None for explicit ones.

    Raises:
        InputError: wrong shapes or dtypes, an empty set, or a position out of range.
    """

    input_ids: Tensor
    positions: Tensor | Literal["all"] = "all"
    source: str = "explicit"
    seed: int | None = None

    def __post_init__(self) -> None:
        ids = torch.as_tensor(self.input_ids)
        if ids.dim() != 2 or ids.shape[0] < 1 or ids.shape[1] < 2 or ids.is_floating_point():
            raise InputError(
                f"input_ids is {ids.dtype} of shape {tuple(ids.shape)}; expected integer ids "
                "[N, T] with at least one row of two tokens."
            )
        rows, length = ids.shape
        positions = self.positions
        if isinstance(positions, str):
            if positions != "all":
                raise InputError(f'positions is {positions!r}; give a tensor [N, P] or "all".')
            positions = torch.arange(length - 1).expand(rows, -1)
        positions = torch.as_tensor(positions).cpu()
        if positions.is_floating_point() and bool((positions != positions.floor()).any()):
            raise InputError("positions are not whole numbers. Give an integer tensor [N, P].")
        positions = positions.long().contiguous()
        if positions.dim() != 2 or positions.shape[0] != rows or positions.shape[1] < 1:
            raise InputError(
                f"positions has shape {tuple(positions.shape)}; expected [{rows}, P], P >= 1."
            )
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high > length - 2:
            raise InputError(
                f"positions reach from {low} to {high}, but position t scores token t + 1, so they "
                f"lie in [0, {length - 2}] for rows of {length} tokens."
            )
        repeats = (positions.sort(dim=1).values.diff(dim=1) == 0).any(dim=1)
        if bool(repeats.any()):
            raise InputError(
                f"row {int(repeats.nonzero()[0])} scores a position twice, which would count it "
                "double. Name each position once."
            )
        if bool((ids < 0).any()):
            raise InputError(f"input_ids holds {int(ids.min())}; token ids are not negative.")
        object.__setattr__(self, "input_ids", ids.long().cpu().contiguous())
        object.__setattr__(self, "positions", positions)

    # Sources ------------------------------------------------------------------------------------

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
    ) -> CalibrationSet:
        """Pack documents into rows and draw positions; deterministic given the seed.

        Args:
            texts: documents; a list is shuffled by the seed, a stream is taken as it comes.
            tokenizer: a Hugging Face tokenizer with an end token.
            num_sequences: N, rows.
            seq_len: T, tokens per row; None = min(2048, the tokenizer's context).
            positions_per_sequence: P scored positions, uniform without replacement; "all" scores
                every position of a row, which costs almost nothing more and gives a better H.
            seed: for document order and positions.
            source: a name kept in the provenance.

        Raises:
            InputError: too little text in total, no end token, or P > T - 1.
        """
        length = _row_length(tokenizer, seq_len)
        if num_sequences < 1:
            raise InputError(f"num_sequences is {num_sequences}; at least one row is needed.")
        documents: Iterable[str] = [texts] if isinstance(texts, str) else texts
        if isinstance(documents, (list, tuple)):
            documents = random.Random(seed).sample(documents, len(documents))
        ids = _pack(documents, tokenizer, num_sequences, length)
        positions = draw_positions(num_sequences, length, positions_per_sequence, seed)
        return cls(ids, positions, source, seed)

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase, **options: Any
    ) -> CalibrationSet:
        """Read documents from a file: `.jsonl` with a "text" field, else text split at blank lines.

        `options` are those of `from_texts`.

        Raises:
            FileNotFoundError: no such file.
            InputError: a line of the `.jsonl` has no text, or there is too little text.
        """
        return cls.from_texts(
            read_documents(path), tokenizer, **{"source": Path(path).name} | options
        )

    @classmethod
    def from_hub(
        cls,
        dataset: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        split: str = "train",
        field_name: str = "text",
        **options: Any,
    ) -> CalibrationSet:
        """Stream documents from a hub dataset; needs `pip install cocurve-lab[hub]` and a network.

        Raises:
            InputError: `datasets` is not installed, or the dataset cannot be reached.
        """
        stream = stream_hub(dataset, name=name, split=split, field_name=field_name)
        return cls.from_texts(
            stream, tokenizer, **{"source": f"{dataset} {name or ''}".strip()} | options
        )

    # Parts --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def seq_len(self) -> int:
        """T, tokens per row."""
        return int(self.input_ids.shape[1])

    @property
    def positions_per_sequence(self) -> int:
        """P, scored positions per row."""
        return int(self.scored.shape[1])

    @property
    def scored(self) -> Tensor:
        """`positions` as a tensor [N, P]: "all" is spelled out when the set is made."""
        assert isinstance(self.positions, Tensor)
        return self.positions

    def rows(self, start: int, stop: int) -> CalibrationSet:
        """The rows `start:stop` as a set of their own."""
        return CalibrationSet(
            self.input_ids[start:stop], self.scored[start:stop], self.source, self.seed
        )

    def split(self, *, held_out: int = 0, test: int = 0) -> tuple[CalibrationSet, ...]:
        """Disjoint parts (calibration, held-out, test); a part of 0 rows is left out of the tuple.

        Parts are runs of neighbouring rows, so where a part ends one document may be cut in two.

        Raises:
            InputError: no row would remain for calibration.
            MismatchError: the same row stands in two parts (repeated text).
        """
        remain = len(self) - held_out - test
        if remain < 1 or min(held_out, test) < 0:
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
        """SHA-256 of each row's tokens [N], by which overlap is found."""
        return [fingerprint(row.numpy()) for row in self.input_ids]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokens and positions."""
        return fingerprint(self.input_ids.numpy(), self.scored.numpy())

    def require_disjoint(self, other: CalibrationSet | HasProvenance) -> None:
        """Raise MismatchError if a row of this set is also in `other` (or built into that H)."""
        if isinstance(other, CalibrationSet):
            theirs = other.row_fingerprints
        else:
            theirs = other.provenance.get("row_fingerprints", [])
        shared = set(self.row_fingerprints) & set(theirs)
        if shared:
            row = next(i for i, mark in enumerate(self.row_fingerprints) if mark in shared)
            raise MismatchError(
                f"{len(shared)} rows are in both sets, the first is row {row}: what is measured on "
                "them is not held out. Use text the calibration has not seen."
            )

    def __repr__(self) -> str:
        scored = self.positions_per_sequence
        every = " (all)" if scored == self.seq_len - 1 else ""
        return (
            f"CalibrationSet({len(self)} rows x {self.seq_len} tokens, {scored} scored positions "
            f"per row{every}, from {self.source})"
        )


def default_calibration(
    model_id: str,
    tokenizer: PreTrainedTokenizerBase,
    num_sequences: int = 128,
    held_out: int = 16,
    text_file: str | os.PathLike[str] | None = None,
    **options: Any,
) -> tuple[CalibrationSet, CalibrationSet]:
    """Calibration and held-out rows where the user names none.

    The embedded model has its own splits; any other model gets C4 (allenai/c4, en, streamed), or
    `text_file` where there is no network. `options` are those of `CalibrationSet.from_texts`.

    Raises:
        InputError: offline and no text file given, or too little text.
        MismatchError: the parts share a row.
    """
    if _has_own_text(model_id, text_file):
        built = _own_rows("calibration", tokenizer, num_sequences, options)
        judge = _own_rows("held_out", tokenizer, held_out, options)
    else:  # one stream, read on: no document is in both sets
        stream, source = _default_text(text_file, options)
        built = _next_rows(stream, source, tokenizer, num_sequences, options)
        try:
            judge = _next_rows(stream, source, tokenizer, held_out, options)
        except _TooLittle as error:
            raise InputError(
                f"{built.source} has enough text for the {num_sequences} rows to build on, but not "
                f"for {held_out} held-out rows, which share no document with them (plain text has "
                f"one between blank lines): of what is left, {error}"
            ) from None
    judge.require_disjoint(built)
    return built, judge


def default_rows(
    model_id: str,
    tokenizer: PreTrainedTokenizerBase,
    num_sequences: int = 128,
    text_file: str | os.PathLike[str] | None = None,
    **options: Any,
) -> CalibrationSet:
    """The calibration rows of `default_calibration` alone, where nothing need be held out.

    Raises: as `default_calibration`.
    """
    if _has_own_text(model_id, text_file):
        return _own_rows("calibration", tokenizer, num_sequences, options)
    return _next_rows(*_default_text(text_file, options), tokenizer, num_sequences, options)


def _has_own_text(model_id: str, text_file: str | os.PathLike[str] | None) -> bool:
    return text_file is None and is_demo(model_id)


def _own_rows(
    name: str, tokenizer: PreTrainedTokenizerBase, count: int, options: dict[str, Any]
) -> CalibrationSet:
    """Rows of a split of the embedded model's texts."""
    file = demo_folder().parent / "texts" / f"{name}.jsonl"
    named = {"source": f"demo {name}", "num_sequences": count}
    return CalibrationSet.from_file(file, tokenizer, **options, **named)


def _default_text(
    text_file: str | os.PathLike[str] | None, options: dict[str, Any]
) -> tuple[Iterator[str], str]:
    """The documents of a file, shuffled by the seed, or of C4 as they come; and their source."""
    if text_file is None:
        stream = stream_hub("allenai/c4", name="en", split="train", field_name="text")
        return stream, "allenai/c4 en"
    documents = read_documents(text_file)
    random.Random(options.get("seed", 0)).shuffle(documents)
    return iter(documents), Path(text_file).name


def _next_rows(
    stream: Iterator[str],
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    options: dict[str, Any],
) -> CalibrationSet:
    """Rows of the next documents of a stream."""
    named = {"source": source} | options | {"num_sequences": count}
    return CalibrationSet.from_texts(stream, tokenizer, **named)


def draw_positions(rows: int, length: int, per_row: int | Literal["all"], seed: int) -> Tensor:
    """Positions [N, P] uniform without replacement in [0, T - 2], ascending; "all" takes each."""
    if per_row == "all":
        return torch.arange(length - 1).repeat(rows, 1)
    if not 1 <= per_row <= length - 1:
        raise InputError(
            f"positions_per_sequence is {per_row}, but a row of {length} tokens has {length - 1} "
            'positions with a next token. Ask for fewer, or for "all".'
        )
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randperm(length - 1, generator=generator)[:per_row] for _ in range(rows)]
    return torch.stack(draws).sort(dim=1).values


class _TooLittle(InputError):
    """A text ended before the rows were full."""


def _row_length(tokenizer: PreTrainedTokenizerBase, seq_len: int | None) -> int:
    if seq_len is None:
        return int(min(LONGEST_ROW, tokenizer.model_max_length))
    if seq_len < 2:
        raise InputError(
            f"seq_len is {seq_len}; a row needs two tokens to have a prediction to score."
        )
    return seq_len


def _pack(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, rows: int, length: int
) -> Tensor:
    """Join documents by the end token and cut the first rows * length tokens.

    Documents are taken one by one, so what a stream holds beyond them stays in it.
    """
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no end token to join documents with. Set eos_token.")
    needed, stream = rows * length, iter(documents)
    tokens: list[int] = []
    while len(tokens) < needed:
        text = next(stream, None)
        if text is None:
            raise _TooLittle(
                f"the text has {len(tokens)} tokens, but {rows} rows of {length} need {needed}. "
                "Give more text, fewer rows, or shorter ones."
            )
        if not isinstance(text, str):
            raise InputError(f"a document is {type(text).__name__} {text!r:.40}; give strings.")
        if text.strip():
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            tokens += [*ids, tokenizer.eos_token_id]
    return torch.tensor(tokens[:needed]).view(rows, length)


def read_documents(path: str | os.PathLike[str]) -> list[str]:
    """Documents of a text file: the "text" fields of a `.jsonl`, else paragraphs."""
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8-sig")  # a byte-order mark is no text
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}). Convert it first.") from None
    if path.suffix.lower() != ".jsonl":
        return [part.strip() for part in re.split(r"\n\s*\n", content) if part.strip()]
    documents = []
    # not splitlines: a JSON string may hold other line separators (U+2028) as they are
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            document = None
        if not isinstance(document, str):
            raise InputError(
                f'{path}, line {number} is not a JSON object with a "text" field that is a string. '
                "Correct the line, or remove it."
            )
        documents.append(document)
    return documents


def stream_hub(dataset: str, *, name: str | None, split: str, field_name: str) -> Iterator[str]:
    """Yield the text field of a hub dataset, streamed; `datasets` is imported only here."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError(
            f"reading {dataset} needs the `datasets` package. Run `pip install cocurve-lab[hub]`, "
            "or give a text file: CalibrationSet.from_file(path, tokenizer)."
        ) from None
    try:
        rows = load_dataset(dataset, name, split=split, streaming=True)
        yield from (row[field_name] for row in rows)
    except Exception as error:  # each hub client release raises its own network errors
        raise InputError(
            f"{dataset} cannot be read ({type(error).__name__}: {error}). Offline? Give a text "
            "file: CalibrationSet.from_file(path, tokenizer)."
        ) from None
