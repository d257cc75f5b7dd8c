"""`cocurve paper`: the paper's tables measured on one model, in one resumable command."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.tables import pick
from cocurve_lab.cli.common import (
    Rows,
    StreamedModel,
    Suite,
    progress,
    require_writable,
    rows_of,
)
from cocurve_lab.cli.options import Verb, flag, part
from cocurve_lab.models.identity import is_demo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cocurve_lab.calibration import CalibrationSet
    from cocurve_lab.curvature.matrix import Curvature

    from .published import Published
    from .reproduction import Candidate


@dataclass(frozen=True, kw_only=True)
class Paper(Verb):
    """Measure the paper's tables on a model, and print the paper's numbers beside the measured ones.

    The command builds H, solves a plan for each ratio and lambda, prunes the model, and runs the
    paper's suite on each pruned model and on the dense one. It times one plan per ratio. Every
    finished task is kept in the folder. You can stop with Ctrl-C or SIGTERM at any time; running
    the same command again resumes. results.md has the tables, results.csv all numbers, plans/ the
    plans. Tasks that run programs which the model wrote are left out without
    --allow-code-execution. With --stream size and speed are left out too, each plan's model is kept
    in the folder while its tasks run, and tasks that generate read all layers for each token.

    Examples:
      cocurve paper demo --out demo_results --sequences 16 --limit 20
      cocurve paper meta-llama/Llama-3.1-8B-Instruct --out results --allow-code-execution
      cocurve paper MODEL --out results --ratios 0.1 0.2 0.3 0.4 0.5 --lambdas 1
      cocurve paper MODEL --out results --release CoCurve/artifacts/paper-v1/llm/llama-3.1-8b-instruct
      cocurve paper LARGE_MODEL --stream --out results --lambdas 1 --ratios 0.2
      cocurve paper MODEL --out results --suite local --tasks piqa.jsonl --calibration text.jsonl
    """  # noqa: E501

    model: StreamedModel = part()
    out: Path = flag("folder for H and all results", metavar="FOLDER")
    text: Rows = rows_of("calibration", 128, "text to calibrate on", "C4 from the hub")
    taken_for: str | None = flag(
        "which of the paper's models this is, such as Mistral-7B, or none; default: by its shape "
        "and tokenizer",
        name="as",
        metavar="NAME",
    )
    ratios: tuple[float, ...] = flag("shares to remove (0.2)", (0.2,))
    lambdas: tuple[float, ...] = flag("weights (0 0.5 1)", (0.0, 0.5, 1.0))
    methods: tuple[str, ...] = flag("other methods too, such as llm-pruner wanda-sp")
    top_r: int = flag("r of the top-r support (256)", 256)
    ffn_groups: int = flag("FFN groups per layer (16)", 16)
    release: Path | None = flag(
        "the authors' release of this model: its plans and reference_metrics.json are added",
        metavar="FOLDER",
    )
    suite: Suite = part(name="tasks to run; default: demo for the demo model, otherwise paper")
    repeats: int = flag("repeats of each timing (5)", 5)

    def run(self) -> int:
        """Run `cocurve paper`."""
        return run(self)


def run(options: Paper) -> int:
    """Run `cocurve paper`."""
    from cocurve_lab.curvature.merging import progress_of
    from cocurve_lab.estimator.estimate import load_or_estimate
    from cocurve_lab.models.loading import report_device
    from cocurve_lab.models.units import enumerate_units

    from .published import published, recognized
    from .reproduction import Reproduction
    from .side_by_side import write_tables

    settings = _settings(options)
    name = _named(options.taken_for)
    require_writable(options.out)
    options.text.require()
    kept = f"interrupted; finished work is kept in {options.out}. To resume:\n  {options.again}"
    print(report_device(options.model.device, options.model.dtype), flush=True)
    try:
        model, tokenizer = options.model.load(options.model.place)
        if name is None:
            name = recognized(model.config, tokenizer)
            print(_taken_for(name), flush=True)
        units = enumerate_units(model, options.ffn_groups)
        rows = _rows(options, tokenizer)
        print(f"{options.model.place}: {units}\n{rows}", flush=True)
        inputs = (model, units, rows, options.top_r)
        curvature = load_or_estimate(options.out, *inputs, progress=progress())
        done, wanted = progress_of(curvature)
        if done < wanted:
            raise KeyboardInterrupt
        paper = published(name)
        candidates = list(_candidates(options, model, curvature, rows, paper))
        seconds = curvature.provenance.get("seconds")
        say = partial(print, flush=True)
        study = Reproduction(model, tokenizer, candidates, paper, settings, seconds, say)
        table = study.run()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept) from None  # `main` prints it and exits with 130
    heading = _heading(options, paper, rows, curvature)
    further = [row for row in paper.rows if not study.shows(row, table)]
    page = write_tables(table, options.out, heading, further)
    print(f"\n{page.read_text(encoding='utf-8')}")
    failed = sum(bool(row["failed"]) for row in table)
    print(f"Saved to {page} and results.csv.")
    if failed:
        print(f"{failed} results are missing, for the reasons above. To try them again:")
        print(f"  {options.again}")
    return 1 if failed else 0


def _rows(options: Paper, tokenizer: Any) -> CalibrationSet:
    """Make the rows H is built on: by default those of the release, of any text but a model's own.

    Where its recipe leaves too little of a file, all of it is taken, and that is said.
    """
    from cocurve_lab.calibration import TooLittle, own_text

    text, place = options.text, options.model.place
    if text.recipe is not None or (not text.files and own_text(place) is not None):
        return text.calibration(place, tokenizer)
    try:
        return replace(text, recipe="release").calibration(place, tokenizer)
    except TooLittle as error:
        print(f"The release's recipe leaves too little text: {error} All documents are taken.")
        return text.calibration(place, tokenizer)


def _named(given: str | None) -> str | None:
    """Return the paper's name of a model, "" for none, or None if the shape decides."""
    from .published import paper_names

    known = {name.lower(): name for name in paper_names()} | {"none": ""}
    if given is not None and given.lower() not in known:
        raise InputError(f"--as is {given!r}. Give one of {', '.join(paper_names())}, or none.")
    return None if given is None else known[given.lower()]


