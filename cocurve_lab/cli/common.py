"""Options and checks that several verbs share: models and H, new files, text."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.atomic import write_atomically
from ..base.errors import FileFormatError, InputError
from ..base.progress import Progress
from ..models.identity import MANIFEST
from ..models.loading import load_model, load_tokenizer, place_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..calibration import CalibrationSet
    from ..curvature.matrix import Curvature
    from ..solver.selection import Selection

DTYPES = ("float32", "bfloat16", "float16", "float64")
Run = Callable[[argparse.Namespace], int]


# Verbs --------------------------------------------------------------------------------------------


def add_verb(
    verbs: Any, name: str, run: Run, description: str, example: str
) -> argparse.ArgumentParser:
    """Add a verb, with a paragraph that explains it and commands to copy."""
    # the list of verbs shows the first clause of the description
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
    """Make a path of an argument; the shell does not expand the ~ in --out=~/H."""
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no path on any system")
    return Path(os.path.expanduser(text))


def progress() -> Progress:
    """The kind of progress: a bar on a terminal, lines in a log file."""
    return True if sys.stderr.isatty() else "lines"


# Models, H and plans ------------------------------------------------------------------------------


_DTYPE = "dtype of the weights; default: float32 on the CPU, otherwise as stored"
_STREAM = (
    "read each layer of a model from its files when it runs, for models larger than the device "
    "(needs pip install 'cocurve-lab[stream]')"
)


def add_model(
    parser: argparse.ArgumentParser,
    name: str = "model",
    *,
    dtype: str = _DTYPE,
    stream: bool = False,
) -> None:
    """Add the model, the device and dtype (described as `dtype`) it is loaded with, and --stream.

    --stream is for verbs that can do with one layer at a time: all others need the whole model.
    """
    parser.add_argument(name, metavar=name.upper(), help='"demo", a folder, or a hub id')
    add_device(parser, dtype=dtype)
    if stream:
        parser.add_argument("--stream", action="store_true", help=_STREAM)


def add_device(parser: argparse.ArgumentParser, *, dtype: str = _DTYPE) -> None:
    """Add --device and --dtype."""
    parser.add_argument("--device", help="cpu, cuda or cuda:1; default: a GPU if torch can use one")
    parser.add_argument("--dtype", choices=DTYPES, help=dtype)


def read_model(
    options: argparse.Namespace, place: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the dense model of the command line, or of another place, with its tokenizer."""
    return load_model(
        place or options.model,
        device=options.device,
        dtype=options.dtype,
        stream=getattr(options, "stream", False),
    )


