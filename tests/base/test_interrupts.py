"""Ctrl-C waits until what it must not cut is whole; another's program may not run for ever."""

from __future__ import annotations

import signal
import threading

import pytest

import cocurve_lab as cl
from cocurve_lab.base.interrupts import uninterrupted, within
from cocurve_lab.extensions.texts import documents
from cocurve_lab.extensions.texts.documents import written_chat
from helpers.tiny_models import word_tokenizer


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_while_a_sequence_is_booked_waits_until_it_is_whole() -> None:
    booked = []
    handler = signal.getsignal(signal.SIGINT)

    def book() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            booked.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        book()
    assert booked == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignored, as in a background job: it stays so
    book()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_program_ends_in_time_or_is_left() -> None:
    assert within(20, "a sum", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        within(20, "a quotient", lambda: 1 // 0)
    end = threading.Event()
    with pytest.raises(cl.InputError, match=r"a wait did not end within 0\.01 s"):
        within(0.01, "a wait", end.wait)
    end.set()


def test_a_template_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "within", lambda _, name, run: within(0.2, name, run))
    tokenizer = word_tokenizer()
    loops = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = loops
    with pytest.raises(cl.InputError, match=r"did not end within 0\.2 s"):
        written_chat(tokenizer, [{"role": "user", "content": "w1"}], "Give chat=False")
