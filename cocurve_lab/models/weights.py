"""The weights of a model by name: in memory, in files, or brought by a `WeightSource`."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..base.errors import FileFormatError, InputError, one_line
from ..base.files import require_regular
from ..base.schema import read_json
from ..base.storage import fingerprint
from .architectures import describe
from .layers import source_of
from .load_errors import beside, explain, require_own_files
from .sources import file_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SCALE = re.compile(r"(_scales?|_scale_inv|\.scales|\.qweight|\.qzeros|_packed|\.absmax)$")
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
# names that a trainer, a compiler or an adapter gives to the weights of the model inside
_WRAPPED = re.compile(
    r"(^|\.)(base_model\.model|module|_orig_mod|_fsdp_wrapped_module|base_layer|lora_[AB])\."
)
_MODELOPT = "hf_quant_config.json"  # where ModelOpt also says what it did
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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

    try:
        return Path(str(cached_file(place, name, **options)))
    except OSError as error:
        if Path(place).is_dir() or "EntryNotFound" in type(error.__cause__).__name__:
            return None
        raise explain(place, error, cache=options.get("cache_dir")) from error


def require_sound_files(folder: str, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise FileFormatError if a header in a folder is damaged or contradicts the configuration.

    Weights are not read. `shapes` are those of the configuration, by name; weights that a file
    names otherwise are not compared.
    """
    for name, stored, file in _headers(folder):
        if name in shapes:
            require_shape(stored, name, shapes[name], file)


def _headers(place: str, **options: Any) -> Iterator[tuple[str, Any, Path]]:
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
        for name, stored, _ in _headers(place):
            kind = stored.get_dtype()
            if name.endswith("weight") and kind not in _DTYPES:
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
    return FileFormatError(
        f"{file} cannot be read ({one_line(error)}): it is truncated or damaged. Copy or download "
        "it again."
    )


class PickledError(FileFormatError):
    """The weights are not in safetensors files, and can only be loaded as a whole."""