def _taken_for(name: str) -> str:
    """Say which of the paper's models this is, by its shape."""
    if not name:
        return "Not one of the paper's models by its shape; --as NAME names one."
    return (
        f"Taken for {name} by its shape and tokenizer; a fine-tuned model has the same. If it is "
        "another model, give --as none."
    )


def _settings(options: Paper) -> Any:
    """Return what to measure, checked before a model is loaded."""
    from cocurve_lab.evaluation.code_execution import require_permission
    from cocurve_lab.evaluation.confinement import require_confinement
    from cocurve_lab.evaluation.efficiency import EfficiencyOptions
    from cocurve_lab.evaluation.tasks import TaskOptions, suite_tasks
    from cocurve_lab.methods.registry import get_method
    from cocurve_lab.solver.targets import require_ratio, require_strength

    from .published import reference_metrics
    from .reproduction import ReproductionOptions

    for ratio in options.ratios:
        require_ratio(ratio)
        if options.release is not None:
            reference_metrics(options.release, ratio)
    for strength in options.lambdas:
        require_strength(strength)
    for name in options.methods:
        if get_method(name).needs_gradients and options.model.stream:
            raise InputError(
                f"{name} needs gradients, and with them all weights in memory. Leave it out, or "
                "--stream."
            )
    suite = options.suite.name or ("demo" if is_demo(options.model.place) else "paper")
    options.suite.require()
    bars = progress() is True
    files = tuple(options.suite.tasks)
    tasks = TaskOptions(files=files, data=options.suite.data, progress=bars)
    suite_tasks(suite, tasks)
    if options.suite.allow_code_execution:
        require_permission(True)
        require_confinement()
    return ReproductionOptions(
        folder=options.out,
        suite=suite,
        limit=options.suite.limit,
        allow_code_execution=options.suite.allow_code_execution,
        tasks=tasks,
        chat=options.suite.chat,
        efficiency=EfficiencyOptions(batch_sizes=(1,), repeats=options.repeats, progress=bars),
        release=options.release,
    )


def _candidates(
    options: Paper,
    model: PreTrainedModel,
    curvature: Curvature,
    rows: CalibrationSet,
    paper: Published,
) -> Iterator[Candidate]:
    """Yield the plans of each ratio: the release's, other methods', CoCurve's by rising lambda.

    None is made yet: one that cannot be made is a fact for the table.
    """
    from cocurve_lab.methods.registry import get_method
    from cocurve_lab.solver.selection import Selection
    from cocurve_lab.solver.solve import solve_greedy

    from .reproduction import RELEASED, Candidate, plan_of

    for ratio in options.ratios:
        guards = paper.guards_at(ratio)
        if options.release is not None:
            make = partial(Selection.from_release, options.release, ratio)
            yield Candidate(RELEASED, ratio, make)
        for method in map(get_method, options.methods):
            inputs = (options.out, method, model, curvature.units, rows, ratio, guards)
            make = partial(plan_of, *inputs, progress=progress() is True)
            yield Candidate(method.title, ratio, make)
        for strength in sorted(options.lambdas):
            make = partial(solve_greedy, curvature, ratio, strength, guards)
            yield Candidate(f"lambda {strength:g}", ratio, make)


def _heading(options: Paper, paper: Published, rows: Any, curvature: Curvature) -> str:
    """Write the first lines of the page: what was measured, on what, and how it differs."""
    limit = options.suite.limit
    many = "all samples" if limit is None else f"the first {limit} samples"
    gate = f"FFN redundancy, the paper's gate: {curvature.ffn_redundancy:.3f}"
    for row in pick(paper.rows, variant="gate"):
        gate += f"; the paper has {row['values']['FFN redundancy']} ({row['values']['use']})"
    text = f"""\
# {options.model.place}

{curvature!r}. {rows!r}. Tasks are scored on {many}. {gate}.

Perplexities, and shares of right answers; ± is one standard error over samples. Sizes \
and speeds are relative to the dense model. results.csv has every metric, and the guards \
of each plan."""
    if not paper.name:
        return text
    return f"""{text}

Columns headed *paper* are the paper's numbers of {paper.name}, from its own machines and \
harness. Where they name no lambda, they are of its best plan over lambda and \
compensation. {paper.note}""".rstrip()
