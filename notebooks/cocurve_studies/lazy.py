"""Names of classes for annotations. Their packages are imported where they are used, not here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame
    from pandas.io.formats.style import Styler as Styler
    from plotly.graph_objects import Figure as Figure
    from transformers import (
        PreTrainedModel as PreTrainedModel,
    )
    from transformers import (
        PreTrainedTokenizerBase as PreTrainedTokenizerBase,
    )

    from cocurve_lab.calibration import CalibrationSet as CalibrationSet
    from cocurve_lab.extensions.interactions.measured import Interactions as Interactions
    from cocurve_lab.extensions.judging.answers import AnswerTable as AnswerTable
    from cocurve_lab.measuring.risk import PlanTable as PlanTable
else:
    DataFrame = Styler = Figure = PreTrainedModel = PreTrainedTokenizerBase = Any
    CalibrationSet = Interactions = AnswerTable = PlanTable = Any
