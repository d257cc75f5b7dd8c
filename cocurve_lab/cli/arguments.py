"""What verbs take and write: kinds of arguments, H from a place, and new files. No torch here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import create_mutex_group
from tyro.constructors import PrimitiveConstructorSpec

from .. import Curvature, InputError
from ..base import arguments, files
from ..base.atomic import scratch, write_atomically
from ..base.progress import Progress
from ..curvature.release import SHIPPED
from ..curvature.settings import Shard

Dtype = Literal["float32", "bfloat16", "float16", "float64"]


def progress() -> Progress:
    """The kind of progress: a bar on a terminal, lines in a log file."""
    return True if sys.stderr.isatty() else "lines"


# Arguments ----------------------------------------------------------------------------------------


def _word(kind: type, metavar: str, read: Callable[[str], Any]) -> Any:
    """How tyro reads a word of the command line."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def _file(word: str) -> Path:
    return Path(os.path.expanduser(word))  # the shell does not expand the ~ in --out=~/H


def _readable(word: str) -> Path:
    files.require_regular(_file(word), files.MOST_BYTES)
    return _file(word)


def _shard(word: str) -> Shard:
    number, _, count = word.partition("/")
    if number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
        return int(number), int(count)
    raise InputError(f"{word!r} is no shard. Give I/N with I from 1 to N, such as 2/3.")


Count = Annotated[int, _word(int, "COUNT", lambda word: arguments.as_int(int(word), "it", 1))]
File = Annotated[Path, _word(Path, "PATH", _file)]
Readable = Annotated[Path, _word(Path, "FILE", _readable)]  # one that can be read
Percent = Annotated[
    float, _word(float, "PERCENT", lambda word: float(word.removesuffix("%")) / 100)
]
BUDGET = create_mutex_group(required=True, title="budget")
ShardOf = Annotated[Shard, _word(tuple, "I/N", _shard)]


# H ------------------------------------------------------------------------------------------------


def read_curvature(place: str) -> Curvature:
    """Load H from a file, by a name, or from a folder of builds or of the authors' release."""
    folder = Path(place).expanduser()
    if (folder / "registry.json").is_file():
        return Curvature.from_release(folder)
    if not folder.is_dir() or place in SHIPPED:
        return Curvature.load(place)
    # only what follows the fingerprint counts: a model may be called x.shard-1-of-2
    found = [f for f in folder.glob("H_*.pkl") if ".shard-" not in f.name.rpartition("_")[2]]
    if len(found) != 1:
        raise InputError(
            f"{folder} holds {len(found)} whole H, not one. Build it, or resume its build (a "
            ".ckpt): cocurve build MODEL --out FOLDER. Join its shards: cocurve merge FOLDER. Of "
            "several give the file of one."
        )
    return Curvature.load(found[0])


# New files ----------------------------------------------------------------------------------------


def write_new(path: Path, text: str) -> None:
    """Write a text to a new file, or to one that holds exactly this text already."""
    if not path.is_file() or files.read_regular(path) != text.encode():
        require_new(path)
    write_atomically(path, text.encode())


def require_new(path: Path) -> None:
    """Check, before hours of work, that a file or folder does not exist and can be written."""
    require_writable(path.parent)
    if path.exists():
        raise InputError(f"{path} exists and is not overwritten. Choose another, or move it away.")


def require_writable(folder: Path) -> None:
    """Check, before hours of work, that a folder can be written into. Leaves no trace.

    For a folder that does not exist yet, the nearest existing one above it is tried. What killed
    runs left there is removed.
    """
    place = Path(os.path.abspath(folder))
    while not os.path.lexists(place):
        place = place.parent
    # by writing a few bytes: permissions alone do not tell of a full disk or a read-only mount
    with scratch(place) as trial:
        Path(trial, "trial").write_bytes(b"cocurve")
