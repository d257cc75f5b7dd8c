"""Perplexity against a pass of its own for every token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.extensions.judging.perplexity import PerplexityOptions
from helpers.tiny_models import CONTEXT, full_logits, opening_tokenizer, tiny_model, word_tokenizer

QUIET = PerplexityOptions(progress=False)


def words(count: int, seed: int = 0) -> str:
    return " ".join(f"w{n}" for n in np.random.default_rng(seed).integers(90, size=count))


def naive(model, ids: list[int], context: int, stride: int) -> tuple[float, int]:
    """Sum of nats and count: each token from the first window that holds it and a token before."""
    nats, count = 0.0, 0
    for token in range(1, len(ids)):
        start = next(s for s in range(0, len(ids), stride) if s <= token < s + context)
        if start == token:
            continue  # the first token of a window that begins where the one before it ended
        logits = full_logits(model, torch.tensor([ids[start:token]]))[0, -1]
        nats -= float(torch.log_softmax(logits, dim=-1)[ids[token]])
        count += 1
    return nats, count


@pytest.mark.parametrize(
    ("tokens", "context", "stride"),
    [(70, 16, 4), (71, 16, 5), (9, 16, 4), (64, 16, 16), (65, 16, 16), (20, 16, 1), (2, 2, 2)],
)
def test_equals_a_pass_per_token(tokens: int, context: int, stride: int) -> None:
    model, text = tiny_model(), words(tokens)
    nats, count = naive(model, [int(w[1:]) + 2 for w in text.split()], context, stride)
    found = cl.perplexity(model, word_tokenizer(), text, context, stride, QUIET)
    assert found.tokens == count == sum(found.window_tokens)
    assert found.nll == pytest.approx(nats / count, abs=1e-5)
    assert found.value == pytest.approx(math.exp(nats / count), rel=1e-5)


def test_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text, found = tiny_model(), words(90), []
    for size in (1, 3, 64):
        monkeypatch.setattr("cocurve_lab.extensions.judging.perplexity._BATCH_TOKENS", size * 16)
        found.append(cl.perplexity(model, word_tokenizer(), text, 16, 4, QUIET).nll)
    assert found == pytest.approx([found[0]] * 3, abs=1e-6)


def test_a_shorter_context_is_used() -> None:
    model, text = tiny_model(), words(200)
    asked = cl.perplexity(model, word_tokenizer(), text, options=QUIET)
    assert (asked.context, asked.stride) == (CONTEXT, CONTEXT // 4)
    own = cl.perplexity(model, word_tokenizer(), text, CONTEXT, CONTEXT // 4, QUIET)
    assert own.value == asked.value
    assert cl.perplexity(model, word_tokenizer(), text, 2048, 2048, QUIET).stride == CONTEXT


def test_documents_are_joined_by_a_blank_line() -> None:
    blank, whole = (
        cl.perplexity(tiny_model(), word_tokenizer(), text, 16, 4, QUIET)
        for text in (["w1 w2", "w3 w4 w5"], "w1 w2\n\nw3 w4 w5")
    )
    assert blank.nll == whole.nll


@pytest.mark.parametrize(("context", "stride"), [(16, 4), (16, 16), (3, 1)])
def test_every_window_begins_as_the_tokenizer_begins_a_text(context: int, stride: int) -> None:
    model, text, begins = tiny_model(), words(50), opening_tokenizer("<unk>", "w3")
    ids, room = [int(w[1:]) + 2 for w in text.split()], context - 2

    def found(tokenizer: Any, options: PerplexityOptions = QUIET, **more: str) -> Any:
        return cl.perplexity(model, tokenizer, text, context, stride, options, **more)

    nats = 0.0
    for token in range(50):
        starts = range(0, 50, min(stride, room))
        start = next(s for s in starts if s <= token < s + room)
        logits = full_logits(model, torch.tensor([[1, 5, *ids[start:token]]]))[0, -1]
        nats -= float(torch.log_softmax(logits, dim=-1)[ids[token]])
    assert (found(begins).tokens, found(begins).nll) == (50, pytest.approx(nats / 50, abs=1e-5))
    plain = found(word_tokenizer())
    assert found(begins, bos="") == plain
    assert found(word_tokenizer(), bos="<unk>") == found(opening_tokenizer("<unk>"))
    # the release's windows: one text, which the tokenizer begins as a whole
    settings = PerplexityOptions(progress=False, starts="first window")
    release = found(begins, settings)
    nats, count = naive(model, [1, 5, *ids], context, stride)
    assert (release.tokens, release.nll) == (count, pytest.approx(nats / count, abs=1e-5))
    assert found(word_tokenizer(), settings) == plain


def test_the_standard_error_is_that_of_windows() -> None:
    one = cl.perplexity(tiny_model(), word_tokenizer(), words(300), 20, 20, QUIET)
    assert one.standard_error == pytest.approx(
        np.std(one.window_nll, ddof=1) / 19 / math.sqrt(15), rel=1e-9
    )


def broken() -> Any:
    model = tiny_model()
    model.lm_head.weight[3, 0] = torch.nan
    return model


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *(
            (
                lambda a=given: cl.perplexity(tiny_model(), word_tokenizer(), *a, QUIET),
                cl.InputError,
            )
            for given in [
                *(("w1 w2", 16, 0), ("w1 w2", 16, 17), ("w1 w2", 1, 1)),
                *(("w1", 16, 4), ("", 16, 4), ([b"w1 w2"], 16, 4)),
            ]
        ),
        (lambda: PerplexityOptions(starts="both"), cl.InputError),  # type: ignore[arg-type]
        (
            lambda: cl.perplexity(tiny_model(), word_tokenizer(), "w1 w2", bos="absent"),
            cl.InputError,
        ),
        (
            lambda: cl.perplexity(tiny_model(), opening_tokenizer("w1", "w2"), "w1", 2, 1, QUIET),
            cl.InputError,
        ),
        (
            lambda: cl.perplexity(tiny_model(vocab_size=40), word_tokenizer(), words(50), 16, 4),
            cl.InputError,
        ),
        (
            lambda: cl.perplexity(broken(), word_tokenizer(), words(50), 16, 4, QUIET),
            cl.NumericalError,
        ),
    ],
)
def test_bad_input(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
