"""The files in which measurements of plans are kept: one for each model and text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.storage import fingerprint
from ...measuring.plan_memory import model_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...calibration import CalibrationSet
    from .generation import Question

Folder = str | os.PathLike[str] | None  # where results are kept; None keeps nothing


def plans_file(folder: Folder, model: PreTrainedModel, text: CalibrationSet) -> Path | None:
    """Return the file of measured plans of a model on a text, for `measure_plans(checkpoint=...)`.

    All studies in a folder share it, so a plan measured in one is not measured again in another.
    """
    return _file(folder, "plans", model, text.fingerprint)


def answers_file(
    folder: Folder, model: PreTrainedModel, questions: Sequence[Question]
) -> Path | None:
    """Return the file of answers of a model's plans, for `AnswerOptions(checkpoint=...)`.

    Args:
        folder: of the tables; None keeps nothing.
        model: the dense model.
        questions: all of them, in the order in which they are given to be asked.
    """
    asked = [[q.capability, q.prompt, q.answer] for q in questions]
    return _file(folder, "answers", model, fingerprint(asked))


def _file(folder: Folder, name: str, model: PreTrainedModel, text_mark: str) -> Path | None:
    if folder is None:
        return None
    mark = fingerprint(*model_settings(model).values(), text_mark)
    return Path(folder) / f"{name}_{mark[:10]}.ckpt"
