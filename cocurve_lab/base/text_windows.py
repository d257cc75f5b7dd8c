"""Which text a thing has seen: hashes of its windows of tokens, and the share of a text in them.

A window is 8 tokens. A text counts as seen if a tenth of its windows is in the record, or most of
one row: 21 windows or more and above 40 %, or all. Shorter leaks are told as a share, and not
refused. Rows under 8 tokens have no window: only whole rows are compared.

The limits were measured with the demo model's tokenizer on pairs of texts that share no document.
Shares of all windows, and the largest of one row, in percent:

    rows of                        24 tokens   64 tokens   256 tokens
    demo, held-out                  0.0   0     0.6   7      0.9   5
    demo, test                      0.2  12     1.2  12      2.0   9
    WikiText-2, test in valid       1.8  59     3.5  23      3.4  11
    C4, halves of a slice           0.0   6     0.0   2      0.1   1
    TinyStories, halves             3.5  94     4.9  39      5.7  12

None of them is refused. A window of 13 tokens would find less by chance (0.3 % of WikiText) but not
a row of 24 with one token changed; one of 6 would find 10 %.

A record has at most 6,000 hashes of 48 bits, the lowest ones, in 48 kB of base64. Which windows
these are depends on their content alone, so a shift changes nothing, and records can be joined.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

import numpy as np

WINDOW, MOST, BYTES = 8, 6_000, 6
SEEN, ROW_SEEN, ROW_WINDOWS, LEAST = 0.1, 0.4, 21, 6
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


def windows(ids: np.ndarray) -> np.ndarray:
    """Hash each window of rows [N, T] of token ids: 48 bits as uint64 [N, max(T - 7, 0)]."""
    count = max(ids.shape[1] - WINDOW + 1, 0)
    found = np.zeros((len(ids), count), np.uint64)
    for place in range(WINDOW):
        # products wrap around at 2^64
        found = (found + ids[:, place : place + count].astype(np.uint64) + np.uint64(1)) * _MIX
        found ^= found >> np.uint64(29)
    return found >> np.uint64(64 - 8 * BYTES)


def record(*found: np.ndarray) -> str:
    """Record hashes as base64 text: the lowest `MOST` of all."""
    marks = np.unique(np.concatenate([each.ravel() for each in found]))[:MOST]
    content = marks.astype(">u8").view(np.uint8).reshape(-1, 8)[:, -BYTES:].tobytes()
    return base64.b64encode(content).decode()


def read(text: str) -> np.ndarray:
    """Return the hashes of a record, ascending; ValueError for another text."""
    content = np.frombuffer(base64.b64decode(text, validate=True), np.uint8).reshape(-1, BYTES)
    wide = np.zeros((len(content), 8), np.uint8)
    wide[:, -BYTES:] = content
    marks = wide.view(">u8")[:, 0].astype(np.uint64)
    if len(marks) > MOST or (marks[1:] <= marks[:-1]).any():
        raise ValueError("the hashes do not ascend, or are too many")
    return marks


def is_record(value: object) -> bool:
    """Whether a value read from a file is a record, or None for an unknown text."""
    try:
        return value is None or (isinstance(value, str) and read(value) is not None)
    except ValueError:
        return False


def joined(records: Iterable[str | None]) -> str | None:
    """Join the records of several texts; None if one has none."""
    known = list(records)
    return None if None in known else record(*(read(each or "") for each in known))


def share_seen(found: np.ndarray, known: str) -> tuple[float, bool]:
    """Return the share of the windows [N, W] of a text that a record holds, and if it is too much.

    A full record is compared by the windows that it would hold.
    """
    marks = read(known)
    full, held = len(marks) == MOST, np.isin(found, marks)
    judged = found <= marks[-1] if full else np.ones_like(held)
    rows, of = held.sum(axis=1), judged.sum(axis=1)
    share = float(rows.sum() / max(of.sum(), 1))
    least = max(LEAST, ROW_WINDOWS * of.sum() / max(held.size, 1))
    most = (rows >= least) & (rows > ROW_SEEN * of)
    whole = (rows == of) & (of > 0) & (not full)
    return share, share > SEEN or bool((most | whole).any())
