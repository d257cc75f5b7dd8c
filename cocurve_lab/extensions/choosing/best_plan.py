"""`best_plan`: from a model, a budget and some minutes to the best smaller model, in one call.

H is built on as many rows as its share of the time allows, and whole layers are measured alone
and in pairs. Plans of H, of the KL of single units and of layers are measured. The best of them
starts a search by measured KL that moves units and layers. The best plan as pruned need not be the
best one refitted, so the plan found and those that it competed with are refitted, as many as the
time allows, and the best of them is taken. All numbers of the report are measured on rows that no
step before has seen.
"""

from __future__ import annotations

import logging
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...base.arguments import as_float
from ...base.errors import InfeasibleError, InputError
from ...base.progress import Progress
from ...calibration import LONGEST_ROW, CalibrationSet
from ...curvature.matrix import Curvature
from ...curvature.settings import BuildOptions
from ...estimator.build import Build
from ...estimator.estimate import estimate_curvature
from ...measuring.results import mean_and_error
from ...measuring.risk import Side, compare_models, measure_plans
from ...models.architectures import describe
from ...models.identity import model_device, model_name
from ...models.runtime import context_of, measuring, require_one_device
from ...models.units import UnitSet, enumerate_units
from ...pruner.cutting import prune
from ...solver.guards import FREE, Guards
from ...solver.selection import Selection
from ...solver.solve import solve_greedy
from ...solver.targets import Target
from ..analysis.variants import measured_diagonal
from ..interactions.measured import Interactions, measure_interactions
from ..judging.kept import plans_file
from ..judging.perplexity import Perplexity
from ..pretrained.kept import kept_curvature
from ..pretrained.texts import python_manual
from ..repairing.repair import RepairOptions, repair
from ..texts.documents import default_calibration, own_text
from .report import Samples, cost_of_ratios, page, write_samples
from .search import PlanSearch, search_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
# of the time: when the build ends, and when the search does, without and with refits after it
_BUILD, _SEARCH, _SEARCH_THEN_REFITS = 0.4, 0.85, 0.7
_LAYERS = 0.1  # of the time, for measured layers
_SEARCH_ROWS, _JUDGE_ROWS, _TEST_ROWS, _OTHER_ROWS = 32, 16, 16, 8
_LONGEST, _SHORTEST = LONGEST_ROW, 256  # tokens of a row whose length is not given
_REFIT, _PASSES = 0.1, 5  # of the time, for the first refit; a row of it costs up to five passes
_LEAST_REFITTED = 16  # rows of a refit


