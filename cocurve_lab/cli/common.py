"""Options and checks that several verbs share: models and H, new files, text."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..base.arguments import as_int
from ..base.atomic import scratch, write_atomically
from ..base.errors import FileFormatError, InputError
from ..base.files import MOST_BYTES, MOST_JSON, read_regular, require_regular
from ..base.progress import Progress
from ..calibration import CalibrationSet, Recipe
from ..curvature.matrix import Curvature
from ..curvature.release import SHIPPED
from ..estimator.estimate import files_in
from ..evaluation.task_files import local_tasks
from ..extensions.release.reading import MASK, REGISTRY
from ..extensions.release.rows import AUTHORS_SEED
from ..extensions.texts.documents import default_calibration, default_rows, own_text, row_options
from ..models.identity import allow_other_weights, is_pruned
from ..models.loading import load_model, load_tokenizer, place_of
from ..pruner.saving import load_pruned
from ..solver.selection import Selection
from .options import argument, as_path, flag, part

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


def progress() -> Progress:
    """The kind of progress: a bar on a terminal, lines in a log file."""
    return True if sys.stderr.isatty() else "lines"


# Models, H and plans ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a model is loaded with: --device and --dtype."""

    device: str | None = flag("cpu, cuda or cuda:1; default: a GPU if torch can use one")
    dtype: Dtype | None = flag(
        "dtype of the weights; default: float32 on the CPU, otherwise as stored"
    )
    stream: bool = False

    def load(self, place: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load a model, also a pruned one from its folder, with its tokenizer."""
        model, tokenizer = self.load_any(place)
        if tokenizer is None:
            raise InputError(f"{place} holds no tokenizer. Save that of the dense model there.")
        return model, tokenizer

    def load_any(
        self, place: str, tokenizer: str | None = None
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
        """Load a model as `load` does, and its tokenizer if there is one.

        Args:
            place: as `load_model` takes it, or a folder of `cocurve prune`.
            tokenizer: where the tokenizer of a folder without one is.
        """
        if not is_pruned(place_of(place)):
            return load_model(place, device=self.device, dtype=self.dtype, stream=self.stream)
        pruned = load_pruned(place, device=self.device, dtype=self.dtype, stream=self.stream)
        return pruned, read_tokenizer(place, tokenizer)


@dataclass(frozen=True, kw_only=True)
class Model(Device):
    """The model of a verb that needs the whole of it."""

    place: str = argument("MODEL", '"demo", "smollm2" (see fetch), a folder, or a hub id')


@dataclass(frozen=True, kw_only=True)
class StreamedModel(Model):
    """The model of a verb that can do with one layer at a time: with --stream."""

    stream: bool = flag(
        "read each layer of a model from its files when it runs, for models larger than the "
        "device (needs pip install 'cocurve-lab[stream]')"
    )


@dataclass(frozen=True, kw_only=True)
class PlannedModel(StreamedModel):
    """The model of a verb that uses a plan or an H on it."""

    other_weights: bool = flag("allow a plan, an H or a dense model of other weights")

    def allowing(self, thing: T, model: PreTrainedModel) -> T:
        """Return a plan or an H that --other-weights allows on a model, if it is given."""
        return allow_other_weights(thing, model) if self.other_weights else thing


def read_tokenizer(place: str, otherwise: str | None = None) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder or hub id; if the folder has none, that of `otherwise`."""
    folder = Path(place_of(place))
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None if otherwise is None else read_tokenizer(otherwise)
    return load_tokenizer(place)


def read_curvature(place: str) -> Curvature:
    """Load H from a file, by a name, or from a folder of builds or of the authors' release."""
    there = as_path(place)
    if there.is_file() or place in SHIPPED:
        return Curvature.load(place)
    if (there / REGISTRY).is_file():
        return Curvature.from_release(there)
    files = files_in(there)
    if len(files.whole) == 1:
        return Curvature.load(files.whole[0])
    found = [file.name for file in (*files.whole, *files.shards, *files.checkpoints)]
    raise InputError(
        f"{there} holds not one H, but {', '.join(found) or 'none'}. Build it, or resume its build "
        "(a .ckpt): cocurve build MODEL --out FOLDER. Join its shards: cocurve merge FOLDER. Of "
        "several give the file of one."
    )


def read_plan(path: Path) -> Selection:
    """Read the plan in a file, or in a folder rXX of the authors' release; errors name the file."""
    if (path / MASK).is_file() and path.resolve().name[1:].isdecimal():
        folder = path.resolve()
        return Selection.from_release(folder.parent, int(folder.name[1:]) / 100)
    if not path.is_file():
        raise InputError(f"there is no plan {path}. Solve one: cocurve solve H --out FILE.")
    try:
        return Selection.from_json(read_regular(path, MOST_JSON).decode("utf-8-sig"))
    except (FileFormatError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} is not a plan: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The tasks of a verb: --suite and what goes with it."""

    name: Literal["demo", "paper", "local"] | None = flag("tasks to run", name="suite")
    tasks: tuple[Path, ...] = flag("task files for --suite local", metavar="FILE")
    data: Path | None = flag(
        "for --suite paper: copies of its datasets, FOLDER/ORGANIZATION/NAME with the files as on "
        "the hub; default: the hub",
        metavar="FOLDER",
    )
    allow_code_execution: bool = flag(
        "run the programs that the model writes for a suite, confined by bubblewrap (Debian: "
        "apt-get install bubblewrap)"
    )
    limit: int | None = flag("questions per task; default: all")
    chat: bool | None = flag(
        "ask prompts of a suite through the tokenizer's chat template, or as they are; default: "
        "through it where there is one, except in suite paper"
    )

    def require(self) -> None:
        """Check that --suite and --tasks belong together, and that the task files can be read."""
        if (self.name == "local") != bool(self.tasks):
            raise InputError("--tasks names the files of --suite local. Give both, or neither.")
        require_counts(self, "limit")
        if self.tasks:
            local_tasks(self.tasks)


# New files ----------------------------------------------------------------------------------------


def write_new(path: Path, text: str) -> bool:
    """Write a text to a new file; return False if the file holds exactly this text already."""
    if path.is_file() and read_regular(path) == text.encode():
        return False
    require_new(path, "exists and holds something else")
    write_atomically(path, text.encode())
    return True


def require_counts(options: Any, *names: str) -> None:
    """Check, before hours of work, that flags are whole numbers from 1 where they are given."""
    for name in names:
        if getattr(options, name) is not None:
            as_int(getattr(options, name), f"--{name.replace('_', '-')}", 1)


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
        with scratch(place) as trial:
            Path(trial, "trial").write_bytes(b"cocurve")
    except OSError as error:
        why = error.strerror or error
        raise InputError(
            f"nothing can be written into {folder} ({place}: {why}). Choose another "
            "folder, or make this one writable."
        ) from None


_POSITIONS = 'scored positions per row (%(default)s); "all" costs almost nothing more'

# Text ---------------------------------------------------------------------------------------------


def rows_of(
    name: str, sequences: int, what: str, otherwise: str, positions: int | str = "all"
) -> Any:
    """Make the part of a verb's rows of text.

    Args:
        name: "calibration" or "text", the flag that names the file.
        sequences: default number of rows.
        what: what the text is for.
        otherwise: the text of models without a text of their own, if no file is given.
        positions: default number of scored positions.
    """
    text = (
        f'{what}: records with "text", "messages" (a chat, written by the tokenizer\'s template), '
        'or "prompt" and "completion"; or plain text split at blank lines. Default: the own text '
        f"of demo and smollm2; {otherwise} for other models"
    )
    return part(
        file=flag(text, None, name=name, metavar="FILE"),
        sequences=flag("rows (%(default)s)", sequences),
        positions=flag(_POSITIONS, positions, type=as_positions),
    )


def as_positions(text: str) -> int | str:
    """Parse "all" or a number."""
    if text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor all") from None


def as_token(text: str) -> str | int:
    """Read a token: its id if it is a number, else its text."""
    return int(text) if text.isdecimal() else text


def require_text(file: Path) -> None:
    """Check, before hours of work, that a file of text can be read."""
    if file.is_dir() or not file.exists():
        fact = f"{file} is a folder" if file.is_dir() else f"there is no text {file}"
        raise InputError(f'{fact}. Give a .jsonl file with a "text" field, or plain text.')
    require_regular(file, MOST_BYTES)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of text: the file, and how it is cut."""

    file: Path | None = None
    sequences: int
    length: int | None = flag("tokens per row; default: the context, at most 2048")
    positions: int | Literal["all"] = flag(_POSITIONS, "all", type=as_positions)
    seed: int | None = flag("seed of rows and positions (0; with --recipe release 42)")
    eos: str | int | None = flag(
        "the token that ends a document of the text; default: the tokenizer's. One document that "
        "fills all rows needs none",
        metavar="TEXT or ID",
        type=as_token,
    )
    bos: str | int | None = flag(
        'the token that begins every row; default: as the tokenizer begins a text; "" for none',
        metavar="TEXT or ID",
        type=as_token,
    )

    recipe: Recipe | None = flag(
        "release: the rows and positions of the authors' release. Documents under 32 words or that "
        "look like multiple choice are left out, end tokens become padding, C4 is shuffled, and "
        "the seed is 42"
    )

    def require(self) -> None:
        """Check, before a model is loaded, that the text file exists."""
        require_counts(self, "sequences", "length")
        if self.file is not None:
            require_text(self.file)

    def calibration(self, model: str, tokenizer: PreTrainedTokenizerBase) -> CalibrationSet:
        """Make the rows H is built on, as `default_calibration` does, so that notebooks find H."""
        return default_rows(model, tokenizer, self.sequences, text_file=self.file, **self.cut())

    def calibration_and_held_out(
        self, model: str, tokenizer: PreTrainedTokenizerBase, held_out: int
    ) -> tuple[CalibrationSet, CalibrationSet]:
        """Make the rows H is built on, and rows after them that share no document with them."""
        return default_calibration(
            model, tokenizer, self.sequences, held_out, text_file=self.file, **self.cut()
        )

    def held_out(self, model: str, tokenizer: PreTrainedTokenizerBase) -> CalibrationSet:
        """Make the rows to measure on."""
        count = self.sequences
        if self.file is not None:
            options = row_options(model, self.cut())
            return CalibrationSet.from_file(self.file, tokenizer, num_sequences=count, **options)
        if own_text(model) is None:
            raise InputError(f"there is no text for {model!r}. Give --text FILE.")
        return default_calibration(model, tokenizer, 1, count, **self.cut())[1]

    def cut(self) -> dict[str, Any]:
        """How the text is cut into rows, as options of `CalibrationSet.from_texts`."""
        return {
            "seq_len": self.length,
            "positions_per_sequence": self.positions,
            "seed": AUTHORS_SEED if self.seed is None and self.recipe == "release" else self.seed,
            "recipe": self.recipe,
            "eos": self.eos,
            "bos": self.bos,
        }
