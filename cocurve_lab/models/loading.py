"""Loading a model and its tokenizer: the embedded one, a folder, or a model of the hub."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..base.errors import ArchitectureError, InputError
from ..base.files import require_regular_files
from ..base.schema import reading
from .architectures import describe
from .families import MULTIMODAL
from .identity import (
    DEMO,
    EMBEDDED,
    MANIFEST,
    demo_folder,
    is_demo,
    is_pruned,
    require_sealed,
    vocabulary_mark,
)
from .layers import STORE, weights_of
from .runtime import transient_bars
from .sources import OPENING, SOURCES, file_in, source_of_file
from .weights import require_finite

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# the options of from_pretrained that a configuration or a tokenizer takes too
PLACE_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")
_HUB_OPTIONS = (*PLACE_OPTIONS, "trust_remote_code")


# Places -------------------------------------------------------------------------------------------


def place_of(model_id: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Resolve a model id: the name of an embedded model or a source is a folder; ~ the home."""
    embedded = str(model_id) in EMBEDDED
    source = SOURCES.get(model_id) if isinstance(model_id, str) else None
    if source is None and not embedded:
        return os.path.expanduser(model_id)
    if os.path.isdir(model_id):
        raise InputError(
            f"{model_id!r} is the name of a model of the lab and of a folder here. Give "
            f"'./{model_id}' for the folder, or move it away."
        )
    return demo_folder().with_name(str(model_id)) if source is None else source.require()


# Devices ------------------------------------------------------------------------------------------


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """Choose the device: the given one, else CUDA if torch can use it, else the CPU."""
    best = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device is None:
        return best
    try:
        found = torch.device(device)
        torch.empty(0, device=found)  # torch checks a device only when it is used
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        why = str(error).strip().partition("\n")[0]
        raise InputError(f"device {str(device)!r} cannot be used ({why}). Use '{best}'.") from None
    return found


def pick_dtype(
    device: torch.device, dtype: torch.dtype | str | None, demo: bool
) -> torch.dtype | Literal["auto"]:
    """Choose the dtype of a model: the given one, else float32 or "auto", the checkpoint's own."""
    # the embedded model is small enough for float32 anywhere
    if dtype is None:
        return torch.float32 if demo or device.type == "cpu" else "auto"
    return "auto" if dtype == "auto" else read_dtype(dtype)


def read_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Turn a name such as "bfloat16" into a dtype; a dtype is returned as it is."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise InputError(f"dtype is {dtype!r}; use float32, bfloat16, float16 or float64.")
    return found


# Models and tokenizers ----------------------------------------------------------------------------


