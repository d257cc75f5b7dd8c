"""Seams: what an extension offers is found when asked for, and its absence is named."""

from __future__ import annotations

import pytest

import cocurve_lab as cl
from cocurve_lab.base import seams
from cocurve_lab.base.plugs import Plug
from cocurve_lab.models import layers
from cocurve_lab.models.architectures import describe
from helpers.tiny_models import tiny_model


def test_an_offer_is_imported_when_it_is_asked_for() -> None:
    seams.offer("a test", "math:hypot")
    assert seams.require_extension("a test", "this")(3, 4) == 5
    seams.offer("a test", "no_such_package:f")
    with pytest.raises(ModuleNotFoundError):
        seams.extension("a test")


def test_a_plug_gives_its_own_object_until_another_is_put_in() -> None:
    plug: Plug[list[int]] = Plug(lambda: [1])
    assert plug() == [1]
    plug.put(lambda: [2])
    assert plug() == [2]


def test_without_an_extension_weights_are_in_memory_and_a_feature_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seams, "_HOMES", {})
    with pytest.raises(cl.InputError, match="bfloat16"):
        seams.require_extension("bfloat16 products", "bfloat16_products")
    monkeypatch.setattr(layers, "STORE", Plug(layers.InMemory))
    monkeypatch.setattr("cocurve_lab.models.loading.STORE", layers.STORE)
    with pytest.raises(cl.InputError, match="stream"):
        cl.load_model("demo", device="cpu", stream=True)
    model = tiny_model()
    assert isinstance(layers.weights_of(model), layers.Resident)
    with layers.present(describe(model), 0):
        assert cl.enumerate_units(model)
    assert layers.bytes_of(model.parameters()) == 4 * model.num_parameters()
