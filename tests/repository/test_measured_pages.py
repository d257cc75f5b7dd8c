"""Pages of measurements say what the kept measurements say."""

from __future__ import annotations

import json
from types import ModuleType

import pytest

from helpers.benchmarks import command

NAMES = (
    "methods",
    "paired",
    "refitted",
    "edges",
    "strengths",
    "abilities",
    "texts",
    "kinds",
    "scales",
    "reached",
)  # claims draw at random


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return command("bench_smollm2")


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_the_real_model_has_the_tables_of_its_kept_plans(
    name: str, bench: ModuleType
) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in bench.PAGES)
    assert bench.printed(name) in pages


def test_the_page_of_gemma_has_the_tables_of_its_numbers() -> None:
    gemma = command("bench_gemma")
    text = gemma.PAGE.read_text(encoding="utf-8")
    assert gemma.page(text, json.loads(gemma.NUMBERS.read_text())) == text
