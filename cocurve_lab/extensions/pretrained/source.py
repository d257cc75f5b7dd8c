"""SmolLM2-135M-Instruct under its short name: what the core asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.sources import Part

if TYPE_CHECKING:
    from ...curvature.matrix import Curvature


class Smollm2:
    """SmolLM2-135M-Instruct; a `ModelSource`, whose files are imported when it is used."""

    @property
    def row_options(self) -> Mapping[str, Any]:
        """How its rows are cut."""
        from .smollm2 import END

        return {"eos": END, "bos": END, "seq_len": 256}

    def folder(self) -> Path:
        """Return its folder, whether or not it is there."""
        from .smollm2 import smollm2_folder

        return smollm2_folder()

    def require(self) -> Path:
        """Return its folder; InputError says how to get it."""
        from .smollm2 import require_smollm2

        return require_smollm2()

    def text(self, part: Part) -> tuple[list[str], str]:
        """Return a part of Python's manual, and its source with its hash."""
        from .texts import python_manual

        return python_manual(part)

    @staticmethod
    def curvature(content: dict[str, Any]) -> Curvature:
        """Return the H in the fields of a file that ships with it."""
        from .kept import curvature_of

        return curvature_of(content)

    @staticmethod
    def curvature_file() -> Path:
        """Return the file of its H, of rows of C4."""
        from .kept import KEPT_TEXTS, kept_folder

        return kept_folder() / KEPT_TEXTS["c4"]

    def questions(self) -> Path:
        """Return a file of questions that anyone can judge and it answers."""
        from .kept import kept_folder

        return kept_folder() / "questions.jsonl"
