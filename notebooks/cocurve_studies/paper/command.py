"""`cocurve paper`: the paper's tables measured on one model, in one resumable command."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from cocurve_lab.base.errors import InputError
from cocurve_lab.cli.arguments import Count, File, progress, require_writable
from cocurve_lab.cli.common import Rows, StreamedDevice, Suite
from cocurve_lab.extensions.texts.records import read_text
from cocurve_lab.models.identity import is_demo

from ..tables import pick
from . import GuardsRule

if TYPE_CHECKING:
    from cocurve_lab.calibration import CalibrationSet
    from cocurve_lab.curvature.matrix import Curvature

    from .protocol import Protocol
    from .published import Published
    from .reproduction import Candidate


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What to measure.

    Attributes:
        model: "demo", "smollm2" (see fetch), a folder, or a hub id
        out: folder for H and all results; without one, smollm2 prints the paper beside what ships
        wikitext: calibrate on WikiText-2's training text, as the paper does beside C4
        held_out: rows that guards, lambda and gains are chosen on
        taken_for: which of the paper's models this is, such as Mistral-7B, or none; default: by its
            shape and tokenizer
        ratios: shares to remove
        lambdas: plans of these lambdas too, such as 0 1
        methods: other methods too, such as llm-pruner wanda-sp; all: the paper's nine (with
            --stream those without gradients)
        guards: search: for each plan those of lowest perplexity on the held-out rows, the paper's
            rule; paper: those it states; none
        cost: what the ratios are shares of: parameters, as in the paper, or floating-point
            operations per token at the length of the rows; not with --methods, which count
            parameters
        top_r: r of the top-r support
        ffn_groups: FFN groups per layer
        release: the authors' release of this model: its plans and reference_metrics.json are added
        repeats: repeats of each timing
    """

    model: Positional[str]
    on: StreamedDevice = StreamedDevice()
    out: File | None = None
    text: Rows = Rows(positions=64)
    wikitext: bool = False
    held_out: Count = 16
    taken_for: Annotated[str | None, arg(name="as")] = None
    ratios: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5)
    lambdas: tuple[float, ...] = ()
    methods: tuple[str, ...] = ()
    guards: GuardsRule = "search"
    cost: Literal["parameters", "flops"] = "parameters"
    top_r: Count = 256
    ffn_groups: Count = 16
    release: File | None = None
    suite: Suite = Suite()
    repeats: Count = 5


def paper(options: Paper) -> int:
    """Measure the paper's tables on a model, and print the paper's numbers beside them.

    The command follows the paper's protocol. It builds H, and for each ratio makes CoCurve's plan:
    guards by perplexity on held-out rows, lambda of 0, 0.5 and 1 by held-out KL, and CoCurve+ with
    gains where they help there. It prunes the model, runs the paper's suite on each pruned model
    and on the dense one, and times one plan per ratio. Every finished task is kept in the folder.
    You can stop with Ctrl-C or SIGTERM at any time; running the same command again resumes.
    results.md has the tables, results.csv all numbers, plans/ the plans.
    A gated model of the hub needs `hf auth login` once, after its licence is accepted on its page.
    Tasks that run programs which the model wrote are left out without --allow-code-execution, and
    need bubblewrap (Debian: apt-get install bubblewrap). With --stream size and speed are left out
    too, each plan's model is kept in the folder while its tasks run, and tasks that generate read
    all layers for each token.

    Examples:
      cocurve paper smollm2
      cocurve paper demo --out demo_results --sequences 16 --limit 20
      cocurve paper meta-llama/Llama-3.1-8B-Instruct --out results --allow-code-execution
      cocurve paper MODEL --out results --ratios 0.2 --methods all --lambdas 0 0.5 1
      cocurve paper MODEL --out results --ratios 0.2 --guards paper --seed 7 --as Mistral-7B
      cocurve paper MODEL --out results --release paper-v1/llm/llama-3.1-8b-instruct
      cocurve paper LARGE_MODEL --stream --out results --lambdas 1 --ratios 0.2
      cocurve paper MODEL --out results --suite local --tasks piqa.jsonl --text text.jsonl
    """
    return run(options)


