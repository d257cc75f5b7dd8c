"""Measured risk: the KL that plans really cost, on text the curvature has not seen.

`measure_plans` is the one engine for "the KL of many plans": sequences outside, the teacher once
per sequence, many plans per batch through per-row masks, per-sequence values kept so that two plans
are compared on the same text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..calibration import CalibrationSet
from ..errors import InputError, MismatchError, NumericalError
from ..estimator.fisher import kl_divergence
from ..estimator.replay import widen
from ..models.architectures import Architecture, describe
from ..models.identity import fingerprint_model, model_device, model_dtype
from ..models.masking import Scales, column_scales, resolve, scaled, stack_rows
from ..models.runtime import is_out_of_memory, measuring, require_measurable
from ..models.units import Unit, UnitSet
from ..progress import Progress, open_bar
from ..solver.selection import Selection
from .plan_memory import Kind, PlanMemory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..curvature.matrix import Curvature

log = logging.getLogger(__name__)
KIND = Kind("cocurve-plans", 2, "plans measured")  # KL and nll of each sequence
DENSE = "dense"  # where the memory keeps the teacher's own nll
_LOGIT_BYTES = 256 << 20  # full-vocabulary logits held at a time
_BATCH_TOKENS = 16_384  # tokens per forward, so that activations stay moderate for long rows


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Measured KL of plans, plan by sequence.

    Attributes:
        selections: the plans, in the order asked for.
        kl: [plans, sequences] float64, mean KL(teacher || masked) over a sequence's scored
            positions, full vocabulary, nats per token.
        source: where the text came from.
        nll: [plans, sequences] float64, mean negative log-likelihood of the token that really comes
            next, over the same positions, nats per token.
        dense_nll: [sequences] float64, the same of the dense model.
    """

    selections: tuple[Selection, ...]
    kl: np.ndarray
    source: str = ""
    nll: np.ndarray | None = None
    dense_nll: np.ndarray | None = None

    @property
    def mean(self) -> np.ndarray:
        """Measured risk R(s) of each plan [plans], nats per token (eq. risk)."""
        return self.kl.mean(axis=1)

    @property
    def standard_error(self) -> np.ndarray:
        """Standard error of `mean` over sequences [plans]; NaN with a single sequence."""
        return standard_error(self.kl)

    @property
    def perplexity(self) -> np.ndarray:
        """exp of the mean `nll` of each plan [plans]: rows are scored one by one, none overlaps.

        Raises:
            InputError: the table was made without `nll`.
        """
        if self.nll is None:
            raise InputError("this table has no nll. Tables of measure_plans have.")
        return np.exp(self.nll.mean(axis=1))

    def paired(self, plan: int, other: int) -> tuple[float, float]:
        """Mean difference plan - other over the same sequences, and its standard error.

        Far sharper than the two plans' own errors: text that is hard for one is hard for both.
        """
        difference = self.kl[plan] - self.kl[other]
        return float(difference.mean()), float(standard_error(difference[None])[0])

    def rows(self) -> list[dict[str, Any]]:
        """One dict per plan, ready for a DataFrame."""
        perplexities = np.full(len(self), np.nan) if self.nll is None else self.perplexity
        return [
            {
                "interaction_strength": selection.interaction_strength,
                "requested_ratio": selection.requested_ratio,
                "realized_ratio": selection.realized_ratio,
                "params_removed_fraction": selection.params_removed_fraction,
                "units": len(selection),
                "predicted_risk": selection.predicted_risk,
                "measured_risk": float(mean),
                "standard_error": float(error),
                "perplexity": None if self.nll is None else float(perplexity),
            }
            for selection, mean, error, perplexity in zip(
                self.selections, self.mean, self.standard_error, perplexities, strict=True
            )
        ]

    def __len__(self) -> int:
        return len(self.selections)

    def __repr__(self) -> str:
        lines = [
            f"PlanTable({len(self)} plans x {self.kl.shape[1]} sequences, KL in nats per token)"
        ]
        for row in self.rows():
            strength = row["interaction_strength"]
            name = "     -" if strength is None else f"{strength:6.3g}"
            predicted = row["predicted_risk"]
            lines.append(
                f"  lambda {name}  removed {row['realized_ratio']:6.2%}  predicted "
                f"{'      -' if predicted is None else f'{predicted:.5f}'}  measured "
                f"{row['measured_risk']:.5f} +- {row['standard_error']:.5f}"
            )
        return "\n".join(lines)


