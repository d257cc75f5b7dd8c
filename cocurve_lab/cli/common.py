"""What verbs run: a model from a place, rows of text, and the tasks of a suite."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import transformers
from tyro.conf import create_mutex_group

from .. import (
    CalibrationSet,
    FileFormatError,
    InputError,
    Selection,
    default_calibration,
    load_model,
    load_pruned,
)
from ..base import files
from ..evaluation.tasks import TaskOptions, suite_tasks
from ..extensions.release.rows import AUTHORS_SEED
from ..extensions.texts.documents import default_rows
from ..models import identity, loading
from .arguments import Count, Dtype, File, Readable, progress

CHAT = create_mutex_group(required=False, title="prompts of a suite")


# warnings of transformers are not for the command line, and its bars would spoil a log file
transformers.logging.set_verbosity_error()
if not sys.stderr.isatty():
    transformers.logging.disable_progress_bar()


# Models and plans ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Device:
    """How a model is loaded.

    Attributes:
        device: cpu, cuda or cuda:1; default: a GPU if torch can use one
        dtype: dtype of the weights; default: float32 on the CPU, otherwise as stored
    """

    device: str | None = None
    dtype: Dtype | None = None

    def load(self, place: str, otherwise: str | None = None) -> tuple[Any, Any]:
        """Load a model, also a pruned one from its folder, with its tokenizer.

        Args:
            place: as `load_model` takes it, or a folder of `cocurve prune`.
            otherwise: where the tokenizer of a folder without one is.
        """
        if identity.is_pruned(loading.place_of(place)):
            return load_pruned(place, **vars(self)), read_tokenizer(place, otherwise)
        return load_model(place, **vars(self))


@dataclass(frozen=True, kw_only=True)
class StreamedDevice(Device):
    """How a model is loaded, whole or one layer at a time.

    Attributes:
        stream: read each layer of a model from its files when it runs, for models larger than the
            device
    """

    stream: bool = False


def read_tokenizer(place: str, otherwise: str | None = None) -> Any:
    """Load the tokenizer of a folder or hub id; if the folder has none, that of `otherwise`."""
    folder = Path(loading.place_of(place))
    if otherwise is not None and folder.is_dir() and not any(folder.glob("tokenizer*")):
        place = otherwise
    return loading.load_tokenizer(place)


def read_plan(path: Path) -> Selection:
    """Read the plan in a file, or in a folder rXX of the authors' release; errors name the file."""
    folder = path.resolve()
    if folder.is_dir() and folder.name[1:].isdecimal():
        return Selection.from_release(folder.parent, int(folder.name[1:]) / 100)
    try:
        return Selection.from_json(files.read_regular(path, files.MOST_JSON).decode("utf-8-sig"))
    except (FileFormatError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} is not a plan: {error}") from None


# Text ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of text.

    Attributes:
        text: records with "text", "messages" (a chat, written by the tokenizer's template), or
            "prompt" and "completion"; or plain text split at blank lines. Default: the own text of
            demo and smollm2, and for other models C4 from the hub; evaluate then asks for a text
        sequences: rows
        length: tokens per row; default: the context, at most 2048
        positions: scored positions per row; "all" costs almost nothing more
        seed: seed of rows and positions (0; with --recipe release 42)
        eos: text or id of the token that ends a document of the text; default: the tokenizer's. One
            document that fills all rows needs none
        bos: text or id of the token that begins every row; default: as the tokenizer begins a text;
            "" for none
        recipe: release: the rows and positions of the authors' release. Documents under 32 words or
            that look like multiple choice are left out, end tokens become padding, C4 is shuffled,
            and the seed is 42
    """

    text: Readable | None = None
    sequences: Count = 128
    length: Count | None = None
    positions: int | Literal["all"] = "all"
    seed: int | None = None
    eos: int | str | None = None
    bos: int | str | None = None
    recipe: Literal["plain", "release"] | None = None

    def calibration(self, model: str, tokenizer: Any) -> CalibrationSet:
        """Make the rows H is built on, as `default_calibration` does, so that notebooks find H."""
        return default_rows(model, tokenizer, self.sequences, text_file=self.text, **self.cut())

    def calibration_and_held_out(
        self, model: str, tokenizer: Any, held_out: int
    ) -> tuple[CalibrationSet, CalibrationSet]:
        """Make the rows H is built on, and rows after them that share no document with them."""
        return default_calibration(
            model, tokenizer, self.sequences, held_out, text_file=self.text, **self.cut()
        )

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


# Tasks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Tasks, run by lm_eval.

    Attributes:
        suite: tasks to run
        tasks: task files of --suite local
        data: for --suite paper or proxy: copies of the datasets, FOLDER/ORGANIZATION/NAME with the
            files as on the hub; default: the hub
        allow_code_execution: run the programs that the model writes for a suite, confined by
            bubblewrap (Debian: apt-get install bubblewrap)
        limit: questions per task; default: all, and with --suite proxy 200
        chat: ask prompts of a suite through the tokenizer's chat template. Default: through it
            where there is one, except in suites paper and proxy
        no_chat: ask prompts as they are
    """

    suite: Literal["demo", "paper", "proxy", "local"] | None = None
    tasks: tuple[File, ...] = ()
    data: File | None = None
    allow_code_execution: bool = False
    limit: Count | None = None
    chat: Annotated[bool, CHAT] = False
    no_chat: Annotated[bool, CHAT] = False

    def options(self) -> TaskOptions:
        """Return the options of the tasks, checked before a model is loaded."""
        if (self.suite == "local") != bool(self.tasks):
            raise InputError("--tasks names the files of --suite local. Give both, or neither.")
        # lm_eval has only bars, which would spoil a log file
        options = TaskOptions(files=self.tasks, data=self.data, progress=progress() is True)
        if self.suite is not None:
            suite_tasks(self.suite, options)
        return options

    @property
    def template(self) -> bool | None:
        """Whether prompts go through the chat template; None where the default decides."""
        return self.chat if self.chat or self.no_chat else None
