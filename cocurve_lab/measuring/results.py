"""What measured results share: standard errors over rows, and a table that shows itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pandas import DataFrame


def standard_error(values: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean over the last axis; NaN for a single value.

    The spread is the sample standard deviation, with n - 1 in its denominator.
    """
    count = values.shape[-1]
    if count < 2:
        return np.full(values.shape[:-1], np.nan)
    return np.asarray(values.std(axis=-1, ddof=1) / np.sqrt(count))


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Return the mean of values [n] and its standard error, which is NaN for a single value."""
    return float(values.mean()), float(standard_error(values))


class Tabular:
    """A result that `print` and a notebook show as its table."""

    @property
    def table(self) -> DataFrame:
        """The result as a DataFrame, made when it is asked for."""
        raise NotImplementedError

    def __repr__(self) -> str:
        shown = self.table.to_string(float_format=lambda value: f"{value:.4g}")
        return f"{type(self).__name__}\n{shown}"

    def _repr_html_(self) -> str:
        return str(self.table.to_html())
