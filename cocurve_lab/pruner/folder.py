"""The configuration of a saved folder, as `load_pruned` reads it.

extensions/publishing writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import FileFormatError, InputError, one_line
from ..base.schema import read_json
from ..models.sources import OPENING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_OWN_KEYS = ("per_layer_config", "allow_global_per_layer_attribute_access", "auto_map")


def dense_configuration(folder: Path) -> PreTrainedConfig:
    """Read the configuration of a saved folder without its layers' widths; run no code of it."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    path = folder / "config.json"
    with rejecting(f"{path} cannot be read"):
        content = read_json(path)
        OPENING().require_settings(content, folder)
        # otherwise the model's own, as in Gemma 4
        if "auto_map" in content or "Cocurve" in str(content.get("architectures")):
            content = stock_keys(content)
        content = PreTrainedConfig._decode_special_floats(content)  # infinity, in Granite 4
        config = CONFIG_MAPPING[content["model_type"]].from_dict(content)
    config._name_or_path = str(folder)
    return config


@contextmanager
def rejecting(fact: str) -> Iterator[None]:
    """Turn what transformers makes of a damaged file, nearly any error, into a FileFormatError."""
    try:
        yield
    except InputError as error:
        raise FileFormatError(str(error)) from None
    except Exception as error:
        raise FileFormatError(
            f"{fact} ({type(error).__name__}: {one_line(error)}). Save the model again."
        ) from None


def stock_keys(content: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's values without the keys that only the modeling file understands."""
    kept = {name: value for name, value in content.items() if name not in _OWN_KEYS}
    if isinstance(text := kept.get("text_config"), dict):
        kept["text_config"] = stock_keys(text)
    return kept
