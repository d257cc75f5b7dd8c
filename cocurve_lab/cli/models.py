"""Verbs that run a model, or read it and write a smaller one."""

from __future__ import annotations

import json as plain
import shutil
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import rich
from rich.table import Table
from rich.text import Text
from transformers import CONFIG_MAPPING, PreTrainedModel
from tyro.conf import Positional, arg, create_mutex_group

from .. import (
    KINDS,
    BuildOptions,
    CalibrationSet,
    InputError,
    Target,
    allow_other_weights,
    best_plan,
    continue_text,
    enumerate_units,
    evaluate_tasks,
    export_gguf,
    load_or_estimate,
    load_pruned,
    report_device,
    save_pruned,
    search_plan,
    solve_greedy,
)
from ..calibration import LONGEST_ROW
from ..estimator.estimate import kept_at, whole_path
from ..extensions.big_models import cluster, on_disk, stored
from ..extensions.choosing.search import SearchOptions
from ..extensions.judging import kept, perplexity
from ..extensions.repairing import recovery, repair
from ..extensions.texts import documents as texts
from ..measuring.risk import mean_and_error, model_risk
from ..models import architectures, identity, loading, runtime, sources
from ..pruner import cutting, manifest, saving
from ..pruner.folder import CardFacts
from .arguments import (
    BUDGET,
    Count,
    File,
    Percent,
    Readable,
    ShardOf,
    progress,
    read_curvature,
    require_new,
    require_writable,
    write_new,
)
from .common import Device, Rows, StreamedDevice, Suite, read_plan, read_tokenizer

START = create_mutex_group(required=True, title="start")
TOKENIZER = create_mutex_group(required=False, title="tokenizer")


# Measure ------------------------------------------------------------------------------------------


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
    if paper:
        print("| model | class | M | removable parameters | share of all |\n|---|---|---|---|---|")
        for name, values in plain.loads(
            (identity.demo_folder().parent / "paper_models.json").read_bytes()
        ).items():
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
        print(plain.dumps(facts, indent=1) if json else _told(facts))


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


def _told(facts: dict[str, Any]) -> str:
    """Write the facts as text; equal layers in a row share a line."""
    lines = [
        f"{facts['class']}: M = {facts['units']} units, {facts['removable_parameters']:,} of "
        f"{facts['parameters']:,} parameters can be removed ({facts['removable_share']:.1%}); H "
        f"takes {facts['matrix_bytes'] / 1e6:,.1f} MB"
    ]
    for text, equal in groupby(facts["layers"], _units_of):
        numbers = [row["layer"] for row in equal]
        lines.append(f"layers {numbers[0]} to {numbers[-1]}: {text}")
    for name, mixed in facts["stays"].items():
        lines.append(f"{name} of {len(mixed)} layers has no units and stays.")
    return "\n".join(lines)


def _units_of(row: dict[str, Any]) -> str:
    """The units of a layer: how many of each kind, and how many parameters each has."""
    return ", ".join(
        f"{each['units']} {kind} x " + " or ".join(f"{cost:,}" for cost in each["parameters_each"])
        for kind, each in row.items()
        if kind != "layer" and each["units"]
    )


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
        if on.stream and ray_source is None:  # workers run in other folders
            folder = Path(model).expanduser()
            ray_source = str(folder.resolve()) if folder.is_dir() else model
        workers = cluster.RayWorkers(ray, address=ray_address, source=ray_source)
    loaded, tokenizer = on.load(model)
    units = enumerate_units(loaded, ffn_groups)
    calibration = rows.calibration(model, tokenizer)
    print(f"{report_device(on.device, on.dtype)}\n{model}: {units}\n{calibration}", flush=True)
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

    own = texts.own_text(model) or texts.own_text(against or "")
    documents, source = ([], "") if own is None else own("held_out")
    if rows.text is not None:
        documents, source = texts.read_documents(rows.text, words), rows.text.name
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
        tell(
            "kl",
            {
                "against": against,
                "mean": mean,
                "standard_error": error if len(text) > 1 else None,
                "rows": len(text),
                "tokens_per_row": text.seq_len,
                "source": text.source,
                "told": note,
            },
            f"KL({against} || model) {mean:.4f} ± {error:.4f} nats per token, {text} {note}",
        )
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


