"""`cocurve evaluate`: perplexity, KL from the dense model, and tasks."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..base.errors import InputError
from ..calibration import read_documents
from ..models.loading import demo_folder, is_demo
from .common import (
    add_model,
    add_suite,
    add_text,
    add_verb,
    as_path,
    held_out_rows,
    progress,
    read_any_model,
    require_new,
    require_text,
    write_new,
)

if TYPE_CHECKING:
    from ..calibration import CalibrationSet
    from ..evaluation.report import EvaluationReport

DESCRIPTION = """\
Measure a dense or pruned model: its perplexity on a text. --against adds the KL divergence from the
dense model in nats per token, with its standard error over rows. --suite adds tasks, run by
lm_eval. Use a text that H was not built on."""
EXAMPLE = """\
  cocurve evaluate smaller --against demo
  cocurve evaluate smaller --against MODEL --text held_out.jsonl --json
  cocurve evaluate demo --suite demo --limit 40 --report report.json"""


def add_to(verbs: Any) -> None:
    """Add the verb `evaluate`."""
    parser = add_verb(verbs, "evaluate", run, DESCRIPTION, EXAMPLE)
    add_model(parser, stream=True)
    parser.add_argument("--against", metavar="DENSE", help="the dense model, for the KL")
    add_text(parser, "text", 16, "text to measure on", "none")
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="tokenizer of a pruned folder without one"
    )
    add_suite(parser, "tasks to run")
    parser.add_argument(
        "--report", metavar="FILE", type=as_path, help="file for the suite's report"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run `cocurve evaluate`."""
    from ..measuring.perplexity import PerplexityOptions, perplexity

    _require_suite(options)
    require_text(options)
    place = options.tokenizer or options.against
    model, tokenizer = read_any_model(options.model, options, place)
    if tokenizer is None:
        raise InputError(f"{options.model} holds no tokenizer. Give --tokenizer or --against.")
    found: dict[str, Any] = {"model": options.model}
    documents = _documents(options)
    if documents is not None:
        settings = PerplexityOptions(progress=progress())
        measured = perplexity(model, tokenizer, documents, options=settings)
        whole = asdict(measured) | {"standard_error": measured.standard_error}
        found["perplexity"] = {k: v for k, v in whole.items() if not k.startswith("window_")}
        if not options.json:
            print(measured, flush=True)
    if options.against is not None:
        dense, rows = _against(options)
        found["kl"] = _divergence(options.against, dense, model, rows)
        if not options.json:
            print(_words(found["kl"]), flush=True)
    if options.suite is not None:
        report = _tasks(options, model, tokenizer)
        found["tasks"] = json.loads(report.to_json())
        if not options.json:
            print(report, flush=True)
    if options.json:  # before the report, so that a full disk does not lose the results
        print(json.dumps(found, indent=1), flush=True)
    if options.report is not None:
        write_new(options.report, report.to_json())
    return 0


def _require_suite(options: argparse.Namespace) -> None:
    """Check, before hours of measuring, that options belong together and files can be written."""
    if (options.suite == "local") != bool(options.tasks):
        raise InputError("--tasks names the files of --suite local. Give both, or neither.")
    missing = next((file for file in options.tasks if not file.exists()), None)
    if missing is not None:
        raise InputError(f"there is no task file {missing}. Check the path.")
    if options.data is not None and options.suite != "paper":
        raise InputError("--data is for the datasets of --suite paper. Give both, or neither.")
    if options.allow_code_execution and options.suite is None:
        raise InputError(
            "--allow-code-execution is for programs of a --suite. Give --suite, or remove it."
        )
    if options.report is None:
        return
    if options.suite is None:
        raise InputError("--report keeps what --suite measures. Give both, or use --json.")
    require_new(options.report)


def _documents(options: argparse.Namespace) -> list[str] | None:
    """The text for the perplexity: --text, the demo model's held-out text, or None."""
    if options.text is not None:
        return read_documents(options.text)
    if is_demo(options.model) or is_demo(options.against or ""):
        return read_documents(demo_folder().parent / "texts" / "held_out.jsonl")
    if options.suite is None:
        raise InputError("there is nothing to measure on. Give --text FILE, or --suite.")
    return None


def _divergence(against: str, dense: Any, model: Any, rows: CalibrationSet) -> dict[str, Any]:
    """Measure KL(dense || model) on rows of the text, in nats per token."""
    from ..measuring.risk import model_risk, standard_error

    values = model_risk(dense, model, rows, progress=progress())
    return {
        "against": against,
        "mean": float(values.mean()),
        "standard_error": float(standard_error(values[None])[0]) if len(values) > 1 else None,
        "rows": len(rows),
        "tokens_per_row": rows.seq_len,
        "source": rows.source,
    }


def _against(options: argparse.Namespace) -> tuple[Any, CalibrationSet]:
    """The dense model, and the rows of text that its tokenizer makes."""
    dense, tokenizer = read_any_model(options.against, options)
    if tokenizer is None:
        raise InputError(f"{options.against} holds no tokenizer. Give --against a dense model.")
    return dense, held_out_rows(options, options.against, tokenizer)


def _words(kl: dict[str, Any]) -> str:
    """The measured KL as a line of text."""
    error = "" if kl["standard_error"] is None else f" ± {kl['standard_error']:.4f}"
    return (
        f"KL({kl['against']} || model) {kl['mean']:.4f}{error} nats per token, {kl['rows']} rows "
        f"of {kl['tokens_per_row']} tokens from {kl['source']}"
    )


def _tasks(options: argparse.Namespace, model: Any, tokenizer: Any) -> EvaluationReport:
    """Run the tasks of --suite."""
    from ..evaluation.tasks import TaskOptions, evaluate_tasks

    bars = progress() is True  # lm_eval has only bars, which would spoil a log file
    settings = TaskOptions(
        files=tuple(options.tasks),
        data=options.data,
        progress=bars,
    )
    return evaluate_tasks(
        model,
        tokenizer,
        options.suite,
        options.limit,
        options.allow_code_execution,
        options=settings,
    )
