"""What the commands of tests/benchmarks share: arguments, times taken in turn, tables, the demo."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "notebooks" / "results"


def flag(default: Any = None, help: str | None = None, **more: Any) -> dict[str, Any]:
    """A flag of `arguments` with a help text, or with further settings of argparse."""
    return {"default": default, "help": help, **more}


def arguments(doc: str | None, quick: dict[str, Any] | None = None, **flags: Any) -> Any:
    """Parse the command line: a flag per keyword, of the type of its default.

    A list takes several values, and False is a switch. `quick` has the defaults under --quick, a
    run that only checks the command. --threads sets torch's.
    """
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=shape)
    for name, given in flags.items():
        settings = given if isinstance(given, dict) else flag(given)
        default, positional = settings["default"], settings.pop("positional", False)
        if default is False:
            settings["action"] = "store_true"
        elif isinstance(default, (list, tuple)):
            settings = ({"nargs": "+", "type": type(default[0])} if default else {}) | settings
        elif default is not None:
            settings.setdefault("type", type(default))
        parser.add_argument(name if positional else f"--{name.replace('_', '-')}", **settings)
    if quick is not None:
        parser.add_argument("--quick", action="store_true", help="small, to check the command")
    options = parser.parse_args()
    if quick is not None and options.quick:
        parser.set_defaults(**quick)
        options = parser.parse_args()
    if getattr(options, "threads", None):
        import torch  # only here: a command of numpy alone has no use for it

        torch.set_num_threads(options.threads)
    return options


# Tables -------------------------------------------------------------------------------------------


def head(*columns: object) -> None:
    """Print the two first lines of a Markdown table."""
    row(*columns)
    print("|---" * len(columns) + "|", flush=True)


def row(*cells: object) -> None:
    """Print a line of a Markdown table."""
    print(_line(cells), flush=True)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join([_line(heads), "|---" * len(heads) + "|", *map(_line, rows)])


def _line(cells: Sequence[object]) -> str:
    """One line of a table; a bar inside a cell is no border."""
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def filled(page: Path, tables: Mapping[str, str]) -> str:
    """The text of a page with tables between its marks: <!-- NAME --> and <!-- end of NAME -->."""
    text = page.read_text(encoding="utf-8")
    for name, found in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin in text:
            before, rest = text.split(begin)
            text = f"{before}{begin}\n\n{found}\n\n{end}{rest.split(end)[1]}"
    return text


def spread(values: Sequence[float], unit: str = "", places: int = 2) -> str:
    """Median and range, "1.10x (1.02 to 1.11)"."""
    middle, low, high = (f"{value:.{places}f}" for value in (median(values), *ends(values)))
    return f"{middle}{unit} ({low} to {high})"


def ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def error_bar(value: float, error: float, places: int = 4, sign: str = "") -> str:
    """A value and its standard error, "0.0413 ± 0.0020"."""
    return f"{value:{sign}.{places}f} ± {error:.{places}f}"


# Times --------------------------------------------------------------------------------------------


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """How long a call takes, with all that it started on a GPU, and what it returns."""
    from torch.utils.benchmark import timer  # only here: see `arguments`

    begun = timer()  # which waits for what the GPU has begun
    found = call()
    return timer() - begun, found


def in_turn(
    ways: Mapping[str, Callable[[], Any]], rounds: int, warm: bool = False
) -> dict[str, list[Any]]:
    """What each way returns in each round. They take turns, so that a slow minute hits all.

    Every other round goes the other way.
    """
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(-warm, rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            result = ways[name]()
            if number >= 0:
                found[name].append(result)
    return found


# The demo model -----------------------------------------------------------------------------------


def demo_rows(name: str, count: int, tokenizer: Any, seed: int = 0) -> Any:
    """`count` rows of "calibration", "held_out" or "test", every position scored."""
    import cocurve_lab as cl
    from cocurve_lab.models.identity import demo_folder

    texts = demo_folder().parent / "texts" / f"{name}.jsonl"
    settings = {"num_sequences": count, "positions_per_sequence": "all", "seed": seed}
    return cl.CalibrationSet.from_file(texts, tokenizer, **settings)


def demo(**rows: int) -> list[Any]:
    """The demo model, and so many rows of each of its texts."""
    import cocurve_lab as cl

    model, tokenizer = cl.load_model("demo", device="cpu", dtype="float32")
    return [model, *(demo_rows(name, count, tokenizer) for name, count in rows.items())]