def _perplexity(
    model: Any, tokenizer: Any, documents: list[str], rows: Rows
) -> tuple[dict[str, Any], Any]:
    """Measure a perplexity, on as many tokens as the rows have together."""
    length = rows.length or int(min(LONGEST_ROW, runtime.context_of(model)))
    measured = perplexity.perplexity(
        model,
        tokenizer,
        documents,
        options=perplexity.PerplexityOptions(progress=progress(), tokens=rows.sequences * length),
        bos=rows.bos,
    )
    return {
        "value": measured.value,
        "standard_error": measured.standard_error,
        "nll": measured.nll,
        "tokens": measured.tokens,
        "protocol": measured.protocol,
        "context": measured.context,
        "stride": measured.stride,
    }, measured


# Write a smaller model ----------------------------------------------------------------------------


def prune(
    model: Positional[str],
    plan: Positional[File],
    *,
    out: File,
    on: StreamedDevice = StreamedDevice(),
    other_weights: bool = False,
    verify: bool = False,
    refit: bool = False,
    rows: Rows = Rows(),
) -> None:
    """Remove the units of a plan from a model.

    The smaller model is saved as a folder with its tokenizer; its weights are the model's own, bit
    for bit, apart from gains. They are read, cut and written one after the other, in the dtype of
    the model's files (the demo model and, on the CPU, --refit: float32), so no GPU is needed, and
    memory for the largest of them is enough. --refit and --verify load the model, unless --stream
    lets them read one layer at a time; a model without safetensors files is loaded, too. --refit
    fits the output projections again by least squares on the text, which needs memory for both
    models without --stream; the folder's manifest and card tell of it. --verify checks on two rows
    of the text that it computes what the masked model computes, before anything is saved and before
    the refit.

    Examples:
      cocurve prune demo plan.json --out smaller --verify
      cocurve prune MODEL plan.json --out smaller --verify --text held_out.jsonl --dtype bfloat16
      cocurve prune MODEL RELEASE/llama-3.1-8b-instruct/r20 --out smaller
      cocurve prune MODEL plan.json --out smaller --refit --text c4.jsonl

    Args:
        model: "demo", "smollm2" (see fetch), a folder, or a hub id
        plan: file from `cocurve solve`, or the folder rXX of a ratio in the authors' release
        out: a new folder
        other_weights: allow a plan of other weights
        verify: compare with the masked model
        refit: refit what stays, layer by layer
    """
    if on.stream and refit == verify:
        raise InputError(
            "--stream is for --refit or for --verify, not for both: a refitted model computes "
            "something else than the masked one. Leave one out, or leave out --stream."
        )
    selection = read_plan(plan)
    require_new(out)
    dense: Any = None
    with suppress(stored.PickledError):  # such a model must be loaded
        dense = on_disk.open_model(model, dtype=on.dtype)
    if dense is not None and not refit:
        as_stored: Any = identity.model_dtype(dense)
        on = replace(on, dtype=as_stored)
    if verify or refit or dense is None:
        dense, tokenizer = on.load(model)
    else:
        tokenizer = loading.load_tokenizer(model)
    if other_weights:
        selection = allow_other_weights(selection, dense)
    before = dense.num_parameters()
    print(f"{selection}\n{before:,} -> {before - selection.pruned_cost:,} parameters", flush=True)
    if refit:
        text = rows.calibration(model, tokenizer)
        if verify:
            cutting.prune(dense, selection, verify=text)
        repair.repair(
            dense,
            selection,
            text,
            options=repair.RepairOptions(progress=progress()),
            out=out,
            tokenizer=tokenizer,
        )
    elif verify:
        text = replace(rows, sequences=2).calibration(model, tokenizer)
        if on.stream:
            cutting.prune(dense, selection, verify=text, out=out, tokenizer=tokenizer)
        else:  # in place, because two models may not fit, and the dense one can be loaded again
            pruned = cutting.prune(dense, selection, inplace=True, verify=text)
            save_pruned(pruned, out, tokenizer=tokenizer)
    else:
        cutting.require_prunable(dense, selection, on_disk=True)
        on_disk.prune_to_folder(dense, selection, out, tokenizer=tokenizer, progress=progress())
    print(f"Saved to {out}.")