def fingerprint_tensor(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's shape, dtype and bits."""
    # as bytes, because numpy has no bfloat16
    bits = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return fingerprint(list(tensor.shape), str(tensor.dtype), bits.numpy())


class Watch:
    """Compares the weights of a file with the manifest's `sums`, and again after it changed."""

    def __init__(self, file: Path, sums: Mapping[str, str] | None = None) -> None:
        self.file, self._sealed, self._sums = file, sums or {}, dict(sums or {})
        self._opened = self._state()
        self._known: dict[str, Any] = {}  # the state of the file when a weight was last compared

    def _state(self) -> Any:
        at = os.stat(self.file)
        return at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns

    def passed(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """Read a weight that must be what it was; FileFormatError or InputError if it is not."""
        before, tensor, state = self._state(), read(), self._state()
        if self._known.get(name) == before == state:
            return tensor
        mark = fingerprint_tensor(tensor)
        if name in self._sealed and mark != self._sealed[name]:
            raise FileFormatError(
                f"{name} in {self.file} does not match its checksum: it is damaged or changed. Use "
                "a copy, or save the model again."
            )
        unchanged = self._opened == before == state
        if self._sums.get(name, mark if unchanged else "") != mark:
            raise InputError(
                f"{self.file} changed after the model was loaded, and {name} may be another. What "
                "is finished is kept. Restore the file, or load the model again and start anew."
            )
        require_finite(tensor, name, self.file)
        self._sums[name], self._known[name] = mark, before
        return tensor


class StoredWeights:
    """The weights of a model in safetensors files, read when they are asked for, and not kept.

    Args:
        model: the model, on the meta device; its names and shapes must be those in the files.
        files: safetensors files that hold all its weights; opening them reads their headers only.
        mapped: map the files into memory instead of reading from them.
        sums: as for `Watch`, by the weights' names in the model.

    Attributes:
        tied: as from `tied_names`; these may be missing in the files.
        dtype: the dtype of the first weight in the files.
        ignored: what the files hold and the model does not need, by its names there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        files: Iterable[Path],
        *,
        mapped: bool = False,
        sums: Mapping[str, str] | None = None,
    ) -> None:
        self.tied = tied_names(model)
        self.ignored: list[str] = []
        # several where a file keeps each expert apart: by expert and half, else by None
        self._places: dict[str, dict[Part, tuple[Any, str, Watch]]] = {}
        wanted = model.state_dict()
        files, own = list(files), _own_names(model, wanted)
        if not files:
            raise PickledError(
                f"{model.config._name_or_path} holds neither {INDEX} nor {WHOLE}. Pickled or GGUF "
                "weights cannot be read one by one: load the model with cl.load_model, save it "
                "with model.save_pretrained(folder), and give that folder."
            )
        for file in files:
            handle, watch = open_weights(file, mapped=mapped), Watch(file, sums)
            for stored in handle.keys():  # noqa: SIM118, a handle is no mapping
                name, part = own(stored)
                if name is None:
                    self.ignored.append(stored)
                    continue
                self._places.setdefault(name, {})[part] = handle, stored, watch
                found = handle.get_slice(stored)
                if found.get_dtype() not in _DTYPES:  # first: packed weights differ in shape too
                    raise FileFormatError(
                        f"{name} in {file} is stored as {found.get_dtype()}, so the model is "
                        "quantized. Give an unquantized one, for example in bfloat16."
                    )
                require_shape(found, name, _part_shape(wanted[name].shape, name, part), file)
        missing = next((n for n in wanted if n not in self._places and n not in self.tied), None)
        for name, parts in self._places.items():
            count, halves = len(wanted[name]) if wanted[name].dim() else 1, _halves(name)
            if None not in parts and len(parts) != count * halves:
                missing = f"an expert of {name}"
        if missing is not None:
            raise FileFormatError(
                f"{missing} is in none of the weight files of {model.config._name_or_path}. The "
                "folder is incomplete: download or save the model again."
            )
        handle, stored, _ = next(iter(next(iter(self._places.values())).values()))
        self.dtype = _DTYPES[handle.get_slice(stored).get_dtype()]

    def read(self, name: str) -> Tensor:
        """Read a weight by its name in the model, on the CPU, in the dtype of its file."""
        name = name if name in self._places else self.tied[name]
        parts, halves = self._places[name], _halves(name)
        if None in parts:
            return self._read(name, *parts[None])

        def whole() -> Tensor:
            # gate rows, then up rows, of one expert after the other, as transformers stacks them
            order = sorted(part for part in parts if part is not None)
            rows = [self._read(f"{name} {part}", *parts[part]) for part in order]
            steps = range(0, len(rows), halves)
            return torch.stack([torch.cat(rows[at : at + halves]) for at in steps])

        _, _, watch = next(iter(parts.values()))
        return watch.passed(name, whole)  # each part's own watch sees whether its file changed

    def _read(self, name: str, handle: Any, stored: str, watch: Watch) -> Tensor:
        from safetensors import SafetensorError

        try:
            return watch.passed(name, lambda: handle.get_tensor(stored))
        except (SafetensorError, OSError) as error:
            raise damaged(watch.file, error) from None

    def separate(self) -> list[str]:
        """Return the names in `tied` whose weight the files hold, other than its twin's."""
        there = [name for name in self.tied if name in self._places]
        return [n for n in there if not torch.equal(self.read(n), self.read(self.tied[n]))]

    def __deepcopy__(self, _: Any) -> StoredWeights:
        return self  # nothing in it changes, and open files cannot be copied


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the weights that equal another by tying, such as a head: {name: the other name}."""
    first: dict[int, str] = {}
    tied = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(weight), name) != name:
            tied[name] = first[id(weight)]
    return tied


def settle_ties(model: PreTrainedModel) -> None:
    """Let the configuration say whether the head is the embedding, as it is in this model.

    A checkpoint may hold two weights although its configuration ties them; transformers loads both.
    """
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False


def with_stored(model: Any, weights: StoredWeights) -> PreTrainedModel:
    """Attach stored weights to a model on the meta device; warn of those that it ignores."""
    tell_ignored(model, weights.ignored)
    model.cocurve_stored = weights
    return model.eval().requires_grad_(False)


def loaded_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model with its weights; InputError if they are on disk."""
    if any(weight.is_meta for weight in model.parameters()):
        raise InputError("the weights are on disk. Load the model: cl.load_pruned(folder).")
    return copy.deepcopy(model)


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model to the meta device."""
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        for weight in model.parameters()
    }
    twin = copy.deepcopy(model, memo)
    vars(twin).pop("hf_device_map", None)  # nothing of it is on a device
    return twin


def is_readable(model: Any) -> bool:
    """Return whether `reader_of` can read all weights, also those on the meta device."""
    known = hasattr(model, "cocurve_stored") or source_of(model) is not None
    return known or not any(weight.is_meta for weight in model.parameters())


def reader_of(model: PreTrainedModel) -> Callable[[str], Tensor]:
    """Return a function from a weight's name in the model to the weight: stored, streamed or here.

    The tensor is on the CPU, in the model's dtype, and for reading only.
    """
    stored: Any = getattr(model, "cocurve_stored", None)
    weights = model.state_dict()
    stream = None if stored is not None else source_of(model)

    def read(name: str) -> Tensor:
        if stored is not None:
            return stored.read(name).to(weights[name].dtype)
        if stream is not None and weights[name].is_meta:
            return stream.read(name)
        return weights[name].detach().cpu()

    return read


def numbers_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return a function from a weight of the model, or a view of one, to its numbers.

    The tensor is for reading only; it is on the CPU if it was on the meta device.
    """
    names, read = {id(weight): name for name, weight in model.named_parameters()}, reader_of(model)

    def numbers(view: Tensor) -> Tensor:
        if not view.is_meta:
            return view.detach()
        # a view on the meta device knows its weight, and which numbers of it it has
        whole = read(names[id(view if view._base is None else view._base)])
        return whole.as_strided(view.shape, view.stride(), view.storage_offset())

    return numbers


def _halves(name: str) -> int:
    return 2 if name.endswith(".gate_up_proj") else 1


def _part_shape(shape: Sequence[int], name: str, part: Part) -> Sequence[int]:
    """Return the shape in a file of a weight, or of what is one expert's in it."""
    return shape if part is None else (shape[1] // _halves(name), *shape[2:])


def _own_names(model: Any, wanted: Iterable[str]) -> Callable[[str], tuple[str | None, Part]]:
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
    own, found = _own_names(shapes, shapes.state_dict()), []
    for name, _, _ in _headers(place, **options):
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


def require_finite(weight: Tensor, name: str, place: Any) -> None:
    """Raise FileFormatError if a number of a weight is NaN or infinite.

    Attention can hide such weights: its logits may stay finite, and their removal costs nothing.
    """
    known = weight.dtype in _DTYPES.values() and not weight.is_meta and weight.numel() > 0
    if known and not torch.isfinite(torch.stack(torch.aminmax(weight.detach()))).all():
        raise FileFormatError(
            f"{name} of {place} holds NaN or infinity. Download or save the model again."
        )
