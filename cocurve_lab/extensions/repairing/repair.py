"""Repair: the columns of W_O and W_down that stay make up for what went.

Let x [tokens, R] be the kept columns of an output projection, e [tokens, d] what is lacking behind
it, W_R [d, R] its kept weight and p [tokens] the weights of tokens. Least squares with a ridge
gives

    W_R += e^T P x (x^T P x + Gamma)^-1,   P = diag(p),

the minimum of ||P^1/2 (x D^T - e)||^2 + ||D Gamma^1/2||^2 over D, so a large ridge changes nothing.
Where the projection has a bias, x and e are centred, and it takes the difference of the means.

Targets:
- "gap" (sequential): x is of the model pruned and refitted so far, layer by layer. e is the dense
  model's residual stream behind the removed blocks that follow, up to the next block that stays,
  minus this model's. A projection is refitted if its block lost columns or blocks are missing
  behind it; so a plan of whole layers is refitted too. A token's weight is one over the mean square
  of the dense stream, which the next norm divides by: the first token's stream is a hundred times
  larger than the median, and would be served alone. Gamma is in units of each column's own
  second moment.
- "stream" (sequential): x and e as for "gap", right after the block itself, in blocks that lost
  columns. All tokens weigh the same, and Gamma is in units of the mean second moment.
- "dense" (not sequential): every layer is refitted alone, on the dense model's columns; e is what
  the columns that went wrote. This is the refit of SlimGPT (Ling et al., 2024;
  `methods/slimgpt.py`).

Where an RMS norm lies between a block and the stream (Gemma 2 and 3, OLMo2), e and p are taken back
through it, with the size of each token's write as it is before the refit. Layer norms on the stream
itself (OPT-350m) allow no such step, and the refit is then that of "dense". ReplaceMe (arXiv
2505.02819) fits one gap of whole layers.

Memory: the dense and the pruned model, on the CPU the hidden states of all rows (once, and four
times for a stream), and the sums of one block, [R, R] and [d, R] float64. A streamed model that is
refitted into a folder has one layer in memory at a time, and a second one over a gap.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch

from ...base.arguments import as_float
from ...base.errors import ArchitectureError, InputError
from ...base.progress import Progress, open_bar
from ...base.storage import fingerprint
from ...calibration import CalibrationSet
from ...measuring.results import mean_and_error
from ...measuring.risk import model_risk
from ...models.architectures import Architecture, describe
from ...models.identity import require_source, weight_marks
from ...models.kinds import KINDS
from ...models.runtime import measuring, require_measurable
from ...pruner.cutting import prune, require_prunable
from ...pruner.slicing import kept_columns
from ...solver.selection import Selection
from ..big_models.on_disk import Present, prune_to_folder
from .least_squares_refit import Fit, Pair, Target
from .projection_inputs import text_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
RIDGE = {"gap": 0.3, "stream": 0.01, "dense": 0.01}  # by target, without another
RIDGES = (0.1, 0.3, 1.0, 3.0)  # that held-out text chooses among, for the target "gap"


@dataclass(frozen=True)
class RepairOptions:
    """Options of `repair`.

    Attributes:
        ridge: at least 0, in units of a column's own second moment for the target "gap", else of
            the mean over columns. None: 0.3 and 0.01.
        progress: show a bar; "lines" writes lines for a log file instead.
        target: of a sequential refit: the dense stream behind the "gap" of removed blocks that
            follows, or the "stream" right after the block.
    """

    ridge: float | None = None
    progress: Progress = True
    target: Literal["gap", "stream"] = "gap"

    def __post_init__(self) -> None:
        if self.ridge is not None and not 0 <= as_float(self.ridge, "ridge") < math.inf:
            raise InputError(f"ridge is {self.ridge}. Give a finite number of at least 0.")
        if self.target not in ("gap", "stream"):
            raise InputError(f"target is {self.target!r}. Give 'gap' or 'stream'.")


@overload
def repair(
    model: PreTrainedModel,
    selection: Selection,
    calibration: CalibrationSet,
    *,
    sequential: bool = True,
    held_out: Sequence[CalibrationSet] = (),
    options: RepairOptions = RepairOptions(),
) -> PreTrainedModel: ...
@overload
def repair(
    model: PreTrainedModel,
    selection: Selection,
    calibration: CalibrationSet,
    *,
    sequential: bool = True,
    options: RepairOptions = RepairOptions(),
    out: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path: ...
def repair(
    model: PreTrainedModel,
    selection: Selection,
    calibration: CalibrationSet,
    *,
    sequential: bool = True,
    held_out: Sequence[CalibrationSet] = (),
    options: RepairOptions = RepairOptions(),
    out: str | os.PathLike[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel | Path:
    """Prune a model and refit the output projections before what went, by least squares on text.

    Any plan can be repaired, whichever method made it. Blocks that lost nothing, and have none
    missing behind them, stay as pruned. Weights in half precision are refitted in float64 and
    rounded once; on a GPU, products of activations are float32.

    The refit starts from the plan's gains, if it has any.

    Args:
        model: the dense model; it is left as it was.
        selection: the plan.
        calibration: rows; every token counts, whichever positions are scored. Few rows overfit:
            for 40 % of the demo model, 4,096 tokens were too few, and 32,768 enough. Rows of all
            kinds of text that the model is for serve it best.
        sequential: statistics from the model pruned and refitted so far; False: from the dense one.
        held_out: texts that choose. Without a ridge in the options, each of `RIDGES` is tried. A
            refit is kept if its KL on each text, paired by row, is not above that of the pruned
            model by more than one standard error; of those, the least mean over texts. None may be
            kept. Not with `out`.
        options: ridge, target and progress.
        out: a new folder. The refitted model is written there layer by layer, as `save_pruned`
            would. `model` may be a streamed one.
        tokenizer: with `out`: the dense model's, to save in the folder too.

    Returns:
        The pruned and refitted model, whose manifest records the refit under "repair". With `out`,
        the folder.
    """
    dense = require_prunable(model, selection, on_disk=out is not None)
    dense.require_columns("a refit")
    if len(dense.attention_layers) < len(dense.layers):
        raise ArchitectureError(
            f"a refit is not for hybrids: some layers have {', '.join(dense.family.mixers)} in "
            "place of attention, whose write it does not know. Prune without it."
        )
    require_measurable(model, calibration)
    require_source(model, selection)
    if held_out and out is not None:
        raise InputError(
            "held-out text chooses among models in memory. Refit without out=, then save_pruned."
        )
    target: Target = options.target if sequential else "dense"
    fits = _fits(dense, selection, target)
    plan = _PlanRefit(dense, selection, calibration, fits, target, options.ridge, options.progress)
    if out is not None:
        return prune_to_folder(
            model,
            selection,
            out,
            tokenizer=tokenizer,
            progress=options.progress,
            refit=plan.run if fits else None,
        )
    texts = [text.require_disjoint(calibration) for text in held_out]
    return plan.best_on(texts) if texts else plan.in_memory()


@dataclass(frozen=True)
class _PlanRefit:
    """The refit of a plan; `fits` are the projections that change, and the rest is `repair`'s."""

    dense: Architecture
    selection: Selection
    calibration: CalibrationSet
    fits: list[Fit]
    target: Target
    ridge: float | None
    progress: Progress

    def run(self, pruned: PreTrainedModel, present: Present) -> dict[str, Any]:
        """Refit blocks of a pruned model in place; return the manifest's record.

        `present`, given a layer, keeps its weights in both models inside its block.
        """
        threads = torch.get_num_threads()
        layers = range(1 + max(fit.block[0] for fit in self.fits))
        bar = open_bar(self.progress, total=len(layers), desc="Refit", unit="layer")
        with measuring(self.dense.model, threads), measuring(pruned, threads), bar:
            pair = Pair(self.dense, describe(pruned), self.calibration.input_ids, self.target)
            ridge = RIDGE[pair.target] if self.ridge is None else self.ridge
            for layer in layers:
                with present(layer):
                    for fit in self.fits:
                        if fit.block[0] == layer:
                            pair.refit(fit, ridge)
                    if layer < layers[-1]:
                        pair.advance(layer)
                bar.update()
        return {
            "method": "refit",
            "sequential": pair.target != "dense",
            "target": pair.target,
            "kinds": list(KINDS),
            "ridge": float(ridge),
            **text_record(self.calibration),
        }

    def in_memory(self) -> PreTrainedModel:
        """Prune, refit, and record the refit in the manifest."""
        pruned = prune(self.dense.model, self.selection)
        if self.fits:
            manifest: Any = pruned.cocurve_manifest
            manifest["repair"] = self.run(pruned, lambda _: nullcontext())
            manifest["weights_fingerprint"] = fingerprint(weight_marks(pruned))
            manifest["weights_since_pruning"] = "refitted"
        return pruned

    def best_on(self, texts: Sequence[CalibrationSet]) -> PreTrainedModel:
        """Return the refit of the ridge that is best on held-out texts, or the pruned model."""
        model = self.dense.model
        best = prune(model, self.selection)
        as_cut = [model_risk(model, best, text) for text in texts]
        least = np.mean([risks.mean() for risks in as_cut])
        for ridge in RIDGES if self.ridge is None else [self.ridge]:
            trial = replace(self, ridge=ridge).in_memory()
            found = [model_risk(model, trial, text) for text in texts]
            changes = [mean_and_error(now - cut) for now, cut in zip(found, as_cut, strict=True)]
            mean = np.mean([risks.mean() for risks in found])
            if mean < least and all(more <= error for more, error in changes):
                best = trial
                least = mean
        return best


def _fits(dense: Architecture, selection: Selection, target: Target) -> list[Fit]:
    """The projections that a refit changes, from first to last."""
    blocks = [(layer, kind) for layer in range(len(dense.layers)) for kind in KINDS]
    kept = {block: kept_columns(dense, selection, *block)[0] for block in blocks}
    stays = [at for at, block in enumerate(blocks) if len(kept[block])]
    ends = [*stays, len(blocks)]
    lost = [block for block in blocks[: ends[0]] if dense.width(*block)]
    if lost:
        log.warning(
            "nothing stays before layer %d that could make up for the blocks removed up to layer "
            "%d; protect_first=1 keeps the first layer",
            lost[0][0],
            lost[-1][0],
        )
    found = []
    for at, end in pairwise(ends):
        block = blocks[at]
        gap = tuple(blocks[at + 1 : end]) if target == "gap" else ()
        missing = any(dense.width(*each) for each in gap)  # not by an earlier pruning
        if missing or len(kept[block]) < dense.width(*block):
            found.append(Fit(block, kept[block], gap))
    return found
