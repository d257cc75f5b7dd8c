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


# dataset -> configuration -> (split, pattern and name of its file, rows)
_FILES: dict[str, dict[str, list[tuple[str, str, Rows]]]] = {
    "Salesforce/wikitext": {
        "wikitext-103-raw-v1": [
            ("test", "wikitext-103-raw-v1/test-00000-of-00001.parquet", [{"text": "w80"}])
        ],
        "wikitext-2-raw-v1": [
            (
                "test",
                "wikitext-2-raw-v1/test-00000-of-00001.parquet",
                [{"text": text} for text in ("", " = w1 = \n", "", "w2 w3 w4\n", "w5 w6\n", "")],
            )
        ],
    },
    "allenai/c4": {
        "en": [
            (
                "validation",
                "en/c4-validation.00000-of-00008.json.gz",
                [{"text": f"w{n % 90} w1", "url": ""} for n in range(510)],
            )
        ]
    },
    "allenai/ai2_arc": {
        name: [(s, f"{name}/{s}-00000-of-00001.parquet", [_ARC] * 3) for s in ("train", "test")]
        for name in ("ARC-Challenge", "ARC-Easy")
    },
    "Rowan/hellaswag": {
        "default": [
            (s, f"data/{s}-00000-of-00001.parquet", [_SWAG] * 2) for s in ("train", "validation")
        ]
    },
    "allenai/winogrande": {
        "winogrande_xl": [
            (s, f"winogrande_xl/{s}-00000-of-00001.parquet", [_WINO] * 2)
            for s in ("train", "validation")
        ]
    },
    "baber/piqa": {
        "default": [
            (s, f"data/{s}-00000-of-00001.parquet", [_GOAL] * 2) for s in ("train", "validation")
        ]
    },
    "allenai/openbookqa": {
        "main": [(s, f"main/{s}-00000-of-00001.parquet", [_BOOK] * 2) for s in ("train", "test")]
    },
    "aps/super_glue": {
        "boolq": [
            (s, f"boolq/{s}-00000-of-00001.parquet", [_BOOL] * 2) for s in ("train", "validation")
        ]
    },
    "cais/mmlu": {
        "all": [(s, f"all/{s}-00000-of-00001.parquet", [_MMLU] * 4) for s in ("dev", "test")]
    },
    "openai/gsm8k": {
        "main": [
            (s, f"main/{s}-00000-of-00001.parquet", [_SUM] * n)
            for s, n in (("train", 5), ("test", 2))
        ]
    },
    "openai/openai_humaneval": {
        "openai_humaneval": [("test", "openai_humaneval/test-00000-of-00001.parquet", [_CODE] * 2)]
    },
    "google-research-datasets/mbpp": {
        "full": [
            ("prompt", "full/prompt-00000-of-00001.parquet", [_mbpp(n) for n in range(1, 11)]),
            ("test", "full/test-00000-of-00001.parquet", [_mbpp(n) for n in (11, 12)]),
        ]
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
