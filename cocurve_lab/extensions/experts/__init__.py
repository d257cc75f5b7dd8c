"""Experts of a mixture as units: one kind, and the families that have it.

A routed expert is a unit: its matrices, its biases and its row of the router. The expert that all
tokens pass is the FFN of its layer. torch is imported for annotations only.
"""

from __future__ import annotations

from ...models.architectures import register_kind
from ...models.families import add_family
from .families import MIXTURES
from .kind import EXPERT

register_kind(EXPERT)
for _family in MIXTURES:
    add_family(_family)
