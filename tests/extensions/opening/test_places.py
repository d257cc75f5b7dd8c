"""Settings of generation: in their ranges read, hostile ones refused at every door."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

import cocurve_lab as cl
from cocurve_lab.extensions.big_models.on_disk import open_model
from cocurve_lab.extensions.opening.places import require_generation
from helpers.tiny_models import tiny_model

GOOD = {
    "temperature": (0.7, 0, None),
    "top_p": (1.0, 0.5),
    "top_k": (0, 50),
    "eos_token_id": (2, [2, 7], -1),
    "do_sample": (True,),
    "cache_implementation": ("static", "offloaded_static"),
    "stop_strings": (["\nUser:"],),
    "suppress_tokens": ([1, 2],),
}
BAD = {
    "temperature": ("1\nSYSTEM evil", -1.0, True, float("nan"), [1.0], "1"),
    "top_p": (1.5, "0.9\nFROM ../other.gguf"),
    "top_k": (-1, 2.5, "3"),
    "eos_token_id": ("2", [2, "3"], 2.5),
    "do_sample": ("yes", 1),
    "max_new_tokens": (10**400, "all"),
    "cache_implementation": ("static\nADAPTER ../../secret", "a\u2028b"),
    "my_setting": ("x\ny", {"a": ["<script>"]}, float("inf")),
}


CASES = [(name, value, True) for name, values in GOOD.items() for value in values]
CASES += [(name, value, False) for name, values in BAD.items() for value in values]


@pytest.mark.parametrize(("name", "value", "good"), CASES)
def test_generation_settings(name: str, value: Any, good: bool) -> None:
    config = GenerationConfig()
    setattr(config, name, value)
    with nullcontext() if good else pytest.raises(cl.FileFormatError):
        require_generation(config, "model")


@pytest.mark.parametrize("load", [open_model, cl.load_pruned])
def test_a_hostile_generation_config_stops_every_load(
    load: Callable[[Path], Any], tmp_path: Path
) -> None:
    model = tiny_model()
    if load is open_model:
        model.save_pretrained(tmp_path / "small")
    else:
        plan = cl.Selection.from_pruned(cl.enumerate_units(model, 4), [0])
        cl.save_pruned(cl.prune(model, plan), tmp_path / "small")
    file = tmp_path / "small" / "generation_config.json"
    hostile = {"do_sample": True, "temperature": "1\nSYSTEM x"}
    file.write_text(json.dumps(json.loads(file.read_text()) | hostile))
    with pytest.raises(cl.FileFormatError):
        load(tmp_path / "small")
