"""Two devices without a GPU: CPU tensors that say they are elsewhere, and refuse to be mixed.

Values are real, so results can be compared to the bit. What torch does on a real device is not
seen: its kernels, its streams and its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

import cocurve_lab as cl
from cocurve_lab.models.identity import model_device
from cocurve_lab.models.layers import weights_of
from cocurve_lab.models.loading import pick_device, pick_dtype
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer, write_model

# a device type that torch can name and no build of it has; libraries treat it like no other
PRETENDED = "lazy"
FIRST, SECOND = torch.device(PRETENDED, 0), torch.device(PRETENDED, 1)
WITHOUT_DOUBLE = torch.device("mps", 0)  # pretended too
CPU = torch.device("cpu")
_FACTORIES = (
    *("zeros", "ones", "empty", "full", "arange", "tensor", "as_tensor", "eye", "rand", "randn"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "scalar_tensor", "linspace"),
)
# what takes tensors of several devices in torch, too
_ACROSS = {"copy_", "__set__", "_has_compatible_shallow_copy_type"}
_to = Tensor.to


class Placed(Tensor):
    """A tensor on a pretended device; `place` says which."""

    place: torch.device

    @staticmethod
    def __new__(cls, values: Tensor, place: torch.device | None = None, **_: Any) -> Placed:
        found: Placed = _plain(values).detach().as_subclass(cls)
        found.place = place or place_of(values)
        if found.place.type == WITHOUT_DOUBLE.type and found.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # all in here is about the real tensors
            return cls._call(func, args, dict(kwargs or {}))

    @staticmethod
    def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.__name__
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if (owner, name) == ("device", "__get__"):
            return place_of(args[0])
        if name == "to":
            return _moved(*args, **kwargs)
        if name == "numpy":
            raise TypeError(f"can't convert {place_of(args[0])} device type tensor to numpy")
        asked = kwargs.get("device")
        place = torch.device(asked) if asked else _common(name, args, kwargs)
        place = CPU if name == "cpu" else place
        if asked:
            kwargs["device"] = _real(place)
        if (owner, name) == ("data", "__set__"):
            args[0].place = place_of(args[1])
        found = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        if name in ("__get__", "__set__") and owner not in ("data", "grad", "T", "mT", "_base"):
            return found
        return tree_map(lambda out: _put(out, place), found)


def place_of(values: Tensor) -> torch.device:
    """The device that a tensor says it is on."""
    return getattr(values, "place", None) or (torch.device("meta") if values.is_meta else CPU)


def _real(place: torch.device) -> torch.device:
    """Where the numbers of a tensor are."""
    return place if place.type in ("cpu", "meta") else CPU


def _plain(value: Any) -> Any:
    if not isinstance(value, Placed):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


def _put(value: Any, place: torch.device) -> Any:
    if not isinstance(value, Tensor) or place == _real(place):
        return _plain(value)
    return Placed(value, place)


def _common(name: str, args: Any, kwargs: Any) -> torch.device:
    """The one device of all tensors of a call.

    Raises:
        RuntimeError: they are on several.
    """
    if name in _ACROSS or (name == "__setitem__" and not _indexes(args[1])):
        return place_of(args[0])
    counted = [args[0]] if name == "__getitem__" else tree_leaves((args, kwargs))
    if name == "__getitem__":  # torch takes indices from the CPU, too
        counted += [index for index in _indexes(args[1]) if place_of(index) != CPU]
    places = {place_of(t) for t in counted if isinstance(t, Tensor) and (t.dim() or _is_far(t))}
    if len(places) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} found "
            f"{' and '.join(sorted(map(str, places)))}"
        )
    return places.pop() if places else CPU


def _is_far(values: Tensor) -> bool:
    return place_of(values) != CPU


def _indexes(index: Any) -> list[Tensor]:
    return [value for value in tree_leaves(index) if isinstance(value, Tensor)]


def _moved(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`, also to and from pretended devices."""
    if args and isinstance(args[0], Tensor):
        args = (place_of(args[0]), args[0].dtype, *args[1:])
    copy = kwargs.pop("copy", False)
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    place = device or place_of(values)
    if place == place_of(values) and dtype in (None, values.dtype) and not copy:
        return values  # as torch does where there is nothing to do
    with torch._C.DisableTorchFunctionSubclass():
        found = _to(_plain(values), _real(place), dtype or values.dtype, copy=copy)
    return _put(found, place)


