"""The identity of a model: its name, device and dtype, a fingerprint of its weights, the demo."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from ..base.errors import FileFormatError, InputError
from ..base.files import demo_folder, read_regular
from ..base.origin import ALLOWED, EXACT, LOADED, NARROW, Verdict, require_same_source
from ..base.schema import read_json
from ..base.storage import fingerprint, unseal_json
from .architectures import is_packed
from .weights import fingerprint_tensor, reader_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
DEMO = "demo"  # the name of the embedded model
EMBEDDED = (DEMO, "mixture")  # a mixture of experts that knows the same world
MANIFEST = "cocurve_manifest.json"  # lies beside the weights of a pruned model
READ = (  # what is read beside the weights and the manifest
    "modeling_cocurve.py", "config.json", "generation_config.json",
    "model.safetensors.index.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja",
)  # fmt: skip
TERMS = ("LICEN[CS]E*", "COPYING*", "NOTICE*", "USE_POLICY*")  # what has to go with weights
# configuration keys that depend on how a model was loaded, not on what it computes
_LOADER_KEYS = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")

_KNOWN: WeakKeyDictionary[torch.nn.Module, tuple[Any, dict[str, Any]]] = WeakKeyDictionary()


def is_demo(model_id: str | os.PathLike[str]) -> bool:
    """Whether a model id means an embedded model, by name or by folder."""
    places = [demo_folder().with_name(name) for name in EMBEDDED]
    here = Path(model_id)
    return str(model_id) in EMBEDDED or (here.is_dir() and here.resolve() in places)


def is_pruned(place: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a pruned model; one that a trainer saved has no manifest."""
    if (Path(place) / MANIFEST).exists():
        return True
    try:
        content = read_json(Path(place) / "config.json")
        classes = str([content.get("architectures"), content.get("auto_map")])
        return "per_layer_config" in content and "Cocurve" in classes
    except (OSError, FileFormatError, AttributeError, TypeError):
        return False


def require_sealed(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest of a pruned model's folder, after comparing the files with its checksums.

    Weights are compared when they are read. The message of the FileFormatError is the fact alone.
    """
    manifest: dict[str, Any] = read_json(Path(folder) / MANIFEST)
    unseal_json(manifest, "Use a copy")
    sums = manifest.get("files", {})
    changed = [name for name, mark in file_sums(folder).items() if sums.get(name) != mark]
    if changed:
        raise FileFormatError(
            f"{', '.join(changed)} beside it was changed or added after the model was saved. Undo "
            "that; to change a chat template, set it before save_pruned."
        )
    return manifest


def file_sums(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the SHA-256 of each file of a pruned model that is read, other than weights."""
    folder = Path(folder)
    paths = [*map(folder.joinpath, READ), *folder.glob("additional_chat_templates/*")]
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(read_regular(p)).hexdigest()
        for p in paths
        if p.is_file()
    }


def embedding_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the input embedding [V, d]; its device and dtype count as the model's.

    It is never packed, so its dtype is also that of the activations.
    """
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def model_device(model: PreTrainedModel) -> torch.device:
    """Return the device that inputs go to."""
    return embedding_weight(model).device


def model_dtype(model: PreTrainedModel) -> str:
    """Return the model's dtype by name, such as "float32"."""
    return str(embedding_weight(model).dtype).removeprefix("torch.")


def model_name(model: PreTrainedModel) -> str:
    """Return a short name for files and titles: the last part of the model's path or hub id."""
    source = str(getattr(model.config, "_name_or_path", "") or model.config.model_type)
    return short_name(source)


def short_name(source: str) -> str:
    """Return the last part of a path or hub id, cut to 100 bytes so that file names can hold it."""
    # what ends a path on any system; file systems take 255 bytes, and shards and checkpoints add
    name = re.split(r"[/\\\0]", hub_id(source).rstrip("/"))[-1].encode("utf-8", "replace")
    return name[:100].decode("utf-8", "ignore") or "model"


def hub_id(source: str) -> str:
    """Return the hub id of a snapshot in the hub's cache, and any other path or id as it is."""
    found = re.search(r"[/\\]models--([^/\\]+)[/\\]snapshots[/\\][^/\\]+[/\\]?$", source)
    return found[1].replace("--", "/") if found else source


def fingerprint_model(model: PreTrainedModel, marks: list[list[str]] | None = None) -> str:
    """Return the SHA-256 of a model's configuration and all its weights, on any device the same.

    Of the configuration, values count that differ from the class's defaults and that no loader
    adds (path, versions, dtype). `marks` are the model's `weight_marks` if they are known already.
    """
    config = {k: v for k, v in model.config.to_diff_dict().items() if k not in _LOADER_KEYS}
    marks = weight_marks(model) if marks is None else marks
    # through JSON, so that a configuration just made and one read from a file are equal
    return fingerprint(json.loads(json.dumps(config, default=str)), marks)


