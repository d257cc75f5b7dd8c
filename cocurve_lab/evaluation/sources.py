"""Where questions and texts are: on the hub, or in a folder laid out like it.

The pinned `datasets` runs no loading scripts. A dataset that still has one is read from the branch
of the hub that holds its converted parquet files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..base.errors import InputError


@dataclass(frozen=True)
class Source:
    """A split of a dataset on the hub.

    Attributes:
        dataset: its hub id, ORGANIZATION/NAME.
        subset: its configuration; None where it has one only.
        split: the split.
        revision: the branch; None for the main one.
        files: pattern of the split's files, for a branch without configurations.
    """

    dataset: str
    subset: str | None
    split: str
    revision: str | None = None
    files: str | None = None

    def rows(
        self, data: str | os.PathLike[str] | None = None, first: int | None = None
    ) -> list[dict[str, Any]]:
        """Read the rows, one dict each.

        Args:
            data: a folder with a copy of the dataset as DATA/ORGANIZATION/NAME, the files as on the
                hub; None reads the hub.
            first: only so many from the start, streamed; None reads all.
        """
        place = self.dataset if data is None else str(local_copy(data, self.dataset))
        try:
            from datasets import load_dataset
        except ImportError:
            raise InputError(
                f"{self.dataset} needs the `datasets` package. Run `pip install "
                "'cocurve-lab[eval]'`."
            ) from None
        try:
            rows = load_dataset(
                place,
                self.subset,
                split=self.split,
                revision=None if data is not None else self.revision,
                data_files=None if self.files is None else {self.split: self.files},
                # a stream leaves no copy in the cache: a local one is there already, and of C4 only
                # the start is wanted
                streaming=data is not None or first is not None,
            )
            return [dict(row) for row in islice(rows, first)]
        except Exception as error:  # each hub client release raises its own network errors
            raise unreadable(self.dataset, data, error) from None


def local_copy(data: str | os.PathLike[str], dataset: str) -> Path:
    """Return the folder of a dataset's local copy."""
    place = Path(data) / dataset
    if not place.is_dir():
        raise InputError(
            f"there is no {place}. Copy the dataset {dataset} there, with its files as on the hub."
        )
    return place.resolve()


def unreadable(what: str, data: str | os.PathLike[str] | None, error: Exception) -> InputError:
    """Make the error of a suite that cannot read a dataset."""
    why = f"({type(error).__name__}: {error!s:.200})"
    if data is not None:
        return InputError(
            f"{what} cannot be read from its copy in {data} {why}. Copy it again, with its files "
            "as on the hub."
        )
    return InputError(
        f"{what} cannot be read from the hub {why}. Go online, name a folder of local copies "
        '(data=FOLDER, or --data FOLDER), or evaluate files you have with suite="local".'
    )
