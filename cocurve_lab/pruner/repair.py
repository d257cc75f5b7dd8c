"""Repair: the columns of W_O and W_down that stay make up for those that went.

In a block that lost some of its units, let x [tokens, R] be the kept columns, e [tokens, d] what
the block's output lacks, and W_R [d, R] the kept weight. Least squares with a ridge gives

    W_R += e^T x (x^T x + gamma I)^-1,   the minimum of ||x D^T - e||^2 + gamma ||D||^2 over D,

so a large ridge changes nothing. Where the projection has a bias, x and e are centred, and the bias
takes the difference of the means.

Targets:
- "stream" (sequential, the default): x is of the model pruned and refitted so far, layer by layer;
  e is the dense model's residual stream after the block minus this model's. The block makes up for
  what earlier layers left over, too.
- "write" (sequential): x is the same; e is what the dense block would write on the same input,
  minus what this block writes.
- "dense" (not sequential): every layer is refitted alone, on the dense model's columns; e is what
  the columns that went wrote. This is the refit of SlimGPT (Ling et al., 2024;
  `methods/slimgpt.py`).

Where a norm lies between a block and the stream (Gemma 2 and 3, OLMo2, OPT-350m), the stream is not
linear in the weight, and "stream" falls back to "write".

Memory: the dense and the pruned model, on the CPU the hidden states of all rows (once, and four
times for "stream"), and the sums of one block, [R, R] and [d, R] float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..calibration import CalibrationSet
from ..curvature.matrix import Curvature
from ..errors import InputError
from ..measuring.choosing_gains import choose_gains
from ..measuring.racing import TIE, ChoiceOptions
from ..measuring.risk import model_risk
from ..models.architectures import describe
from ..models.families import KINDS, Kind
from ..models.identity import weight_marks
from ..models.runtime import measuring, require_measurable, require_one_device
from ..numeric import as_float, as_list, require_type
from ..progress import Progress, open_bar
from ..solver.selection import Selection
from ..storage import fingerprint
from .cutting import prune, require_prunable
from .refitting import Pair, Target
from .slicing import kept_columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RepairOptions:
    """Options of `repair`.

    Attributes:
        ridge: gamma >= 0, in units of the mean diagonal of x^T x.
        kinds: the kinds of block that are refitted; the others stay as pruned.
        target: "stream" or "write", what a sequential refit matches (see repair.py).
        progress: show a bar; "lines" writes lines for a log file instead.

    Raises:
        InputError: a value is out of range.
    """

    ridge: float = 0.01
    kinds: tuple[Kind, ...] = KINDS
    target: Target = "stream"
    progress: Progress = True

    def __post_init__(self) -> None:
        if not 0 <= as_float(self.ridge, "ridge") < math.inf:
            raise InputError(f"ridge is {self.ridge}. Give a finite number of at least 0.")
        kinds = as_list(self.kinds, "kinds")
        if not kinds or not all(kind in KINDS for kind in kinds):
            raise InputError(f"kinds are {self.kinds!r}. Give one or both of {KINDS}.")
        if self.target not in ("stream", "write"):
            raise InputError(
                f'target is {self.target!r}. Give "stream" or "write"; for the dense model\'s '
                "statistics, pass sequential=False."
            )


def repair(
    model: PreTrainedModel,
    selection: Selection,
    calibration: CalibrationSet,
    *,
    sequential: bool = True,
    gains: tuple[Curvature, CalibrationSet] | None = None,
    options: RepairOptions = RepairOptions(),
) -> PreTrainedModel:
    """Prune a model and refit the output projections that lost columns, by least squares on text.

    Any plan can be repaired, whichever method made it. Blocks that lost nothing, or everything,
    stay as pruned. Weights in half precision are refitted in float64 and rounded once; on a
    GPU, products of activations are float32.

    The refit starts from the plan's gains, if it has any. With `gains`, they are chosen here, on
    held-out rows: `choose_gains` must find that they help the pruned model, and the KL of the
    refitted model must be lower with them than without by more than `TIE` paired standard errors.

    Args:
        model: the dense model; it is left as it was.
        selection: the plan.
        calibration: rows; every token counts, whichever positions are scored. "stream" fits few
            rows too closely: for 40 % of the demo model, with 512 columns, 4,096 tokens were too
            few, and 32,768 were enough.
        sequential: statistics from the model pruned and refitted so far; False: from the dense one.
        gains: H and held-out rows, at least two, to try gains of (eq. comp); the plan's own are
            dropped.
        options: ridge, kinds, target and progress.

    Returns:
        The pruned and refitted model, on the model's device. Its manifest records the refit under
        "repair".

    Raises:
        InputError: no CalibrationSet, or text that does not fit the model; else as `prune`.
        MismatchError: held-out rows are among the calibration; else as `prune`, `choose_gains`.
        ArchitectureError: as `prune`.
        NumericalError: the statistics are singular or not finite.
    """
    require_type(options, RepairOptions, "options")
    require_rows(model, calibration)
    if gains is None:
        return _repaired(model, selection, calibration, sequential, options)
    if not isinstance(gains, tuple) or len(gains) != 2:
        raise InputError(
            f"gains is {type(gains).__name__}, not H and held-out rows. Give (curvature, held_out)."
        )
    curvature, held_out = gains
    require_type(curvature, Curvature, "the first of gains")
    require_rows(model, held_out)
    held_out.require_disjoint(calibration)
    require_prunable(model, selection)
    quiet = ChoiceOptions(progress=options.progress is True)
    scaled = choose_gains(model, curvature, selection, held_out, options=quiet).best
    plain = _repaired(model, selection.with_gains({}), calibration, sequential, options)
    if not scaled.gains:
        return plain
    other = _repaired(model, scaled, calibration, sequential, options)
    found = model_risk(model, other, held_out) - model_risk(model, plain, held_out)
    error = found.std(ddof=1) / math.sqrt(len(found))
    return other if found.mean() < -TIE * error else plain


def _repaired(
    model: PreTrainedModel,
    selection: Selection,
    calibration: CalibrationSet,
    sequential: bool,
    options: RepairOptions,
) -> PreTrainedModel:
    pruned = prune(model, selection)
    refit(model, pruned, selection, calibration, sequential=sequential, options=options)
    return pruned


def require_rows(model: PreTrainedModel, calibration: CalibrationSet) -> None:
    """Raise InputError unless these rows run, on a model whose weights are all there."""
    require_type(calibration, CalibrationSet, "the text of a repair")
    require_measurable(model, calibration.input_ids)
    require_one_device(model)


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
    require_rows(model, calibration)
    dense, student = describe(model), describe(pruned)
    threads, layers = torch.get_num_threads(), range(len(dense.layers))
    wanted: Target = options.target if sequential else "dense"
    bar = open_bar(options.progress, total=len(layers), desc="Refit", unit="layer")
    found = False
    with measuring(model, threads), measuring(pruned, threads), bar:
        pair = Pair.enter(dense, student, calibration.input_ids, wanted)
        for layer in layers:
            for kind in (kind for kind in KINDS if kind in options.kinds):
                kept, _ = kept_columns(dense, selection, layer, kind)
                if 0 < len(kept) < dense.width(layer, kind):
                    sums = pair.sums(layer, kind, kept)
                    sums.refit(student.output_projection(layer, kind), options.ridge)
                    found = True
            pair.advance(layer)
            bar.update()
    if found:
        manifest: Any = pruned.cocurve_manifest
        manifest |= {
            "repair": repair_record(calibration, pair.target, options),
            "weights_fingerprint": fingerprint(weight_marks(pruned)),
            "weights_since_pruning": "refitted",
        }


def repair_record(
    calibration: CalibrationSet, target: Target, options: RepairOptions
) -> dict[str, Any]:
    """Make the manifest's record of a refit, as JSON values."""
    return {
        "method": "refit",
        "sequential": target != "dense",
        "target": target,
        "kinds": list(options.kinds),
        "ridge": float(options.ridge),
        "calibration": calibration.source,
        "calibration_fingerprint": calibration.fingerprint,
        "sequences": len(calibration),
        "positions": calibration.input_ids.numel(),
    }
