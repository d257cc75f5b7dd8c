"""Why a model cannot be loaded: checks before transformers acts, and errors after it failed.

A configuration comes from whoever made the model. It may name code of the hub to run, files outside
its folder, or so many layers that building them never ends. transformers reports a gated, a missing
and an unreachable model alike, as an OSError; the cause is in the chain of exceptions behind it.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..base.atomic import is_full
from ..base.errors import FileFormatError, InputError, one_line, shown
from ..base.files import require_regular, require_regular_files
from ..base.schema import read_json
from .sources import file_in

# about a second on the meta device, and far more than any model of the families here has
MOST_PARTS = 1000
_PARTS = ("layer", "layers", "experts")  # n_layer, num_hidden_layers, num_local_experts
_ATTENTION = ("eager", "sdpa", "flex_attention")  # parts of transformers and torch themselves
_ATTENTION_KEYS = {"attn_implementation", "_attn_implementation", "_attn_implementation_internal"}
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATH_SIGNS = (".", "~", os.sep)
# (names of exceptions or a part of the message, the fact and the next step); the first that fits
_CAUSES: tuple[tuple[set[str] | str, str], ...] = (
    (
        {"GatedRepoError"},
        "{name} is gated: its owner asks you to accept terms first. Accept them on the model's "
        "page, run `hf auth login` (or pass token=), and try again; or give a folder that holds "
        "the model.",
    ),
    (
        {"RevisionNotFoundError"},
        "{name} exists, but not in the requested revision. Omit revision=, or name a branch, tag "
        "or commit of that model.",
    ),
    (
        {"RepositoryNotFoundError", "HFValidationError"},
        "there is no model {name} on the hub, nor a folder of that name here. Check the spelling "
        "(owner/name); if it is private, run `hf auth login`; or give a folder.",
    ),
    (  # the last two are of the hub's HTTP client: compared by name, not imported
        {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout"},
        "{name} is not in {cache} and the hub cannot be reached. Connect this machine (and unset "
        "HF_HUB_OFFLINE), or copy the model's folder here and give its path.",
    ),
    (
        "trust_remote_code=True",
        "{part}{name} comes with its own code, which is not run. Read that code, then load the "
        "model in Python with trust_remote_code=True; or give a model that needs none.",
    ),
    (
        {"UnpicklingError"},  # not torch's own words, which advise to run the file
        "the weights of {name} are a pickle that holds more than tensors. Loading it could run "
        "code, so nothing of it was run. Give a folder with .safetensors files.",
    ),
    (
        "file named model.safetensors found",  # no other kind was asked for
        "{name} holds no .safetensors weights, which stream=True reads. Load it without stream, "
        "save it with model.save_pretrained(folder), and give that folder.",
    ),
    (
        {"ImportError", "ModuleNotFoundError"},
        "{part}{name} needs a Python package that is missing ({error}). Give a model without such "
        "needs, for example one that is not quantized; or install it.",
    ),
)


# Before the load ----------------------------------------------------------------------------------


def require_place(model_id: str | os.PathLike[str]) -> None:
    """Raise InputError if `model_id` is clearly a path, and no model is there.

    A hub id is `name` or `owner/name`. Anything that starts like a path, has more parts, or exists
    on this machine is a path.
    """
    text = str(model_id)
    path = Path(text).expanduser()
    if path.is_dir():
        require_regular_files(path)
        require_no_adapter(path)
        if not (path / "config.json").exists() and file_in(path) is None:
            held = ", ".join(sorted(entry.name for entry in path.iterdir())[:8])
            found = f"has no config.json; it holds {held}" if held else "is empty"
            raise InputError(
                f"the folder {text!r} {found}. Give the folder that holds config.json and "
                "the weights."
            )
    elif path.is_file():
        if file_in(path) is None:
            raise InputError(f"{text!r} is a file. Give the folder that contains it.")
    elif text.startswith(_PATH_SIGNS) or text.count("/") > 1 or not isinstance(model_id, str):
        raise InputError(f"there is no folder {text!r}.{_alike(path)} Check the path.")


def gguf_at(place: str | os.PathLike[str], name: str, **options: Any) -> Path:
    """Return a GGUF file of a folder, or of the hub; `options` say where the hub is asked."""
    from transformers.utils import cached_file

    if Path(place).is_dir():
        return Path(place, name)
    try:
        return Path(str(cached_file(place, name, **options)))
    except OSError as error:
        raise explain(place, error, cache=options.get("cache_dir"), part=f"{name} of ") from error


def require_no_adapter(place: str | os.PathLike[str], **options: Any) -> None:
    """Raise InputError if an adapter, alone or beside its base, is in a folder or hub model."""
    if beside(place, "adapter_config.json", **options) is not None:
        what = "folder" if Path(place).is_dir() else "model"
        raise InputError(
            f"the {what} {str(place)!r} holds an adapter, as PEFT saves it. Merge it first: "
            "PeftModel.from_pretrained(base, folder).merge_and_unload(), save_pretrained to a "
            "new folder, and give that. To use the base alone, move the adapter away."
        )


def beside(place: str | os.PathLike[str], name: str, **options: Any) -> Path | None:
    """Return a small file of a folder or hub model; None if it has none, or the hub fails."""
    from transformers.utils import cached_file

    if Path(place).is_dir():
        return file if (file := Path(place, name)).exists() else None
    try:
        return Path(str(cached_file(place, name, **options)))
    except OSError:  # a hub that fails is explained by the load
        return None


def _alike(path: Path) -> str:
    """Return a hint for a wrong path: its first missing part, or folders with a similar name."""
    # the nearest folder above that exists
    parent = next(folder for folder in (path.parent, *path.parents) if folder.is_dir())
    if parent != path.parent:
        return f" {str(parent)!r} is there, but holds no {path.relative_to(parent).parts[0]!r}."
    names = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    close = [repr(str(parent / name)) for name in difflib.get_close_matches(path.name, names, n=3)]
    return f" Did you mean {' or '.join(close)}?" if close else ""


def require_usable(content: Any, place: str | os.PathLike[str], *, attention: bool = True) -> None:
    """Check the content of a config.json; what its class checks itself is not repeated here.

    `attention` says whether its choice of an attention implementation will be followed.
    """
    about = f"the configuration of {str(place)!r}"
    if not isinstance(content, dict):
        raise InputError(
            f"{about} is {shown(content)}, not a JSON object. Give a folder with a Hugging Face "
            "model."
        )
    named = content.get("architectures")
    for name in named if isinstance(named, list) else []:
        if str(name).endswith("Classification"):
            raise InputError(
                f"{about} is of a {shown(name)}, which gives labels and not text. Give the "
                "language model that it was made of."
            )
    unused = "num_experts" if content.get("model_type") == "doge" else ""  # rows of an embedding
    for key, value in _entries(content):
        if key != unused and key.endswith(_PARTS) and isinstance(value, int) and value > MOST_PARTS:
            raise InputError(
                f"{about} says {key} = {shown(value)}; at most {MOST_PARTS:,} are built. Correct "
                "config.json."
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{about} says {key} = {value}. Give a finite number in config.json.")
        if not (attention and key in _ATTENTION_KEYS):
            continue
        for name in value.values() if isinstance(value, dict) else (value,):
            if name is not None and name not in _ATTENTION:
                raise InputError(
                    f"{about} says {key} = {shown(name)}, which may be code from the hub; it is "
                    "not loaded. Remove that line from config.json, or choose yourself: "
                    "load_model(..., attn_implementation=...)."
                )


def _entries(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a configuration and of those inside it."""
    for key, value in content.items():
        yield key, value
        if isinstance(value, dict):
            yield from _entries(value)


