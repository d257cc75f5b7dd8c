"""Verbs that run a model, or read its configuration: `inventory`, `build`, `search`, `evaluate`."""

from __future__ import annotations

import json as plain
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from transformers import CONFIG_MAPPING, PreTrainedModel
from tyro.conf import Positional, arg, create_mutex_group

from .. import (
    KINDS,
    BuildOptions,
    CalibrationSet,
    InputError,
    allow_other_weights,
    enumerate_units,
    evaluate_tasks,
    load_or_estimate,
    report_device,
    search_plan,
    solve_greedy,
)
from ..calibration import LONGEST_ROW
from ..estimator.estimate import kept_at, whole_path
from ..extensions.choosing.search import SearchOptions
from ..extensions.judging import kept, perplexity
from ..extensions.texts import documents as texts
from ..measuring.risk import mean_and_error, model_risk
from ..models import architectures, identity, loading, runtime, sources
from ..pruner import manifest, saving
from .arguments import (
    Count,
    File,
    Readable,
    ShardOf,
    progress,
    read_curvature,
    require_new,
    require_writable,
    write_new,
)
from .common import Rows, StreamedDevice, Suite, quieten, read_plan

START = create_mutex_group(required=True, title="start")


def inventory(
    model: Positional[str | None] = None,
    *,
    paper: bool = False,
    config: Readable | None = None,
    ffn_groups: Count = 16,
    json: bool = False,
) -> None:
    """List the removable units of a model.

    They are KV-aligned groups of attention heads and groups of FFN channels, with the number of
    parameters of each. Only the configuration is read; no weights are downloaded or loaded. It
    takes seconds to see whether a model is supported, and how large H (M x M) becomes.

    Examples:
      cocurve inventory demo
      cocurve inventory meta-llama/Llama-3.1-8B-Instruct --json
      cocurve inventory --paper
      cocurve inventory --config some/folder/config.json --ffn-groups 32

    Args:
        model: "demo", a folder, or a hub id
        paper: a table of the paper's models
        config: a config.json instead of MODEL
        ffn_groups: FFN groups per layer
        json: print JSON
    """
    quieten()
    if paper:
        print("| model | class | M | removable parameters | share of all |\n|---|---|---|---|---|")
        stored = identity.demo_folder().parent / "paper_models.json"
        for name, values in plain.loads(stored.read_text(encoding="utf-8")).items():
            # the padding token changes no shape, but Phi3's default is outside a small vocabulary
            kind, values["pad_token_id"] = values.pop("model_type"), None
            of = _facts(loading.shapes_only(CONFIG_MAPPING[kind](**values)), ffn_groups)
            print(
                f"| {name} | {of['class']} | {of['units']:,} | {of['removable_parameters']:,} | "
                f"{of['removable_share']:.1%} |"
            )
    elif (model is None) == (config is None):
        raise InputError("no model is named. Give one of MODEL, --config and --paper.")
    else:
        facts = _facts(_shapes(model, config), ffn_groups)
        print(plain.dumps(facts, indent=1) if json else "\n".join(_lines(facts)))


def _shapes(model: str | None, config: Path | None) -> PreTrainedModel:
    """Make a model on the meta device: shapes without weights."""
    place = loading.place_of(model or "") if config is None else config
    if identity.is_pruned(place):
        return saving.empty_pruned(Path(place)).model
    if config is None:
        sources.OPENING().require_place(place)
    return loading.shapes_only(place)