def load_model(
    model_id: str | os.PathLike[str] = DEMO,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    stream: bool = False,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to measure.

    Args:
        model_id: "demo" or "mixture", which ship, another short name (see `cocurve fetch`), a hub
            id, a folder ("./NAME" is always one), or a GGUF file, which is dequantized to float32.
        device: by default CUDA if torch can use it, else the CPU. "mps" and "xpu" are untested.
        dtype: by default float32 on the CPU and for the embedded model, else the checkpoint's own,
            which "auto" names. `torch_dtype`, as it was called before, is the same.
        stream: load only what stands around the layers (embedding, final norm, head). A layer is
            read from its safetensors file when it runs, and at most two layers are in memory. For
            models larger than the device.
        **options: passed to `from_pretrained` (revision, token, attn_implementation, ...).
            `trust_remote_code` is False unless given. An attention kernel of the hub is used only
            if it is given here, never because config.json names it. With a `device_map`, layers
            may lie on several GPUs, on the CPU or on disk.

    Returns:
        The model, in eval mode and without gradients, and its tokenizer.

    Raises:
        ArchitectureError: the family is not supported.
        InputError: the model cannot be found, downloaded, trusted or used; with the next step.
    """
    target, place = pick_device(device), place_of(model_id)
    source, older = str(place), options.pop("torch_dtype", None)
    chosen = pick_dtype(target, older if dtype is None else dtype, is_demo(source))
    if is_pruned(source):
        raise InputError(
            f"{source} holds a pruned model, whose layers differ in width. Load it with "
            "load_pruned. Its tokenizer is in the folder if it was saved there; otherwise use that "
            "of the dense model."
        )
    OPENING().require_place(place)
    file = file_in(place)
    if file is not None:
        if stream or options:
            given = "stream" if stream else next(iter(options))
            raise InputError(
                f"{file} is one file, which is read as a whole: {given}= is not for it. Load it "
                "without, save it with model.save_pretrained(folder), and give that folder."
            )
        shapes_only(str(file))  # an unsupported family is rejected before its weights are read
        model: Any = source_of_file(file).model(file, "float32" if chosen == "auto" else chosen)
        model, tokenizer = model.to(target).requires_grad_(False), load_tokenizer(file)
    else:
        # if trust_remote_code is unset, transformers asks on stdin
        options = {"trust_remote_code": False} | options | {"dtype": chosen}
        model, tokenizer = _load_checkpoint(model_id, source, target, stream, options)
    describe(model)
    keep_score_cap(model)
    vars(model)["cocurve_vocabulary"] = vocabulary_mark(tokenizer)
    return model, tokenizer


def _load_checkpoint(
    model_id: str | os.PathLike[str],
    source: str,
    target: torch.device,
    stream: bool,
    options: dict[str, Any],
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model that transformers saved, in the order in which it may be refused.

    `options` are all those of `from_pretrained`.
    """
    opening, where = OPENING(), _picked(options, PLACE_OPTIONS)
    opening.require_no_adapter(source, **where)
    # an unsupported family is rejected before gigabytes are downloaded
    shapes = shapes_only(source, **_picked(options, (*_HUB_OPTIONS, "attn_implementation")))
    tokenizer = load_tokenizer(model_id, **options)
    opening.require_files(source, shapes, **where)
    explained = opening.explaining(model_id, cache=options.get("cache_dir"))
    with explained, transient_bars(hidden=is_demo(source)):  # it loads before a bar can be drawn
        if stream:
            model: Any = STORE().load(source, shapes, target, options)
        else:
            model, report = auto_class(shapes.config).from_pretrained(
                source, output_loading_info=True, **options
            )
            opening.require_loaded(model, report, source, shapes, **where)
    for name, weight in model.named_parameters():
        require_finite(weight, name, str(model_id))
    opening.require_generation(model.generation_config, source)
    if getattr(model, "hf_quantizer", None) is None:  # a mark on weights that are not quantized
        vars(model.config).pop("quantization_config", None)
    model.cocurve_dtype = shapes.config.dtype
    if "device_map" not in options and not stream:
        torch.nn.Module.to(model, target)
    weights_of(model)  # what is wrong with offloaded weights is said now
    return model.eval().requires_grad_(False), tokenizer


def keep_score_cap(model: PreTrainedModel) -> None:
    """Make sure that a model that caps its attention scores (Gemma 2) does so.

    transformers 5.17 chooses sdpa, which silently omits the cap; later releases reject that.
    """
    capped = getattr(model.config, "attn_logit_softcapping", None)
    if capped and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def load_tokenizer(
    model_id: str | os.PathLike[str] = DEMO, **options: Any
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a dense or pruned model, without the model.

    Args:
        model_id: "demo", a folder that holds a tokenizer, or a hub id.
        **options: as for `load_model`; those that concern only the weights are ignored.

    Warns:
        UserWarning: it splits text otherwise than its own tokenizer.json, as transformers does when
            `tokenizer_class` names a class with rules of its own.
    """
    from transformers import AutoTokenizer

    place = place_of(model_id)
    require_regular_files(Path(place))
    opening = OPENING()
    if not Path(place).is_dir():  # a folder may hold a tokenizer alone, without config.json
        opening.require_place(place)
    file = file_in(place)
    if file is not None and not (Path(place) / "tokenizer.json").exists():
        return source_of_file(file).tokenizer(file)
    options = {"trust_remote_code": False} | _picked(options, _HUB_OPTIONS)
    if (Path(place) / MANIFEST).is_file():
        with reading(Path(place) / MANIFEST, "Save the model again."):
            require_sealed(place)
    with opening.explaining(model_id, cache=options.get("cache_dir"), part="the tokenizer of "):
        tokenizer = AutoTokenizer.from_pretrained(str(place), **options)
        opening.require_tokenizer(tokenizer, model_id, str(place), **options)
    return tokenizer


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that makes a model of this configuration."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    nested = config.model_type in MULTIMODAL
    return AutoModelForImageTextToText if nested else AutoModelForCausalLM


def shapes_only(source: str | os.PathLike[str] | PreTrainedConfig, **options: Any) -> Any:
    """Build a model on the meta device from its configuration, a file of a few kilobytes.

    `source` is a folder, a hub id, a config.json, or the configuration itself; `options` go to
    `AutoConfig.from_pretrained`.
    """
    from transformers import PreTrainedConfig

    name = source if not isinstance(source, PreTrainedConfig) else source.model_type
    cache = options.get("cache_dir")
    with OPENING().explaining(name, cache=cache, part="the configuration of "):
        config = source if isinstance(source, PreTrainedConfig) else _read_config(source, options)
        try:
            with torch.device("meta"):
                model = auto_class(config).from_config(config)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            raise ArchitectureError(
                f"{str(name)!r} is a {config.model_type!r} model, which is not a causal language "
                "model. Give a model that continues text."
            ) from None
    describe(model)
    return model


def _read_config(source: str | os.PathLike[str], options: dict[str, Any]) -> PreTrainedConfig:
    """Read the configuration of a model, and check it before anything in it is followed."""
    from transformers import AutoConfig, PreTrainedConfig

    file = file_in(source)
    if file is not None:
        return source_of_file(file).config(file)
    options = {"trust_remote_code": False} | options
    content, _ = PreTrainedConfig.get_config_dict(source, **options)
    OPENING().require_settings(content, source, attention="attn_implementation" not in options)
    return AutoConfig.from_pretrained(source, **options)


def _picked(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}
