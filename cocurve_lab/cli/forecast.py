"""`cocurve inventory --build`: what builds would take on GPUs that are not here, as tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..base.errors import InputError
from ..base.tables import as_markdown
from ..models.units import enumerate_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..calibration import CalibrationSet

Models = Iterable[tuple[str, "PreTrainedModel"]]
Positions = int | Literal["all"]
LENGTH, TOP_R = 2048, 256
# the paper's setting, and fewer rows with more positions, whose H is as good for less
SETTINGS: tuple[tuple[int, Positions], ...] = ((128, 64), (12, "all"))
# one H100 reached 0.40 to 0.49 of it, measured (tests/benchmarks/GPU.md)
SHARE, DISK, HOST = 0.4, 3.0, 64.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --build and what goes with it."""
    parser.add_argument(
        "--build",
        action="store_true",
        help="tables of what a build of H in bfloat16 takes on GPUs of 24, 48, 80 and 141 GB",
    )
    for name, unit, what, default in (
        ("host-memory", "GB", "memory of the host; files that fit are read once", HOST),
        ("disk", "GB/s", "reading speed of the disk", DISK),
        ("share", "SHARE", "share of the data sheet's operations per second", SHARE),
    ):
        text = f"with --build: {what} ({default:g})"
        parser.add_argument(f"--{name}", metavar=unit, type=float, help=text)


def settled(options: argparse.Namespace) -> tuple[float, float, float]:
    """Host memory in bytes, disk speed in bytes per second, and the share, as given or default."""
    given = {"--host-memory": options.host_memory, "--disk": options.disk, "--share": options.share}
    for name, value in given.items():
        if value is None:
            continue
        if not options.build:
            raise InputError(f"{name} {value:g} is for --build. Add --build, or leave it out.")
        if not 0 < value < (1.0001 if name == "--share" else 1e9):
            most = ", at most 1" if name == "--share" else ""
            raise InputError(f"{name} is {value:g}. Give a number above 0{most}.")
    host, disk, share = given.values()
    return (
        1e9 * (HOST if host is None else host),
        1e9 * (DISK if disk is None else disk),
        SHARE if share is None else share,
    )


def plans(models: Models, options: argparse.Namespace, assumed: tuple[float, float, float]) -> str:
    """The builds of models on every GPU in both settings, as JSON or Markdown.

    Args:
        models: name and model of each, on the meta device.
        options: the command line.
        assumed: as from `settled`.
    """
    host, disk, share = assumed
    shapes = [(name, _in_bfloat16(model)) for name, model in models]
    tables = []
    for rows, positions in SETTINGS:
        found = list(_rows(shapes, options.ffn_groups, rows, positions, assumed))
        tables.append({"rows": rows, "positions": positions, "builds": found})
    if options.json:
        return json.dumps(tables, indent=1)
    about = (
        f'On paper, in bfloat16, rows of {LENGTH:,} tokens, r = {TOP_R}. "loaded": all weights '
        "fit on the GPU. Otherwise layers are read when they run, once in each sweep, while the "
        "GPU computes: the longer of the two times counts.\n"
        f"Assumed: {share:.0%} of the operations per second on the GPU's data sheet, a disk of "
        f"{disk / 1e9:g} GB/s, and {host / 1e9:g} GB of host memory; files that fit there are read "
        "once."
    )
    return "\n\n".join([about, *map(_table, tables)])


def _in_bfloat16(model: Any) -> PreTrainedModel:
    """The model, whose weights are on the meta device, in bfloat16."""
    return model.to(torch.bfloat16)


def _rows(
    models: Models,
    ffn_groups: int,
    rows: int,
    positions: Positions,
    assumed: tuple[float, float, float],
) -> Iterator[dict[str, Any]]:
    """One build per model and GPU."""
    from ..extensions.big_models.forecast import GPUS, build_on_paper, rows_of

    host, disk, share = assumed
    text: CalibrationSet = rows_of(rows, LENGTH, positions)
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
                "hours_reading": build.hours_reading(rows, disk, host),
            }


def _table(table: dict[str, Any]) -> str:
    """One setting as a Markdown table."""
    head = (
        *("model", "GPU", "weights", "ablations per block", "sweeps per row", "read per row"),
        *("operations per row", "hours computing", "hours reading"),
    )
    lines = []
    for row in table["builds"]:
        loaded = not row["streamed"]
        cells = (
            row["model"],
            row["gpu"],
            f"{row['weight_bytes'] / 1e9:.1f} GB",
            "loaded" if loaded else f"{row['block']:,}",
            "-" if loaded else f"{row['sweeps_per_row']:,}",
            "-" if loaded else f"{row['bytes_read_per_row'] / 1e9:,.0f} GB",
            f"{row['operations_per_row']:.1e}",
            _hours(row["hours_computing"]),
            _hours(row["hours_reading"]),
        )
        lines.append(cells)
    about = f"{table['rows']} rows, {table['positions']} positions of each scored:"
    return f"{about}\n\n{as_markdown(head, lines)}"


def _hours(hours: float) -> str:
    """Hours with two figures; what is shorter than half a minute is no more than that."""
    if hours < 0.01:
        return "< 0.01"
    return f"{hours:.2g}" if hours < 10 else f"{hours:.0f}"
