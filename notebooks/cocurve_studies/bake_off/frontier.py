"""The plans behind the cells of a bake-off: errors of their order, and their texts side by side."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cocurve_lab.base.errors import InfeasibleError, InputError
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.extensions.judging.kept import plans_file
from cocurve_lab.extensions.judging.lockstep import Sampling, compare_text
from cocurve_lab.measuring.risk import measure_plans, standard_error
from cocurve_lab.models.units import enumerate_units
from cocurve_lab.solver.selection import Selection

from ..tables import DataFrame, Row, Rows, pick, table_of
from .bench import Bench
from .comparison import Comparison
from .contenders import Competitor, named
from .settings import CompareOptions, Judges

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LONG = 80  # characters of a prompt that a table still shows whole


def leaders(
    comparison: Comparison, ratio: float, count: int, search: str = "searched", metric: str = "kl"
) -> list[str]:
    """Name the methods of best rank at a ratio, best first; those off the ratio have no rank."""
    ranked = comparison.summary(ratio, search).dropna(subset=f"{metric}_rank")
    best = ranked.sort_values(f"{metric}_rank", kind="stable")["method"]
    return [str(name) for name in best[:count]]


def guards_table(
    comparison: Comparison, ratios: Sequence[float], methods: Sequence[str]
) -> DataFrame:
    """Table KL and perplexity of some methods without guards and with their own best ones.

    A method that failed at a ratio keeps its row, with the reason in place of the guards. One
    without cells has no row.
    """
    rows: Rows = []
    searches = {"none": "no guards", "searched": "own guards"}
    for ratio in ratios:
        cells = {
            s: {row["method"]: row for row in pick(comparison.summary(ratio, s))} for s in searches
        }
        for name in (name for name in methods if name in cells["none"]):
            own = cells["searched"][name]
            row: Row = {"removed": f"{ratio:.0%}", "method": name}
            for metric, heading, places in (("kl", "KL", 4), ("perplexity", "perplexity", 3)):
                for search, words in searches.items():
                    value = cells[search][name][metric]
                    row[f"{heading}, {words}"] = None if value is None else round(value, places)
            rows.append(row | {"its guards": own["failed"] or own["guards"]})
    return table_of(rows)


def chosen_plans(
    model: PreTrainedModel,
    methods: Mapping[str, Competitor],
    ratio: float,
    calibration: CalibrationSet,
    judges: Judges,
    options: CompareOptions | None = None,
) -> dict[str, Selection]:
    """Select the plans that `compare` measured, with the guards each method found best.

    With the folder of that run in the options, evidence and held-out KL are read from it. Methods
    that repair weights are omitted (their model is more than its plan), and so are those that do
    not reach the ratio.

    Args:
        model, methods, judges, options: as in that run; empty `options.guards` give the plans
            without guards.
        ratio: share of removable cost, [0, 1).
        calibration: the first calibration of that run.

    Returns:
        label -> Selection, in the order of `methods`.
    """
    options = options or CompareOptions()
    units = enumerate_units(model, options.ffn_groups)
    bench = Bench(model, units, judges, replace(options, progress=False))
    plans = {}
    for label, contender in named(methods).items():
        if contender.repairs:
            continue
        try:
            seen = bench.seen(contender, calibration, 0)
            plans[label] = bench.enter(contender, seen, ratio, bench.searches(contender)[-1]).plan
        except InfeasibleError:  # `Comparison.unreached` says which, and why
            continue
    return plans


def paired_table(
    model: PreTrainedModel,
    plans: Mapping[str, Selection],
    reference: str,
    text: CalibrationSet,
    folder: str | os.PathLike[str] | None = None,
) -> DataFrame:
    """Compare every plan with one of them on the same rows of text.

    Text that is hard for one plan is hard for all, so a difference taken row by row has a far
    smaller error than the two perplexities it comes from.

    Args:
        model: the dense model.
        plans: label -> plan; all of one ratio, or the comparison says little.
        reference: the label that the others are compared with.
        text: rows that no method saw.
        folder: keeps what was measured; None keeps nothing.

    Returns:
        A row per plan, best perplexity first: method, realized_ratio, kl and kl_error (nats per
        token), perplexity, nll_behind and nll_behind_error (its negative log-likelihood minus the
        reference's, nats per token; above 0 it is worse), sequences. The reference's own is 0.
    """
    if reference not in plans:
        raise InputError(f"there is no plan of {reference!r}. Choose one of {', '.join(plans)}.")
    path = plans_file(folder, model, text)
    table = measure_plans(model, list(plans.values()), text, checkpoint=path, progress=False)
    assert table.nll is not None  # measure_plans fills it
    behind = table.nll - table.nll[list(plans).index(reference)]
    errors = standard_error(behind)
    rows: Rows = [
        {
            "method": name,
            "realized_ratio": plan.realized_ratio,
            "kl": float(table.mean[place]),
            "kl_error": float(table.standard_error[place]),
            "perplexity": float(table.perplexity[place]),
            "nll_behind": float(behind[place].mean()),
            "nll_behind_error": float(errors[place]),
            "sequences": len(text),
        }
        for place, (name, plan) in enumerate(plans.items())
    ]
    return table_of(sorted(rows, key=lambda row: float(row["perplexity"])))


def side_by_side(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plans: Mapping[str, Selection],
    prompts: Sequence[str],
    max_new_tokens: int = 24,
) -> DataFrame:
    """Continue each prompt greedily, by the dense model and by each plan.

    Args:
        model, tokenizer: the dense model.
        plans: label -> plan; each label becomes a column.
        prompts: texts to continue; of a long one the table shows the end.
        max_new_tokens: largest length of a continuation.

    Returns:
        A row per prompt: prompt, dense, and one column per plan.
    """
    rows: Rows = []
    for prompt in prompts:
        row: Row = {"prompt": prompt if len(prompt) <= _LONG else f"…{prompt[-_LONG:]}"}
        for label, plan in plans.items():
            pair = compare_text(model, tokenizer, prompt, plan, Sampling(max_new_tokens))
            row |= {"dense": pair.dense, label: pair.pruned}
        rows.append(row)
    return table_of(rows)