def run(options: Paper) -> int:
    """Run `cocurve paper`."""
    if options.out is None:
        return _print_shipped(options.model)
    from cocurve_lab.curvature.merging import progress_of
    from cocurve_lab.estimator.estimate import load_or_estimate
    from cocurve_lab.extensions.device import report_device
    from cocurve_lab.models.units import enumerate_units
    from cocurve_lab.solver.targets import flop_costs

    from .protocol import Protocol
    from .published import published, recognized
    from .reproduction import Reproduction
    from .side_by_side import write_tables

    settings = _settings(options, options.out)
    name = _named(options.taken_for)
    require_writable(options.out)
    kept = f"interrupted; finished work is kept in {options.out}"
    print(report_device(options.on.device, options.on.dtype), flush=True)
    try:
        model, tokenizer = options.on.load(options.model)
        if name is None:
            name = recognized(model.config, tokenizer)
            print(_taken_for(name), flush=True)
        units = enumerate_units(model, options.ffn_groups)
        rows, held_out = _rows(options, tokenizer)
        print(f"{options.model}: {units}\n{rows}", flush=True)
        curvature = load_or_estimate(
            options.out, model, units, rows, options.top_r, progress=progress()
        )
        done, wanted = progress_of(curvature)
        if done < wanted:
            raise KeyboardInterrupt
        paper = published(name)
        protocol = Protocol(
            options.out / "measured",
            model,
            curvature,
            rows,
            held_out,
            paper,
            options.guards,
            progress=progress() is True,
            costs=flop_costs(units, rows.seq_len) if options.cost == "flops" else None,
        )
        candidates = list(_candidates(options, protocol))
        seconds = curvature.provenance.get("seconds")
        say = partial(print, flush=True)
        study = Reproduction(model, tokenizer, candidates, paper, settings, seconds, say)
        table = study.run()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept) from None  # `main` prints it and exits with 130
    heading = _heading(options, paper, rows, curvature)
    further = [row for row in paper.rows if not study.shows(row, table)]
    page = write_tables(table, options.out, heading, further)
    print(f"\n{read_text(page)}")
    failed = sum(bool(row["failed"]) for row in pick(table))
    print(f"Saved to {page} and results.csv.")
    if failed:
        print(f"{failed} results are missing, for the reasons above. The same command tries again.")
    return 1 if failed else 0


def _print_shipped(model: str) -> int:
    """Print the paper beside what ships with a model; nothing is measured."""
    from cocurve_lab.extensions.pretrained.smollm2 import NAME

    from .shipped import paper_findings, shipped

    if model != NAME:
        raise InputError(f"--out is missing, and {model} has to be measured. Give a folder.")
    print(paper_findings(shipped()))
    return 0


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


def _settings(options: Paper, folder: File) -> Any:
    """Return what to measure, checked before a model is loaded."""
    from cocurve_lab.evaluation.code_execution import require_confinement, require_permission
    from cocurve_lab.evaluation.efficiency import EfficiencyOptions
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
    if options.cost == "flops" and options.methods:
        raise InputError(
            "--cost flops is for plans of H, and --methods count parameters. Leave out one of them."
        )
    for name in _methods(options):
        if get_method(name).needs_gradients and options.on.stream:
            raise InputError(
                f"{name} needs gradients, and with them all weights in memory. Leave it out, or "
                "--stream."
            )
    suite = options.suite.suite or ("demo" if is_demo(options.model) else "paper")
    named = replace(options.suite, suite=suite)
    tasks = named.options()
    if options.suite.allow_code_execution:
        require_permission(True)
        require_confinement()
    return ReproductionOptions(
        folder=folder,
        suite=suite,
        limit=options.suite.limit,
        allow_code_execution=options.suite.allow_code_execution,
        tasks=tasks,
        chat=options.suite.template,
        efficiency=EfficiencyOptions(
            batch_sizes=(1,), repeats=options.repeats, progress=progress() is True
        ),
        release=options.release,
    )


