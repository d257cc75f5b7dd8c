"""What a saved folder holds for others: a configuration for transformers, and a model card.

    configuration.py     config.json, so that transformers loads the folder without this library
    modeling_cocurve.py  copied beside the weights; builds layers of different widths
    card.py              the model card, for readers on the hub

The files are imported when a folder is saved.
"""

from __future__ import annotations

from ...pruner.folder import PUBLISHING, Publishing


def _publishing() -> Publishing:
    from . import configuration

    return configuration


PUBLISHING.put(_publishing)
