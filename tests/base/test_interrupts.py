"""Ctrl-C waits until what it must not cut is whole."""

from __future__ import annotations

import signal

import pytest

from cocurve_lab.base.interrupts import uninterrupted


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
