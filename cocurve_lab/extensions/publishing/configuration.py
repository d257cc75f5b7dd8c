"""The configuration of a saved folder, so that transformers loads it without this library.

If all layers have the same widths, it is a stock configuration. Otherwise each layer's widths go
into `per_layer_config`, and the modeling file is put beside the weights. If neither can express
the model, the folder can be loaded with `load_pruned` only.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download

from ...base.files import read_regular
from ...base.schema import read_json
from ...models.architectures import UNIT_KINDS, Architecture, describe
from ...models.identity import TERMS
from ...models.loading import auto_class
from ...pruner.folder import Loader, stock_keys
from . import modeling_cocurve
from .card import write_card

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["write_card", "write_configuration"]  # the plug `Publishing`

MODELING_FILE = "modeling_cocurve.py"
_HEADS = ("attention_columns", "key_value_heads")
_COLUMNS = {*_HEADS, "ffn_columns"}
_APART = ("rope_theta", "partial_rotary_factor")  # beside rope_scaling, in transformers 4


def write_configuration(
    pruned: Architecture, layers: Sequence[Mapping[str, int]], folder: Path
) -> Loader:
    """Write config.json, and the modeling file if it is needed; return what loads the folder.

    The source's license, and its tokenizer.model beside a tokenizer, are copied.
    A configuration is written only if its class, built from it without weights, has exactly this
    model's tensors. `layers` are the widths of the manifest.
    """
    model = pruned.model
    _write_for_others(model, folder)
    own = getattr(modeling_cocurve, _own_name(model), None)
    if own is None and not pruned.family.mixers:
        return "cocurve_lab"
    for text in _uniform_configurations(pruned.config, layers):
        uniform = _around(model.config, text)
        if _has_tensors_of(auto_class(uniform).from_config, uniform, pruned):
            _write(uniform, folder)
            return "stock"
    if own is None:
        return "cocurve_lab"
    layered = _layered_configuration(model, layers)
    if not _has_tensors_of(own, layered, pruned):
        return "cocurve_lab"
    _write(layered, folder)
    shutil.copyfile(Path(__file__).with_name(MODELING_FILE), folder / MODELING_FILE)
    return "own code"


def _uniform_configurations(
    config: PreTrainedConfig, layers: Sequence[Mapping[str, int]]
) -> Iterator[PreTrainedConfig]:
    """Yield stock configurations of these widths; none if layers differ or a block is removed."""
    from transformers import MistralConfig

    counts: dict[str, int] = {}
    for widths in layers:  # layers with different kinds of units have counts of their own
        mine = _counts(config, widths)
        if not all(widths.values()) or any(counts.get(k, v) != v for k, v in mine.items()):
            return
        counts |= mine
    content = _stock_content(config) | counts
    candidates = [(type(config), content)]
    if config.model_type == "llama":
        # Llama rejects a hidden size that is not a multiple of its number of heads. Mistral does
        # not, and computes the same if there are no biases.
        own = ("model_type", "attention_bias", "mlp_bias", "pretraining_tp")
        shared = {name: value for name, value in content.items() if name not in own}
        mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": None}
        candidates.append((MistralConfig, shared | mistral))
    for kind, fields in candidates:
        try:  # made anew, not edited, so that the class checks it now as it will on loading
            made = kind.from_dict(fields)
        except Exception:  # each class has its own checks and errors
            continue
        yield made


def _around(whole: PreTrainedConfig, text: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a multimodal model whose language model has this one."""
    if whole.get_text_config() is whole:
        return text
    around = copy.deepcopy(whole)
    around.text_config = text
    return around


def _layered_configuration(
    pruned: PreTrainedModel, layers: Sequence[Mapping[str, int]]
) -> PreTrainedConfig:
    """Return the configuration for the modeling file, with each layer's widths."""
    config = pruned.config.get_text_config()
    layered: Any = type(config).from_dict(_stock_content(config))
    # Generation, trainers and harnesses read these counts for the whole model. Without the flag,
    # that raises an error which a default of getattr does not catch. With it they read the dense
    # counts, an upper bound for every layer.
    layered.allow_global_per_layer_attribute_access = True
    # A layer without heads gets the counts of the narrowest layer. Only vLLM reads them: it keeps
    # a KV cache for every layer, otherwise one of the dense width.
    heads = [{name: w[name] for name in _HEADS} for w in layers if w.get("key_value_heads")]
    narrowest = min(heads, key=lambda counts: counts["key_value_heads"], default={})
    own: dict[int, dict[str, Any]] = {}
    for index, widths in enumerate(layers):
        empty = widths.get("attention_columns") == 0
        gone = ["attention"] if empty else []
        # the FFN beside units of another kind is a part of their block, which is not skipped
        if widths.get("ffn_columns") == 0 and not set(widths) - _COLUMNS:
            gone.append("mlp")
        counts = _counts(config, {**widths, **narrowest} if empty else widths)
        own[index] = ({"skip": gone} if gone else {}) | counts
    layered.per_layer_config = own
    layered = _around(pruned.config, layered)
    module = MODELING_FILE.removesuffix(".py")
    base = _own_name(pruned.base_model)
    layered.auto_map = {
        "AutoModel": f"{module}.{base}",
        auto_class(layered).__name__: f"{module}.{_own_name(pruned)}",
    }
    classifier = base.removesuffix("Model") + "ForSequenceClassification"
    if hasattr(modeling_cocurve, classifier):
        layered.auto_map["AutoModelForSequenceClassification"] = f"{module}.{classifier}"
    layered.architectures = [_own_name(pruned)]
    return layered


