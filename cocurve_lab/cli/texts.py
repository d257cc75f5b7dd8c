"""The rows a verb runs on, from its arguments."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .common import as_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..calibration import CalibrationSet


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
    from ..loading import is_demo

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
