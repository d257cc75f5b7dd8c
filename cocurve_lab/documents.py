"""Documents to cut calibration rows from: of a file, or streamed from the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .errors import InputError


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
