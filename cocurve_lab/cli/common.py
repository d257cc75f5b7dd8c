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
from ..models.identity import MANIFEST
from ..models.loading import load_model, load_tokenizer, place_of
from ..progress import Progress
from ..storage import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..calibration import CalibrationSet
    from ..curvature.matrix import Curvature

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
    from ..pruner.saving import load_pruned

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
    from ..curvature.matrix import Curvature
    from ..estimator.files import files_in

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


def add_text(
    parser: argparse.ArgumentParser, name: str, sequences: int, what: str, otherwise: str
) -> None:
    """Where rows come from, --calibration FILE or --text FILE, and how they are cut."""
    parser.add_argument(
        f"--{name}",
        dest="text",
        metavar="FILE",
        type=as_path,
        help=f'{what}: .jsonl with a "text" field, or plain text split at blank lines. Default: '
        f"the demo model's own texts; for any other model {otherwise}",
    )
    parser.add_argument("--sequences", type=int, default=sequences, help="rows (%(default)s)")
    parser.add_argument("--length", type=int, help="tokens per row; default: the most, up to 2048")
    parser.add_argument(
        "--positions",
        type=_positions,
        default="all",
        help='scored positions per row, or "all" (%(default)s), which costs almost nothing more',
    )
    parser.add_argument("--seed", type=int, default=0, help="of the rows and positions (0)")


def require_text(options: argparse.Namespace) -> None:
    """Refuse a text that is not there, before a model is loaded.

    Raises:
        InputError: names the file.
    """
    file = options.text
    if file is not None and (file.is_dir() or not file.exists()):
        fact = f"{file} is a folder" if file.is_dir() else f"there is no text {file}"
        raise InputError(f'{fact}. Give a .jsonl file with a "text" field, or plain text.')


def calibration_rows(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> CalibrationSet:
    """The rows H is built on: those of `default_calibration`, so that notebooks find the result."""
    from ..calibration import default_rows

    return default_rows(
        options.model, tokenizer, options.sequences, text_file=options.text, **_cut(options)
    )


def held_out_rows(
    options: argparse.Namespace, model: str, tokenizer: PreTrainedTokenizerBase
) -> CalibrationSet:
    """The rows something is measured on.

    Raises:
        InputError: no text is given, and the model is not the embedded one.
    """
    from ..calibration import CalibrationSet, default_calibration
    from ..models.loading import is_demo

    count = options.sequences
    if options.text is not None:
        return CalibrationSet.from_file(
            options.text, tokenizer, num_sequences=count, **_cut(options)
        )
    if not is_demo(model):
        raise InputError(f"there is no text for {model!r}. Give --text FILE.")
    _, rows = default_calibration(
        model, tokenizer, num_sequences=1, held_out=count, **_cut(options)
    )
    return rows


def _cut(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "seq_len": options.length,
        "positions_per_sequence": options.positions,
        "seed": options.seed,
    }


def _positions(text: str) -> int | str:
    """Read "all" or a number."""
    if text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor all") from None
