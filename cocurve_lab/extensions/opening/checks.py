"""All checks of a load: the functions of `Opening`, as this extension carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import FileFormatError, InputError
from .errors import explaining
from .files import (
    foreign_weight,
    ignored_in,
    is_wrapped,
    may_ignore,
    quantization,
    require_sound_files,
    require_used_scales,
    tell_ignored,
)
from .places import (
    require_generation,
    require_no_adapter,
    require_own_files,
    require_place,
    require_settings,
    require_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "explaining",
    "require_files",
    "require_generation",
    "require_loaded",
    "require_no_adapter",
    "require_place",
    "require_settings",
    "require_tokenizer",
]


def require_files(place: str, shapes: PreTrainedModel, **options: Any) -> None:
    """Check the weight files against the model on the meta device; no weight is read."""
    require_own_files(place, **options)
    try:
        require_used_scales(place, shapes, **options)
        if Path(place).is_dir() and quantization(shapes) is None:  # packed ones differ in shape
            wanted = {name: weight.shape for name, weight in shapes.state_dict().items()}
            require_sound_files(place, wanted)
    except FileFormatError as error:
        raise InputError(str(error)) from error


def require_loaded(
    model: PreTrainedModel,
    report: Mapping[str, Any],
    place: str,
    shapes: PreTrainedModel,
    **options: Any,
) -> None:
    """Check what was loaded; `report` is what `from_pretrained` says of missing weights."""
    missing, ignored = sorted(report["missing_keys"]), may_ignore(model)
    unexpected = sorted(name for name in report["unexpected_keys"] if not ignored(name))
    for name in filter(is_wrapped, unexpected):
        raise InputError(str(foreign_weight(place, name)))
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(
            f"the files of {place!r} hold no {', '.join(missing[:3])}{more}, for which "
            "transformers would draw random numbers. Get the whole model, and load it again."
        )
    require_used_scales(place, shapes, unexpected)
    if unexpected:  # as when they are read from the disk
        raise foreign_weight(place, unexpected[0])
    tell_ignored(model, ignored_in(place, shapes, **options))
