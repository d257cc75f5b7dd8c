"""What the extensions on H refuse: one table of calls, with the error and what it must name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_lab.base.errors import InfeasibleError, InputError, MismatchError, NumericalError
from cocurve_lab.curvature.matrix import merge_shards
from cocurve_lab.extensions.analysis.exact import ExactOptions
from cocurve_lab.extensions.analysis.preview import ProbeOptions
from cocurve_lab.extensions.analysis.stability import StopWhenConverged
from cocurve_lab.extensions.surrogates.additive_torch import TorchAdditiveKL
from cocurve_lab.extensions.surrogates.sketched import with_shifts
from cocurve_lab.extensions.surrogates.staged import staged_plan
from helpers.problems import make_units, random_curvature, with_random_shifts
from helpers.tiny_models import tiny_model, tiny_text

MODEL, TEXT, TOP = tiny_model(), tiny_text(4), 40
UNITS = cl.enumerate_units(MODEL, 4)
BROKEN = tiny_model()
BROKEN.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")


def estimate(model: Any = MODEL, top_r: int = TOP, method: Any = None, **rest: Any) -> cl.Curvature:
    rest = {"progress": False, "method": method} | rest
    return cl.estimate_curvature(model, UNITS, rest.pop("text", TEXT), top_r, **rest)


def build(**options: Any) -> cl.Curvature:
    return estimate(options=cl.BuildOptions(**{"groups": 2} | options))


H = build(sketch_positions=20, sketch_top=5)
WITHOUT = build(removed=[1], sketch_positions=20, sketch_top=5)
GROUPED = random_curvature(make_units(), groups=4)
SKETCHED = with_random_shifts(make_units(), positions=40)
SHIFTS, ADDITIVE = SKETCHED.require_shifts(), SKETCHED.additive()
PAIR, PLAN = SKETCHED.pair_kl(), cl.solve_greedy(random_curvature(UNITS), 0.2)


def staged(stages: Any = (0.2,), model: Any = MODEL, h: Any = H, **rest: Any) -> Any:
    rest = {"progress": False, "surrogate": "H"} | rest
    return staged_plan(model, h, rest.pop("text", TEXT), 0.6, stages, **rest)


def early(**options: Any) -> Callable[[], Any]:
    return lambda: StopWhenConverged(**options)


CALLS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # options and their methods
    (lambda: estimate(method="probe", options=cl.BuildOptions()), InputError, "ProbeOptions"),
    (lambda: estimate(method="ablation", options=ProbeOptions()), InputError, "BuildOptions"),
    (lambda: estimate(method="guess"), InputError, "guess"),
    (lambda: estimate(options={}), InputError, "dict"),
    (lambda: estimate(method="probe", checkpoint="c"), InputError, "checkpoint"),
    (lambda: estimate(method="exact", checkpoint="c"), InputError, "checkpoint"),
    (lambda: estimate(top_r=0, method="probe"), InputError, "top_r is 0"),
    (lambda: ProbeOptions(probes=0), InputError, "probes is 0"),
    (lambda: ProbeOptions(groups=0), InputError, "groups is 0"),
    (lambda: ProbeOptions(seed=-1), InputError, "seed is -1"),
    (lambda: ExactOptions(groups=0), InputError, "groups is 0"),
    (lambda: estimate(BROKEN, method="probe"), NumericalError, "sequence 0"),
    (lambda: estimate(BROKEN, method="exact"), NumericalError, "sequence 0"),
    # removed and refitted units, and sketches of a build
    (lambda: build(removed=(0, 0)), InputError, "twice"),
    (lambda: build(removed=(99,)), InputError, "99"),
    (lambda: build(removed=("L9.ffn[0]",)), InputError, r"L9\.ffn"),
    (lambda: build(removed=range(len(UNITS))), InputError, f"all {len(UNITS)} units"),
    (lambda: build(removed=3), InputError, "removed"),
    (lambda: build(removed=(0,), full_vocabulary=True), InputError, "full_vocabulary"),
    (lambda: build(removed=(0,), refit_ratio=0.4), InputError, "refit_ratio"),
    *((lambda r=r: build(refit_ratio=r), InputError, "refit_ratio") for r in (-0.1, 1.5, math.nan)),
    (lambda: build(refit_ratio="0.4"), InputError, "refit_ratio"),
    (lambda: build(sketch_positions=-1), InputError, "sketch_positions is -1"),
    (lambda: build(sketch_top=0), InputError, "sketch_top is 0"),
    (lambda: cl.Curvature.merge([H, WITHOUT]), MismatchError, "removed"),
    (lambda: WITHOUT.spectrum(), InputError, "staged H"),
    (
        lambda: merge_shards([build(shard=(1, 2)), build(shard=(2, 2), refit_ratio=0.4)]),
        MismatchError,
        r"refit_ratio is 0\.4",
    ),
    # shifts, pair KL and additive KL
    (lambda: random_curvature(UNITS).pair_kl(), InputError, "no sketch"),
    (lambda: TorchAdditiveKL(random_curvature(UNITS), "cpu"), InputError, "no sketch"),
    (lambda: TorchAdditiveKL(SKETCHED, "cpu", "float16"), InputError, "float16"),  # type: ignore[arg-type]
    (lambda: TorchAdditiveKL(SKETCHED, "nowhere"), InputError, "nowhere"),
    (lambda: ADDITIVE.predict([0], "half"), InputError, "half"),  # type: ignore[arg-type]
    (lambda: ADDITIVE.predict([99]), InputError, "99"),
    (lambda: ADDITIVE.predict(PLAN), MismatchError, "units"),
    (lambda: ADDITIVE.solve(0.9, guards=cl.Guards(layer_cap=0.3)), InfeasibleError, "0.9"),
    (lambda: replace(SHIFTS, groups=0 * SHIFTS.groups).of("price"), InputError, "price"),
    (lambda: replace(SHIFTS, base=SHIFTS.probabilities[:1]), InputError, "do not fit"),
    (lambda: SHIFTS.joined([SHIFTS, WITHOUT.require_shifts()]), InputError, "do not fit"),
    (lambda: with_shifts(random_curvature(UNITS), SHIFTS), InputError, "units"),
    (lambda: PAIR.spectrum(), InputError, "pair KL"),
    (lambda: cl.solve_gains(PAIR, cl.solve_greedy(PAIR, 0.2)), InputError, "pair KL"),
    (lambda: cl.redundancy_gate(PAIR), InputError, "pair KL"),
    # plans in stages
    (lambda: staged((0.4, 0.2)), InputError, "0.2 is not above 0.4"),
    (lambda: staged((0.2, 0.2)), InputError, "0.2 is not above 0.2"),
    (lambda: staged((0.0, 0.2)), InputError, "0 is not above 0"),
    (lambda: staged((0.2, 0.7)), InputError, "0.6 is not above 0.7"),
    (lambda: staged((math.nan,)), InputError, "nan"),
    *((lambda s=s: staged(s), InputError, "stage") for s in ("0.2", ("a",), 0.2)),
    (lambda: staged(surrogate="F"), InputError, "'F'"),
    (lambda: staged(h=build(sketch_positions=0), surrogate="pair KL"), InputError, "no sketch"),
    (lambda: staged(h=WITHOUT), InputError, "finished build"),
    (lambda: staged(h=build(shard=(1, 2))), InputError, "finished build"),
    (lambda: staged(h=random_curvature(UNITS)), InputError, "finished build"),
    (lambda: staged(model=tiny_model(seed=2)), MismatchError, "model_fingerprint"),
    (lambda: staged(text=tiny_text(4, seed=3)), MismatchError, "calibration_fingerprint"),
    (lambda: staged(guards=cl.Guards(layer_cap=0.3)), InfeasibleError, "0.6"),
    # stability
    (lambda: cl.selection_stability(GROUPED, 0.3, draws=0), InputError, "draws is 0"),
    (lambda: cl.selection_stability(GROUPED, 1.0), InputError, "ratio is 1"),
    (
        lambda: cl.selection_stability(GROUPED, 0.9, guards=cl.Guards(layer_cap=0.5)),
        InfeasibleError,
        "0.9",
    ),
    (lambda: cl.is_converged(GROUPED, tolerance=-1), InputError, "tolerance is -1"),
    (early(ratio=1.0), InputError, "ratio"),
    (early(interaction_strength=-1), InputError, "interaction_strength"),
    (early(tolerance=0), InputError, "tolerance is 0"),
    (early(patience=0), InputError, "patience 0"),
    (
        lambda: estimate(
            text=tiny_text(16, 12),
            options=cl.BuildOptions(groups=4, on_sequence=StopWhenConverged()),
        ),
        InputError,
        "4 groups",
    ),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_it_is_refused_and_what_is_wrong_is_named(number: int) -> None:
    call, error, named = CALLS[number]
    with pytest.raises(error, match=named):
        call()


def test_files_of_another_build_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "H.ckpt"
    estimate(checkpoint=path, options=cl.BuildOptions(refit_ratio=0.4))
    with pytest.raises(MismatchError, match=r"refit_ratio is 0\.4"):
        estimate(checkpoint=path)
    # the H that is kept for a stage has another sketch than that of the whole model
    fewer = with_shifts(build(sketch_positions=90), H.require_shifts())
    options = cl.BuildOptions(removed=fewer.additive().solve(0.2).pruned, groups=2)
    cl.load_or_estimate(tmp_path, MODEL, UNITS, TEXT, TOP, progress=False, options=options)
    with pytest.raises(MismatchError, match="sketch"):
        staged(h=fewer, folder=tmp_path, surrogate="additive KL")
