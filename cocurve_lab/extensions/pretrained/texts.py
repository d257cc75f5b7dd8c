"""Text for a fetched model on every machine, without a corpus in the repository.

English prose of that size is in every Python: the language reference, `pydoc_data.topics`. It is
read from there and not copied. It differs between versions of Python, so its hash is told.

It is not C4. At 20 % and lambda 0, a plan from 3 rows of it costs 1.27 nats per token on C4, one
from 3 rows of C4 1.04; on WikiText .88 and 1.34. Answers that the model wrote itself are further
from C4: 1.45 and .93 (`notebooks/results/SMOLLM2_FINDINGS.md`).
"""

from __future__ import annotations

import sys
from importlib import import_module

from ...base.errors import InputError
from ...base.storage import fingerprint
from ...models.sources import Part
from .smollm2 import NAME

HELD_OUT = 4  # every fourth topic, in alphabetical order


def python_manual(part: Part) -> tuple[list[str], str]:
    """Return documents of Python's language reference, and their source with its hash.

    The parts share no document, whatever the number of rows.
    """
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise InputError(
            f"this Python has no pydoc_data.topics ({error}), the default text of {NAME}. Give a "
            "file: --text FILE, or text_file=."
        ) from None
    names = sorted(topics)
    chosen = [name for n, name in enumerate(names) if (n % HELD_OUT == 0) == (part == "held_out")]
    mark = fingerprint([[name, topics[name]] for name in names])
    version = ".".join(map(str, sys.version_info[:2]))
    source = f"{part.replace('_', '-')} part of pydoc_data.topics, Python {version} ({mark[:12]})"
    return [topics[name] for name in chosen], source
