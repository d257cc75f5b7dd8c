"""Records from the files that people have: JSON, JSON lines, CSV, TSV or Parquet, also as .gz."""

from __future__ import annotations

import csv
import gzip
import io
import os
import zlib
from pathlib import Path
from typing import Any

from ...base.errors import FileFormatError, InputError, one_line
from ...base.files import MOST_BYTES, open_regular, read_regular
from ...base.schema import parse_json

TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_OTHERS = (  # known not to be text, or to hold more than text
    ".arrow", ".feather", ".zst", ".bz2", ".xz", ".zip", ".tar", ".7z", ".pkl", ".npy", ".npz",
    ".html", ".htm", ".xml", ".yaml", ".yml", ".toml", ".ipynb", ".pdf", ".docx", ".epub", ".xls",
    ".xlsx", ".sqlite", ".db",
)  # fmt: skip


def kind_of(path: str | os.PathLike[str]) -> str:
    """Return the suffix that says what a file holds, such as ".jsonl" for `a.JSONL.gz`."""
    path = Path(path)
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def read_text(path: str | os.PathLike[str]) -> str:
    """Read UTF-8 text, from a .gz too; a byte-order mark is not part of it."""
    if (kind := kind_of(path)) in _OTHERS:
        raise InputError(
            f"{path} is a {kind} file, which is not read. Give plain text, or a file that ends in "
            f"{', '.join(TABLES)}; .gz is unpacked."
        )
    content = _content(Path(path))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text ({error}). Convert it to UTF-8; of other files, those that "
            f"end in {', '.join(TABLES)} or .gz are read."
        ) from None


def read_records(path: str | os.PathLike[str]) -> list[Any]:
    """Read the records of a file: an object per line or row, or the values of a JSON list.

    Its suffix says what it holds (`TABLES`); .json may be lines too. A JSON object with one list
    in it is that list.
    """
    path, kind = Path(path), kind_of(path)
    if kind not in TABLES:
        raise InputError(f"{path} has no records. Give a file that ends in {', '.join(TABLES)}.")
    if kind == ".parquet":
        found = _parquet(path)
    elif kind in (".csv", ".tsv"):
        found = _rows(path, "\t" if kind == ".tsv" else ",")
    elif kind == ".json":
        found = _values_or_lines(read_text(path), path)
    else:
        found = _lines(read_text(path), path)
    if not found:
        raise InputError(f"{path} holds no record. Give a file with at least one.")
    return found


def read_objects(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a file, each of which must have named fields."""
    try:
        found = read_records(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error}). Give another file.") from None
    for number, record in enumerate(found, start=1):
        if not isinstance(record, dict):
            raise InputError(f"record {number} of {path} is no object. Give one with named fields.")
    return found


def _content(path: Path) -> bytes:
    if path.suffix.lower() != ".gz":
        return read_regular(path)
    try:
        with open_regular(path) as packed, gzip.open(packed) as file:
            content = file.read(MOST_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} cannot be read as .gz ({error}). Make it again.") from None
    if len(content) > MOST_BYTES:
        raise InputError(f"{path} unpacks to more than {MOST_BYTES >> 30} GiB. Give a part of it.")
    return content


def _values_or_lines(text: str, path: Path) -> list[Any]:
    try:
        return _values(parse_json(text))
    except FileFormatError as error:
        if "Extra data" in str(error):  # after the first value: lines under the name of C4's files
            return _lines(text, path)
        raise InputError(f"{path}: {error}. Correct it.") from None


def _lines(text: str, path: Path) -> list[Any]:
    # not splitlines: a JSON string may contain other line separators, such as U+2028
    lines = enumerate(text.split("\n"), start=1)
    return [_parsed(line, f"line {n} of {path}") for n, line in lines if line.strip()]


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except FileFormatError as error:
        raise InputError(f"{where}: {error}. Correct it.") from None


def _values(content: Any) -> list[Any]:
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        found = lists[0] if len(lists) == 1 and "messages" not in content else [content]
        return list(found)
    return content if isinstance(content, list) else [content]


def _rows(path: Path, delimiter: str) -> list[dict[str, Any]]:
    usual = csv.field_size_limit(2**31 - 1)  # a document may be longer than its 128 kB
    try:
        reader = csv.DictReader(io.StringIO(read_text(path), newline=""), delimiter=delimiter)
        found = list(reader)
    except csv.Error as error:
        raise InputError(f"line {reader.line_num} of {path}: {error}. Correct it.") from None
    finally:
        csv.field_size_limit(usual)
    for number, row in enumerate(found, start=1):
        if None in row or None in row.values():
            raise InputError(
                f"row {number} of {path} has not as many cells as the header. Correct it."
            )
    return found


def _parquet(path: Path) -> list[Any]:
    from pyarrow import BufferReader, parquet

    content = _content(path)
    try:
        return list(parquet.read_table(BufferReader(content)).to_pylist())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read as .parquet ({one_line(error)}). Write the file again, or "
            "give .jsonl."
        ) from None
