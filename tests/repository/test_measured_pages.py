"""Pages of measurements say what the kept measurements say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
NAMES = (
    "methods",
    "edges",
    "strengths",
    "abilities",
    "texts",
    "kinds",
    "scales",
)  # claims draw at random


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_smollm2", FOLDER / "bench_smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_the_real_model_has_the_tables_of_its_kept_plans(
    name: str, bench: ModuleType
) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in bench.PAGES)
    assert bench.printed(name) in pages
