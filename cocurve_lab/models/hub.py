"""What goes wrong between a model's name and its weights, each as one sentence and a next step.

transformers reports a gated, a missing and an unreachable model alike, as an OSError; what really
happened is in the exception behind it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError
from ..storage import is_full

_PATH_SIGNS = (".", "~", os.sep)
_UNREACHED = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout"}


def require_place(model_id: str | os.PathLike[str]) -> None:
    """Raise InputError where `model_id` is plainly a folder, and no model can be in it.

    A hub id is `name` or `owner/name`; anything that starts like a path, has more parts than that,
    or exists here, is a folder.
    """
    text = str(model_id)
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            held = ", ".join(sorted(entry.name for entry in path.iterdir())[:8])
            found = f"holds no config.json but {held}" if held else "is empty"
            raise InputError(
                f"the folder {text!r} {found}. Give the folder that holds config.json and "
                "the weights."
            )
    elif path.is_file():
        raise InputError(f"{text!r} is a file. Give the folder that it lies in.")
    elif text.startswith(_PATH_SIGNS) or text.count("/") > 1 or not isinstance(model_id, str):
        raise InputError(f"there is no folder {text!r}.{_alike(path)} Check the path.")


def explain(
    model_id: str | os.PathLike[str],
    error: BaseException,
    *,
    cache: str | os.PathLike[str] | None = None,
    part: str = "",
) -> InputError:
    """The InputError for a failed load: what happened, and what to do about it.

    Where the disk is full, what was half downloaded of this model is deleted: it holds the space
    the user now has to find. Any other broken download stays, because the next one resumes it.

    Args:
        model_id: what was asked for.
        error: what came of it.
        cache: the cache_dir= of the load; None is the hub's own.
        part: what of the model could not be read, as in "the tokenizer of ".
    """
    name, cache_dir = repr(str(model_id)), cache_folder(cache)
    chain = list(_chain(error))
    kinds = {type(link).__name__ for link in chain}
    if any(is_full(link) for link in chain):
        freed = delete_unfinished(str(model_id), cache_dir)
        elsewhere = "set HF_HOME to a folder" if cache is None else "give a cache_dir="
        return InputError(
            f"the disk filled up while {name} was downloaded to {cache_dir}; the unfinished "
            f"files ({freed / 1e9:.1f} GB) were deleted. Free some space, or {elsewhere} on a "
            "larger disk, and run this again."
        )
    if "GatedRepoError" in kinds:
        return InputError(
            f"{name} is gated: its owner asks you to accept terms first. Accept them on the page "
            "of the model, run `hf auth login` (or pass token=), and try again; or give a folder "
            "that holds the model."
        )
    if "RevisionNotFoundError" in kinds:
        return InputError(
            f"{name} exists, but not in the revision asked for. Leave revision= out, or name a "
            "branch, tag or commit of that model."
        )
    if kinds & {"RepositoryNotFoundError", "HFValidationError"}:
        return InputError(
            f"there is no model {name} on the hub, nor a folder of that name here. Check the "
            "spelling (owner/name); if it is private, run `hf auth login`; or give a folder."
        )
    if kinds & _UNREACHED:
        return InputError(
            f"{name} is not in {cache_dir} and the hub cannot be reached. Connect this "
            "machine (and unset HF_HUB_OFFLINE), or copy the model's folder here and give its path."
        )
    if "trust_remote_code=True" in str(error):
        return InputError(
            f"{part}{name} comes with code of its own, which is not run. Read that code, and load "
            "the model in Python with trust_remote_code=True; or give a model without."
        )
    return InputError(
        f"{part}{name} cannot be loaded: {type(error).__name__}: {error}\nGive a folder with a "
        "Hugging Face model, or the hub id of one."
    )


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """Where the hub's downloads are kept: the folder given, else its own."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE if cache is None else cache)


def delete_unfinished(model_id: str, cache: str | os.PathLike[str] | None = None) -> int:
    """Delete half-downloaded files of one model from a cache; returns the bytes freed."""
    freed = 0
    blobs = cache_folder(cache) / ("models--" + model_id.replace("/", "--")) / "blobs"
    for part in blobs.glob("*.incomplete"):
        freed += part.stat().st_size
        part.unlink()
    return freed


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _alike(path: Path) -> str:
    """A hint: the first part of the path that is missing, or neighbours of a similar name."""
    parent = next(folder for folder in (path.parent, *path.parents) if folder.is_dir())
    if parent != path.parent:
        return f" {str(parent)!r} is there, but holds no {path.relative_to(parent).parts[0]!r}."
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    close = [repr(str(parent / name)) for name in difflib.get_close_matches(path.name, names, n=3)]
    return f" Did you mean {' or '.join(close)}?" if close else ""
