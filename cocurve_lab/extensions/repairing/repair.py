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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
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
from ...models.runtime import measuring, require_measurable, require_one_device
from ...pruner.cutting import prune, require_prunable
from ...pruner.slicing import kept_columns
from ...solver.selection import Selection
from ..big_models.on_disk import Cuts, layer_present, prune_to_folder, write_refitted
from .least_squares_refit import Fit, Pair, Target
from .projection_inputs import Block, text_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
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
    describe(model).require_columns("a refit")
    _require_attention(describe(model))
    if out is None:
        require_one_device(model)  # before the check of the text, which runs the model
    require_measurable(model, calibration)
    require_source(model, selection)
    plan = _PlanRefit(model, selection, calibration, sequential, options)
    if held_out:
        if out is not None:
            raise InputError(
                "held-out text chooses among models in memory. Refit without out=, then "
                "save_pruned."
            )
        return _chosen(plan, [text.require_disjoint(calibration) for text in held_out])
    if out is None:
        pruned = prune(model, selection)
        plan.refit(pruned)
        return pruned
    require_prunable(model, selection, on_disk=True)
    return prune_to_folder(
        model,
        selection,
        out,
        tokenizer=tokenizer,
        progress=options.progress,
        refit=plan if plan.fits else None,
    )


def refit(
    model: PreTrainedModel,
    pruned: PreTrainedModel,
    selection: Selection,
    calibration: CalibrationSet,
    *,
    sequential: bool = True,
    options: RepairOptions = RepairOptions(),
) -> None:
    """Refit what `prune` returned, in place, and record it in the manifest; see `repair`."""
    require_one_device(model)
    require_measurable(model, calibration)
    _PlanRefit(model, selection, calibration, sequential, options).refit(pruned)


@dataclass(frozen=True)
class _PlanRefit:
    """The refit of a plan; its arguments are those of `repair`."""

    model: PreTrainedModel
    selection: Selection
    calibration: CalibrationSet
    sequential: bool
    options: RepairOptions

    @cached_property
    def fits(self) -> list[Fit]:
        """The projections that are refitted, from first to last."""
        dense = describe(self.model)
        blocks = [(layer, kind) for layer in range(len(dense.layers)) for kind in KINDS]
        kept = {block: kept_columns(dense, self.selection, *block)[0] for block in blocks}
        found: list[Fit] = []
        gap: list[Block] = []  # behind the block, since the walk is from last to first
        for block in reversed(blocks):
            width = dense.width(*block)
            if len(kept[block]):
                behind = tuple(reversed(gap)) if self._target == "gap" else ()
                if len(kept[block]) < width or any(dense.width(*each) for each in behind):
                    found.append(Fit(block, kept[block], behind))
                gap = []
            else:
                gap.append(block)
        if missing := [block for block in reversed(gap) if dense.width(*block)]:
            (first, _), (last, _) = missing[0], missing[-1]
            log.warning(
                "nothing stays before layer %d that could make up for the blocks removed up to "
                "layer %d; protect_first=1 keeps the first layer",
                first,
                last,
            )
        return found[::-1]

    @property
    def _target(self) -> Target:
        return self.options.target if self.sequential else "dense"

    def refit(self, pruned: PreTrainedModel) -> None:
        """Refit a pruned model in place and record it in the manifest."""
        if not self.fits:
            return
        manifest: Any = pruned.cocurve_manifest
        manifest |= {
            "repair": self._refit_layers(pruned, lambda _: nullcontext()),
            "weights_fingerprint": fingerprint(weight_marks(pruned)),
            "weights_since_pruning": "refitted",
        }

    # What `prune_to_folder` asks for, with one layer of the pruned model in memory at a time

    @property
    def weights(self) -> list[str]:
        """The names of the weights that change."""
        return [name for names in self._names.values() for name in names]

    def run(self, pruned: PreTrainedModel, cuts: Cuts, folder: Path) -> dict[str, Any]:
        """Refit a model on the meta device; write the weights that change into a folder."""
        dense, small = describe(self.model), describe(pruned)

        @contextmanager
        def present(layer: int) -> Iterator[None]:
            with layer_present(dense, small, cuts, layer):
                yield
                for name in self._names.get(layer, ()):
                    write_refitted(folder, name, pruned.get_parameter(name))

        return self._refit_layers(pruned, present)

    @cached_property
    def _names(self) -> dict[int, list[str]]:
        """The weights that change, by layer."""
        names = {id(module): name for name, module in self.model.named_modules()}
        dense, found = describe(self.model), dict[int, list[str]]()
        for layer, kind in (fit.block for fit in self.fits):
            projection = dense.output_projection(layer, kind)
            found.setdefault(layer, []).extend(
                f"{names[id(projection)]}.{name}" for name, _ in projection.named_parameters()
            )
        return found

    def _refit_layers(
        self, pruned: PreTrainedModel, present: Callable[[int], AbstractContextManager[None]]
    ) -> dict[str, Any]:
        """Refit blocks of a pruned model in place; return the manifest's record.

        `present`, given a layer, keeps its weights in both models inside its block.
        """
        threads, student = torch.get_num_threads(), describe(pruned)
        layers = range(1 + max(fit.block[0] for fit in self.fits))
        bar = open_bar(self.options.progress, total=len(layers), desc="Refit", unit="layer")
        with measuring(self.model, threads), measuring(pruned, threads), bar:
            dense, ids = describe(self.model), self.calibration.input_ids
            pair = Pair(dense, student, ids, self._target)
            ridge = self.options.ridge
            if ridge is None:
                ridge = 0.3 if pair.target == "gap" else 0.01
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


def _chosen(plan: _PlanRefit, texts: Sequence[CalibrationSet]) -> PreTrainedModel:
    """Return the refit of the ridge that is best on held-out texts, or the pruned model."""

    def risks(pruned: PreTrainedModel) -> list[np.ndarray]:
        return [model_risk(plan.model, pruned, text) for text in texts]

    best = prune(plan.model, plan.selection)
    as_cut = risks(best)
    least = float(np.mean([found.mean() for found in as_cut]))
    for ridge in RIDGES if plan.options.ridge is None else [plan.options.ridge]:
        trial = replace(plan, options=replace(plan.options, ridge=ridge))
        pruned = prune(plan.model, plan.selection)
        trial.refit(pruned)
        found = risks(pruned)
        gains = [mean_and_error(now - cut) for now, cut in zip(found, as_cut, strict=True)]
        mean = float(np.mean([now.mean() for now in found]))
        if mean < least and all(more <= error for more, error in gains):
            best, least = pruned, mean
    return best


def _require_attention(architecture: Architecture) -> None:
    """Raise ArchitectureError if a layer has no attention, whose write a refit reads."""
    without = set(range(len(architecture.layers))) - set(architecture.attention_layers)
    if without:
        raise ArchitectureError(
            f"a refit is not for hybrids: layer {min(without)} has "
            f"{', '.join(architecture.family.mixers)} in place of attention, whose write it does "
            "not know. Prune without it."
        )