def require_own_files(place: str | os.PathLike[str], **options: Any) -> None:
    """Raise InputError if the index of a model's weights names files that are not beside it.

    `options` say where the hub is asked: revision, token, cache_dir, local_files_only.
    """
    from transformers.utils import cached_file

    for index in _INDEXES:
        try:
            path = cached_file(place, index, **options)
        except OSError:  # most models have no index; a hub that fails is explained by the load
            continue
        try:
            names = set(read_json(str(path))["weight_map"].values())
        except (FileFormatError, KeyError, TypeError, AttributeError):
            names = {None}
        for name in names:
            if not isinstance(name, str):
                raise InputError(f"{path} does not map weights to files. Download the model again.")
            kinds = (PurePosixPath(name), PureWindowsPath(name))
            if any(part.anchor or ".." in part.parts for part in kinds):
                raise InputError(
                    f"{path} takes weights from {shown(name)}, outside its folder. Nothing was "
                    "read from there. Do not trust this model, or put the file beside the index."
                )
            if (file := Path(str(path)).parent / name).exists():
                require_regular(file)


# After it failed ----------------------------------------------------------------------------------


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

    `cache` is the cache_dir= of the load (None: the hub's own); `part` is what could not be read,
    such as "the tokenizer of ".
    """
    name, cache_dir, chain = repr(str(model_id)), cache_folder(cache), list(_chain(error))
    # first, because a missing or broken file may be the consequence of a full disk
    if any(is_full(link) for link in chain):
        freed = delete_unfinished(str(model_id), cache_dir)
        elsewhere = "set HF_HOME to a folder" if cache is None else "give a cache_dir="
        return InputError(
            f"the disk filled up while {name} was downloaded to {cache_dir}; the unfinished "
            f"files ({freed / 1e9:.1f} GB) were deleted. Free some space, or {elsewhere} on a "
            "larger disk, and run this again."
        )
    kinds = {type(link).__name__ for link in chain}
    for cause, message in _CAUSES:
        if cause in str(error) if isinstance(cause, str) else kinds & cause:
            facts = {"name": name, "cache": cache_dir, "part": part, "error": one_line(error)}
            return InputError(message.format(**facts))
    return InputError(
        f"{part}{name} cannot be loaded ({type(error).__name__}: {one_line(error)}). Give a folder "
        "with a Hugging Face model, or the hub id of one."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those behind it, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder for downloads: the one given, else the hub's own."""
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
