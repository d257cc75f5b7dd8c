"""Arguments in another order are errors of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import cocurve_lab as cl
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer

MODEL, TEXT, TOKENIZER = tiny_model(), tiny_text(), word_tokenizer()
PLAN: Any = cl.Selection.from_pruned(cl.enumerate_units(MODEL, GROUPS), [0])


@pytest.mark.parametrize(
    "call",
    [
        lambda: cl.pruning_risk(PLAN, MODEL, TEXT),
        lambda: cl.pruning_risk(MODEL, PLAN, "a text"),  # type: ignore[arg-type]
        lambda: cl.enumerate_units("demo"),  # type: ignore[arg-type]
        lambda: cl.continue_text(TOKENIZER, MODEL, "w1"),  # type: ignore[arg-type]
        lambda: cl.perplexity(TOKENIZER, MODEL, "w1 w2 w3"),  # type: ignore[arg-type]
        lambda: cl.answer_accuracy(MODEL, TOKENIZER, ["a question"], [PLAN]),
    ],
)
def test_arguments_in_another_order(call: Callable[[], Any]) -> None:
    with pytest.raises(cl.InputError, match="Give a"):
        call()
