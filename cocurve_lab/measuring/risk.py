"""Measured risk: the KL that plans really cost, on text that the curvature has not seen.

Everything that needs the KL of many plans calls `measure_plans`. It runs the teacher once per
sequence and many plans per batch, each row under its own masks. It keeps the values of each
sequence, so that two plans can be compared on the same text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..base.arguments import as_list, require_type
from ..base.errors import InputError, MismatchError, NumericalError
from ..base.progress import Progress, open_bar
from ..base.seams import require_extension
from ..calibration import CalibrationSet
from ..estimator.batches import LOGIT_BYTES
from ..estimator.fisher import kl_divergence
from ..estimator.replay import widen
from ..models.architectures import Architecture, describe
from ..models.identity import fingerprint_model, model_device, model_dtype
from ..models.layers import source_of
from ..models.masking import Scales, column_scales, resolve, scaled, stack_rows
from ..models.runtime import in_double, is_out_of_memory, measuring, require_measurable, sums_on
from ..models.units import Unit, UnitSet
from ..solver.selection import Selection
from .plan_memory import FileKind, PlanMemory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..curvature.matrix import Curvature

log = logging.getLogger(__name__)
KIND = FileKind("cocurve-plans", 2, "plans measured")  # columns: KL and nll of a sequence
DENSE = "dense"  # the key under which the memory keeps the teacher's own nll
_BATCH_TOKENS = 16_384  # tokens per forward pass, which bounds the activations of long rows


# Plans -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Measured KL of plans, by plan and sequence; made by `measure_plans`.

    Attributes:
        selections: the plans, in the given order.
        kl: [plans, sequences] float64, mean KL(teacher || masked) over the scored positions of a
            sequence, full vocabulary, nats per token.
        source: the source of the text.
        nll: [plans, sequences] float64, mean negative log-likelihood of the actual next token over
            the same positions, nats per token.
        dense_nll: [sequences] float64, the same for the dense model.
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
        """exp of the mean `nll` of each plan [plans]; rows do not overlap and share no context.

        Raises:
            InputError: the table was made without `nll`.
        """
        if self.nll is None:
            raise InputError("this table has no nll. Make it with measure_plans.")
        return np.exp(self.nll.mean(axis=1))

    def paired(self, plan: int, other: int) -> tuple[float, float]:
        """Return the mean KL difference plan - other in nats per token, and its standard error.

        Args:
            plan, other: places of two plans in the table.
        """
        # by sequence: text that is hard for one plan is hard for the other, and that part cancels,
        # so the error is far smaller than those of the two plans
        difference = self.kl[plan] - self.kl[other]
        return float(difference.mean()), float(standard_error(difference[None])[0])

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per plan, ready for a DataFrame."""
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
                "measured_risk_error": float(error),
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
                f"{row['measured_risk']:.5f} ± {row['measured_risk_error']:.5f}"
            )
        return "\n".join(lines)


