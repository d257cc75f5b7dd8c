"""The names of weights in files: older ones, those of experts kept apart, and ignored ones."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from ...base.errors import FileFormatError
from ...models.architectures import describe
from .files import foreign_weight, headers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# an expert's own matrices in a file, and where they are in the weight of all experts
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_HALVES = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", 0)),
}
Part = tuple[int, int] | None
_MULTIMODAL_NAMES = (  # as `Family.saved_names`
    ("language_model.model.", "language_model."),
    ("language_model.lm_head.", "lm_head."),
    (".vision_model.", "."),
)


def own_names(model: Any, wanted: Iterable[str]) -> Callable[[str], tuple[str | None, Part]]:
    """Return a function from a weight's name in a file to that in the model; None: ignore it.

    And which part of the weight it is, where the file keeps each expert apart.
    """
    architecture = describe(model)
    wanted, base = set(wanted), f"{model.base_model_prefix}."
    prefixes = (base, f"{architecture.stack.rpartition('.')[0]}.")
    ignored = may_ignore(model)

    def own(stored: str) -> tuple[str | None, Part]:
        name, part = stored, cast(Part, None)
        for saved, inside in (*architecture.family.saved_names, *_MULTIMODAL_NAMES):
            name = name.replace(saved, inside)
        if (expert := _EXPERT.fullmatch(name)) is not None:
            weight, half = _HALVES[expert[3]]
            name, part = f"{expert[1]}.{weight}", (int(expert[2]), half)
        if name not in wanted:  # saved without its head, or without the name of its place
            longer = (prefix + name.removeprefix(base) for prefix in prefixes)
            name = next((full for full in longer if full in wanted), name)
        if name in wanted:
            return name, part
        if ignored(name):
            return None, part
        raise foreign_weight(model.config._name_or_path, stored)

    return own


def may_ignore(model: Any) -> Callable[[str], bool]:
    """Return whether a weight that a model does not have may be in its files, by its name.

    These are the names in transformers' list for its class, such as layers that predict further
    tokens, and two buffers that transformers computes and old checkpoints hold.
    """
    listed = model._keys_to_ignore_on_load_unexpected or ()
    names = re.compile("|".join([*listed, r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]))
    return lambda name: names.search(name) is not None


def ignored_in(place: str, shapes: PreTrainedModel, **options: Any) -> list[str]:
    """Return what the safetensors files of a loaded model hold and it ignores, by names there."""
    own, found = own_names(shapes, shapes.state_dict()), []
    for name, _, _ in headers(place, **options):
        with suppress(FileFormatError):  # a quantizer's own, which was used
            if own(name)[0] is None:
                found.append(name)
    return found


def tell_ignored(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Warn of weights in the files of a model that it ignores, if there are any."""
    if names:
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        warnings.warn(
            f"the files of {model.config._name_or_path} hold {', '.join(sorted(names)[:3])}{more}, "
            "which the model does not use. They are ignored, and a pruned folder is without them.",
            UserWarning,
            stacklevel=2,
        )


def halves(name: str) -> int:
    return 2 if name.endswith(".gate_up_proj") else 1


def part_shape(shape: Sequence[int], name: str, part: Part) -> Sequence[int]:
    """Return the shape in a file of a weight, or of what is one expert's in it."""
    return shape if part is None else (shape[1] // halves(name), *shape[2:])
