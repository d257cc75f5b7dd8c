"""What several verbs take and do alike: models, H, files that are never overwritten."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..loading import MANIFEST, load_model, load_tokenizer, place_of
from ..progress import Progress
from ..storage import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..curvature import Curvature

DTYPES = ("float32", "bfloat16", "float16", "float64")
Run = Callable[[argparse.Namespace], int]


def add_verb(
    verbs: Any, name: str, run: Run, description: str, example: str
) -> argparse.ArgumentParser:
    """A verb with a paragraph on what it does and commands to copy."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=description.split(". ")[0].split(": ")[0].rstrip("."),
        description=description,
        epilog=f"examples:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def as_path(text: str) -> Path:
    """A path of the command line; the shell leaves the ~ of --out=~/H to us."""
    return Path(os.path.expanduser(text))


def add_model(parser: argparse.ArgumentParser, name: str = "model") -> None:
    parser.add_argument(name, metavar=name.upper(), help='"demo", a folder, or a hub id')
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: a GPU where torch has one")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the weights; default: float32 on the CPU, else as they are stored",
    )


def read_any_model(
    place: str, options: argparse.Namespace, tokenizer: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A dense model, or a pruned one from its folder; with its tokenizer where there is one."""
    if not (Path(place_of(place)) / MANIFEST).exists():
        return load_model(place, device=options.device, dtype=options.dtype)
    from ..saving import load_pruned

    pruned = load_pruned(place, device=options.device, dtype=options.dtype)
    return pruned, read_tokenizer(place, tokenizer)


def read_tokenizer(place: str, otherwise: str | None = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a folder or of a hub id, `otherwise` where the folder has none; or None."""
    folder = Path(place_of(place))
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None if otherwise is None else read_tokenizer(otherwise)
    return load_tokenizer(place)


def read_curvature(place: str) -> Curvature:
    """H from a file, or from a folder that holds one.

    Raises:
        InputError: there is none, or there are several (named).
    """
    from ..curvature import Curvature
    from ..shards import files_in

    there = as_path(place)
    if not there.is_dir():
        if not there.exists():
            raise InputError(f"there is no {there}. Build H: cocurve build MODEL --out FOLDER.")
        return Curvature.load(there)
    files = files_in(there)
    if len(files.whole) != 1:
        names = ", ".join(file.name for file in files.whole) or "no H"
        advice = "Give the file of one."
        if not files.whole:
            advice = "Build one: cocurve build MODEL --out FOLDER."
            if files.shards:
                advice = f"Merge its shards: cocurve merge {there}."
            elif files.checkpoints:
                advice = "An unfinished build lies there: give its command again to go on with it."
        raise InputError(f"{there} holds {names}. {advice}")
    return Curvature.load(files.whole[0])


def write_new(path: Path, text: str) -> bool:
    """Write a text to a new file; False where it stands there already, word for word.

    Raises:
        InputError: the file exists and says something else.
    """
    if path.is_file() and path.read_bytes() == text.encode():
        return False
    require_new(path, "exists and holds something else")
    write_atomically(path, text.encode())
    return True


def require_new(path: Path, fact: str = "exists") -> None:
    """Refuse, before hours of work, a file that is there or could not be written after them.

    Raises:
        InputError: names the file, and what is in its way.
    """
    if path.exists():
        raise InputError(
            f"{path} {fact}; it is not overwritten. Choose another file, or move it away."
        )
    require_writable(path.parent)


def require_writable(folder: Path) -> None:
    """Refuse, before hours of work, a folder that nothing can be written into; leaves no trace.

    A folder that is not there yet is tried in the nearest one above it that is.

    Raises:
        InputError: names the folder and the reason.
    """
    place = Path(os.path.abspath(folder))
    while not os.path.lexists(place):
        place = place.parent
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".cocurve.") as trial:
            Path(trial, "trial").write_bytes(b"cocurve")
    except OSError as error:
        raise InputError(
            f"nothing can be written into {folder} ({place}: {error.strerror}). Choose another "
            "folder, or make this one writable."
        ) from None


def progress() -> Progress:
    """A bar on a terminal, lines in a log file."""
    return True if sys.stderr.isatty() else "lines"
