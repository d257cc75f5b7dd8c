"""Build the small H that ships with the demo model: the first picture of notebook 01.

    python -m data.make.small_curvature  # writes data/demo/H_16_rows.npz

It is H of few rows, rounded to float32 and without its groups, so it has no error bars. The lab
shows it until the reader's own is built, and calculates nothing else with it.
"""

import argparse
from pathlib import Path

import numpy as np

import cocurve_lab as cl

ROWS = 16
NAME = "demo (ships with it)"


def small_curvature(rows: int) -> cl.Curvature:
    """H of the demo model on rows of its calibration text, all positions scored."""
    model, tokenizer = cl.load_model("demo")
    text, _ = cl.default_calibration("demo", tokenizer, rows, positions_per_sequence="all")
    built = cl.estimate_curvature(model, cl.enumerate_units(model), text)
    matrix = built.matrix.astype(np.float32)  # a file is half as large, and no picture changes
    return cl.Curvature(matrix, built.units, built.provenance).with_provenance(model_name=NAME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(f"data/demo/H_{ROWS}_rows.npz"))
    options = parser.parse_args()
    curvature = small_curvature(ROWS)
    print(curvature)
    print(f"{curvature.save(options.out)}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