@dataclass(frozen=True, eq=False)
class BestPlan:
    """What `best_plan` found. `print` it for the report; a notebook shows it as a page.

    Attributes:
        selection: the plan: that of the search, or another one whose refit is better.
        model: the smaller model, refitted if that is better.
        made_by: what made the plan, such as "the search" or "measured layers, lambda 0".
        repaired: whether it is refitted.
        curvature: H over the rows that the time allowed.
        search: the search, with its start.
        start: what made the start: "H, lambda 1", "KL of each unit alone", and so on.
        pruned, refitted: the plan as pruned, and the best refit, on the test rows; `refitted` is
            None where no refit was asked for.
        refits: KL of each refit on the judging rows, by what made its plan; nats per token.
        samples: what both models write after some prompts, and how fast.
        costs: KL of plans of 10, 20 and 30 % on four judging rows, by what makes the plan.
        test: the rows of the report.
        minutes: the minutes that it took.
    """

    selection: Selection
    model: PreTrainedModel
    made_by: str
    repaired: bool
    curvature: Curvature
    search: PlanSearch
    start: str
    pruned: Side
    refitted: Side | None
    refits: dict[str, float]
    samples: Samples
    costs: list[tuple[str, list[str]]]
    test: CalibrationSet
    minutes: float

    @property
    def side(self) -> Side:
        """The result on the test rows."""
        return self.refitted if self.repaired and self.refitted is not None else self.pruned

    @property
    def kl(self) -> float:
        """KL(dense || result) on the test rows, nats per token."""
        return float(self.side.kl.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of `kl` over rows, nats per token."""
        return self.side.error

    @property
    def perplexities(self) -> tuple[Perplexity, Perplexity]:
        """Perplexity of the dense model and of the result on the test rows."""
        rows, tokens = self.test.scored.shape
        protocol = (
            f"{rows} rows of {self.test.seq_len} tokens ({self.test.source}), each by itself."
        )
        dense, mine = (
            Perplexity(
                value=float(np.exp(loss.mean())),
                nll=float(loss.mean()),
                tokens=rows * tokens,
                protocol=protocol,
                context=self.test.seq_len,
                stride=self.test.seq_len,
                window_nll=tuple((loss * tokens).tolist()),
                window_tokens=(tokens,) * rows,
            )
            for loss in (self.side.dense_loss, self.side.loss)
        )
        return dense, mine

    @property
    def page(self) -> str:
        """The report as an offline page of HTML."""
        return page(self)

    def _repr_html_(self) -> str:
        return self.page

    def __repr__(self) -> str:
        plan, side, search = self.selection, self.side, self.search
        total = plan.units.total_parameters or plan.units.total_cost
        dense, mine = self.perplexities
        refit = "not refitted"
        if self.refitted is not None:
            better = "taken" if self.repaired else "not taken, as it is no better on held-out rows"
            refit = f"refit {better} (on the rows of this report {self.pruned.kl.mean():.4f} "
            refit += (
                f"without, {self.refitted.kl.mean():.4f} with). On the judging rows: "
                + ", ".join(f"{name} {kl:.4f}" for name, kl in self.refits.items())
            )
        return "\n".join(
            [
                f"Removed {plan.pruned_cost:,} of {total:,} parameters "
                f"({plan.realized_ratio:.2%} of those that can be removed).",
                f"KL(dense || result) {self.kl:.4f} ± {self.standard_error:.4f} nats per token, on "
                f"{len(side.kl)} rows that no step before has seen.",
                f"Perplexity on them {dense.value:.3f} dense, {mine.value:.3f} now.",
                f"The likeliest next token is the dense model's at {side.kept:.1%} of positions.",
                f"H: {self.curvature.provenance['sequences_done']} rows; start: {self.start}; the "
                f"plan is that of {self.made_by}.",
                f"Search: {search.evaluations:,} row evaluations; {search.distance} units differ "
                f"from the start, whose KL on the judging rows was {search.held_out.mean[0]:.4f}, "
                f"now {search.kl:.4f}.",
                f"Repair: {refit}.",
                f"It took {self.minutes:.1f} minutes.",
            ]
        )


def best_plan(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: float | Target,
    minutes: float = 30.0,
    *,
    guards: Guards = FREE,
    refit: bool = True,
    num_sequences: int = 128,
    text_file: str | os.PathLike[str] | None = None,
    seq_len: int | None = None,
    curvature: Curvature | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress = True,
) -> BestPlan:
    """Find the best smaller model of a size that some minutes of work buy.

    H takes 40 % of the time, or less if it runs out of rows; measured layers up to 10 %, the search
    20 %, refits and the report the rest. A refit gets as many rows as fit. A step that has begun is
    ended, so the whole may take a little longer, and much longer where one row of H takes longer
    than its share. The search uses rows like those of H; the rows of the judging and of the test
    are used for nothing else. A refit is taken
    if its KL is lower on the judging rows, and if it is not worse on another kind of text by more
    than one standard error: Python's manual, unless the model's own text is all there is.

    Args:
        model: the dense model; it is left as it was.
        tokenizer: its tokenizer.
        target: share of removable parameters to remove, (0, 1), or a `Target`.
        minutes: the time to spend.
        guards: where units may go.
        refit: refit the plan found and others, and take the best if it is better (`repair`).
        num_sequences: the most rows for H and for a refit; 128 in the paper. Another 32 are for
            judging and for the report.
        text_file: the text for all of it; None takes the model's default (C4 from the hub). Where
            the hub cannot be read, Python's manual stands in, and a warning says so.
        seq_len: tokens per row; None takes the most, up to 2048 and the context, of which eight
            rows of H fit into its share of the time, but at least 256.
        curvature: an H of the model that is there already; None takes the one that ships with it,
            or builds one.
        checkpoint: a folder for what is measured; the same call with more minutes goes on from it.
        progress: show progress.

    Returns:
        A BestPlan; `.model` can be saved with `save_pruned`.

    Raises:
        InfeasibleError: no plan reaches the target under the guards.
        KeyboardInterrupt: Ctrl-C; with a checkpoint nothing that was measured is lost.
    """
    minutes = as_float(minutes, "minutes")
    if not 0 < minutes < math.inf:
        raise InputError(f"minutes are {minutes}. Give the time to spend, such as 30.")
    require_one_device(model)  # it is pruned and refitted in memory
    clock = Clock(60 * minutes)
    units = enumerate_units(model)
    # before hours of work: whether the target can be reached at all
    solve_greedy(Curvature(np.eye(len(units)), units), target, 0.0, guards)
    if seq_len is None and own_text(model_name(model)) is None:
        seq_len = row_length(model, tokenizer, len(units), clock)
    calibration, judge, test, other_text = _rows(
        model, tokenizer, num_sequences, text_file, seq_len
    )
    folder = None if checkpoint is None else Path(checkpoint)
    if curvature is None:
        curvature = kept_curvature(model_name(model))
    if curvature is None:
        curvature = _build(model, units, calibration, clock, folder, progress)
    done = curvature.provenance.get("sequences_done", _SEARCH_ROWS)
    rows = calibration.rows(0, max(2, min(_SEARCH_ROWS, done, len(calibration))))
    clock.tell("Measuring whole layers and the plans to start from", progress)
    layers = _layers(model, units, rows.rows(0, 2), clock, folder, progress)
    path = plans_file(folder, model, rows)
    named = _candidates(curvature, layers, target, guards)
    plans = list(named.values())
    table = measure_plans(model, plans, rows, checkpoint=path, progress=progress)
    best = int(table.mean.argmin())
    begun, few = clock.gone, rows.rows(0, 2)
    measure_plans(model, plans, few, progress=False)  # no file: it may know them
    seconds = (clock.gone - begun) / (len(plans) * len(few))
    # the row evaluations that fit; at least 1
    end = (_SEARCH_THEN_REFITS if refit else _SEARCH) * clock.total
    evaluations = max(1, int((end - clock.gone) / seconds))
    clock.tell(f"Searching near {list(named)[best]}, {evaluations:,} row evaluations", progress)
    found = search_plan(
        model,
        plans[best],
        rows,
        held_out=judge,
        evaluations=evaluations,
        surrogate=curvature,
        scales=() if layers is None else (layers,),
        checkpoint=path,
        progress=progress,
    )
    plan, made_by, repaired = found.selection, "the search", False
    refitted, refits = None, dict[str, float]()
    smaller: PreTrainedModel | None = None
    if refit:
        by_kl = [list(named)[place] for place in table.mean.argsort()]
        contenders = {made_by: plan} | {name: named[name] for name in by_kl}
        fit = int(_REFIT * clock.total / (_PASSES * seconds))
        fitted = calibration.rows(0, min(len(calibration), max(_LEAST_REFITTED, fit)))
        clock.tell(f"Refitting on {len(fitted)} rows", progress)
        name, other, repaired, refits = _best_refit(
            model, contenders, fitted, [judge, *other_text], clock, progress
        )
        # chosen on the judging rows, told on the test rows
        refitted = compare_models(model, other, test)
        if repaired:
            plan, smaller, made_by = contenders[name], other, name
    clock.tell("Writing the report", progress)
    as_pruned = prune(model, plan)
    pruned = compare_models(model, as_pruned, test)
    smaller = as_pruned if smaller is None else smaller
    return BestPlan(
        selection=plan,
        model=smaller,
        made_by=made_by,
        repaired=repaired,
        curvature=curvature,
        search=found,
        start=list(named)[best],
        pruned=pruned,
        refitted=refitted,
        refits=refits,
        samples=write_samples(model, smaller, tokenizer, test),
        costs=cost_of_ratios(model, curvature, judge.rows(0, 4)),
        test=test,
        minutes=clock.gone / 60,
    )


# Steps --------------------------------------------------------------------------------------------


class Clock:
    """The seconds there are, and those since the start."""

    def __init__(self, seconds: float) -> None:
        self.total, self.begun = seconds, time.monotonic()

    @property
    def gone(self) -> float:
        return time.monotonic() - self.begun

    def tell(self, what: str, progress: Progress) -> None:
        """Say what begins, and how much time is left."""
        if progress:
            left = max(0.0, self.total - self.gone)
            print(f"{what}; {left / 60:.1f} of {self.total / 60:g} minutes are left.", flush=True)


def row_length(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, units: int, clock: Clock
) -> int | None:
    """Tokens per row of which eight rows of H fit into its share; None: the most there are.

    A row of H costs about half a forward pass of the row for each unit.
    """
    most = int(min(_LONGEST, context_of(model), tokenizer.model_max_length))
    if most <= _SHORTEST:
        return None
    ids = torch.zeros(1, _SHORTEST, dtype=torch.long, device=model_device(model))
    begun = clock.gone
    with measuring(model, torch.get_num_threads()):
        describe(model).last_hidden(ids)
    a_row = max(1e-9, (clock.gone - begun) * units / 2)
    fit = _BUILD * clock.total / (8 * a_row)  # in units of the shortest length
    length = _SHORTEST * 2 ** max(0, int(math.log2(max(1.0, fit))))
    return None if length >= most else length


def _rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_sequences: int,
    text_file: str | os.PathLike[str] | None,
    seq_len: int | None,
) -> tuple[CalibrationSet, CalibrationSet, CalibrationSet, list[CalibrationSet]]:
    """Rows to build, search and refit on, to judge on, for the report, and of another text.

    The other text is Python's manual, which ships. There is none where a model's own text is all
    that it reads, and where the manual has to stand in for C4.
    """
    held_out, own = _JUDGE_ROWS + _TEST_ROWS, own_text(model_name(model))
    given: dict[str, Any] = {"positions_per_sequence": "all", "seq_len": seq_len}
    try:
        built, others = default_calibration(
            model_name(model), tokenizer, num_sequences, held_out, text_file, **given
        )
        other = []
        if text_file is not None or own is None:
            documents, source = python_manual("held_out")
            other = [
                CalibrationSet.from_texts(
                    documents, tokenizer, _OTHER_ROWS, built.seq_len, "all", source=source
                )
            ]
    except InputError as error:
        if text_file is not None or own is not None:
            raise
        log.warning("%s Python's manual stands in for it.", error)
        given["seq_len"], other = _SHORTEST, []
        built, others = (
            CalibrationSet.from_texts(documents, tokenizer, count, source=source, **given)
            for count, (documents, source) in (
                (num_sequences, python_manual("calibration")),
                (held_out, python_manual("held_out")),
            )
        )
    return built, others.rows(0, _JUDGE_ROWS), others.rows(_JUDGE_ROWS, held_out), other


def _build(
    model: PreTrainedModel,
    units: UnitSet,
    calibration: CalibrationSet,
    clock: Clock,
    folder: Path | None,
    progress: Progress,
) -> Curvature:
    """H over the rows that fit its share of the time."""

    def stop(build: Build) -> str | None:
        if build.done == 1:
            fit = max(1, int(_BUILD * clock.total / clock.gone))
            rows = min(fit, len(calibration))
            clock.tell(f"About {rows} rows of H fit into its share of the time", progress)
        return "The time for H is spent." if clock.gone >= _BUILD * clock.total else None

    return estimate_curvature(
        model,
        units,
        calibration,
        checkpoint=None if folder is None else folder / "H.ckpt",
        progress=progress,
        options=BuildOptions(on_sequence=stop),
    )


def _layers(
    model: PreTrainedModel,
    units: UnitSet,
    rows: CalibrationSet,
    clock: Clock,
    folder: Path | None,
    progress: Progress,
) -> Interactions | None:
    """Measured layers, with as many pairs as their share of the time allows; None: none fit."""
    path = plans_file(folder, model, rows)
    count, begun = len(set(units.layers.tolist())), clock.gone
    whole = Selection.from_pruned(
        units, np.flatnonzero(units.layers == units.layers.min()).tolist()
    )
    measure_plans(model, [whole], rows, progress=False)  # no file: it may know it
    fit = int(_LAYERS * clock.total / (clock.gone - begun)) - count
    pool = min(count, int((1 + math.sqrt(1 + 8 * max(0, fit))) / 2))  # p (p - 1) / 2 pairs
    if fit < 1 or pool < 2:
        return None
    return measure_interactions(
        model, "layers", rows, units=units, pool=pool, checkpoint=path, progress=progress
    )


def _candidates(
    curvature: Curvature, layers: Interactions | None, target: float | Target, guards: Guards
) -> dict[str, Selection]:
    """The plans that H, single units and layers make, by what made them."""
    plans: dict[str, Selection] = {}
    ways = [
        ("H, lambda 1", curvature, 1.0),
        ("H, lambda 0", curvature, 0.0),
        ("KL of each unit alone", measured_diagonal(curvature), 0.0),
    ]
    for name, matrix, strength in ways:
        with suppress(InfeasibleError):  # greedy stalls at this lambda
            plans[name] = solve_greedy(matrix, target, strength, guards)
    # guards and targets are over units, and layers have none of them
    if layers is not None and guards == FREE and not isinstance(target, Target):
        for strength in (0.0, 0.5, 1.0):
            with suppress(InfeasibleError, InputError):  # the layers have too few parameters
                plans[f"measured layers, lambda {strength:g}"] = layers.solve(target, strength)
    if not plans:
        solve_greedy(curvature, target, 1.0, guards)  # says why
    return plans


def _best_refit(
    model: PreTrainedModel,
    contenders: dict[str, Selection],
    calibration: CalibrationSet,
    texts: list[CalibrationSet],
    clock: Clock,
    progress: Progress,
) -> tuple[str, PreTrainedModel, bool, dict[str, float]]:
    """Refit plans in their order while there is time, at least the first one.

    Returns:
        The name of the best one, its model, whether it may be taken, and the KL of each on the
        first text. One may be taken whose KL on the first text is below that of the first plan as
        pruned, and on the others not above it by more than one paired standard error.
    """
    as_pruned = prune(model, next(iter(contenders.values())))
    before = [compare_models(model, as_pruned, text).kl for text in texts]
    del as_pruned  # the dense model, the best refit and the present one are enough
    refits: dict[str, float] = {}
    best: tuple[str, PreTrainedModel, bool] | None = None
    seen = set[str]()
    for name, plan in contenders.items():
        if plan.fingerprint in seen:
            continue
        seen.add(plan.fingerprint)
        begun = clock.gone
        refitted = repair(model, plan, calibration, options=RepairOptions(progress=progress))
        risks = [compare_models(model, refitted, text).kl for text in texts]
        changes = [mean_and_error(now - cut) for now, cut in zip(risks, before, strict=True)]
        may = changes[0][0] < 0 and all(mean <= error for mean, error in changes[1:])
        refits[name] = float(risks[0].mean())
        if best is None or (not may, refits[name]) < (not best[2], refits[best[0]]):
            best = name, refitted, may
        if clock.gone + (clock.gone - begun) > clock.total:
            break
    assert best is not None
    return *best, refits
