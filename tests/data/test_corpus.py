"""The corpus: the same on every machine, and nothing of a test in what training sees."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from data.make import world

DATA = Path(__file__).resolve().parents[2] / "data"
SIZES = {"train": 3000, "calibration": 1000, "held_out": 1000, "test": 800}
Made = dict[str, list[Any]]


@pytest.fixture(scope="module")
def made() -> Made:
    """The first documents of each split; those of training are a large sample."""
    return {split: list(world.documents(split, size)) for split, size in SIZES.items()}


@pytest.fixture(scope="module")
def train_text(made: Made) -> str:
    return "\n".join(document.text for document in made["train"])


def shipped(folder: str) -> dict[str, list[dict[str, str]]]:
    return {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted((DATA / folder).glob("*.jsonl"))
    }


def test_shipped_files_are_what_the_generator_writes(made: Made) -> None:
    for split, rows in shipped("texts").items():
        first = [(document.family, document.text) for document in made[split][: len(rows)]]
        assert [(row["family"], row["text"]) for row in rows] == first
    for family, rows in shipped("prompts").items():
        assert len(rows) >= 100
        assert rows == list(world.prompts("test", family, len(rows)))


def test_splits_share_no_document(made: Made) -> None:
    seen = [{document.text for document in documents} for documents in made.values()]
    for one, other in combinations(seen, 2):
        assert not one & other


@pytest.mark.parametrize("family", ["knowledge", "commonsense", "arithmetic", "code"])
def test_no_test_prompt_with_its_answer_is_in_training(family: str, train_text: str) -> None:
    for row in shipped("prompts")[family]:
        joint = "" if row["prompt"].endswith("\n") else " "
        assert f"{row['prompt']}{joint}{row['answer']}" not in train_text
