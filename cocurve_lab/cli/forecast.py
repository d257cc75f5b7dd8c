"""`cocurve inventory --build`: what builds would take on GPUs that are not here, as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..base.errors import InputError
from ..base.tables import as_markdown
from ..extensions.big_models.forecast import (
    GPUS,
    HERE,
    build_on_paper,
    rate_here,
    row_operations,
    rows_of,
)
from ..models.architectures import describe
from ..models.units import enumerate_units
from .options import flag

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Positions = int | Literal["all"]
LENGTH, TOP_R = 2048, 256
# the paper's setting, and fewer rows with more positions, whose H is as good for less
SETTINGS: tuple[tuple[int, Positions], ...] = ((128, 64), (12, "all"))
# one H100 reached 0.40 to 0.49 of the share, measured (tests/benchmarks/GPU.md)
ASSUMED = {"host_memory": 64.0, "disk": 3.0, "share": 0.4}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecasts of builds: --build, and the machine that they assume."""

    build: bool = flag(
        "tables of what a build of H in bfloat16 takes on GPUs of 24, 48, 80 and 141 GB"
    )
    host_memory: float | None = flag(
        "with --build: memory of the host; files that fit are read once (64)", metavar="GB"
    )
    disk: float | None = flag("with --build: reading speed of the disk (3)", metavar="GB/s")
    share: float | None = flag(
        "with --build: share of the data sheet's operations per second (0.4)", metavar="SHARE"
    )

    here: int | None = flag(
        "with --build: also what so many rows of 256 tokens take on this CPU, timed in two seconds",
        metavar="ROWS",
    )

    def __post_init__(self) -> None:
        if self.here is not None and (not self.build or self.here < 1):
            raise InputError(f"--here is {self.here}. Give at least 1 row, with --build.")
        for key, default in ASSUMED.items():
            name, value = f"--{key.replace('_', '-')}", getattr(self, key)
            if value is None:
                object.__setattr__(self, key, default)
            elif not self.build:
                raise InputError(f"{name} {value:g} is for --build. Add --build, or leave it out.")
            elif not 0 < value < (1.0001 if key == "share" else 1e9):
                most = ", at most 1" if key == "share" else ""
                raise InputError(f"{name} is {value:g}. Give a number above 0{most}.")

    def tables(
        self, models: Iterable[tuple[str, PreTrainedModel]], ffn_groups: int, as_json: bool
    ) -> str:
        """The builds of models on every GPU in both settings, as JSON or Markdown.

        Args:
            models: name and model of each, on the meta device.
            ffn_groups: FFN groups per layer.
            as_json: whether numbers are wanted, not text.
        """
        models = list(models)
        dtype: Any = torch.bfloat16
        here = [] if self.here is None else [self._here(self.here, *m, ffn_groups) for m in models]
        shapes = [(name, model.to(dtype)) for name, model in models]
        tables = [
            {
                "rows": rows,
                "positions": positions,
                "builds": list(self._builds(shapes, ffn_groups, rows, positions)),
            }
            for rows, positions in SETTINGS
        ]
        if as_json:
            return json.dumps([*tables, *here], indent=1)
        about = (
            f'On paper, in bfloat16, rows of {LENGTH:,} tokens, r = {TOP_R}. "loaded": all weights '
            "fit on the GPU. Otherwise layers are read when they run, once in each sweep, while "
            "the GPU computes: the longer of the two times counts.\n"
            f"Assumed: {self.share:.0%} of the operations per second on the GPU's data sheet, a "
            f"disk of {self.disk:g} GB/s, and {self.host_memory:g} GB of host memory; files that "
            "fit there are read once."
        )
        words = [
            f"{h['model']} on this CPU in float32, {h['threads']} threads, {h['rows']} rows of "
            f"{HERE} tokens, all positions: {h['operations_per_row']:.1e} operations per row at "
            f"{h['rate'] / 1e9:.0f} billion per second, {60 * h['hours_computing']:.3g} minutes."
            for h in here
        ]
        return "\n\n".join([about, *map(_table, tables), *words])

    def _here(
        self, rows: int, name: str, model: PreTrainedModel, ffn_groups: int
    ) -> dict[str, Any]:
        """A build of `rows` rows on this machine."""
        inputs = describe(model), enumerate_units(model, ffn_groups), rows_of(rows, HERE, "all")
        operations, rate = row_operations(*inputs, TOP_R), rate_here(model)
        return {
            "model": name,
            "rows": rows,
            "threads": torch.get_num_threads(),
            "operations_per_row": operations,
            "rate": rate,
            "hours_computing": rows * operations / rate / 3600,
        }

    def _builds(
        self,
        models: Iterable[tuple[str, PreTrainedModel]],
        ffn_groups: int,
        rows: int,
        positions: Positions,
    ) -> Iterator[dict[str, Any]]:
        """One build per model and GPU."""
        host, disk, share = (getattr(self, key) for key in ASSUMED)
        text = rows_of(rows, LENGTH, positions)
        for name, model in models:
            units = enumerate_units(model, ffn_groups)
            for gpu in GPUS:
                build = build_on_paper(model, units, text, TOP_R, gpu.memory)
                yield {
                    "model": name,
                    "gpu": gpu.name,
                    "weight_bytes": build.weights,
                    "streamed": build.streamed,
                    "units_per_batch": build.units_per_batch,
                    "block": build.block,
                    "memory_bytes": build.memory,
                    "sweeps_per_row": build.sweeps,
                    "bytes_read_per_row": build.bytes_read,
                    "operations_per_row": build.operations,
                    "hours_computing": build.hours_computing(rows, share * gpu.peak),
                    "hours_reading": build.hours_reading(rows, 1e9 * disk, 1e9 * host),
                }


def _table(table: dict[str, Any]) -> str:
    """One setting as a Markdown table."""
    head = (
        *("model", "GPU", "weights", "ablations per block", "sweeps per row", "read per row"),
        *("operations per row", "hours computing", "hours reading"),
    )
    lines = []
    for row in table["builds"]:
        streamed = ("loaded", "-", "-")
        if row["streamed"]:
            read = f"{row['bytes_read_per_row'] / 1e9:,.0f} GB"
            streamed = (f"{row['block']:,}", f"{row['sweeps_per_row']:,}", read)
        weights, operations = row["weight_bytes"] / 1e9, row["operations_per_row"]
        hours = (_hours(row["hours_computing"]), _hours(row["hours_reading"]))
        names = (row["model"], row["gpu"], f"{weights:.1f} GB")
        lines.append((*names, *streamed, f"{operations:.1e}", *hours))
    about = f"{table['rows']} rows, {table['positions']} positions of each scored:"
    return f"{about}\n\n{as_markdown(head, lines)}"


def _hours(hours: float) -> str:
    """Hours with two figures; what is shorter than half a minute is no more than that."""
    if hours < 0.01:
        return "< 0.01"
    return f"{hours:.2g}" if hours < 10 else f"{hours:.0f}"
