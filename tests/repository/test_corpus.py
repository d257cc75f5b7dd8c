"""The corpus: the same on every machine, and nothing of a test in what training sees."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
SPLITS = ("train", "calibration", "held_out", "test")


@pytest.fixture(scope="module")
def train_text(world: ModuleType) -> str:
    """A large sample of the training stream."""
    return "\n".join(text for _, text in world.documents("train", 6000))


def shipped(folder: str) -> dict[str, list[dict[str, str]]]:
    return {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted((DATA / folder).glob("*.jsonl"))
    }


def test_shipped_files_are_what_the_generator_writes(world: ModuleType) -> None:
    for split, rows in shipped("texts").items():
        made = world.documents(split, len(rows))
        assert [(row["family"], row["text"]) for row in rows] == list(made)
    for family, rows in shipped("prompts").items():
        assert len(rows) >= 100
        assert rows == list(world.prompts("test", family, len(rows)))


def test_splits_share_no_document(world: ModuleType) -> None:
    seen = {split: {text for _, text in world.documents(split, 800)} for split in SPLITS}
    for number, split in enumerate(SPLITS):
        for other in SPLITS[:number]:
            assert not seen[split] & seen[other]


@pytest.mark.parametrize("family", ["knowledge", "commonsense", "arithmetic", "code"])
def test_no_test_prompt_with_its_answer_is_in_training(family: str, train_text: str) -> None:
    for row in shipped("prompts")[family]:
        joint = "" if row["prompt"].endswith("\n") else " "
        assert f"{row['prompt']}{joint}{row['answer']}" not in train_text


def test_arithmetic_combinations_are_held_out_in_every_form(train_text: str) -> None:
    """The unordered pair behind a test sum occurs in no training sum, whatever its wording."""
    sums = r"(\d+) (?:\+|plus|and) (\d+)"
    trained = {frozenset(pair) for pair in re.findall(sums, train_text)}
    tested = {
        frozenset(pair)
        for row in shipped("prompts")["arithmetic"]
        for pair in re.findall(sums, row["prompt"])
    }
    assert tested
    assert not tested & trained


def test_arithmetic_and_code_answers_are_true() -> None:
    for row in shipped("prompts")["arithmetic"]:
        found = re.search(r"(\d+) (\+|-|plus|minus) (\d+)", row["prompt"])
        if found:
            a, sign, b = int(found[1]), found[2], int(found[3])
            assert int(row["answer"]) == (a + b if sign in "+plus" else a - b)
    for row in shipped("prompts")["code"]:
        source, call = row["prompt"].rstrip("\n").rsplit("\n>>> ", 1)
        scope: dict[str, object] = {}
        exec(source, scope)  # our own generator's one-liners
        assert repr(eval(call, scope)) == row["answer"]