def weight_marks(model: PreTrainedModel) -> list[list[str]]:
    """Return [name, SHA-256] of every weight, sorted by name. Reads all: about 10 s for an 8B."""
    read = reader_of(model)
    return [[name, fingerprint_tensor(read(name))] for name in sorted(model.state_dict())]


def vocabulary_mark(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a mark of what token ids mean: the SHA-256 of the first thousand tokens."""
    # not of all: a fine-tuned model's tokenizer may have more
    return fingerprint(tokenizer.convert_ids_to_tokens(list(range(min(1000, len(tokenizer))))))


# Origin -------------------------------------------------------------------------------------------

Marks = Mapping[str, Mapping[str, str]]  # of each weight, the SHA-256 of each form
T = TypeVar("T")


def tensor_marks(tensor: torch.Tensor) -> dict[str, str]:
    """Return the SHA-256 of a tensor in each form of a checkpoint's record (base/origin.py)."""
    own, found = fingerprint_tensor(tensor), dict[str, str]()
    for form in NARROW if _plain(tensor) and tensor.is_floating_point() else ():
        narrow = tensor.detach().to(getattr(torch, form))
        found[form] = own if narrow.dtype == tensor.dtype else fingerprint_tensor(narrow)
        # a few first: most numbers of a wider dtype do not fit, and comparing all takes as long as
        # the checksums
        parts = (slice(1024), slice(None)) if EXACT not in found else ()
        flat, wide = narrow.reshape(-1), tensor.reshape(-1)
        if parts and all(torch.equal(flat[p].to(tensor.dtype), wide[p]) for p in parts):
            found[EXACT] = found[form]
    return dict.fromkeys((LOADED, EXACT, *NARROW), own) | found


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor.detach()) is torch.Tensor  # not one of a quantizer's own


def weights_state(model: PreTrainedModel) -> list[tuple[Any, ...]]:
    """Return what differs once a weight was changed, other than through `.data`; reads none."""
    return [
        (id(w), w.dtype, w.is_inference() or w._version, _plain(w) and w.data_ptr())
        for w in model.parameters()
    ]


def known_record(
    model: PreTrainedModel, marks: Marks | None = None, *, fresh: bool = False
) -> dict[str, Any]:
    """Return the record of a model; reads its weights if they changed since, or if `fresh`.

    Changes through `.data` are seen only if it is fresh. `marks` are the `tensor_marks` of all
    weights if they are known already.
    """
    state = weights_state(model)
    seen, record = _KNOWN.get(model, (None, {}))
    if fresh or seen != state:
        read = reader_of(model)
        marks = marks or {name: tensor_marks(read(name)) for name in model.state_dict()}
        forms = {f: [[n, marks[n][f]] for n in sorted(marks)] for f in (LOADED, EXACT, *NARROW)}
        checkpoint = {LOADED: fingerprint_model(model, forms.pop(LOADED))}
        if not any(map(is_packed, model.modules())):  # numbers in 4 bits cannot be read
            checkpoint |= {form: fingerprint(found) for form, found in forms.items()}
        dtype, name = model_dtype(model), model_name(model)
        record = {"name": name, "checkpoint": checkpoint, "dtype": dtype}
        _KNOWN[model] = state, record
    return record


def require_source(model: PreTrainedModel, *things: Any, what: str = "the plan") -> Verdict:
    """Require that `what` is used on a model is of its weights; logs once what must be told.

    Args:
        model: the model.
        things: a plan or an H, or the records of one thing, of which one must fit.
        what: names them in messages.

    Raises:
        MismatchError: it is of other weights, and `allow_other_weights` did not allow them.
    """
    records = [t if isinstance(t, Mapping) else getattr(t, "origin", None) for t in things]
    known = any(record and record.get("checkpoint") for record in records)
    mine = known_record(model) if known else {}
    verdict = require_same_source(mine, *records, between=("the model", what))
    told = getattr(model, "__dict__", {}).setdefault("cocurve_told", {""})
    if verdict.note not in told:
        log.warning("%s", verdict.note)
    told.add(verdict.note)
    return verdict


def allow_other_weights(thing: T, model: PreTrainedModel) -> T:
    """Return a copy of a plan or an H that may be used on a model of other weights.

    As the plan of a base model on its fine-tuned copy. What is solved on the copy may be, too; the
    log and a pruned model's manifest say so. Files hold no such mark: allow what they hold again.
    """
    own: Any = thing
    if not hasattr(own, "origin"):
        raise InputError(f"{type(own).__name__} has no weights. Give a Selection or a Curvature.")
    mark = known_record(model)["checkpoint"].get(EXACT)
    if own.origin is None:  # made by hand, and so nobody's
        return thing
    if hasattr(own, "allowed"):  # an H
        return replace(own, allowed=(*own.allowed, mark))
    return own.with_made(origin={**own.origin, ALLOWED: (*own.origin.get(ALLOWED, ()), mark)})
