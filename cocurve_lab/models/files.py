"""The weight files of a model: which they are, and whether their headers fit the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.errors import FileFormatError, one_line
from .configuration import require_own_files
from .hub import explain

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(place: str, **options: Any) -> list[Path]:
    """The safetensors files of a folder or hub model; none if its weights are pickled.

    Files of the hub are downloaded if they are not here.

    Args:
        place: the folder or hub id.
        **options: as for `open_model`.

    Raises:
        FileFormatError: a file that the index names is missing.
        InputError: the index is none or leads out of its folder, the hub cannot be reached, or the
            disk is full.
    """
    require_own_files(place, **options)
    whole = _find(place, WHOLE, options)
    if whole is not None:  # transformers takes it too, whatever an index says
        return [whole]
    index, files = _find(place, INDEX, options), []
    if index is None:
        return []
    content = json.loads(index.read_text(encoding="utf-8"))
    for name in sorted(set(content["weight_map"].values())):
        file = _find(place, name, options)
        if file is None:
            raise FileFormatError(
                f"{index} names {name}, which is not there. The folder is incomplete: copy or "
                "download the missing file."
            )
        files.append(file)
    return files


def _find(place: str, name: str, options: dict[str, Any]) -> Path | None:
    """A file of a folder or hub model, or None."""
    from transformers.utils import cached_file

    try:
        return Path(str(cached_file(place, name, **options)))
    except OSError as error:
        if Path(place).is_dir() or "EntryNotFound" in type(error.__cause__).__name__:
            return None
        raise explain(place, error, cache=options.get("cache_dir")) from error


def require_sound_files(folder: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check the headers of a folder's safetensors files; their weights are not read.

    Args:
        folder: the folder.
        shapes: the shape of each weight by name, as the configuration makes it. A file may name a
            weight otherwise, and is then not compared.

    Raises:
        FileFormatError: a file is missing, truncated or damaged, or holds a weight of another
            shape.
        InputError: as `weight_files`.
    """
    for file in weight_files(folder):
        handle = open_weights(file)
        for name in handle.keys():  # noqa: SIM118, a handle is no mapping
            if name in shapes:
                require_shape(handle.get_slice(name), name, shapes[name], file)


def require_shape(stored: Any, name: str, shape: Sequence[int], file: Path) -> None:
    """Raise FileFormatError unless a tensor in a file has this shape."""
    if tuple(stored.get_shape()) != tuple(shape):
        raise FileFormatError(
            f"{name} in {file} has shape {tuple(stored.get_shape())}, but the configuration beside "
            f"it says {tuple(shape)}. The folder mixes two models: download or save the model "
            "again."
        )


def open_weights(file: Path, *, mapped: bool = False) -> Any:
    """Open a safetensors file, which reads its header only.

    Args:
        file: the file.
        mapped: map it into memory instead of reading from it.

    Raises:
        FileFormatError: it is truncated or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # safetensors maps for writing, which the system may refuse for a file larger than memory
        return safe_open(file, framework="pt", backend="mmap" if mapped else "pread")
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from None


def damaged(file: Path, error: Exception) -> FileFormatError:
    """Make the error for a weight file that cannot be read."""
    return FileFormatError(
        f"{file} cannot be read ({one_line(error)}): it is truncated or damaged. Copy or download "
        "it again."
    )
