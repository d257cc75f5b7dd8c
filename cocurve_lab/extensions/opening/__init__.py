"""Checks of models that anybody made, before, while and after transformers loads them.

    places.py   is there a model, does its configuration ask for nothing that may not be; settings
    files.py    are the weight files whole, of this model and not packed; all checks of a load
    errors.py   what an error of transformers means, and the next step

The files are imported when a model is loaded.
"""

from __future__ import annotations

from ...models.sources import OPENING, Opening


def _checks() -> Opening:
    from . import files

    return files


OPENING.put(_checks)