def _made(factory: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(factory)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return factory(*args, **kwargs)
        place = torch.device(device)
        return _put(factory(*tree_map(_plain, args), device=_real(place), **kwargs), place)

    return make


@contextmanager
def pretended_devices() -> Iterator[tuple[torch.device, torch.device]]:
    """Two devices that `to`, factories and modules take inside the block, in every thread."""
    _device_constructors()  # torch remembers what these are: the real ones, not ours
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", lambda self, *args, **kwargs: _moved(self, *args, **kwargs))
        for name in _FACTORIES:
            patch.setattr(torch, name, _made(getattr(torch, name)))
        # else a module keeps its parameters and changes their numbers only
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            yield FIRST, SECOND
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)


# Models on another device, and spread over two ----------------------------------------------------


TEXT = tiny_text(2, 20, 6)


@pytest.fixture(autouse=True)
def pretended() -> Iterator[None]:
    with pretended_devices():
        yield


def build(model: Any) -> cl.Curvature:
    return cl.estimate_curvature(model, cl.enumerate_units(model, GROUPS), TEXT, 16, progress=False)


def same(model: Any, whole: Any) -> None:
    """H, the KL of plans and text are those of a model on the CPU."""
    expected = build(whole)
    found = build(model)
    assert np.array_equal(found.matrix, expected.matrix)
    assert found.matrix.trace() > 0
    plans = [cl.Selection.from_pruned(expected.units, chosen) for chosen in ([0], [1, 5], [3, 9])]
    tables = [cl.measure_plans(each, plans, TEXT, progress=False) for each in (model, whole)]
    assert np.array_equal(tables[0].kl, tables[1].kl)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_a_model_on_another_device_gives_the_same_numbers(family: str) -> None:
    model = tiny_model(family, "gqa").to(FIRST)
    assert model_device(model) == FIRST
    same(model, tiny_model(family, "gqa"))


def test_a_device_without_float64_leaves_sums_to_the_cpu() -> None:
    with pytest.raises(TypeError, match="float64"):
        torch.ones(2, device=WITHOUT_DOUBLE).double()
    model = tiny_model().to(WITHOUT_DOUBLE)
    same(model, tiny_model())
    tokenizer, text = word_tokenizer(), " ".join(f"w{at % 90}" for at in range(80))
    values = [
        cl.perplexity(m, tokenizer, text, context=16, stride=8) for m in (model, tiny_model())
    ]
    assert values[0] == values[1]
    with pytest.raises(TypeError, match="float64"):
        cl.load_model("demo", device="mps", dtype="float64")


@pytest.mark.parametrize(
    ("device", "demo", "asked", "chosen"),
    [
        ("cpu", False, None, torch.float32),
        ("cuda:1", False, None, "auto"),
        ("xpu", False, None, "auto"),
        ("cuda", True, None, torch.float32),
        ("cpu", False, "bfloat16", torch.bfloat16),
        ("cuda", True, torch.float64, torch.float64),
        ("mps", False, "float16", torch.float16),
    ],
)
def test_the_dtype_follows_from_device_and_wish(
    device: str, demo: bool, asked: Any, chosen: Any
) -> None:
    assert pick_dtype(torch.device(device), asked, demo) == chosen


def test_the_device_is_the_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for usable, best in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda usable=usable: usable)
        assert pick_device() == torch.device(best)
        assert pick_device("lazy:1") == SECOND
        assert pick_device("cpu").type == "cpu"


def saved(folder: Path, family: str = "llama") -> Path:
    write_model(folder, tiny_model(family, "gqa"))
    return folder


@pytest.mark.parametrize(
    ("family", "rest"),
    [
        ("llama", []),
        ("gemma2", []),
        ("llama", ["cpu"]),
        ("llama", ["disk"]),
        ("llama", ["cpu", "disk"]),
    ],
)
def test_a_device_map_of_load_model_gives_the_same_numbers(
    tmp_path: Path, family: str, rest: list[str]
) -> None:
    folder = saved(tmp_path, family)
    layers = [FIRST, SECOND, SECOND][: 3 - len(rest)] + rest
    places = {f"model.layers.{at}": place for at, place in enumerate(layers)}
    places |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb"), FIRST)
    # the head of gemma2 is its embedding
    places |= {"model.norm": SECOND, "lm_head": FIRST if family == "gemma2" else SECOND}
    model, _ = cl.load_model(folder, dtype="float32", device_map=places)
    whole, _ = cl.load_model(folder, device="cpu")
    same(model, whole)
    assert len(weights_of(model).devices) == len(rest)


def test_a_model_streamed_to_another_device_gives_the_same_numbers(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    model, tokenizer = cl.load_model(folder, device=FIRST, dtype="float32", stream=True)
    assert set(weights_of(model).devices.values()) == {FIRST}
    whole, _ = cl.load_model(folder, device="cpu")
    same(model, whole)
    texts = [
        cl.continue_text(each, tokenizer, "w3 w9", max_new_tokens=4) for each in (model, whole)
    ]
    assert texts[0] == texts[1]
