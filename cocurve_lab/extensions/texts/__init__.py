"""Where text comes from: files of many forms, the hub, and the texts of models that have their own.

The files are imported when text is read.
"""

from __future__ import annotations

from ...models.sources import TEXTS, Texts


def _texts() -> Texts:
    from . import documents

    return documents


TEXTS.put(_texts)
