"""What several tests of studies share: a tiny model with its H, and a model that must not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

import cocurve_lab as cl
from cocurve_studies.trust.choices import Texts
from helpers.tiny_models import GROUPS, tiny_model, tiny_text

QUIET = cl.ChoiceOptions(progress=False)


class Problem:
    """A tiny model, its H from four groups, and texts that H has not seen."""

    def __init__(self) -> None:
        self.model, self.calibration = tiny_model(), tiny_text(4)
        self.units = cl.enumerate_units(self.model, GROUPS)
        self.curvature = cl.estimate_curvature(
            self.model, self.units, self.calibration, 16, progress=False
        )
        text = tiny_text(8, 20, 5, seed=1)
        self.texts = Texts(text.rows(0, 4), text.rows(4, 8))


@contextmanager
def forbidden(model: Module) -> Iterator[None]:
    """A model that must not run."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the model ran again")

    handle = model.get_input_embeddings().register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
