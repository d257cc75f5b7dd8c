"""What is checked in a model's JSON files before transformers acts on them.

A configuration comes from whoever made the model. It may name code of the hub to run, files outside
its folder, or so many layers that building them never ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..base.errors import InputError, shown

# about a second on the meta device, and far more than any model of the families here has
MOST_PARTS = 1000
_PARTS = ("layer", "layers", "experts")  # n_layer, num_hidden_layers, num_local_experts
_ATTENTION = ("eager", "sdpa", "flex_attention")  # parts of transformers and torch themselves
_ATTENTION_KEYS = (
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
)
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def require_usable(content: Any, place: str | os.PathLike[str], *, attention: bool = True) -> None:
    """Check the content of a config.json; what its class checks itself is not repeated here.

    Args:
        content: the parsed JSON.
        place: the model, for the message.
        attention: whether its choice of an attention implementation will be followed.

    Raises:
        InputError: it is no JSON object, has too many layers or experts, or asks for an attention
            kernel that transformers would take from the hub.
    """
    if not isinstance(content, dict):
        raise InputError(
            f"the configuration of {str(place)!r} is {shown(content)}, not a JSON object. Give a "
            "folder with a Hugging Face model."
        )
    for key, value in _entries(content):
        if key.endswith(_PARTS) and isinstance(value, int) and value > MOST_PARTS:
            raise InputError(
                f"the configuration of {str(place)!r} says {key} = {shown(value)}; at most "
                f"{MOST_PARTS:,} are built. Correct config.json."
            )
        if attention and key in _ATTENTION_KEYS:
            _require_own_attention(key, value, place)


def require_own_files(place: str | os.PathLike[str], **options: Any) -> None:
    """Check that the index of a model's weights, if there is one, names only files beside it.

    Args:
        place: a folder or hub id.
        **options: where the hub is asked: revision, token, cache_dir, local_files_only.

    Raises:
        InputError: it names another place, or is no index.
    """
    from transformers.utils import cached_file

    for index in _INDEXES:
        try:
            path = cached_file(place, index, **options)
        except OSError:  # most models have no index; a hub that fails is explained by the load
            continue
        for name in _files_named(Path(str(path))):
            if not isinstance(name, str):
                raise InputError(f"{path} does not map weights to files. Download the model again.")
            if _leaves(name):
                raise InputError(
                    f"{path} takes weights from {shown(name)}, outside its folder. Nothing was "
                    "read from there. Do not trust this model, or put the file beside the index."
                )


def _files_named(index: Path) -> set[Any]:
    """The files in an index; {None} where it is no index."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {None}


def _leaves(name: str) -> bool:
    """Whether a relative path leads out of its folder on any system."""
    kinds = (PurePosixPath(name), PureWindowsPath(name))
    return any(path.anchor or ".." in path.parts for path in kinds)


def _require_own_attention(key: str, value: Any, place: str | os.PathLike[str]) -> None:
    for name in value.values() if isinstance(value, dict) else (value,):
        if name is not None and name not in _ATTENTION:
            raise InputError(
                f"the configuration of {str(place)!r} says {key} = {shown(name)}, which may be "
                "code from the hub; it is not loaded. Remove that line from config.json, or "
                "choose yourself: load_model(..., attn_implementation=...)."
            )


def _entries(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys and values of a configuration and of those inside it."""
    for key, value in content.items():
        yield key, value
        if isinstance(value, dict):
            yield from _entries(value)
