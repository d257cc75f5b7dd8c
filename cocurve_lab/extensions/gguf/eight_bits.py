"""A saved pruned model with weights in 8 bits, by torchao, for transformers."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ...base.arguments import as_path
from ...base.errors import InputError
from ...models.loading import load_tokenizer
from ...models.runtime import bars_that_go
from ...models.weights import loaded_copy
from ...pruner.folder import MODELING_FILE
from ...pruner.manifest import read_manifest
from ...pruner.saving import new_folder, open_pruned

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EIGHT_BITS = INT8, FP8 = "INT8", "FP8"


def quantize_folder(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], kind: str = INT8
) -> Path:
    """Write a saved pruned model again, with its projections in 8 bits; needs the package torchao.

    Each row of a projection has 8-bit numbers and one scale; embedding, head and norms stay as
    they are. transformers and vLLM load the result with `trust_remote_code=True` where torchao is
    installed, and compute in the dtype of the folder. This library does not read it.

    Args:
        folder: of `save_pruned`, for example.
        out: a folder that does not exist or is empty.
        kind: "INT8" (integers) or "FP8" (float8_e4m3fn: 4 bits of exponent, 3 of mantissa).

    Returns:
        The new folder: weights, configuration, modeling file and tokenizer.

    Raises:
        FileFormatError: `folder` has no manifest, or is damaged.
        InputError: another kind, torchao is not installed, transformers cannot load the folder,
            its modeling file is not this library's, or `out` is not empty.
    """
    from transformers import AutoModelForCausalLM, TorchAoConfig

    settings = _settings(kind)
    folder, out = as_path(folder, "folder"), as_path(out, "out")
    manifest = read_manifest(folder)
    if manifest.get("loads_with") == "cocurve_lab":
        raise InputError(f"{folder} is loaded by cl.load_pruned alone, so not in 8 bits.")
    # torchao finds no scale for a projection of a block that lost everything
    stay = ["lm_head", *_empty(open_pruned(folder))]
    _require_own_code(folder)
    config = TorchAoConfig(settings, modules_to_not_convert=stay)
    with new_folder(out, overwrite=False) as temporary, bars_that_go(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        model = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype="auto", quantization_config=config
        )
        model.save_pretrained(temporary)
        if any(folder.glob("tokenizer*")):
            load_tokenizer(folder).save_pretrained(temporary)
    return out


def with_torchao_weights(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Copy a model, with its projections in 8 bits as `quantize_folder` has them.

    Raises:
        InputError: torchao is not installed, or the weights are on disk.
    """
    settings = _settings(kind)
    copied = loaded_copy(model)
    from torchao.quantization import quantize_

    head = copied.get_output_embeddings()
    quantize_(
        copied,
        settings,
        lambda module, _: (
            isinstance(module, nn.Linear) and module is not head and module.weight.numel() > 0
        ),
    )
    return copied


def require_torchao() -> None:
    """Raise InputError unless torchao is installed."""
    _settings(INT8)


def _settings(kind: str) -> Any:
    """torchao's settings: one scale per row, for the weights alone."""
    if kind not in EIGHT_BITS:
        raise InputError(f"kind is {kind!r}. Use {' or '.join(EIGHT_BITS)}.")
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError:
        raise InputError(
            f"{kind} needs the package torchao, which is not installed. Run "
            "`pip install cocurve-lab[quantize]`."
        ) from None
    return Int8WeightOnlyConfig(version=2) if kind == INT8 else Float8WeightOnlyConfig()


def _require_own_code(folder: Path) -> None:
    """Raise InputError if transformers would run code that this version did not write."""
    named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map") or {}
    own, ours = folder / MODELING_FILE, Path(__file__).with_name(MODELING_FILE)
    places = {str(place).rpartition(".")[0] for place in named.values()}
    if places - {ours.stem} or (named and own.read_bytes() != ours.read_bytes()):
        raise InputError(
            f"{folder} names code that is not the modeling file of this version, and it would be "
            "run. Save the model again: cl.save_pruned(cl.load_pruned(folder), another_folder)."
        )


def _empty(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers without rows or columns."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not module.weight.numel()
    ]
