"""Every error message states a fact and then a next step, in words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from cocurve_lab.base import errors

ROOT = Path(__file__).resolve().parents[2]
ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
FOLDERS = ("cocurve_lab", "widgets/cocurve_widgets", "notebooks/cocurve_studies")
IMPERATIVES = """
add allow ask attach build call check choose clear clone close compare compute convert copy
correct count cut delete do download enumerate evaluate export extract finish free get give go
include install join keep leave load loosen lower make match measure merge move name omit pass
prune put quantize raise remove repair return run save scale search separate set shorten solve
split start take train try unpin update use wait widen write
"""
# `with reading(path, remedy):` adds the file and the next step to what these files raise
COMPLETED = (
    *("base/schema", "curvature/", "solver/", "pruner/manifest", "evaluation/report"),
    *("estimator/build", "cocurve_studies/tables", "base/storage", "interactions/"),
    *("pretrained/kept", "release/reading"),
)


def template(node: ast.expr) -> str | None:
    """The text of a message; {} where a value is put in, None where it is made elsewhere."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (template(node.left) or "{}") + (template(node.right) or "{}")
    return None


def messages() -> Iterator[tuple[str, str]]:
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                text = template(node.args[0]) if name in ERRORS else None
                if text is not None:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def has_next_step(text: str) -> bool:
    if re.search(r"\b(must be|needs its own)\b", text):  # the bound is the next step
        return True
    clauses = re.split(r"(?<=[.:;?!,}])\s+|\b(?:or|and|then|otherwise)\b", text)[1:]
    words = (re.findall(r"[\w{}]+", clause.lower()) for clause in clauses)
    return any(
        word and (word[0] in IMPERATIVES.split() or word[0].startswith("{")) for word in words
    )


def test_every_message_states_fact_and_next_step() -> None:
    found = list(messages())
    assert len(found) > 300
    bare = [
        f"{place} {text}"
        for place, text in found
        if not has_next_step(text) and not any(part in place for part in COMPLETED)
    ]
    assert bare == []