def pruning_risk(
    model: PreTrainedModel,
    selection: Selection | Iterable[Unit | str | int],
    calibration: CalibrationSet,
    *,
    unit_set: UnitSet | None = None,
) -> float:
    """KL(teacher || masked model) of one plan (eq. risk).

    Args:
        model: the dense model.
        selection: a Selection, or units, names or indices.
        calibration: rows and scored positions to average over.
        unit_set: what names and indices refer to; by default the model's own 16-group units.

    Returns:
        Nats per token over the full vocabulary; logits shifts and KL in float32 or better.

    Raises:
        MismatchError: the selection is for other units.
        InputError: an unknown unit, or one named twice.
        NumericalError: NaN or infinite logits.
    """
    architecture = describe(model)
    require_measurable(model, calibration.input_ids)
    scales = column_scales(architecture, *resolve(model, selection, unit_set))
    engine = _Engine(architecture, calibration, 1)
    with measuring(model, torch.get_num_threads()):
        risks = [engine.measure(number, [scales])[0, 0] for number in range(len(calibration))]
    return float(np.mean(risks))


def measure_plans(
    model: PreTrainedModel,
    selections: Sequence[Selection],
    held_out: CalibrationSet,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    plans_per_batch: int | None = None,
    calibrated_on: CalibrationSet | Curvature | None = None,
) -> PlanTable:
    """Measure the KL of many plans on the same text (eq. risk).

    Args:
        model: the dense model.
        selections: plans over the model's units; equal plans are measured once.
        held_out: rows and scored positions.
        checkpoint: file to resume from and write to, after every sequence; it also remembers plans
            measured earlier, so adding plans measures only the new ones.
        progress: show a bar with ETA; "lines" writes lines for a log file instead.
        plans_per_batch: masked copies per forward; None = as many as make 16,384 tokens. Halved
            when memory runs out.
        calibrated_on: if given, overlap with its rows is refused.

    Returns:
        A PlanTable; after Ctrl-C, nothing is lost with a checkpoint.

    Raises:
        InputError: no plan, text that does not fit the model, or one plan that does not fit in
            memory.
        MismatchError: a selection is for other units, the checkpoint is of another model or text,
            or a row was calibrated on.
        NumericalError: NaN or infinite logits.
    """
    if not selections:
        raise InputError("measure_plans got no plan. Give at least one Selection.")
    if calibrated_on is not None:
        held_out.require_disjoint(calibrated_on)
    architecture = describe(model)
    require_measurable(model, held_out.input_ids)
    plans = {selection.fingerprint: selection for selection in selections}
    scales = {
        mark: column_scales(architecture, *resolve(model, plan)) for mark, plan in plans.items()
    }
    memory = PlanMemory.open(
        KIND, checkpoint, (len(held_out), 2), lambda: _settings(model, held_out)
    )
    missing = memory.absent(plans, slice(None))
    batch = plans_per_batch or max(1, min(len(missing), _BATCH_TOKENS // held_out.seq_len))
    engine = _Engine(architecture, held_out, batch)
    label = f"KL of {len(missing)} plan{'' if len(missing) == 1 else 's'}"
    missing.append(DENSE)
    scales[DENSE] = {}
    numbers = [n for n in range(len(held_out)) if memory.absent(missing, n)]
    bar = open_bar(progress, total=len(numbers), desc=label, unit="sequence")
    with measuring(model, torch.get_num_threads()), bar:
        for number in numbers:
            absent = memory.absent(missing, number)
            found = engine.measure(number, [scales[mark] for mark in absent])
            memory.add(absent, number, found)
            bar.update()
    table = np.array([memory.values[selection.fingerprint] for selection in selections])
    dense = memory.values[DENSE][:, 1]
    return PlanTable(tuple(selections), table[..., 0], held_out.source, table[..., 1], dense)


def _settings(model: PreTrainedModel, held_out: CalibrationSet) -> dict[str, Any]:
    return {
        "model_fingerprint": fingerprint_model(model),
        "model_dtype": model_dtype(model),
        "text_fingerprint": held_out.fingerprint,
    }


def model_risk(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    text: CalibrationSet,
    *,
    progress: Progress = False,
) -> np.ndarray:
    """KL(teacher || student) of two models with one vocabulary, sequence by sequence.

    For models that are not a mask of the teacher: repaired or trained after pruning.

    Args:
        teacher, student: on one device; the student's dtype may differ.
        text: rows and scored positions.
        progress: show a bar; "lines" writes lines for a log file instead.

    Returns:
        [sequences] float64, mean over scored positions, full vocabulary, nats per token.

    Raises:
        InputError: the text does not fit a model.
        MismatchError: the vocabularies differ.
        NumericalError: NaN or infinite logits.
    """
    pair = [describe(model) for model in (teacher, student)]
    sizes = [architecture.vocabulary for architecture in pair]
    if sizes[0] != sizes[1]:
        raise MismatchError(
            f"the models have {sizes[0]} and {sizes[1]} logits. Compare like with like."
        )
    for model in (teacher, student):
        require_measurable(model, text.input_ids)
    values = []
    threads = torch.get_num_threads()
    bar = open_bar(progress, total=len(text), desc="KL", unit="row")
    with measuring(teacher, threads), measuring(student, threads), bar:
        for number in range(len(text)):
            ids = text.input_ids[number : number + 1].to(model_device(teacher))
            positions = text.scored[number].to(ids.device)
            hidden = [_scored_hidden(architecture, ids, positions, {}) for architecture in pair]
            found = _mean_kl_and_nll(pair, hidden, ids[0, positions + 1])
            values.append(float(found[0, 0]))
            bar.update()
    if not np.isfinite(values).all():
        raise NumericalError(
            "a model gives NaN or infinite logits. Half precision may overflow: try bfloat16."
        )
    return np.array(values)


@dataclass
class _Engine:
    """Measures plans on one sequence at a time.

    Attributes:
        batch: masked copies per forward; halved for good when memory runs out.
    """

    architecture: Architecture
    text: CalibrationSet
    batch: int

    def measure(self, number: int, plans: list[Scales]) -> np.ndarray:
        """KL and nll [plans, 2] of one sequence, averaged over its scored positions."""
        device = model_device(self.architecture.model)
        ids = self.text.input_ids[number : number + 1].to(device)
        positions = self.text.scored[number].to(device)
        teacher = _scored_hidden(self.architecture, ids, positions, {})
        changed = [number for number, scales in enumerate(plans) if scales]
        values = self._dense(ids, positions, teacher).repeat(len(plans), 1)
        done: list[Tensor] = []
        while len(done) < len(changed):
            rows = [plans[number] for number in changed[len(done) : len(done) + self.batch]]
            found = self._try_batch(ids, positions, teacher, rows)
            if found is None:
                self.batch = len(rows) // 2
                if self.batch == 0:
                    raise InputError(
                        f"memory runs out on sequence {number} with one plan per forward. Use "
                        "shorter rows, bfloat16 weights, or a larger device."
                    )
                log.warning("out of memory: measuring %d plans at a time from here on", self.batch)
                continue
            done += list(found)
        if done:
            values[changed] = torch.stack(done)
        measured = values.cpu().numpy()
        if not np.isfinite(measured[:, 0]).all():
            raise NumericalError(
                f"sequence {number} gives NaN or infinite logits, in the dense model or under a "
                "plan. Half precision may overflow: try bfloat16 or float32."
            )
        return measured

    def _dense(self, ids: Tensor, positions: Tensor, teacher: Tensor) -> Tensor:
        """What a plan that changes nothing measures [1, 2]: KL 0 and the dense model's nll."""
        return self._measured(teacher, teacher, ids[0, positions + 1])

    def _try_batch(
        self, ids: Tensor, positions: Tensor, teacher: Tensor, rows: list[Scales]
    ) -> Tensor | None:
        """Mean KL and nll [B, 2] of some plans, or None where the batch does not fit in memory."""
        try:
            masks = stack_rows(self.architecture, rows)
            repeated = ids.expand(len(rows), -1)
            masked = _scored_hidden(self.architecture, repeated, positions, masks)
            return self._measured(teacher, masked, ids[0, positions + 1])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        return None

    def _measured(self, teacher: Tensor, masked: Tensor, labels: Tensor) -> Tensor:
        return _mean_kl_and_nll([self.architecture] * 2, [teacher, masked], labels)


def _scored_hidden(
    architecture: Architecture, ids: Tensor, positions: Tensor, masks: Scales
) -> Tensor:
    """Final hidden states [B, P, d] at the scored positions."""
    with scaled(architecture, masks):
        output = architecture.decoder(input_ids=ids, use_cache=False)
    return output[0][:, positions]


def _mean_kl_and_nll(
    pair: Sequence[Architecture], hidden: Sequence[Tensor], labels: Tensor
) -> Tensor:
    """Mean KL and nll of labels [P], together [B, 2] float64, a chunk of positions at a time.

    Args:
        pair: teacher and student; the same for a masked student.
        hidden: their final hidden states [1, P, d] and [B, P, d].
    """
    rows, positions, _ = hidden[1].shape
    step = max(1, _LOGIT_BYTES // (4 * (rows + 2) * pair[0].vocabulary))
    total = torch.zeros(rows, 2, dtype=torch.float64, device=labels.device)
    for start in range(0, positions, step):
        part = slice(start, start + step)
        logits, student = (
            widen(architecture.logits(states[:, part]))
            for architecture, states in zip(pair, hidden, strict=True)
        )
        nll = _nll(student, labels[part])
        wide = torch.promote_types(logits.dtype, student.dtype)
        logits, shift = logits.to(wide), student.to(wide).sub_(logits)
        kl = kl_divergence(torch.softmax(logits, dim=-1), shift)
        total += torch.stack([kl.double().sum(dim=-1), nll.double().sum(dim=-1)], dim=1)
    return total / positions


def _nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood [B, P] of labels [P] under logits [B, P, V]."""
    wanted = logits.gather(-1, labels.expand(len(logits), -1).unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(logits, dim=-1) - wanted


def standard_error(values: np.ndarray) -> np.ndarray:
    count = values.shape[1]
    if count < 2:
        return np.full(len(values), np.nan)
    return values.std(axis=1, ddof=1) / np.sqrt(count)
