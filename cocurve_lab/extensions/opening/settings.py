"""Checks of what lies beside the weights: generation settings, and the tokenizer."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING, Any

from ...base.errors import FileFormatError, shown
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
    reading,
    require_fields,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# where rules that split text differ: numbers, contractions, spaces, lines, accents, other scripts
_TRIAL = (
    "Hello",
    "In 2026 they'd 1234567 of them, it's DON'T.",
    "  two  spaces,\ttabs\n\nx = y+1;  ",
    "naïve 北京 Москва",
)


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


def difference_from_file(
    tokenizer: PreTrainedTokenizerBase, place: str, options: dict[str, Any]
) -> str | None:
    """Say what a tokenizer splits otherwise than its tokenizer.json; None if nothing or no file."""
    from tokenizers import Tokenizer
    from transformers.utils import cached_file

    where = {name: value for name, value in options.items() if name != "trust_remote_code"}
    try:
        own = Tokenizer.from_file(str(cached_file(place, "tokenizer.json", **where)))
    except OSError:  # there is none, as beside a tokenizer.model
        return None
    own.no_truncation()
    own.no_padding()
    for text in _TRIAL:
        found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        wanted = own.encode(text, add_special_tokens=False).ids
        if found != wanted:
            return (
                f"is a {type(tokenizer).__name__}, which turns {text!r} into the tokens {found}, "
                f"but its tokenizer.json into {wanted}. If the model was trained with the file, "
                'set "tokenizer_class" to "PreTrainedTokenizerFast" in tokenizer_config.json.'
            )
    return None