def recover(
    folder: Positional[File],
    *,
    against: str,
    out: File,
    on: Device = Device(),
    text: Rows = Rows(),
    held_out: Count = 16,
    rank: Count = 16,
    learning_rate: float = 1e-3,
    epochs: Count = 4,
    minutes: float | None = None,
) -> None:
    """Train a pruned model until it answers as the dense one does.

    These are low-rank updates of its linear layers, by KL on the text (LoRA; needs pip install
    'cocurve-lab[recover]'). They are added to the weights, so the new folder has the size of the
    old one. Held-out rows choose the epoch. Both models must fit in memory. A folder that `prune
    --refit` wrote is a better start than one without a refit. The state after each epoch is kept
    beside the new folder until it is written; the same command goes on from there.

    Examples:
      cocurve recover smaller --against demo --out trained
      cocurve recover smaller --against MODEL --text c4.jsonl --dtype bfloat16 --out trained

    Args:
        folder: folder from `cocurve prune`
        against: the dense model
        out: a new folder
        held_out: rows that choose the epoch
        rank: of the updates
        learning_rate: of AdamW, the largest
        epochs: times each row is read; with --minutes, times held-out rows are measured
        minutes: train for this time instead
    """
    options = recovery.RecoverOptions(
        rank=rank,
        learning_rate=learning_rate,
        epochs=epochs,
        minutes=minutes,
        progress=progress(),
    )
    state = Path(f"{out}.state")
    if identity.is_pruned(out):  # perhaps killed between its last two steps
        shutil.rmtree(state, ignore_errors=True)
    require_new(out)
    pruned = load_pruned(folder, **vars(on))
    dense, tokenizer = on.load(against)
    rows = text.calibration_and_held_out(against, tokenizer, held_out)
    trained: Any = recovery.recover(dense, pruned, *rows, options=options, checkpoint=state)
    save_pruned(trained, out, tokenizer=tokenizer)
    shutil.rmtree(state, ignore_errors=True)
    epoch = (trained.cocurve_manifest.get("recovery") or {}).get("epoch", 0)
    print(f"The weights are those of epoch {epoch}; epoch 0 is the start. Saved to {out}.")


