"""The weight files of a place: are they whole, of this model and not packed; names in them.

This file is the `Opening` of the extension: what other files check of a load is in `__all__` too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...base.errors import FileFormatError, InputError, one_line
from ...base.files import require_regular
from ...base.schema import read_json
from ...models.architectures import describe
from ...models.sources import file_in
from ...models.weights import DTYPES
from .errors import POINTER, explaining, is_pointer
from .places import (
    beside,
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
_SCALE = re.compile(r"(_scales?|_scale_inv|\.scales|\.qweight|\.qzeros|_packed|\.absmax)$")
# names that a trainer, a compiler or an adapter gives to the weights of the model inside
_WRAPPED = re.compile(
    r"(^|\.)(base_model\.model|module|_orig_mod|_fsdp_wrapped_module|base_layer|lora_[AB])\."
)
_MODELOPT = "hf_quant_config.json"  # where ModelOpt also says what it did
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
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


def weight_files(place: str, **options: Any) -> list[Path]:
    """Return the safetensors files of a folder or hub model; none if its weights are pickled.

    Files of the hub are downloaded if they are not here; `options` are those of `open_model`.
    """
    if file_in(place) is not None:
        return []
    require_own_files(place, **options)
    whole = _find(place, WHOLE, options)
    if whole is not None:  # transformers takes it too, whatever an index says
        return [whole]
    index = _find(place, INDEX, options)
    if index is None:
        return []
    names = read_json(index)["weight_map"].values()
    files = {name: _find(place, name, options) for name in sorted(set(names))}
    for name, file in files.items():
        if file is None:
            raise FileFormatError(
                f"{index} names {name}, which is not there. The folder is incomplete: copy or "
                "download the missing file."
            )
    return [file for file in files.values() if file is not None]


def _find(place: str, name: str, options: dict[str, Any]) -> Path | None:
    from transformers.utils import cached_file

    with explaining(place, cache=options.get("cache_dir")):
        try:
            return Path(str(cached_file(place, name, **options)))
        except OSError as error:
            if Path(place).is_dir() or "EntryNotFound" in type(error.__cause__).__name__:
                return None
            raise


def headers(place: str, **options: Any) -> Iterator[tuple[str, Any, Path]]:
    """Yield what is stored in a place: the name of a weight, its header, and the file."""
    for file in weight_files(place, **options):
        handle = open_weights(file)
        for name in handle.keys():  # noqa: SIM118, a handle is no mapping
            yield name, handle.get_slice(name), file


def require_shape(stored: Any, name: str, shape: Sequence[int], file: Path) -> None:
    """Raise FileFormatError unless a tensor in a file has this shape."""
    if tuple(stored.get_shape()) != tuple(shape):
        raise FileFormatError(
            f"{name} in {file} has shape {tuple(stored.get_shape())}, but the configuration beside "
            f"it says {tuple(shape)}. The folder mixes two models: download or save the model "
            "again."
        )


def quantization(shapes: PreTrainedModel) -> str | None:
    """Return the kind of quantization that the configuration of a model names, if any."""
    config: Any = shapes.config
    settings = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )
    if not isinstance(settings, dict):
        return settings
    for bits in ("4bit", "8bit"):  # transformers has a kind for each
        if settings.get(f"load_in_{bits}"):
            return f"bitsandbytes_{bits}"
    return str(settings.get("quant_method", "no quant_method"))


def require_floats(place: str, shapes: PreTrainedModel) -> None:
    """Raise InputError if the configuration says that the weights are quantized."""
    method = quantization(shapes)
    if method is not None:
        raise InputError(
            f"{place} is quantized ({method}), and its weights would be read as they are in the "
            "files. Load it as a whole (cl.load_model), or give an unquantized one, for example in "
            "bfloat16."
        )


def require_used_scales(
    place: str, shapes: PreTrainedModel, unused: Iterable[str] = (), **options: Any
) -> None:
    """Raise InputError if weights would be loaded without their scales; `unused` ones were.

    Without a quantizer, transformers leaves out scales that the model has no place for, and warns.
    A folder is judged by its headers before a load, and a model of the hub by its configuration;
    `options` are those of `open_model`.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    found = sorted(f"a scale, {name}" for name in unused if _SCALE.search(name))
    method = quantization(shapes)
    known = method in AUTO_QUANTIZER_MAPPING  # and so unpacked
    if not (found or known) and Path(place).is_dir():
        own = shapes.state_dict()
        for name, stored, _ in headers(place):
            kind = stored.get_dtype()
            if name.endswith("weight") and kind not in DTYPES:
                found.append(f"{name} as {kind}")
            elif _SCALE.search(name) and name not in own:
                found.insert(0, f"a scale, {name}")
    elif not (found or known):
        file = beside(place, _MODELOPT, **options)
        with suppress(FileFormatError, LookupError, TypeError):
            if file is not None:
                method = str(read_json(file)["quantization"]["quant_algo"])
        if method is not None:
            found = [f"the method {method!r}"]
    if found:
        raise InputError(
            f"{place} holds quantized weights with {found[0]}, which transformers does not use, so "
            "the loaded numbers would not be the model's. Give an unquantized model, for example "
            "in bfloat16."
        )


def open_weights(file: Path, *, mapped: bool = False) -> Any:
    """Open a safetensors file, which reads its header only; FileFormatError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    require_regular(file)
    try:
        # safetensors maps for writing, which the system may refuse for a file larger than memory
        return safe_open(file, framework="pt", backend="mmap" if mapped else "pread")
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from None


def damaged(file: Path, error: Exception) -> FileFormatError:
    if is_pointer(file):
        return FileFormatError(f"{file} {POINTER}")
    return FileFormatError(
        f"{file} cannot be read ({one_line(error)}): it is truncated or damaged. Copy or download "
        "it again."
    )


def foreign_weight(place: str, name: str) -> FileFormatError:
    """Make the error for a weight that the model of a configuration does not have."""
    why = (
        "which its configuration does not have. The folder mixes two models: download or save the "
        "model again."
    )
    if _SCALE.search(name) or name.endswith(".g_idx"):
        why = "so the model is quantized. Give an unquantized one, for example in bfloat16."
    elif is_wrapped(name):
        why = (
            "the name inside a trainer's or an adapter's wrapper. Save the model itself: "
            "merge_and_unload() of an adapter, unwrap_model of accelerate, or model._orig_mod of a "
            "compiled one, then save_pretrained(folder)."
        )
    return FileFormatError(f"the weights of {place} hold {name}, {why}")


def is_wrapped(name: str) -> bool:
    """Return whether a weight is named as inside a trainer, a compiled model or an adapter."""
    return _WRAPPED.search(name) is not None


# Names ------------------------------------------------------------------------------------------


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


# The checks of a load -----------------------------------------------------------------------------


def require_files(place: str, shapes: PreTrainedModel, **options: Any) -> None:
    """Check the weight files against the model on the meta device; no weight is read."""
    require_own_files(place, **options)
    try:
        require_used_scales(place, shapes, **options)
        if Path(place).is_dir() and quantization(shapes) is None:  # packed ones differ in shape
            wanted = {name: weight.shape for name, weight in shapes.state_dict().items()}
            for name, stored, file in headers(place):
                if name in wanted:  # a weight that the file names otherwise is not compared
                    require_shape(stored, name, wanted[name], file)
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
