"""Documents of files, of mixes of files, and of the hub; chats in a tokenizer's words.

And the rows of a model where no text is named: its own, or C4.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.arguments import as_float
from ...base.errors import InputError, one_line, shown
from ...base.interrupts import within
from ...calibration import CalibrationSet, TooLittle, text_start
from ...models.identity import demo_folder, is_demo
from ...models.sources import Part, source_named
from .records import TABLES, kind_of, read_records, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# the day of every chat whose template writes the date: text and H are the same tomorrow
DATE = datetime(2024, 7, 26)
Files = str | os.PathLike[str] | Mapping[Any, float]  # a file, or files with their shares


def texts_of(
    files: Files, tokenizer: PreTrainedTokenizerBase, seed: int = 0
) -> tuple[Iterable[str], str]:
    """Return the documents of a file as they stand, or of a mix of files, and their source."""
    if isinstance(files, Mapping):
        return shuffled(files, tokenizer, seed)
    return read_documents(files, tokenizer), _called(files, tokenizer)


def shuffled(
    files: Files, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[Iterator[str], str]:
    """Return the documents of a file or a mix of files, shuffled by the seed, and their source.

    A document that is there twice is taken once: otherwise rows to judge on could repeat rows that
    H was built on.
    """
    if not isinstance(files, Mapping):
        documents = list(dict.fromkeys(read_documents(files, tokenizer)))
        random.Random(seed).shuffle(documents)
        return iter(documents), _called(files, tokenizer)
    shares = {path: as_float(share, f"the share of {path}") for path, share in files.items()}
    if not shares or not all(0 < share < math.inf for share in shares.values()):
        given = ", ".join(f"{path} {share:g}" for path, share in shares.items()) or "none"
        raise InputError(f"the shares of the files are {given}. Give each a number above 0.")
    whole = sum(shares.values())
    source = " + ".join(f"{share / whole:.4g} {Path(f).name}" for f, share in shares.items())
    streams = {path: shuffled(path, tokenizer, seed)[0] for path in shares}
    return _mixed(streams, shares), source


def _mixed(streams: dict[Any, Iterator[str]], shares: dict[Any, float]) -> Iterator[str]:
    """Yield the next document of whichever source has the fewest characters for its share."""
    taken = dict.fromkeys(streams, 0)
    while True:
        behind = min(streams, key=lambda path: taken[path] / shares[path])
        text = next(streams[behind], None)
        if text is None:
            raise TooLittle(
                f"{behind} has no more text after {taken[behind]:,} characters of it, and the "
                f"other files cannot have its share. Give more of it, or fewer or shorter rows."
            )
        taken[behind] += len(text)
        yield text


def _called(path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of a file of text, with the date of its chats where there may be one."""
    dated = kind_of(path) in TABLES and _writes_date(tokenizer)
    return f"{Path(path).name}, chats dated {DATE:%Y-%m-%d}" if dated else Path(path).name


def read_documents(
    path: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase | None = None
) -> list[str]:
    """Read the documents of a file: records of a table, else text between blank lines.

    A record of a table (records.py: JSON lines, JSON, CSV, TSV, Parquet, also as .gz) is a text,
    or has a field "text", "messages" (a chat), or "prompt" and "completion". Chats are written by
    the tokenizer's chat template; without one their contents stand between blank lines.
    """
    if kind_of(path) not in TABLES:
        content = read_text(path).replace("\r\n", "\n").replace("\r", "\n")
        return [part.strip() for part in re.split(r"\n\s*\n", content) if part.strip()]
    records = enumerate(read_records(path), start=1)
    return [_document(record, f"record {n} of {path}", tokenizer) for n, record in records]


def _document(record: Any, where: str, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the text of a record."""
    found = record
    if isinstance(record, dict):
        found = record.get("text", record.get("messages"))
        pair: list[Any] = [record.get("prompt"), record.get("completion")]
        if found is None and {type(each) for each in pair} in ({str}, {list}):
            found = pair[0] + pair[1]
    if isinstance(found, list) and found and all(map(_is_message, found)):
        if tokenizer is not None and tokenizer.chat_template is not None:
            written = written_chat(tokenizer, found, "Give its text in a field text")
            # a row begins so already
            return written.removeprefix(str(tokenizer.decode(text_start(tokenizer))))
        found = "\n\n".join(message["content"] for message in found)
    if not isinstance(found, str):
        fields = isinstance(record, dict) and f"has the fields {', '.join(map(str, record))}"
        raise InputError(
            f"{where} is no text; it {fields or f'is {shown(record)}'}. Give a string in a field "
            "text, messages with role and content, or prompt and completion."
        )
    return found


def written_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[Any], remedy: str, *, answer: bool = False
) -> str:
    """Write messages by the tokenizer's chat template, up to where an `answer` would begin."""
    try:
        write = partial(
            tokenizer.apply_chat_template,
            messages,
            chat_template=fixed_template(tokenizer),
            tokenize=False,
            add_generation_prompt=answer,
        )
        text = within(20, "the chat template", write)
    except Exception as error:  # a template is a program of the model's maker
        raise InputError(
            f"the tokenizer's chat template fails ({one_line(error)}). {remedy}."
        ) from error
    return str(text)


def fixed_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a tokenizer's chat template, which writes the same on any day."""
    template = str(tokenizer.get_chat_template())
    if not _writes_date(tokenizer):
        return template
    # a macro of the name hides the function, which has no other way in
    written = "format | replace('%-', '%')"
    for code in "aAbBdeFHIjmMpSTyY":
        written += f" | replace('%{code}', '{DATE.strftime('%' + code)}')"
    macro = f"{{% macro strftime_now(format) %}}{{{{ {written} }}}}{{% endmacro %}}"
    return f"{macro}{{{{ '' }}}}{template}"  # the template may begin with a line end


def _writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(k), str) for k in ("role", "content")
    )


def stream_hub(
    dataset: str, *, name: str | None, split: str, field_name: str, shuffled: int | None = None
) -> Iterator[str]:
    """Yield the texts of a hub dataset, streamed, or `shuffled` by a seed in a buffer of 10,000."""
    from datasets import load_dataset

    try:
        rows = load_dataset(dataset, name, split=split, streaming=True)
        if shuffled is not None:
            rows = rows.shuffle(seed=shuffled, buffer_size=10_000)
        yield from (row[field_name] for row in rows)
    except Exception as error:  # each hub client release raises its own network errors
        raise InputError(
            f"{dataset} cannot be read ({type(error).__name__}: {error}). Check the name and the "
            "network, or give a text file: CalibrationSet.from_file(path, tokenizer)."
        ) from None


# The text of a model ----------------------------------------------------------------------------


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
        **options: as for `CalibrationSet.from_texts`, but that every position is scored by default.

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
    """Return options of `from_texts`: those given, else what the source of the model knows.

    Every position is scored by default, as the notebooks and the command line do.
    """
    known: dict[str, Any] = {"positions_per_sequence": "all"}
    source = source_named(model_id)
    if source is not None:
        known |= source.row_options
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
        # of seed 0 the stream as it comes
        order = seed if seed or options.get("recipe") == "release" else None
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