def compress(
    model: Positional[str],
    *,
    out: File,
    smaller: Annotated[Percent | None, BUDGET] = None,
    ratio: Annotated[float | None, BUDGET] = None,
    parameters: Annotated[str | None, BUDGET] = None,
    minutes: float = 30.0,
    on: Device = Device(),
    text: Readable | None = None,
    sequences: Count = 128,
    length: Count | None = None,
    curvature: str | None = None,
    no_refit: bool = False,
    gguf: bool = False,
    checkpoint: File | None = None,
) -> None:
    """Find the best smaller model that some minutes of work buy.

    Build H on as many rows as fit, solve on it, search by measured KL from the best plan, refit,
    and measure on text that no step before has seen. The result is a folder, as `cocurve prune`
    writes it, with a report in report.html. Each step is also a verb or a function of its own. The
    model must fit in memory twice; for a larger one run the steps with --stream: build, solve,
    search, and prune with --refit.

    Examples:
      cocurve compress demo --smaller 20% --minutes 10 --out smaller
      cocurve compress MODEL --parameters 6B --minutes 120 --text c4.jsonl --out smaller --gguf

    Args:
        model: "demo", "smollm2" (see fetch), a folder, or a hub id
        out: a new folder
        smaller: percent of all parameters to remove, such as 20%
        ratio: share of removable parameters to remove, such as 0.2
        parameters: most parameters left: "6B", "350M"
        minutes: time to spend, on all steps and the report
        text: text for all steps; default: the model's own, C4 from the hub, or Python's manual
        sequences: the most rows for H, and for a refit
        length: tokens per row; default: as many as the time allows
        curvature: an H of the model to use; default: that of smollm2, for others one is built
        no_refit: leave the weights as they are
        gguf: also write OUT.gguf, for llama.cpp
        checkpoint: keep what is measured here; the same command with more minutes goes on from it
    """
    require_new(out)
    file = out.with_name(f"{out.name}.gguf")
    if gguf:
        require_new(file)
    dense, tokenizer = on.load(model)
    if smaller is not None:
        parameters = str(round(dense.num_parameters() * (1 - smaller)))
    found = best_plan(
        dense,
        tokenizer,
        Target(parameters=parameters) if ratio is None else ratio,
        minutes,
        refit=not no_refit,
        num_sequences=sequences,
        text_file=text,
        seq_len=length,
        curvature=None if curvature is None else read_curvature(curvature),
        checkpoint=checkpoint,
        progress=progress(),
    )
    save_pruned(
        found.model,
        out,
        tokenizer=tokenizer,
        evaluation=CardFacts(
            kl=found.kl,
            kl_error=found.standard_error,
            kl_text=f"{len(found.side.kl)} rows that no step of the search has seen",
            dense_perplexity=found.perplexities[0],
            pruned_perplexity=found.perplexities[1],
        ),
    )
    write_new(out / "report.html", found.page)
    print(f"{found}\nSaved to {out}. The report is {out / 'report.html'}.")
    if gguf:
        print(export_gguf(found.model, tokenizer, file))


def chat(folder: Positional[File], *, against: str | None = None, tokens: Count = 64) -> None:
    """Let a pruned model, and the dense one beside it, continue what is typed.

    A model with a chat template is asked a question. An empty line ends it.

    Examples:
      cocurve chat smaller --against demo

    Args:
        folder: folder from `cocurve prune` or `compress`
        against: the dense model
        tokens: the most new tokens
    """
    places = [str(folder)] if against is None else [against, str(folder)]
    loaded = {place: Device().load(place, against) for place in places}
    with suppress(EOFError):  # Ctrl-D ends it, too
        while asked := input("> ").strip():
            table = Table(*places, expand=True)
            said = (continue_text(each, words, asked, tokens) for each, words in loaded.values())
            table.add_row(*map(Text, said))
            rich.print(table)


def export(
    folder: Positional[File],
    *,
    gguf: File,
    dtype: Literal["f32", "f16", "q8_0"] = "f16",
    tokenizer: Annotated[str | None, TOKENIZER] = None,
    no_tokenizer: Annotated[bool, TOKENIZER] = False,
) -> None:
    """Write a pruned model as one GGUF file, which llama.cpp runs without this library.

    Its weights are read one after the other, so memory for the largest of them is enough.

    Examples:
      cocurve export smaller --gguf smaller.gguf --dtype f16
      cocurve export smaller --gguf ids.gguf --no-tokenizer

    Args:
        folder: folder from `cocurve prune`
        gguf: a new file
        dtype: dtype of the matrices
        tokenizer: tokenizer of a folder without one
        no_tokenizer: write a file that takes token ids only, for a tokenizer that llama.cpp has not
    """
    require_new(gguf)
    pruned = saving.open_pruned(folder)  # first: a mistyped folder would be taken for a hub id
    words = None if no_tokenizer else read_tokenizer(str(folder), tokenizer)
    print(export_gguf(pruned, words, gguf, dtype=dtype))
