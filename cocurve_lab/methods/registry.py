"""The registry: every method by its name."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from ..base.arguments import require_type
from ..base.errors import InputError
from .base import Method

# name -> (module, class), in the order of the tables
_METHODS = {
    "random": ("random_units", "Random"),
    "magnitude": ("magnitude", "Magnitude"),
    "wanda-sp": ("wanda", "WandaSp"),
    "flap": ("flap", "Flap"),
    "amp": ("amp", "Amp"),
    "llm-pruner": ("llm_pruner", "LlmPruner"),
    "slimgpt": ("slimgpt", "SlimGpt"),
    "slimllm": ("slimllm", "SlimLlm"),
    "2ssp": ("two_ssp", "TwoSsp"),
    "shortgpt": ("short_gpt", "ShortGpt"),
    "blockpruner": ("block_pruner", "BlockPruner"),
    "finercut": ("finer_cut", "FinerCut"),
    "cbo": ("cbo", "Cbo"),
    "reap": ("experts", "Reap"),
    "expert-frequency": ("experts", "ExpertFrequency"),
    "cocurve": ("cocurve", "CoCurve"),
    "diagonal": ("cocurve", "Diagonal"),
    "head-only": ("cocurve", "HeadOnly"),
    "ffn-only": ("cocurve", "FfnOnly"),
}


def method_names(*, experts: bool = False) -> tuple[str, ...]:
    """List the names `get_method` knows, in the order of the tables.

    Either those that rank attention and FFN units, or those that rank `experts` alone.
    """
    return tuple(name for name, (file, _) in _METHODS.items() if (file == "experts") == experts)


def get_method(name: str, **options: Any) -> Method:
    """Make a pruning method by name (`method_names()`), with options of its own.

    Raises:
        InputError: the name is unknown (the message names the closest ones), or an option is.
    """
    require_type(name, str, "the name of a method")
    key = name.strip().lower().replace("_", "-")
    if key not in _METHODS:
        close = get_close_matches(key, _METHODS, n=2, cutoff=0.5)
        hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise InputError(f"no method is named {name!r}. {hint}Known: {', '.join(_METHODS)}.")
    module, kind = _METHODS[key]
    make = getattr(import_module(f".{module}", __package__), kind)
    try:
        method: Method = make(**options)
    except TypeError as error:
        raise InputError(
            f"{key} does not take these options: {error}. Give only fields of {kind}."
        ) from None
    return method
