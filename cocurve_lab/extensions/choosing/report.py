"""The report of `best_plan` as one page without scripts or network: size, cost, speed and text."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.errors import InfeasibleError
from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...measuring.risk import measure_plans
from ...models.identity import model_name
from ...solver.selection import Selection
from ...solver.solve import solve_greedy
from ..judging.agreement import random_plan
from ..judging.generation import continue_text, own_questions
from ..writing import plus_minus

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .best_plan import BestPlan

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_PROMPTS, _PROMPT_TOKENS, _NEW_TOKENS = 10, 24, 24
_RATIOS = (0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Samples:
    """What the dense and the smaller model write after some prompts.

    Attributes:
        texts: (prompt, dense, smaller) of each prompt.
        speeds: tokens per second of the dense and of the smaller model, one prompt at a time.
    """

    texts: tuple[tuple[str, str, str], ...]
    speeds: tuple[float, float]


def write_samples(
    model: PreTrainedModel,
    smaller: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: CalibrationSet,
) -> Samples:
    """Let both models continue prompts: a model's own questions, else the beginnings of rows."""
    prompts = [question.prompt for question in own_questions(model_name(model))]
    if not prompts:
        prompts = [str(tokenizer.decode(row)) for row in rows.input_ids[:, :_PROMPT_TOKENS]]
    step = max(1, len(prompts) // _PROMPTS)  # one ability after the other
    prompts = prompts[::step][:_PROMPTS]
    written, speeds = [], []
    for each in (model, smaller):
        begun = time.monotonic()
        texts = [continue_text(each, tokenizer, prompt, _NEW_TOKENS) for prompt in prompts]
        seconds = time.monotonic() - begun
        tokens = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        written.append(texts)
        speeds.append(tokens / seconds)
    return Samples(tuple(zip(prompts, *written, strict=True)), (speeds[0], speeds[1]))


def cost_of_ratios(
    model: PreTrainedModel, curvature: Curvature, rows: CalibrationSet
) -> list[tuple[str, list[str]]]:
    """KL of plans of 10, 20 and 30 % on a few rows, as pruned, by what makes the plan."""
    makers: dict[str, Any] = {
        "H, λ 1": lambda ratio: solve_greedy(curvature, ratio, 1.0),
        "H, λ 0": lambda ratio: solve_greedy(curvature, ratio, 0.0),
        "whole layers at random": lambda ratio: _random_layers(curvature, ratio),
        "units at random": lambda ratio: random_plan(curvature.units, ratio, 0),
    }
    plans: dict[tuple[str, float], Selection] = {}
    for name, make in makers.items():
        for ratio in _RATIOS:
            with suppress(InfeasibleError):
                plans[name, ratio] = make(ratio)
    table = measure_plans(model, list(plans.values()), rows, progress=False)
    cells = {
        key: plus_minus(float(table.mean[place]), float(table.standard_error[place]))
        for place, key in enumerate(plans)
    }
    return [(name, [cells.get((name, ratio), "-") for ratio in _RATIOS]) for name in makers]


def _random_layers(curvature: Curvature, ratio: float) -> Selection:
    """Whole layers in random order, until the ratio is reached."""
    units = curvature.units
    order = np.random.default_rng(0).permutation(units.num_layers)
    pruned: list[int] = []
    for layer in order:
        if units.costs[pruned].sum() >= ratio * units.total_cost:
            break
        pruned += np.flatnonzero(units.layers == layer).tolist()
    return Selection.from_pruned(units, sorted(pruned), requested_ratio=ratio)


def page(found: BestPlan) -> str:
    """Write the page; it may also stand in a notebook's cell."""
    from jinja2 import Environment  # comes with torch

    plan, side = found.selection, found.side
    units = plan.units
    layers = []
    for layer in range(units.num_layers):
        mine = units.layers == layer
        left = {
            kind: (int((mine & ~plan.indicator & (units.kinds == kind)).sum()), int(of.sum()))
            for kind in dict.fromkeys(units.kinds.tolist())
            if (of := mine & (units.kinds == kind)).any()
        }
        layers.append((layer, left))
    total = units.total_parameters or units.total_cost
    bytes_each = next(found.model.parameters()).element_size()
    rest = total - plan.pruned_cost
    dense, mine = found.perplexities
    speeds = [f"{speed:.1f}" for speed in found.samples.speeds]
    rows = [
        ("parameters", f"{total:,}", f"{rest:,} ({1 - rest / total:.1%} fewer)"),
        ("weights", f"{total * bytes_each / 1e6:,.1f} MB", f"{rest * bytes_each / 1e6:,.1f} MB"),
        ("KL to the dense model, nats per token", "0", plus_minus(found.kl, found.standard_error)),
        ("perplexity", f"{dense.value:.3f}", f"{mine.value:.3f}"),
        ("the dense model's likeliest next token is also the likeliest", "", f"{side.kept:.1%}"),
        ("tokens per second, one prompt at a time", *speeds),
    ]
    template = Environment(autoescape=True).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        found=found,
        name=model_name(found.model),
        rows=rows,
        layers=layers,
        ratios=[f"{ratio:.0%}" for ratio in _RATIOS],
        words=str(found).splitlines(),
    )
