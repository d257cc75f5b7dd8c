"""Checks of a place: its configuration before transformers acts, settings and tokenizer after.

A configuration comes from whoever made the model. It may name code of the hub to run, files outside
its folder, or so many layers that building them never ends.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from ...base.errors import FileFormatError, InputError, shown
from ...base.files import require_regular, require_regular_files
from ...base.interrupts import within
from ...base.schema import (
    COUNT,
    FLAG,
    NUMBER,
    SHARE,
    Field,
    Schema,
    is_count,
    is_number,
    nullable,
    read_json,
    reading,
    require_fields,
)
from ...models.sources import Place, file_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# about a second on the meta device, and far more than any model of the families here has
MOST_PARTS = 1000
MOST_ROWS = 10  # of an embedding for each token; padding adds a few
_PARTS = ("layer", "layers", "experts")  # n_layer, num_hidden_layers, num_local_experts
_ATTENTION = ("eager", "sdpa", "flex_attention")  # parts of transformers and torch themselves
_ATTENTION_KEYS = {"attn_implementation", "_attn_implementation", "_attn_implementation_internal"}
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATH_SIGNS = (".", "~", os.sep)
_WITHOUT_OWNER = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")  # on the hub
# where rules that split text differ: numbers, contractions, spaces, lines, accents, other scripts
_TRIAL = (
    "Hello",
    "In 2026 they'd 1234567 of them, it's DON'T.",
    "  two  spaces,\ttabs\n\nx = y+1;  ",
    "naïve 北京 Москва",
)


def require_place(model_id: str | os.PathLike[str]) -> None:
    """Raise InputError if `model_id` is clearly a path, and no model is there.

    A hub id is `owner/name`, or one of a few old names without an owner. Anything else is a path.
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
    elif text not in _WITHOUT_OWNER and (
        text.startswith(_PATH_SIGNS) or text.count("/") != 1 or not isinstance(model_id, str)
    ):
        raise InputError(
            f"there is no folder {text!r}. Check the path; a model of the hub is OWNER/NAME."
        )


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

    if isinstance(place, Path) or Path(place).is_dir():  # a path is no hub id
        return file if (file := Path(place, name)).exists() else None
    try:
        return Path(str(cached_file(place, name, **options)))
    except Exception:  # a hub or its client that fails is explained by the load
        return None


def require_settings(
    content: Any, place: str | os.PathLike[str], *, attention: bool = True
) -> None:
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
    for index in _INDEXES:
        path = beside(place, index, **options)
        if path is None:  # most models have no index
            continue
        try:
            names = set(read_json(path)["weight_map"].values())
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
            if (file := path.parent / name).exists():
                require_regular(file)


# Beside the weights -----------------------------------------------------------------------------


def require_generation(config: Any, place: str | os.PathLike[str]) -> None:
    """Raise FileFormatError unless a model's generation settings have their types and ranges."""
    remedy = "Correct it in generation_config.json, or remove that file."
    with reading(f"the generation configuration of {place}", remedy):
        require_fields(config.to_dict(), _GENERATION, others=True)
        for name, value in config.to_dict().items():
            if name != "stop_strings" and not _is_setting(value):
                raise FileFormatError(
                    f"{name} is {shown(value)}, which is no setting. Give a number or a name"
                )


def _is_setting(value: Any) -> bool:
    """Whether a value is a number, a name without line ends or signs, or consists of such."""
    if isinstance(value, str):
        return re.fullmatch(r"[\w./ -]*", value) is not None and len(value.splitlines()) <= 1
    if isinstance(value, (list, tuple, dict)):
        return all(map(_is_setting, [*value, *(value.values() if isinstance(value, dict) else ())]))
    return not isinstance(value, float) or math.isfinite(value)


def _is_id(value: Any) -> bool:
    return value == -1 or is_count(value)  # -1 stands for none


_FACTOR = Field("a number above 0", lambda value: is_number(value) and value > 0)
_IDS = Field("token ids", lambda value: all(map(_is_id, value if type(value) is list else [value])))
_GENERATION: Schema = {
    name: nullable(field)._replace(optional=True)
    for field, names in {
        Field("a number from 0", lambda value: is_number(value) and value >= 0): ("temperature",),
        SHARE: ("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"),
        _FACTOR: ("repetition_penalty", "encoder_repetition_penalty"),
        NUMBER: ("length_penalty", "diversity_penalty", "guidance_scale"),
        COUNT: (
            "top_k",
            "max_length",
            "max_new_tokens",
            "min_length",
            "min_new_tokens",
            "num_beams",
        ),
        FLAG: ("do_sample", "use_cache"),
        _IDS: ("bos_token_id", "eos_token_id", "pad_token_id"),
    }.items()
    for name in names
}


def require_tokenizer(
    tokenizer: PreTrainedTokenizerBase, name: Place, place: str, **options: Any
) -> None:
    """Raise InputError if a tokenizer lacks the model's words; warn if it splits otherwise."""
    from tokenizers import Tokenizer
    from transformers.utils import cached_file

    where = {name: value for name, value in options.items() if name != "trust_remote_code"}
    path = beside(place, "config.json", **where)
    config = {} if path is None else read_json(path)
    rows = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size", 0))
    if len(tokenizer) * MOST_ROWS < rows:
        raise InputError(
            f"the tokenizer of {str(name)!r} has {len(tokenizer):,} tokens, and the model's "
            f"embedding {rows:,} rows: its vocabulary is missing. Copy the tokenizer's files from "
            "the model that this one was made of."
        )
    try:
        own = Tokenizer.from_file(str(cached_file(place, "tokenizer.json", **where)))
    except OSError:  # there is none, as beside a tokenizer.model
        return
    own.no_truncation()
    own.no_padding()
    call: Any = tokenizer  # its types do not say that it can be called
    for text in _TRIAL:
        read = partial(call, text, add_special_tokens=False, verbose=False)
        found = within(20, f"the tokenizer of {name}", read)["input_ids"]
        wanted = own.encode(text, add_special_tokens=False).ids
        if found != wanted:
            warnings.warn(
                f"the tokenizer of {name} is a {type(tokenizer).__name__}, which turns {text!r} "
                f"into the tokens {found}, but its tokenizer.json into {wanted}. If the model was "
                'trained with the file, set "tokenizer_class" to "PreTrainedTokenizerFast" in '
                "tokenizer_config.json.",
                UserWarning,
                stacklevel=3,
            )
            return
