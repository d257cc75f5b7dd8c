"""The model card of a pruned model, for its readers on the hub."""

from __future__ import annotations

from ...pruner.plugs import CARDS, WriteCard


def _cards() -> WriteCard:
    from .card import write_card

    return write_card


CARDS.put(_cards)