def _stock_content(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a configuration's values without the keys that only the modeling file understands."""
    return stock_keys(copy.deepcopy(config.to_dict()))


def _write(config: PreTrainedConfig, folder: Path) -> None:
    # not by save_pretrained, which reads the counts of the whole model and warns about it
    content, text = json.loads(config.to_json_string()), config.get_text_config()
    (content if text is config else content["text_config"]).update(_older_names(text))
    (folder / "config.json").write_text(_as_json(content), encoding="utf-8")


def _write_for_others(model: Any, folder: Path) -> None:
    """Name in a tokenizer's settings what others know, and copy what goes with the weights."""
    path = folder / "tokenizer_config.json"
    if path.exists():
        settings = read_json(path)
        settings.pop("auto_map", None)  # its code is not in this folder
        if settings.get("tokenizer_class") == "TokenizersBackend":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        path.write_text(_as_json(settings), encoding="utf-8")
    source, commit = model.config._name_or_path, getattr(model.config, "_commit_hash", None)
    kept = (*TERMS, "tokenizer.model") if path.exists() else TERMS
    if source.count("/") == 1 and not Path(source).is_dir():  # a model of the hub
        with suppress(Exception):  # without its license the model is the same
            source = str(snapshot_download(source, revision=commit, allow_patterns=[*kept]))
    for file in sorted(Path(source).iterdir()) if source and Path(source).is_dir() else ():
        if any(fnmatchcase(file.name, pattern) for pattern in kept) and file.is_file():
            (folder / file.name).write_bytes(read_regular(file, at_most=1 << 28))


def _older_names(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the rotary settings as transformers 4 reads them, which ignores `rope_parameters`.

    Only those from which today's class makes the same configuration.
    """
    content = config.to_dict()
    content.pop("per_layer_config", None)  # reading such a configuration warns
    rope = content.get("rope_parameters") or {}
    local, rope = rope.get("sliding_attention") or {}, rope.get("full_attention") or rope
    scaling = {name: value for name, value in rope.items() if name not in (*_APART, *content)}
    if "type" in scaling:  # what rope_type was called first
        del scaling["rope_type"]
    names = {
        "rope_theta": rope.get("rope_theta"),
        "partial_rotary_factor": rope.get("partial_rotary_factor"),
        "rope_local_base_freq": local.get("rope_theta"),
        "rope_scaling": scaling if scaling != {"rope_type": "default"} else None,
    }
    older: dict[str, Any] = {}
    for name, value in names.items():
        with suppress(Exception):  # each class has its own checks and errors
            if value is not None:
                found = type(config).from_dict(copy.deepcopy(content | older | {name: value}))
                if found.to_dict() == content:
                    older[name] = value
    return older


def _as_json(content: Any) -> str:
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _own_name(model: Any) -> str:
    """Return the modeling file's class for a stock class, or for one of its own."""
    return "Cocurve" + type(model).__name__.removeprefix("Cocurve")


def _counts(config: Any, widths: Mapping[str, int]) -> dict[str, int]:
    """Return a layer's counts under transformers' names, without those of a removed block."""
    settings = {"head_dim": getattr(config, "head_dim", None)} | config.to_dict()
    counts: dict[str, int] = {}
    for kind in UNIT_KINDS.values():
        if f"{kind.name}_columns" in widths:
            counts |= kind.to_settings(settings, widths)
    return {name: count for name, count in counts.items() if count}


def _has_tensors_of(build: Any, config: PreTrainedConfig, pruned: Architecture) -> bool:
    """Whether `build(config)` has a model's tensors, by name and shape, and its head counts."""
    try:
        with torch.device("meta"):
            model = build(copy.deepcopy(config))
    except Exception:  # whatever the class objects to, it cannot hold this model
        return False
    if _shapes(model) != _shapes(pruned.model):
        return False
    # shapes alone do not tell: two heads of 8 have the shapes of one head of 16
    found = describe(model)
    return all(
        pruned.head_dim(layer) == found.head_dim(layer)
        and pruned.queries_per_group(layer) == found.queries_per_group(layer)
        for layer in pruned.attention_layers
    )


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
