"""Reports: rows, the average, and the way to JSON and back."""

from __future__ import annotations

from cocurve_lab.evaluation.report import EvaluationReport

REPORT = EvaluationReport(
    suite="local",
    values={"a": {"acc": 0.5, "acc_norm": 0.25}, "b": {"exact_match": 0.75}},
    errors={"a": {"acc": 0.1, "acc_norm": 0.3}, "b": {"exact_match": 0.4}},
    samples={"a": 4, "b": 8},
    averaged={"a": "acc_norm", "b": "exact_match"},
    settings={"limit": None, "notes": ["2 of a lost their start"]},
    versions={"lm_eval": "0.4.13"},
)


def test_average_and_rows() -> None:
    assert REPORT.average == 0.5
    rows = REPORT.rows()
    assert [(row["task"], row["metric"], row["averaged"]) for row in rows] == [
        ("a", "acc", False),
        ("a", "acc_norm", True),
        ("b", "exact_match", True),
    ]
    assert rows[1]["value_error"] == 0.3
    assert rows[2]["samples"] == 8
    assert REPORT["a"]["acc"] == 0.5