def pruning_risk(
    model: PreTrainedModel,
    selection: Selection | Iterable[Unit | str | int],
    calibration: CalibrationSet,
    *,
    unit_set: UnitSet | None = None,
) -> float:
    """Measure KL(teacher || masked model) of one plan (eq. risk).

    Args:
        model: the dense model.
        selection: a Selection, or units, names or indices.
        calibration: rows and scored positions to average over.
        unit_set: the units that names and indices refer to; by default the model's own units with
            16 FFN groups per layer.

    Returns:
        Nats per token over the full vocabulary, from logit shifts in float32 or better.

    Raises:
        MismatchError: the selection is for other units.
        InputError: an unknown unit, or one named twice.
        NumericalError: NaN or infinite logits.
    """
    require_type(calibration, CalibrationSet, "calibration")
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
        checkpoint: file to resume from, written after every sequence. It also remembers plans
            measured earlier, so only new plans are measured.
        progress: show a bar with ETA; "lines" writes lines for a log file instead.
        plans_per_batch: masked copies per forward pass; None takes as many as make 16,384 tokens.
            It is halved when memory runs out. On a streamed model as many batches as memory holds
            advance together with the dense model, so that a row reads the weights once.
        calibrated_on: a calibration; if a row is in it too, that is an error.

    Returns:
        A PlanTable. Ctrl-C raises KeyboardInterrupt; with a checkpoint nothing is lost.

    Raises:
        InputError: no plan, text that does not fit the model, or one plan that does not fit in
            memory.
        MismatchError: a selection is for other units, the checkpoint is of another model or text,
            or a row is in `calibrated_on`.
        NumericalError: NaN or infinite logits.
    """
    for selection in as_list(selections, "selections"):
        require_type(selection, Selection, "a plan")
    if not selections:
        raise InputError("measure_plans got no plan. Give at least one Selection.")
    if calibrated_on is not None:
        held_out.require_disjoint(calibrated_on)
    meter = Meter(model, held_out, checkpoint=checkpoint, plans_per_batch=plans_per_batch)
    table = meter.measure(selections, progress=progress)
    dense = meter.memory.values[DENSE][:, 1]
    return PlanTable(tuple(selections), table[..., 0], held_out.source, table[..., 1], dense)


def model_risk(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    text: CalibrationSet,
    *,
    progress: Progress = False,
) -> np.ndarray:
    """Measure KL(teacher || student) of two models, sequence by sequence.

    It is for students that are not a mask of the teacher: repaired or trained after pruning.

    Args:
        teacher, student: two models with one vocabulary on one device; dtypes may differ.
        text: rows and scored positions.
        progress: show a bar; "lines" writes lines for a log file instead.

    Returns:
        [sequences] float64, mean over scored positions, full vocabulary, nats per token.
    """
    pair = [describe(model) for model in (teacher, student)]
    require_one_vocabulary(*pair)
    for model in (teacher, student):
        require_measurable(model, text.input_ids)
    return pair_risk(pair, text, progress=progress)


def pair_risk(
    pair: Sequence[Architecture], text: CalibrationSet, *, progress: Progress = False
) -> np.ndarray:
    """`model_risk` of two models that fit the text and each other.

    The second may carry adapters, which `describe` refuses: give what described it before.
    """
    engine, threads = _Engine(pair[0], text, 1), torch.get_num_threads()
    bar = open_bar(progress, total=len(text), desc="KL", unit="row")
    values = []
    with measuring(pair[0].model, threads), measuring(pair[1].model, threads), bar:
        for number in range(len(text)):
            values.append(float(engine.measure_student(number, pair[1])[0]))
            bar.update()
    return np.array(values)


@dataclass(frozen=True, eq=False)
class Side:
    """A model beside the dense one, by row of a text.

    Attributes:
        kl: KL(dense || model) of each row [rows], nats per token.
        dense_loss, loss: negative log-likelihood of each row [rows], nats per token.
        kept: share of the positions where the likeliest token is the dense model's.
    """

    kl: np.ndarray
    dense_loss: np.ndarray
    loss: np.ndarray
    kept: float

    @property
    def error(self) -> float:
        """Standard error of the mean KL over rows; NaN for a single row."""
        return float(standard_error(self.kl[None])[0])


def compare_models(
    teacher: PreTrainedModel, student: PreTrainedModel, text: CalibrationSet
) -> Side:
    """Compare a model with the dense one at the scored positions of a text, full vocabulary.

    Raises: as `model_risk`.
    """
    pair = [describe(model) for model in (teacher, student)]
    require_one_vocabulary(*pair)
    engine, threads = _Engine(pair[0], text, 1), torch.get_num_threads()
    with measuring(teacher, threads), measuring(student, threads):
        found = np.array([engine.compare(number, pair[1]) for number in range(len(text))])
    return Side(found[:, 0], found[:, 2], found[:, 1], float(found[:, 3].mean()))


# Many measurements of one text --------------------------------------------------------------------


class Meter:
    """Measures plans on rows of one text, each plan on each row once.

    `measure_plans` makes one for a single call. A search keeps one, so that the model is identified
    once.

    Args:
        model: the dense model.
        text: rows and scored positions.
        checkpoint, plans_per_batch: as for `measure_plans`.
        keep_teacher: keep the dense model's final hidden states of every row seen [P, d], for calls
            that come back to a row.

    Attributes:
        memory: KL and nll of each plan by row, nats per token; on disk if there is a checkpoint.
        engine: measures one sequence.

    Raises: as `measure_plans`.
    """

    kind = KIND

    def __init__(
        self,
        model: PreTrainedModel,
        text: CalibrationSet,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        plans_per_batch: int | None = None,
        keep_teacher: bool = False,
    ) -> None:
        self.model, self.text = model, text
        architecture = describe(model)
        require_measurable(model, text.input_ids)
        self.memory = PlanMemory.open(
            self.kind, checkpoint, (len(text), 2), lambda: _settings(model, text)
        )
        batch = plans_per_batch or max(1, _BATCH_TOKENS // text.seq_len)
        self.engine = _Engine(architecture, text, batch, {} if keep_teacher else None)

    def measure(
        self,
        plans: Sequence[Selection],
        rows: Sequence[int] | None = None,
        progress: Progress = False,
    ) -> np.ndarray:
        """Measure plans on rows of the text, or read what was measured before.

        Args:
            plans: plans over the model's units.
            rows: places of rows; None takes all.
            progress: as for `measure_plans`.

        Returns:
            KL and nll [plans, rows, 2] float64, nats per token.

        Raises: as `measure_plans`.
        """
        wanted = list(range(len(self.text)) if rows is None else rows)
        named = {plan.fingerprint: plan for plan in plans}
        self.fill(named, wanted, progress)
        return np.array([self.memory.values[plan.fingerprint][wanted] for plan in plans])

    def fill(self, plans: dict[str, Selection], rows: list[int], progress: Progress) -> None:
        """Measure what the memory lacks, row by row: many plans make one batch."""
        architecture, memory = self.engine.architecture, self.memory
        scales: dict[str, Scales] = {
            mark: column_scales(architecture, *resolve(self.model, plan))
            for mark, plan in plans.items()
        }
        missing = memory.absent(plans, rows)
        label = f"KL of {len(missing)} plan{'' if len(missing) == 1 else 's'}"
        missing.append(DENSE)
        scales[DENSE] = {}
        numbers = [n for n in rows if memory.absent(missing, n)]
        if progress and numbers:
            todo = (memory.absent(missing, number) for number in numbers)
            self.engine.announce([sum(bool(scales[mark]) for mark in each) for each in todo])
        bar = open_bar(progress, total=len(numbers), desc=label, unit="sequence")
        with measuring(self.model, torch.get_num_threads()), bar:
            for number in numbers:
                absent = memory.absent(missing, number)
                found = self.engine.measure(number, [scales[mark] for mark in absent])
                memory.add(absent, number, found)
                bar.update()


def _settings(model: PreTrainedModel, text: CalibrationSet) -> dict[str, Any]:
    return {
        "model_fingerprint": fingerprint_model(model),
        "model_dtype": model_dtype(model),
        "text_fingerprint": text.fingerprint,
    }


def require_one_vocabulary(teacher: Architecture, student: Architecture) -> None:
    """Raise MismatchError unless two models have as many logits."""
    sizes = [architecture.vocabulary for architecture in (teacher, student)]
    if sizes[0] != sizes[1]:
        raise MismatchError(
            f"the models have {sizes[0]} and {sizes[1]} logits. Give two models with the same "
            "vocabulary."
        )


# One sequence -----------------------------------------------------------------------------------


@dataclass
class _Engine:
    """Measures plans on one sequence at a time.

    Attributes:
        architecture: the dense model.
        text: rows and scored positions.
        batch: masked copies per forward pass; halved for good when memory runs out.
        kept: final hidden states [1, P, d] of the teacher by sequence; None keeps none.
        most: of plans that advance together where weights come from elsewhere; halved likewise.
    """

    architecture: Architecture
    text: CalibrationSet
    batch: int
    kept: dict[int, Tensor] | None = None
    most: float = inf

    def __post_init__(self) -> None:
        source = source_of(self.architecture.model)
        self.layerwise: Any = None  # measures many plans in one pass over streamed layers
        if source is not None:
            offered = require_extension("layerwise passes", "measuring a streamed model")
            self.layerwise = offered(self.architecture, source, self.text)

    def measure(self, number: int, plans: list[Scales]) -> np.ndarray:
        """Measure KL and nll [plans, 2] of one sequence, means over its scored positions."""
        ids, positions = self._row(number)
        labels, pair = ids[0, positions + 1], (self.architecture, self.architecture)
        # a plan that changes nothing is the dense model: KL 0 and its nll, without its own pass
        changed = [number for number, scales in enumerate(plans) if scales]
        size = self._together()
        teacher = (
            self.teacher(number) if self.layerwise is None else None
        )  # else it comes with plans
        done: list[Tensor] = []
        while teacher is None or len(done) < len(changed):
            rows = [plans[number] for number in changed[len(done) : len(done) + size]]
            found = self._try_rows(ids, positions, teacher, rows)
            if found is None:
                # half of what did not fit, which may be less than `size` at the end of the list;
                # kept for later sequences, since the next attempt would fail as well
                self.most = size = len(rows) // 2
                self.batch = min(self.batch, size)
                if size == 0:
                    raise InputError(
                        f"memory runs out on sequence {number} with one plan per forward. Use "
                        "shorter rows, bfloat16 weights, or a larger device."
                    )
                log.warning("out of memory: measuring %d plans at a time from here on", size)
                continue
            teacher, new = found
            done += new
        values = torch.empty(len(plans), 2, dtype=torch.float64, device=sums_on(ids.device))
        if len(changed) < len(plans):
            values[:] = _mean_kl_and_nll(pair, (teacher, teacher), labels)
        if done:
            values[changed] = torch.stack(done)
        measured = values.cpu().numpy()
        if not np.isfinite(measured[:, 0]).all():
            raise NumericalError(
                f"sequence {number} gives NaN or infinite logits, in the dense model or under a "
                "plan. Half precision may overflow: try bfloat16 or float32."
            )
        return measured

    def measure_student(self, number: int, student: Architecture) -> np.ndarray:
        """Measure KL and nll [2] of another model on one sequence, means over its positions."""
        return self._student(number, student)[0]

    def compare(self, number: int, student: Architecture) -> tuple[float, float, float, float]:
        """KL, nll of the student and of the teacher, share of positions with one first choice."""
        measured, hidden, labels = self._student(number, student)
        nll = same = 0.0
        for part, logits, other in _pieces((self.architecture, student), hidden):
            nll += float(in_double(_nll(logits, labels[part])).sum())
            same += float((logits.argmax(dim=-1) == other.argmax(dim=-1)).sum())
        return float(measured[0]), float(measured[1]), nll / len(labels), same / len(labels)

    def _student(
        self, number: int, student: Architecture
    ) -> tuple[np.ndarray, tuple[Tensor, Tensor], Tensor]:
        """KL and nll [2], final hidden states of both models, and the labels [P]."""
        ids, positions = self._row(number)
        hidden = (self.teacher(number), _scored_hidden(student, ids, positions, {}))
        pair, labels = (self.architecture, student), ids[0, positions + 1]
        measured: np.ndarray = _mean_kl_and_nll(pair, hidden, labels)[0].cpu().numpy()
        if not np.isfinite(measured[0]):
            raise NumericalError(
                f"on sequence {number} a model gives NaN or infinite logits. Half precision may "
                "overflow: try bfloat16."
            )
        return measured, hidden, labels

    def teacher(self, number: int) -> Tensor:
        """Final hidden states [1, P, d] of the dense model at the scored positions of a row."""
        if self.kept is not None and number in self.kept:
            return self.kept[number]
        found = _scored_hidden(self.architecture, *self._row(number), {})
        if self.kept is not None:
            self.kept[number] = found
        return found

    def _row(self, number: int) -> tuple[Tensor, Tensor]:
        """Token ids [1, T] and scored positions [P] of a sequence, on the model's device."""
        device = model_device(self.architecture.model)
        ids = self.text.input_ids[number : number + 1].to(device)
        return ids, self.text.scored[number].to(device)

    def _together(self) -> int:
        """Plans that advance together: a batch, or more where weights come from elsewhere."""
        if self.layerwise is None:
            return self.batch
        together: int = self.layerwise.most_together(self.batch, self.most)
        return together

    def announce(self, counts: Sequence[int]) -> None:
        """Print what measuring takes where weights come from elsewhere.

        Args:
            counts: plans that change something, for each sequence to be measured.
        """
        if self.layerwise is None:
            return
        size = min(self._together(), max(counts))
        passes = sum(max(1, ceil(count / size)) for count in counts)
        print(self.layerwise.announcement(self.batch, size, passes), flush=True)

    def _try_rows(
        self, ids: Tensor, positions: Tensor, teacher: Tensor | None, rows: list[Scales]
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The teacher, and mean KL and nll [2] of each plan; None if memory runs out."""
        labels, pair = ids[0, positions + 1], (self.architecture, self.architecture)
        try:
            if teacher is None or self.layerwise is not None:
                batches = [rows[at : at + self.batch] for at in range(0, len(rows), self.batch)]
                teacher, *masked = self.layerwise.run(ids, positions, batches)
            else:
                masks = stack_rows(self.architecture, rows)
                repeated = ids.expand(len(rows), -1)
                masked = [_scored_hidden(self.architecture, repeated, positions, masks)]
            found = [_mean_kl_and_nll(pair, (teacher, hidden), labels) for hidden in masked]
            return teacher, [values for batch in found for values in batch]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        return None  # the caller tries again: while the error lives, so do the tensors of the pass


def _scored_hidden(
    architecture: Architecture, ids: Tensor, positions: Tensor, masks: Scales
) -> Tensor:
    """Final hidden states [B, P, d] at the scored positions, under masks."""
    with scaled(architecture, masks):
        return architecture.last_hidden(ids)[:, positions]


def _mean_kl_and_nll(
    pair: Sequence[Architecture], hidden: Sequence[Tensor], labels: Tensor
) -> Tensor:
    """Mean KL and mean nll over positions, together [B, 2] float64, nats per token."""
    rows, positions, _ = hidden[1].shape
    total = torch.zeros(rows, 2, dtype=torch.float64, device=sums_on(labels.device))
    for part, logits, student in _pieces(pair, hidden):
        nll = _nll(student, labels[part])
        # the shift of the logits, not a difference of log-probabilities: see estimator/fisher.py
        wide = torch.promote_types(logits.dtype, student.dtype)
        logits, shift = logits.to(wide), student.to(wide).sub_(logits)
        kl = kl_divergence(torch.softmax(logits, dim=-1), shift)
        total += torch.stack([in_double(each).sum(dim=-1) for each in (kl, nll)], dim=1)
    return total / positions


def _pieces(
    pair: Sequence[Architecture], hidden: Sequence[Tensor]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Positions and the logits of teacher and student there, over the whole vocabulary."""
    # a few positions at a time, to bound the memory
    rows, positions, _ = hidden[1].shape
    step = max(1, LOGIT_BYTES // (4 * (rows + 2) * pair[0].vocabulary))
    for start in range(0, positions, step):
        part = slice(start, start + step)
        logits, student = (
            widen(architecture.logits(states[:, part]))
            for architecture, states in zip(pair, hidden, strict=True)
        )
        yield part, logits, student


def _nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood [B, P] of labels [P] under logits [B, P, V]."""
    wanted = logits.gather(-1, labels.expand(len(logits), -1).unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(logits, dim=-1) - wanted


def standard_error(values: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean of each row of [plans, n]; NaN for a single column."""
    count = values.shape[1]
    if count < 2:
        return np.full(len(values), np.nan)
    return values.std(axis=1, ddof=1) / np.sqrt(count)
