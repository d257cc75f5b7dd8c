"""The rows of a model where none are named: its own text, C4, or the documents of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...base.errors import InputError
from ...calibration import CalibrationSet, TooLittle
from ...models.identity import demo_folder, is_demo
from ...models.sources import Part, source_named
from .documents import Files, read_documents, shuffled, stream_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def default_calibration(
    model_id: str,
    tokenizer: PreTrainedTokenizerBase,
    num_sequences: int = 128,
    held_out: int = 16,
    text_file: Files | None = None,
    **options: Any,
) -> tuple[CalibrationSet, CalibrationSet]:
    """Choose calibration and held-out rows for a model.

    The embedded model has its own texts for both, and so has a model of a source (`cocurve fetch`),
    in rows of its own length. Any other model gets C4 (allenai/c4, en, streamed), or the documents
    of `text_file`.

    Args:
        model_id, tokenizer: as from `load_model`.
        num_sequences, held_out: rows of the two sets.
        text_file: a file, or files with shares, as for `CalibrationSet.from_file`, for example
            where there is no network.
        **options: as for `CalibrationSet.from_texts`.

    Returns:
        (calibration, held-out): sets that share no document.
    """
    options = row_options(model_id, options)
    text = _default_text(model_id, tokenizer, text_file, options)
    built = _next_rows(*text("calibration"), tokenizer, num_sequences, options)
    try:
        judge = _next_rows(*text("held_out"), tokenizer, held_out, options)
    except TooLittle as error:
        raise InputError(
            f"{built.source} has enough text for the {num_sequences} rows to build on, but not for "
            f"{held_out} held-out rows, which share no document with them (in plain text, blank "
            f"lines separate documents). In the rest, {error}"
        ) from None
    judge.require_disjoint(built)
    return built, judge


def default_rows(
    model_id: str,
    tokenizer: PreTrainedTokenizerBase,
    num_sequences: int = 128,
    text_file: Files | None = None,
    **options: Any,
) -> CalibrationSet:
    """Choose the calibration rows of `default_calibration` alone, with nothing held out."""
    options = row_options(model_id, options)
    text = _default_text(model_id, tokenizer, text_file, options)
    return _next_rows(*text("calibration"), tokenizer, num_sequences, options)


def own_text(model_id: str) -> Callable[[Part], tuple[list[str], str]] | None:
    """Return what reads a part of a model's own documents and their source, or None."""
    if is_demo(model_id):
        return _demo_text
    source = source_named(model_id)
    return None if source is None else source.text


def row_options(model_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options of `from_texts`: those given, else what the source of the model knows."""
    source = source_named(model_id)
    known = {} if source is None else dict(source.row_options)
    return known | {name: value for name, value in options.items() if value is not None}


def _demo_text(part: Part) -> tuple[list[str], str]:
    """Read one of the embedded model's texts."""
    file = demo_folder().parent / "texts" / f"{part}.jsonl"
    return read_documents(file), f"{part.replace('_', '-')} text of the demo model"


def _default_text(
    model_id: str,
    tokenizer: PreTrainedTokenizerBase,
    text_file: Files | None,
    options: dict[str, Any],
) -> Callable[[Part], tuple[Iterable[str], str]]:
    """Return what gives the documents of a part and their source; no document is in both parts."""
    own, seed = own_text(model_id), options.get("seed", 0)
    if text_file is None and own is not None:
        return own
    if text_file is not None:
        stream, source = shuffled(text_file, tokenizer, seed)
    else:
        order = seed if options.get("recipe") == "release" else None
        where = {"name": "en", "split": "train", "field_name": "text"}
        stream, source = stream_hub("allenai/c4", **where, shuffled=order), "allenai/c4 en"
    return lambda _: (stream, source)  # one stream: the second part reads on where the first ended


def _next_rows(
    stream: Iterable[str],
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    options: dict[str, Any],
) -> CalibrationSet:
    named = {"source": source} | options | {"num_sequences": count}
    return CalibrationSet.from_texts(stream, tokenizer, **named)