def read_any_model(
    place: str, options: argparse.Namespace, tokenizer: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a dense model, or a pruned one from its folder, and its tokenizer if there is one."""
    if not (Path(place_of(place)) / MANIFEST).exists():
        return read_model(options, place)
    from ..pruner.saving import load_pruned

    stream = getattr(options, "stream", False)
    pruned = load_pruned(place, device=options.device, dtype=options.dtype, stream=stream)
    return pruned, read_tokenizer(place, tokenizer)


def read_tokenizer(place: str, otherwise: str | None = None) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder or hub id; if the folder has none, that of `otherwise`."""
    folder = Path(place_of(place))
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None if otherwise is None else read_tokenizer(otherwise)
    return load_tokenizer(place)


def read_curvature(place: str) -> Curvature:
    """Load H from a file, or from a folder of builds or of the authors' release."""
    from ..curvature.matrix import Curvature
    from ..curvature.release import REGISTRY
    from ..estimator.files import files_in

    there = as_path(place)
    if not there.is_dir():
        if not there.exists():
            raise InputError(f"there is no {there}. Build H: cocurve build MODEL --out FOLDER.")
        return Curvature.load(there)
    if (there / REGISTRY).is_file():
        return Curvature.from_release(there)
    files = files_in(there)
    if len(files.whole) != 1:
        names = ", ".join(file.name for file in files.whole) or "no H"
        advice = "Give the file of one."
        if not files.whole:
            advice = "Build one: cocurve build MODEL --out FOLDER."
            if files.shards:
                advice = f"Merge its shards: cocurve merge {there}."
            elif files.checkpoints:
                advice = "It holds an unfinished build: run its command again to resume."
        raise InputError(f"{there} holds {names}. {advice}")
    return Curvature.load(files.whole[0])


def read_plan(path: Path) -> Selection:
    """Read the plan in a file, or in a folder rXX of the authors' release; errors name the file."""
    from ..curvature.release import MASK
    from ..solver.selection import Selection

    if (path / MASK).is_file() and path.resolve().name[1:].isdecimal():
        folder = path.resolve()
        return Selection.from_release(folder.parent, int(folder.name[1:]) / 100)
    if not path.is_file():
        raise InputError(f"there is no plan {path}. Solve one: cocurve solve H --out FILE.")
    try:
        return Selection.from_json(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise FileFormatError(
            f"{path} is not a plan: it is not UTF-8 text. Give a file from `cocurve solve`."
        ) from None
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from None


def add_suite(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --suite, described as `what`, and what goes with it."""
    parser.add_argument("--suite", choices=("demo", "paper", "local"), help=what)
    parser.add_argument(
        "--tasks",
        metavar="FILE",
        type=as_path,
        nargs="+",
        default=[],
        help="task files for --suite local",
    )
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        type=as_path,
        help="for --suite paper: copies of its datasets, FOLDER/ORGANIZATION/NAME with the files "
        "as on the hub; default: the hub",
    )
    parser.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run the programs that the model writes for a suite, confined by bubblewrap (Debian: "
        "apt-get install bubblewrap)",
    )
    parser.add_argument("--limit", type=int, help="questions per task; default: all")


# New files ----------------------------------------------------------------------------------------


def write_new(path: Path, text: str) -> bool:
    """Write a text to a new file; return False if the file holds exactly this text already."""
    if path.is_file() and path.read_bytes() == text.encode():
        return False
    require_new(path, "exists and holds something else")
    write_atomically(path, text.encode())
    return True


def require_new(path: Path, fact: str = "exists") -> None:
    """Check, before hours of work, that a file does not exist and can be written."""
    if path.exists():
        raise InputError(
            f"{path} {fact}; it is not overwritten. Choose another file, or move it away."
        )
    require_writable(path.parent)


def require_writable(folder: Path) -> None:
    """Check, before hours of work, that a folder can be written into. Leaves no trace.

    For a folder that does not exist yet, the nearest existing one above it is tried.
    """
    place = Path(os.path.abspath(folder))
    while not os.path.lexists(place):
        place = place.parent
    # by writing a few bytes: permissions alone do not tell of a full disk or a read-only mount
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".cocurve.") as trial:
            Path(trial, "trial").write_bytes(b"cocurve")
    except OSError as error:
        raise InputError(
            f"nothing can be written into {folder} ({place}: {error.strerror}). Choose another "
            "folder, or make this one writable."
        ) from None


# Text ---------------------------------------------------------------------------------------------


def add_text(
    parser: argparse.ArgumentParser, name: str, sequences: int, what: str, otherwise: str
) -> None:
    """Add the options for rows: the text, and how it is cut.

    Args:
        parser: of the verb.
        name: "calibration" or "text", the option that names the file.
        sequences: default number of rows.
        what: what the text is for.
        otherwise: the text of models other than the demo model, if no file is given.
    """
    parser.add_argument(
        f"--{name}",
        dest="text",
        metavar="FILE",
        type=as_path,
        help=f'{what}: .jsonl with a "text" field, or plain text split at blank lines. Default: '
        f"the demo model's own text; {otherwise} for other models",
    )
    parser.add_argument("--sequences", type=int, default=sequences, help="rows (%(default)s)")
    parser.add_argument(
        "--length", type=int, help="tokens per row; default: the context, at most 2048"
    )
    parser.add_argument(
        "--positions",
        type=_positions,
        default="all",
        help='scored positions per row (%(default)s); "all" costs almost nothing more',
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of rows and positions (0)")
    parser.add_argument(
        "--eos",
        metavar="TEXT or ID",
        type=lambda text: int(text) if text.isdecimal() else text,
        help="the token that ends a document of the text; default: the tokenizer's. One document "
        "that fills all rows needs none",
    )


def require_text(options: argparse.Namespace) -> None:
    """Check, before a model is loaded, that the text file exists."""
    file = options.text
    if file is not None and (file.is_dir() or not file.exists()):
        fact = f"{file} is a folder" if file.is_dir() else f"there is no text {file}"
        raise InputError(f'{fact}. Give a .jsonl file with a "text" field, or plain text.')


def calibration_rows(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> CalibrationSet:
    """Make the rows H is built on, as `default_calibration` does, so that notebooks find H."""
    from ..calibration import default_rows

    return default_rows(
        options.model, tokenizer, options.sequences, text_file=options.text, **_cut(options)
    )


def calibration_and_held_out(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, held_out: int
) -> tuple[CalibrationSet, CalibrationSet]:
    """Make the rows H is built on, and rows after them that share no document with them."""
    from ..calibration import default_calibration

    return default_calibration(
        options.model,
        tokenizer,
        options.sequences,
        held_out,
        text_file=options.text,
        **_cut(options),
    )


def held_out_rows(
    options: argparse.Namespace, model: str, tokenizer: PreTrainedTokenizerBase
) -> CalibrationSet:
    """Make the rows to measure on."""
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
    """How a text is cut into rows, as options of `CalibrationSet.from_texts`."""
    return {
        "seq_len": options.length,
        "positions_per_sequence": options.positions,
        "seed": options.seed,
        "eos": options.eos,
    }


def _positions(text: str) -> int | str:
    """Parse "all" or a number."""
    if text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor all") from None
