"""Staged pruning: re-estimate the surrogate on the partly pruned model between steps.

Every surrogate is exact where it was measured and drifts from there. `staged_plan` solves up to a
ratio, builds H and the shifts again with those units masked, and continues. Units are masked, not
cut, so units, costs and guards stay those of the whole model. So does the teacher: each stage
predicts the KL from the whole model, F(S + T) with S fixed (shifts.py, estimator/algorithm1.py).

This departs from the paper, which names such a rebuild in its conclusion, as an outlook.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from ...base.arguments import as_float, as_list, require_type
from ...base.errors import InfeasibleError, InputError, MismatchError
from ...base.progress import Progress
from ...base.storage import require_settings
from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...curvature.settings import BuildOptions
from ...estimator.estimate import build_settings, estimate_curvature, load_or_estimate
from ...estimator.worker import Executor
from ...solver.guards import FREE, Guards
from ...solver.selection import Selection
from ...solver.solve import solve_greedy
from ...solver.targets import require_ratio
from .additive import ADDITIVE_KL
from .pair_kl import PAIR_KL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SURROGATES = ("H", PAIR_KL, ADDITIVE_KL)


def staged_plan(
    model: PreTrainedModel,
    curvature: Curvature,
    calibration: CalibrationSet,
    ratio: float,
    stages: Iterable[float],
    interaction_strength: float = 1.0,
    guards: Guards = FREE,
    *,
    surrogate: str = "H",
    folder: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    executor: Executor | None = None,
) -> Selection:
    """Solve a plan in stages, and measure the surrogate anew on the remaining units at each.

    Each stage costs a build over the units left. A resumed run gives the same plan.

    Args:
        model: the whole model; it is not changed.
        curvature: its H [M, M], built by ablations on `calibration`, complete. Later builds use its
            r, groups, temperature, products and size of sketch.
        calibration: rows and scored positions of every build.
        ratio: share of removable cost to remove, (0, 1).
        stages: the ratios at which to measure anew, rising, in (0, ratio); none is one shot. A
            stage that one unit jumps over is omitted.
        interaction_strength, guards: as for `solve_greedy`, in all stages. A `layer_cap_factor`
            refers to the final ratio.
        surrogate: "H", "pair KL" or "additive KL". The last two need the sketch of shifts.
        folder: stores the H of each stage, and its checkpoint while it is built; running again
            resumes. None stores nothing.
        progress, executor: as for `estimate_curvature`.

    Returns:
        A Selection in removal order, with `stages`. Its predicted risk is that of `curvature`,
        comparable with a plan in one shot.
    """
    require_type(curvature, Curvature, "curvature")
    if surrogate not in SURROGATES:
        raise InputError(
            f"surrogate is {surrogate!r}. Choose one of {', '.join(map(repr, SURROGATES))}."
        )
    ratio, places = require_ratio(ratio), _require_stages(stages, ratio)
    if surrogate != "H":
        curvature.require_shifts()
    rules = guards
    if guards.layer_cap_factor is not None:
        rules = replace(guards, layer_cap=guards.cap_at(ratio), layer_cap_factor=None)
    try:  # what no stage can reach is said now, not after its builds
        solve_greedy(curvature, ratio, interaction_strength, rules)
    except InfeasibleError as error:
        if error.stalled_ratio is None:
            raise
    top_r, options = _options(model, curvature, calibration)
    ends = [*places, ratio]
    done = _solve(curvature, surrogate, ends[0], interaction_strength, rules)
    measured: list[float] = []
    for number, (place, upto) in enumerate(pairwise(ends), start=2):
        if done.realized_ratio >= upto:
            continue
        if progress:
            print(
                f"Stage {number} of {len(ends)}: {len(done)} units are removed "
                f"({done.realized_ratio:.1%}), on to {upto:.1%}.",
                flush=True,
            )
        build = estimate_curvature if folder is None else partial(load_or_estimate, folder)
        found = build(
            *(model, curvature.units, calibration, top_r),
            options=replace(options, removed=done.pruned),
            progress=progress,
            executor=executor,
        )
        _require_whole(found, curvature, surrogate)
        done = _solve(found, surrogate, upto, interaction_strength, rules, done.pruned)
        measured.append(place)
    return Selection.from_pruned(
        curvature.units,
        done.pruned,
        curvature,
        requested_ratio=ratio,
        interaction_strength=done.interaction_strength,
        ordered=True,
        guards=guards,
        matrix=surrogate,
    )


def _solve(
    curvature: Curvature,
    surrogate: str,
    ratio: float,
    strength: float,
    guards: Guards,
    done: tuple[int, ...] = (),
) -> Selection:
    if surrogate == ADDITIVE_KL:
        return curvature.additive().solve(ratio, strength, guards, include=done)
    matrix = curvature.pair_kl() if surrogate == PAIR_KL else curvature
    return solve_greedy(matrix, ratio, strength, guards, include=done)


def _require_stages(stages: Iterable[float], ratio: float) -> list[float]:
    places = [as_float(stage, "a stage") for stage in as_list(stages, "stages")]
    bounds = [0.0, *places, ratio]
    for low, high in pairwise(bounds):
        if not low < high:
            raise InputError(
                f"stages is {places} for a ratio of {ratio:g}, but {high:g} is not above {low:g}. "
                "Give rising ratios between 0 and the ratio."
            )
    return places


def _options(
    model: PreTrainedModel, curvature: Curvature, calibration: CalibrationSet
) -> tuple[int, BuildOptions]:
    known = curvature.provenance
    if not known.get("complete") or known.get("top_r") is None or curvature.removed:
        raise InputError(
            f"stages go on from a finished build of the whole model, but this is {curvature}. "
            "Give the H of estimate_curvature."
        )
    positions, tokens = (0, 1) if curvature.shifts is None else curvature.shifts.probabilities.shape
    options = BuildOptions(
        groups=known["groups"],
        temperature=known.get("temperature", 1.0),
        refit_ratio=curvature.refit_ratio,
        bfloat16_products="products" in known,
        sketch_positions=positions,
        sketch_top=tokens,
    )
    settings = build_settings(model, curvature.units, calibration, known["top_r"], options)
    require_settings(known, settings, "H")
    return known["top_r"], options


def _require_whole(found: Curvature, dense: Curvature, surrogate: str) -> None:
    if not found.provenance["complete"]:
        raise KeyboardInterrupt("the build was stopped. Run again to go on.")
    if surrogate == "H":
        return
    shape, wanted = (of.require_shifts().probabilities.shape for of in (found, dense))
    if shape != wanted:
        raise MismatchError(
            f"the H kept for this stage has a sketch of {shape} positions and tokens, but that of "
            f"the whole model has {wanted}. Use another folder."
        )
