"""`cocurve compress`: from a model, a budget and some minutes to the best smaller model."""

from __future__ import annotations

import argparse
from typing import Any

from ..base.errors import InputError
from .common import add_model, add_verb, as_path, progress, read_any_model, require_new

DESCRIPTION = """\
Find the best smaller model that some minutes of work buy: build H on as many rows as fit, solve on
it and on the shifts, search by measured KL from the best plan, refit, and measure on text that no
step before has seen. The result is a folder, as `cocurve prune` writes it, and a report of ten
lines. Each step is also a verb or a function of its own. The model must fit in memory twice; for a
larger one run the steps with --stream: build, solve, search, and prune with --refit."""
EXAMPLE = """\
  cocurve compress demo --ratio 0.2 --minutes 10 --out smaller
  cocurve compress MODEL --parameters 6B --minutes 120 --text c4.jsonl --out smaller"""


def add_to(verbs: Any) -> None:
    """Add the verb `compress`."""
    parser = add_verb(verbs, "compress", run, DESCRIPTION, EXAMPLE)
    add_model(parser)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--ratio", type=float, help="share of removable parameters to remove")
    budget.add_argument("--parameters", help='most parameters left: "6B", "350M"')
    parser.add_argument("--minutes", type=float, default=30.0, help="time to spend (30)")
    parser.add_argument("--out", metavar="FOLDER", type=as_path, required=True, help="a new folder")
    parser.add_argument(
        "--text", metavar="FILE", type=as_path, help="text for all steps; default: C4 from the hub"
    )
    parser.add_argument(
        "--sequences",
        type=int,
        default=128,
        help="the most rows for H; also those of the refit (128)",
    )
    parser.add_argument("--length", type=int, help="tokens per row (2048, or the context)")
    parser.add_argument(
        "--questions",
        metavar="FILE",
        type=as_path,
        help='questions for the report: JSON lines with "family", "prompt" and "answer"; default: '
        "the demo model's own, none for other models",
    )
    parser.add_argument("--no-refit", action="store_true", help="leave the weights as they are")
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        type=as_path,
        help="keep what is measured here; the same command with more minutes goes on from it",
    )


def run(options: argparse.Namespace) -> int:
    """Run `cocurve compress`."""
    from ..extensions.choosing.best_plan import best_plan
    from ..measuring.generation import read_questions
    from ..pruner.card import CardFacts
    from ..pruner.saving import save_pruned
    from ..solver.targets import Target

    require_new(options.out)
    questions = None if options.questions is None else read_questions(options.questions)
    budget = Target(parameters=options.parameters) if options.ratio is None else options.ratio
    model, tokenizer = read_any_model(options.model, options)
    if tokenizer is None:
        raise InputError(f"{options.model} holds no tokenizer. Give a folder that has one.")
    found = best_plan(
        model,
        tokenizer,
        budget,
        options.minutes,
        refit=not options.no_refit,
        num_sequences=options.sequences,
        text_file=options.text,
        seq_len=options.length,
        questions=questions,
        checkpoint=options.checkpoint,
        progress=progress(),
    )
    facts = CardFacts(
        kl=found.kl,
        kl_error=found.standard_error,
        kl_text=f"{len(found.side.kl)} rows that no step of the search has seen",
    )
    save_pruned(found.model, options.out, tokenizer=tokenizer, evaluation=facts)
    print(f"{found}\nSaved to {options.out}.")
    return 0
