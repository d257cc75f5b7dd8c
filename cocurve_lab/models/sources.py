"""The plugs for where models and texts come from, and for what is checked of them.

For a model that is neither a folder of transformers nor on the hub, an extension registers an
object: a `ModelSource` under a short name, a `FileSource` under the ending of the files that it
reads. Of files that anybody made the core checks nothing, and transformers' own errors come
through; an `Opening` knows what has gone wrong with them. This file imports neither torch nor
transformers, and neither do the objects until they are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..base.errors import InputError
from ..base.plugs import Plug, absent

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Part = Literal["calibration", "held_out"]
Place = str | os.PathLike[str]  # a folder or hub id


class ModelSource(Protocol):
    """A model with a short name, and with text and questions of its own."""

    @property
    def row_options(self) -> Mapping[str, Any]:
        """How its rows are cut: options of `CalibrationSet.from_texts`."""

    def folder(self) -> Path:
        """Return its folder, whether or not it is there; of the form that transformers saves."""

    def require(self) -> Path:
        """Return its folder; InputError says how to get it."""

    def text(self, part: Part) -> tuple[list[str], str]:
        """Return documents of one part, which shares none with the other, and their source."""

    def questions(self) -> Path:
        """Return a file of questions that it answers, as `read_questions` reads them."""


class Texts(Protocol):
    """Reads text from files."""

    def texts_of(
        self, files: Any, tokenizer: PreTrainedTokenizerBase, seed: int = 0
    ) -> tuple[Iterable[str], str]:
        """Return the documents of a file, or of {file: share}, and what they are called."""


class Opening(Protocol):
    """The checks of one load, in their order; `options` say where the hub is asked."""

    def require_place(self, place: Place) -> None:
        """Raise InputError if a place is clearly a path, and no model is there."""

    def require_no_adapter(self, place: Place, **options: Any) -> None:
        """Raise InputError if an adapter, alone or beside its base, is in a folder or model."""

    def require_settings(self, content: Any, place: Place, *, attention: bool = True) -> None:
        """Check the content of a config.json before anything in it is followed.

        `attention` says whether its choice of an attention implementation will be followed.
        """

    def require_files(self, place: str, shapes: PreTrainedModel, **options: Any) -> None:
        """Check the weight files against the model on the meta device; no weight is read."""

    def require_loaded(
        self,
        model: PreTrainedModel,
        report: Mapping[str, Any],
        place: str,
        shapes: PreTrainedModel,
        **options: Any,
    ) -> None:
        """Check what was loaded; `report` is what `from_pretrained` says of missing weights."""

    def require_generation(self, config: Any, place: Place) -> None:
        """Raise FileFormatError unless a model's generation settings have types and ranges."""

    def require_tokenizer(
        self, tokenizer: PreTrainedTokenizerBase, name: Place, place: str, **options: Any
    ) -> None:
        """Refuse a tokenizer without a vocabulary; warn of one that splits unlike its own file."""

    def explaining(
        self, place: Place, *, cache: Place | None = None, part: str = ""
    ) -> AbstractContextManager[None]:
        """Turn errors of transformers inside the block into an InputError with the next step.

        `cache` is the cache_dir= of the load; `part` is what is read, such as "the tokenizer of ".
        """
        return nullcontext()


class Unchecked(Opening):
    """The core's own: everything passes."""


class FileSource(Protocol):
    """A form of files that hold a whole model each."""

    def config(self, file: Path) -> PreTrainedConfig:
        """Read the configuration, without weights."""

    def model(self, file: Path, dtype: torch.dtype | Literal["float32"]) -> PreTrainedModel:
        """Read the model, on the CPU and in eval mode."""

    def tokenizer(self, file: Path) -> PreTrainedTokenizerBase:
        """Read the tokenizer."""


SOURCES: dict[str, ModelSource] = {}  # by the name of the model
FILES: dict[str, FileSource] = {}  # by the ending of the files, such as ".gguf"


TEXTS: Plug[Texts] = Plug(absent("a text in a file"))
OPENING: Plug[Opening] = Plug(Unchecked)


def source_named(model_id: str | os.PathLike[str]) -> ModelSource | None:
    """Return the source whose name or folder a model id is; None for any other model."""
    for name, source in SOURCES.items():
        if model_id == name or Path(model_id).absolute() == source.folder():
            return source
    return None


def file_in(place: str | os.PathLike[str]) -> Path | None:
    """Return the file of a source that a place is, or that a folder without config.json holds."""
    path = Path(place)
    if path.is_file():
        return path if path.suffix.lower() in FILES else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in FILES)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise InputError(f"the folder {str(place)!r} holds {names}. Give the path of one of them.")
    return files[0] if files else None


def source_of_file(file: Path) -> FileSource:
    """Return the source that reads a file that `file_in` found."""
    return FILES[file.suffix.lower()]