def _facts(model: PreTrainedModel, ffn_groups: int) -> dict[str, Any]:
    """The numbers of units and parameters, as a whole and by layer, for JSON."""
    units, architecture = enumerate_units(model, ffn_groups), architectures.describe(model)
    layers: list[dict[str, Any]] = [{"layer": layer} for layer in range(units.num_layers)]
    for row in layers:
        for kind in dict.fromkeys([*KINDS, *units.kinds.tolist()]):
            costs = units.costs[(units.layers == row["layer"]) & (units.kinds == kind)].tolist()
            row[kind] = {
                "units": len(costs),
                "parameters_each": sorted(set(costs)),
                "parameters": sum(costs),
            }
    mixed = [layer for layer in range(units.num_layers) if architecture.mixers(layer)]
    return {
        "class": type(model).__name__,
        "units": len(units),
        "removable_parameters": units.total_cost,
        "parameters": units.total_parameters,
        "removable_share": units.total_cost / max(1, units.total_parameters or 0),
        "matrix_bytes": 8 * len(units) ** 2,
        "stays": dict.fromkeys(architecture.family.mixers, mixed) if mixed else {},
        "layers": layers,
    }


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the facts as text; equal layers in a row share a line."""
    yield (
        f"{facts['class']}: M = {facts['units']} units, {facts['removable_parameters']:,} of "
        f"{facts['parameters']:,} parameters can be removed ({facts['removable_share']:.1%}); H "
        f"takes {facts['matrix_bytes'] / 1e6:,.1f} MB"
    )
    for text, equal in groupby(facts["layers"], _units_of):
        numbers = [row["layer"] for row in equal]
        yield f"layers {numbers[0]} to {numbers[-1]}: {text}"
    for name, mixed in facts["stays"].items():
        yield f"{name} of {len(mixed)} layers has no units and stays."


def _units_of(row: dict[str, Any]) -> str:
    """The units of a layer: how many of each kind, and how many parameters each has."""
    parts = [
        f"{each['units']} {kind} x " + " or ".join(f"{cost:,}" for cost in each["parameters_each"])
        for kind, each in row.items()
        if kind != "layer" and each["units"]
    ]
    return ", ".join(parts)


def build(
    model: Positional[str],
    *,
    out: File,
    on: StreamedDevice = StreamedDevice(),
    rows: Rows = Rows(),
    top_r: Count = 256,
    ffn_groups: Count = 16,
    groups: Count = BuildOptions.groups,
    units_per_batch: Count | None = None,
    checkpoint_seconds: float = BuildOptions.checkpoint_seconds,
    threads: Count | None = None,
    full_vocabulary: bool = False,
    shard: ShardOf | None = None,
    ray: Count | None = None,
    ray_address: str | None = None,
    ray_source: str | None = None,
) -> None:
    """Estimate H of a model: every unit is ablated alone on every row of the text.

    This is the slow step. A checkpoint is written every minute. You can stop with Ctrl-C or SIGTERM
    at any time; running the same command again resumes. The result is named after the model, text
    and settings, so `load_or_estimate(folder, ...)` in a notebook loads it instead of building. To
    use several GPUs or nodes, run the command with --shard I/N on each, with the same settings and
    folder, and join the shards with `cocurve merge`. The result is the same as that of one build.

    Examples:
      cocurve build demo --sequences 64 --out H
      cocurve build meta-llama/Llama-3.1-8B-Instruct --text c4.jsonl --out H
      cocurve build LARGE_MODEL --stream --text c4.jsonl --out H
      CUDA_VISIBLE_DEVICES=0 cocurve build MODEL --text c4.jsonl --out H --shard 1/2 &
      CUDA_VISIBLE_DEVICES=1 cocurve build MODEL --text c4.jsonl --out H --shard 2/2 &
      wait; cocurve merge H
      cocurve build MODEL --text c4.jsonl --out H --ray 8 --ray-address auto

    Args:
        model: "demo", "smollm2" (see fetch), a folder, or a hub id
        out: folder for H
        top_r: r of the top-r support; a smaller vocabulary is taken whole
        ffn_groups: FFN groups per layer
        groups: groups of rows, for error bars
        units_per_batch: ablations per forward pass; default: as many as fit
        checkpoint_seconds: seconds between checkpoints
        threads: CPU threads; default: as torch chooses
        full_vocabulary: measure the KL of removing each unit alone over the full vocabulary, not on
            the top-r support; H stays the same
        shard: build only shard I of N
        ray: build on this number of Ray workers
        ray_address: the cluster, or "auto"; default: this machine
        ray_source: folder or hub id from which the workers load the model; default: it is sent to
            them, or with --stream MODEL
    """
    options = BuildOptions(
        units_per_batch=units_per_batch,
        groups=groups,
        checkpoint_seconds=checkpoint_seconds,
        num_threads=threads,
        shard=shard,
        full_vocabulary=full_vocabulary,
    )
    require_writable(out)
    workers = None
    if ray is not None:
        from ..extensions.big_models.cluster import RayWorkers

        if on.stream and ray_source is None:  # workers run in other folders
            folder = Path(model).expanduser()
            ray_source = str(folder.resolve()) if folder.is_dir() else model
        workers = RayWorkers(ray, address=ray_address, source=ray_source)
    print(report_device(on.device, on.dtype), flush=True)
    loaded, tokenizer = on.load(model)
    units = enumerate_units(loaded, ffn_groups)
    calibration = rows.calibration(model, tokenizer)
    print(f"{model}: {units}\n{calibration}", flush=True)
    curvature = load_or_estimate(
        out,
        loaded,
        units,
        calibration,
        top_r,
        progress=progress(),
        options=options,
        workers=workers,
    )
    if not kept_at(whole_path(out, curvature), shard).exists():
        raise InputError(
            f"no H could be written into {out}, for the reason above. Correct this, and run the "
            "same command again: finished sequences are in the checkpoint, if that was written."
        )
    print(curvature)


def search(
    model: Positional[str],
    curvature: Positional[str],
    *,
    out: File,
    evaluations: Count,
    ratio: Annotated[float | None, START] = None,
    plan: Annotated[File | None, START] = None,
    strength: Annotated[float, arg(name="lambda")] = 1.0,
    on: StreamedDevice = StreamedDevice(),
    other_weights: bool = False,
    text: Rows = Rows(),
    rows: Count = 32,
    held_out: Count = 16,
    assume_unseen: bool = False,
    search_seed: int = 0,
    checkpoint: File | None = None,
) -> None:
    """Search for a plan of lower measured KL near a plan.

    Swap a few units, measure, and keep what is better. The start is a plan (--plan), or the plan of
    H for a share of the parameters (--ratio); its budget and guards are kept. Swaps are measured on
    the first rows of the text, and the result is judged on held-out rows after it, so --text and
    --sequences must be those H was built with. The plan found is a JSON file, as from `cocurve
    solve`.

    Examples:
      cocurve search demo H --sequences 64 --ratio 0.2 --evaluations 2000 --out found.json
      cocurve search MODEL H --plan plan.json --evaluations 5000 --text c4.jsonl \\
          --checkpoint measured --out found.json

    Args:
        model: "demo", "smollm2" (see fetch), a folder, or a hub id
        curvature: the file of H, or its folder
        out: file for the plan found
        evaluations: budget: one plan on one row is one evaluation
        ratio: start from the plan of H for this share
        plan: start from this plan
        strength: of the start of --ratio
        other_weights: allow a plan or an H of other weights
        rows: of the text, the rows to search on
        held_out: rows to judge on
        assume_unseen: they are not in the text of H or the plan, if it is not recorded
        search_seed: seed of the swaps
        checkpoint: keep what is measured here; the same command goes on from it
    """
    require_new(out)
    if checkpoint is not None:
        require_writable(checkpoint)
    h = read_curvature(curvature)
    # one of the two is given
    start = solve_greedy(h, ratio or 0.0, strength) if plan is None else read_plan(plan)
    dense, tokenizer = on.load(model)
    if other_weights:
        h = allow_other_weights(h, dense)
        start = allow_other_weights(start, dense)
    calibration, judge = text.calibration_and_held_out(model, tokenizer, held_out)
    searched = calibration.rows(0, min(rows, len(calibration)))
    found = search_plan(
        dense,
        start,
        searched,
        held_out=judge.assume_unseen() if assume_unseen else judge,
        evaluations=evaluations,
        surrogate=h,
        checkpoint=kept.plans_file(checkpoint, dense, searched),
        progress=progress(),
        options=SearchOptions(seed=search_seed),
    )
    write_new(out, found.selection.to_json())
    print(f"{found}\nSaved to {out}.")


def evaluate(
    model: Positional[str],
    *,
    against: str | None = None,
    on: StreamedDevice = StreamedDevice(),
    other_weights: bool = False,
    rows: Rows = Rows(sequences=16),
    tokenizer: str | None = None,
    suite: Suite = Suite(),
    report: File | None = None,
    json: bool = False,
) -> None:
    """Measure a dense or pruned model: its perplexity on a text.

    --against adds the dense model's perplexity and the KL divergence from it in nats per token,
    with its standard error over rows. --sequences and --length bound all of them. --suite adds
    tasks, run by lm_eval. Use a text that H was not built on; models without a text of their own
    need --text.

    Examples:
      cocurve evaluate smaller --against demo
      cocurve evaluate smaller --against MODEL --text held_out.jsonl --json
      cocurve evaluate demo --suite demo --limit 40 --report report.json

    Args:
        model: "demo", "smollm2" (see fetch), a folder, or a hub id
        against: the dense model, for the KL
        other_weights: allow a dense model of other weights
        tokenizer: tokenizer of a pruned folder without one
        report: file for the suite's report
        json: print JSON
    """
    options = suite.options()
    if suite.suite is None and (suite != Suite() or report is not None):
        raise InputError("options of a suite are given without --suite. Give it, or remove them.")
    if report is not None:
        require_new(report)
    measured, words = on.load(model, tokenizer or against)
    found: dict[str, Any] = {"model": model}

    def tell(name: str, facts: dict[str, Any], said: Any) -> None:
        found[name] = facts
        if not json:
            print(said, flush=True)

    documents, source = _documents(rows, [model, against or ""], words)
    if documents:
        tell("perplexity", *_perplexity(measured, words, documents, rows))
    elif suite.suite is None or against is not None:
        raise InputError("there is nothing to measure on. Give --text FILE, or --suite.")
    if against is not None:
        dense, own_words = on.load(against)
        tell("dense_perplexity", *_perplexity(dense, own_words, documents, rows))
        note = "" if other_weights else manifest.require_dense(dense, measured).note
        cut = texts.row_options(against, rows.cut()) | {"num_sequences": rows.sequences}
        text = CalibrationSet.from_texts(documents, own_words, source=source, **cut)
        mean, error = mean_and_error(model_risk(dense, measured, text, progress=progress()))
        facts = {
            "against": against,
            "mean": mean,
            "standard_error": error if len(text) > 1 else None,
            "rows": len(text),
            "tokens_per_row": text.seq_len,
            "source": text.source,
            "told": note,
        }
        said = f"KL({against} || model) {mean:.4f} ± {error:.4f} nats per token, {text} {note}"
        tell("kl", facts, said)
    if suite.suite is not None:
        scores = evaluate_tasks(
            measured,
            words,
            suite.suite,
            suite.limit,
            suite.allow_code_execution,
            options=options,
            chat=suite.template,
        )
        tell("tasks", plain.loads(scores.to_json()), scores)
    if json:  # before the report, so that a full disk does not lose the results
        print(plain.dumps(found, indent=1), flush=True)
    if report is not None:
        write_new(report, scores.to_json())


def _documents(rows: Rows, places: list[str], tokenizer: Any) -> tuple[list[str], str]:
    """The text to measure on and its source: --text, a model's own held-out text, or nothing."""
    if rows.text is not None:
        return list(texts.read_documents(rows.text, tokenizer)), rows.text.name
    own = texts.own_text(places[0]) or texts.own_text(places[1])
    return ([], "") if own is None else own("held_out")


def _perplexity(
    model: Any, tokenizer: Any, documents: list[str], rows: Rows
) -> tuple[dict[str, Any], Any]:
    """Measure a perplexity, on as many tokens as the rows have together."""
    length = rows.length or int(min(LONGEST_ROW, runtime.context_of(model)))
    options = perplexity.PerplexityOptions(progress=progress(), tokens=rows.sequences * length)
    measured = perplexity.perplexity(model, tokenizer, documents, options=options, bos=rows.bos)
    facts = asdict(measured) | {"standard_error": measured.standard_error}
    return {k: v for k, v in facts.items() if not k.startswith("window_")}, measured
