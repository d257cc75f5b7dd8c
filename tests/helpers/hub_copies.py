"""A few rows of each of the paper suite's datasets, in files laid out as on the hub."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
_ARC = {
    "id": "1",
    "question": "w1 w2?",
    "choices": {"text": ["w3", "w4 w5", "w6", "w7"], "label": ["A", "B", "C", "D"]},
    "answerKey": "B",
}
_BOOK = {"question_stem": "w8 w9", "choices": _ARC["choices"], "answerKey": "C"}
_WINO = {"sentence": "w1 _ w2 w3.", "option1": "w4", "option2": "w5", "answer": "2"}
_GOAL = {"goal": "w1 w2", "sol1": "w3", "sol2": "w4", "label": 1}
_SWAG = {
    "activity_label": "W1",
    "ctx_a": "w2 w3",
    "ctx_b": "w4",
    "endings": ["w5", "w6", "w7", "w8"],
    "label": "2",
}
_BOOL = {"passage": "w1 w2 w3.", "question": "w4 w5", "label": 1}
_MMLU = {
    "question": " w1 w2? ",
    "subject": "high_school_physics",
    "choices": ["w3", "w4", "w5", "w6"],
    "answer": 1,
}
_SUM = {"question": "w1 w2?", "answer": "w3 <<6*7=42>> w4\n#### 1,042"}
_CODE = {
    "task_id": "HumanEval/0",
    "prompt": "def f():\n",
    "canonical_solution": "    return 1\n",
    "test": "def check(g):\n    assert g() == 1\n",
    "entry_point": "f",
}


def _mbpp(number: int) -> dict[str, Any]:
    tests = [f"assert f() == {number}"]
    return {"task_id": number, "text": "w1", "code": "w2", "test_list": tests}


def _parquet(folder: str, rows: Rows, *splits: str) -> list[tuple[str, str, Rows]]:
    return [(split, f"{folder}/{split}-00000-of-00001.parquet", rows) for split in splits]


_TEXTS = [{"text": text} for text in ("", " = w1 = \n", "", "w2 w3 w4\n", "w5 w6\n", "")]
_WEB = [{"text": f"w{n % 90} w1", "url": ""} for n in range(510)]
_TRAIN = ("train", "validation")
# dataset -> configuration -> (split, name of its file, rows)
_FILES: dict[str, dict[str, list[tuple[str, str, Rows]]]] = {
    "Salesforce/wikitext": {
        "wikitext-103-raw-v1": _parquet("wikitext-103-raw-v1", [{"text": "w80"}], "test"),
        "wikitext-2-raw-v1": _parquet("wikitext-2-raw-v1", _TEXTS, "test"),
    },
    "allenai/c4": {
        "en": [("validation", "en/c4-validation.00000-of-00008.json.gz", _WEB)],
    },
    "allenai/ai2_arc": {
        name: _parquet(name, [_ARC] * 3, "train", "test") for name in ("ARC-Challenge", "ARC-Easy")
    },
    "Rowan/hellaswag": {"default": _parquet("data", [_SWAG] * 2, *_TRAIN)},
    "allenai/winogrande": {"winogrande_xl": _parquet("winogrande_xl", [_WINO] * 2, *_TRAIN)},
    "baber/piqa": {"default": _parquet("data", [_GOAL] * 2, *_TRAIN)},
    "allenai/openbookqa": {"main": _parquet("main", [_BOOK] * 2, "train", "test")},
    "aps/super_glue": {"boolq": _parquet("boolq", [_BOOL] * 2, *_TRAIN)},
    "cais/mmlu": {"all": _parquet("all", [_MMLU] * 4, "dev", "test")},
    "openai/gsm8k": {
        "main": _parquet("main", [_SUM] * 5, "train") + _parquet("main", [_SUM] * 2, "test")
    },
    "openai/openai_humaneval": {
        "openai_humaneval": _parquet("openai_humaneval", [_CODE] * 2, "test")
    },
    "google-research-datasets/mbpp": {
        "full": _parquet("full", [_mbpp(n) for n in range(1, 11)], "prompt")
        + _parquet("full", [_mbpp(n) for n in (11, 12)], "test"),
    },
}


def write_copies(folder: Path) -> Path:
    """Write all of them below a folder, and return it."""
    for dataset, configs in _FILES.items():
        card = ["---", "configs:"]
        for config, splits in configs.items():
            card += [f"- config_name: {config}", "  data_files:"]
            for split, name, rows in splits:
                _write(folder / dataset / name, rows)
                card += [f"  - split: {split}", f"    path: {name}"]
        (folder / dataset / "README.md").write_text("\n".join([*card, "---", ""]))
    # a branch of converted files has no card
    rows = {"test": ["w1 w2 w3", "w4 w5"], "train": ["w80 w81"], "validation": ["w82"]}
    for split, texts in rows.items():
        file = folder / "ptb-text-only" / "ptb_text_only" / "penn_treebank" / split / "0000.parquet"
        _write(file, [{"sentence": text} for text in texts])
    return folder


def _write(path: Path, rows: Rows) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    else:
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
