"""Build the two H that ship with the demo model.

    python -m data.make.small_curvature          # writes data/demo/H_16_rows.npz
    python -m data.make.small_curvature --whole  # writes data/demo/H_64_rows.npz

The first is H of few rows, rounded to float32 and without its groups, so it has no error bars: the
first picture of notebook 01. The second is the H of notebooks 02 to 10, with its groups in the
short form of `write_curvature`.
"""

import argparse

import numpy as np

import cocurve_lab as cl
from cocurve_lab.extensions.pretrained.kept import write_curvature

ROWS, WHOLE = 16, 64
NAME = "demo (ships with it)"


def demo_curvature(rows: int) -> cl.Curvature:
    """H of the demo model on rows of its calibration text, all positions scored."""
    model, tokenizer = cl.load_model("demo")
    text, _ = cl.default_calibration("demo", tokenizer, rows, positions_per_sequence="all")
    built = cl.estimate_curvature(model, cl.enumerate_units(model), text)
    return built.with_provenance(model_name=NAME, kept="demo")


def small_curvature(rows: int) -> cl.Curvature:
    """The same without its groups."""
    built = demo_curvature(rows)
    # in float32 a file is half as large, and no picture changes
    return cl.Curvature(built.matrix.astype(np.float32), built.units, built.provenance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--whole", action="store_true")
    if parser.parse_args().whole:
        write_curvature(demo_curvature(WHOLE), f"data/demo/H_{WHOLE}_rows.npz")
    else:
        print(small_curvature(ROWS).save(f"data/demo/H_{ROWS}_rows.npz"))


if __name__ == "__main__":
    main()
