"""Explanations for a model that cannot be loaded: the fact, and the next step.

transformers reports a gated, a missing and an unreachable model alike, as an OSError. The actual
cause is in the chain of exceptions behind it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from ..base.atomic import is_full
from ..base.errors import InputError, one_line

_PATH_SIGNS = (".", "~", os.sep)
# The last two are of the hub's HTTP client, so causes are compared by class name, not imported.
_UNREACHED = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout"}


def require_place(model_id: str | os.PathLike[str]) -> None:
    """Raise InputError if `model_id` is clearly a path, and no model is there.

    A hub id is `name` or `owner/name`. Anything that starts like a path, has more parts, or exists
    on this machine is a path.
    """
    text = str(model_id)
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            held = ", ".join(sorted(entry.name for entry in path.iterdir())[:8])
            found = f"has no config.json; it holds {held}" if held else "is empty"
            raise InputError(
                f"the folder {text!r} {found}. Give the folder that holds config.json and "
                "the weights."
            )
    elif path.is_file():
        raise InputError(f"{text!r} is a file. Give the folder that contains it.")
    elif text.startswith(_PATH_SIGNS) or text.count("/") > 1 or not isinstance(model_id, str):
        raise InputError(f"there is no folder {text!r}.{_alike(path)} Check the path.")


def explain(
    model_id: str | os.PathLike[str],
    error: BaseException,
    *,
    cache: str | os.PathLike[str] | None = None,
    part: str = "",
) -> InputError:
    """Build the InputError for a failed load: the fact, and the next step.

    If the disk is full, the half-downloaded files of this model are deleted, because they take the
    space that the user now needs. After any other failure they stay, and the next load resumes
    them.

    Args:
        model_id: the model that was asked for.
        error: the exception of the load.
        cache: the cache_dir= of the load; None is the hub's own.
        part: the part of the model that could not be read, for example "the tokenizer of ".
    """
    name, cache_dir = repr(str(model_id)), cache_folder(cache)
    chain = list(_chain(error))
    kinds = {type(link).__name__ for link in chain}
    # first, because a missing or broken file may be the consequence of a full disk
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
            f"{name} is gated: its owner asks you to accept terms first. Accept them on the "
            "model's page, run `hf auth login` (or pass token=), and try again; or give a folder "
            "that holds the model."
        )
    if "RevisionNotFoundError" in kinds:
        return InputError(
            f"{name} exists, but not in the requested revision. Omit revision=, or name a branch, "
            "tag or commit of that model."
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
            f"{part}{name} comes with its own code, which is not run. Read that code, then load "
            "the model in Python with trust_remote_code=True; or give a model that needs none."
        )
    if "UnpicklingError" in kinds:  # not torch's own words, which advise to run the file
        return InputError(
            f"the weights of {name} are a pickle that holds more than tensors. Loading it could "
            "run code, so nothing of it was run. Give a folder with .safetensors files."
        )
    if "file named model.safetensors found" in str(error):  # no other kind was asked for
        return InputError(
            f"{name} holds no .safetensors weights, which stream=True reads. Load it without "
            "stream, save it with model.save_pretrained(folder), and give that folder."
        )
    if "ImportError" in kinds:
        return InputError(
            f"{part}{name} needs a Python package that is missing ({one_line(error)}). Give a "
            "model without such needs, for example one that is not quantized; or install it."
        )
    return InputError(
        f"{part}{name} cannot be loaded ({type(error).__name__}: {one_line(error)}). Give a folder "
        "with a Hugging Face model, or the hub id of one."
    )


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder for downloads: the one given, else the hub's own."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE if cache is None else cache)


def delete_unfinished(model_id: str, cache: str | os.PathLike[str] | None = None) -> int:
    """Delete the half-downloaded files of one model from a cache; return the bytes freed."""
    freed = 0
    # the hub's layout: models--owner--name/blobs/HASH, with .incomplete until it is whole
    blobs = cache_folder(cache) / ("models--" + model_id.replace("/", "--")) / "blobs"
    for part in blobs.glob("*.incomplete"):
        freed += part.stat().st_size
        part.unlink()
    return freed


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those behind it, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _alike(path: Path) -> str:
    """A hint for a wrong path: its first missing part, or folders with a similar name."""
    # the nearest folder above that exists
    parent = next(folder for folder in (path.parent, *path.parents) if folder.is_dir())
    if parent != path.parent:
        return f" {str(parent)!r} is there, but holds no {path.relative_to(parent).parts[0]!r}."
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    close = [repr(str(parent / name)) for name in difflib.get_close_matches(path.name, names, n=3)]
    return f" Did you mean {' or '.join(close)}?" if close else ""