def _methods(options: Paper) -> list[str]:
    """Return the names of the other methods, "all" spelled out."""
    from cocurve_lab.methods.registry import get_method

    from ..bake_off.contenders import BASELINES

    # gradients need all weights in memory
    every = [n for n in BASELINES if not (options.on.stream and get_method(n).needs_gradients)]
    spelled = (every if name == "all" else (name,) for name in options.methods)
    return list(dict.fromkeys(chain.from_iterable(spelled)))


def _rows(options: Paper, tokenizer: Any) -> tuple[CalibrationSet, CalibrationSet]:
    """Make the rows H is built on, and rows to choose on.

    By default they are those of the release, of any text but a model's own. Where its recipe leaves
    too little of a file, all of it is taken, and that is said.
    """
    from cocurve_lab.calibration import CalibrationSet
    from cocurve_lab.evaluation.suites import Source
    from cocurve_lab.extensions.texts.documents import own_text, row_options

    text, place, held_out = options.text, options.model, options.held_out
    if options.wikitext:
        source = Source("Salesforce/wikitext", "wikitext-2-raw-v1", "train")
        documents = [row["text"] for row in source.rows(options.suite.data)]
        cut: dict[str, Any] = row_options(place, text.cut())
        cut |= {"source": "WikiText-2", "num_sequences": text.sequences + held_out}
        calibration, judge = CalibrationSet.from_texts(documents, tokenizer, **cut).split(
            held_out=held_out
        )
        return calibration, judge
    if text.recipe is not None or (text.text is None and own_text(place) is not None):
        return text.calibration_and_held_out(place, tokenizer, held_out)
    release = replace(text, recipe="release")
    if text.text is None:  # C4 has enough
        return release.calibration_and_held_out(place, tokenizer, held_out)
    try:
        return release.calibration_and_held_out(place, tokenizer, held_out)
    except InputError as error:
        found = text.calibration_and_held_out(place, tokenizer, held_out)  # or the same error
        print(f"The release's recipe leaves too little text: {error} All documents are taken.")
        return found


def _candidates(options: Paper, protocol: Protocol) -> Iterator[Candidate]:
    """Yield the plans of each ratio: the release's, other methods', lambdas', CoCurve's.

    None is made yet: one that cannot be made is a fact for the table.
    """
    from cocurve_lab.methods.registry import get_method
    from cocurve_lab.solver.selection import Selection

    from .reproduction import RELEASED, Candidate

    others = {method.title: protocol.of(method) for method in map(get_method, _methods(options))}
    for ratio in options.ratios:
        if options.release is not None:
            make = partial(Selection.from_release, options.release, ratio)
            yield Candidate(RELEASED, ratio, make)
        for title, plan in others.items():
            yield Candidate(title, ratio, partial(plan, ratio), baseline=True)
        for strength in sorted(options.lambdas):
            yield Candidate(
                f"lambda {strength:g}", ratio, partial(protocol.solved, ratio, strength)
            )
        yield Candidate("CoCurve+", ratio, partial(protocol.compensated, ratio))
        yield Candidate("CoCurve", ratio, partial(protocol.chosen, ratio))


def _heading(options: Paper, paper: Published, rows: Any, curvature: Curvature) -> str:
    """Write the first lines of the page: what was measured, on what, and how it differs."""
    limit = options.suite.limit
    many = "all samples" if limit is None else f"the first {limit} samples"
    gate = f"FFN redundancy, the paper's gate: {curvature.ffn_redundancy:.3f}"
    for row in pick(paper.rows, variant="gate"):
        gate += f"; the paper has {row['values']['FFN redundancy']} ({row['values']['use']})"
    if options.cost == "flops":
        gate += f". Ratios are shares of operations per token at {rows.seq_len} tokens"
    text = f"""\
# {options.model}

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
