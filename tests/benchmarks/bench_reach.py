"""How far is an edge of H true? Measured interactions against H's, from two units to two layers.

    python tests/benchmarks/bench_reach.py demo data/demo/H_16_rows.npz
    python tests/benchmarks/bench_reach.py smollm2 kept --rows 2 --folder reach

It prints the tables and findings of notebook 06. All measurements are kept in --folder: after
Ctrl-C the same command goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.pretrained.kept import kept_curvature
from cocurve_studies.findings import told
from cocurve_studies.tables import shown
from cocurve_studies.trust import findings, reach
from helpers.benchmarks import arguments, flag


def main() -> None:
    options = arguments(
        __doc__,
        {"rows": 2, "pairs": 2, "sets": 2, "blocks": 2, "layers": 2},
        model=flag(help="as for load_model", positional=True),
        curvature=flag(help='a file of H, or "kept": the one that ships', positional=True),
        rows=flag(4, "rows to measure on"),
        text=flag(None, "a file of text; by default the model's own"),
        skip=flag(1, "rows of --text to leave out before, such as those of H"),
        folder=flag("reach", "where everything is kept"),
        pairs=12,
        sets=12,
        blocks=20,
        layers=15,
        threads=flag(type=int),
    )
    model, tokenizer = cl.load_model(options.model)
    kept = kept_curvature(options.model) if options.curvature == "kept" else None
    curvature = kept or cl.Curvature.load(options.curvature)
    rows_as = {"text_file": options.text, "positions_per_sequence": "all"}
    _, held_out = cl.default_calibration(
        options.model, tokenizer, options.skip, options.rows, **rows_as
    )
    names = ("pairs", "sets", "blocks", "layers")
    asked = reach.ReachOptions(**{name: getattr(options, name) for name in names})
    print(f"{curvature!r}\n{held_out!r}\n", flush=True)
    table = reach.edge_reach(model, curvature, held_out, asked, cache=options.folder)
    summary = reach.reach_summary(table)
    for rows, columns in (
        (summary, reach.COLUMNS),
        (summary, reach.SATURATION_COLUMNS),
    ):
        print(f"\n{shown(rows, columns).data}")
    print(f"\n{told(findings.reach_findings(table))}")


if __name__ == "__main__":
    main()
