"""The contract of every family on tiny random models, as a table: family x check."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers.utils.logging import disable_progress_bar

from helpers.benchmarks import arguments, flag
from helpers.contract import measure_contract
from helpers.tiny_models import EVERY_FAMILY

HEAD = ("family", "heads", "inventory", "cost", "masked = pruned", "H = naive", "text", "reloaded")
ROW = "| {:19} | {:5} | {:>9} | {:>5} | {:>15} | {:>9} | {:>5} | {:>8} |"


def main() -> None:
    """Print the table; every number is a difference, so 0 is what it should be."""
    chosen = arguments(__doc__, family=flag(help="only these (default: all)", nargs="*")).family
    warnings.simplefilter("ignore")
    disable_progress_bar()
    print(ROW.format(*HEAD))
    print(ROW.format(*("---" for _ in HEAD)))
    for family, heads in EVERY_FAMILY:
        if chosen and family not in chosen:
            continue
        found = measure_contract(family, heads)
        numbers = f"{found.logits:.1e}", f"{found.h_error:.1e}"
        text = "equal" if found.texts_equal else "DIFFER"
        cells = (found.inventory, found.parameters, *numbers, text, f"{found.reloaded:.1e}")
        print(ROW.format(family, heads, *cells), flush=True)


if __name__ == "__main__":
    main()
