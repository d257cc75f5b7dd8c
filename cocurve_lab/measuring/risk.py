"""Measured risk: the KL that plans really cost, on text that the curvature has not seen.

Everything that needs the KL of many plans calls `measure_plans`. It runs the teacher once per
sequence and many plans per batch, each row under its own masks. It keeps the values of each
sequence, so that two plans can be compared on the same text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..base.arguments import require_type
from ..base.errors import InputError, MismatchError
from ..base.progress import Progress, open_bar
from ..calibration import CalibrationSet
from ..estimator.fisher import kl_divergence
from ..estimator.support import widen
from ..estimator.teacher import row
from ..models.architectures import Architecture, describe
from ..models.identity import model_device
from ..models.layer_calls import LayerCall, capture_calls, run_from
from ..models.layers import weights_of
from ..models.logits import log_likelihood, pieces, require_numbers, too_large, unless_too_large
from ..models.masking import Scales, plan_scales, scaled, stack_rows
from ..models.runtime import in_double, measuring, require_measurable, sums_on
from ..models.units import Unit
from ..solver.selection import Selection
from .plan_memory import FileKind, PlanMemory, model_settings
from .results import Tabular, mean_and_error, standard_error

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

    from ..curvature.matrix import Curvature

log = logging.getLogger(__name__)
DENSE = "dense"  # the key under which the memory keeps the teacher's own nll
_BATCH_TOKENS = 16_384  # tokens per forward pass, which bounds the activations of long rows
_REPLAY_TOKENS = 1024  # on a CPU small batches, which begin at nearly one layer, are faster


# Plans -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class PlanTable(Tabular):
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
        """exp of the mean `nll` of each plan [plans]; rows do not overlap and share no context."""
        assert self.nll is not None  # measure_plans gives it
        return np.exp(self.nll.mean(axis=1))

    def paired(self, plan: int, other: int) -> tuple[float, float]:
        """Return the mean KL of plan number `plan` less that of `other`, and its standard error."""
        # by sequence: text that is hard for one plan is hard for the other, and that part cancels,
        # so the error is far smaller than those of the two plans
        return mean_and_error(self.kl[plan] - self.kl[other])

    @property
    def table(self) -> DataFrame:
        """One row per plan: its lambda and sizes, predicted and measured risk (nats per token)."""
        from pandas import DataFrame

        plans = self.selections
        return DataFrame(
            {
                "interaction_strength": [plan.interaction_strength for plan in plans],
                "requested_ratio": [plan.requested_ratio for plan in plans],
                "realized_ratio": [plan.realized_ratio for plan in plans],
                "params_removed_fraction": [plan.params_removed_fraction for plan in plans],
                "units": [len(plan) for plan in plans],
                "predicted_risk": [plan.predicted_risk for plan in plans],
                "measured_risk": self.mean,
                "measured_risk_error": self.standard_error,
                "perplexity": None if self.nll is None else self.perplexity,
            }
        )

    def __len__(self) -> int:
        return len(self.selections)


def pruning_risk(
    model: PreTrainedModel,
    selection: Selection | Iterable[Unit | str | int],
    calibration: CalibrationSet,
) -> float:
    """Measure KL(teacher || masked model) of one plan (eq. risk).

    Args:
        model: the dense model.
        selection: a Selection, or units, names or indices, as for `ablate`.
        calibration: rows and scored positions to average over.

    Returns:
        Nats per token over the full vocabulary, from logit shifts in float32 or better.
    """
    architecture = describe(model)
    engine = _Engine(architecture, calibration, 1)
    scales = plan_scales(architecture, selection)
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
    """
    if not selections:
        raise InputError("measure_plans got no plan. Give at least one Selection.")
    if calibrated_on is not None:
        held_out = held_out.require_disjoint(calibrated_on)
    meter = Meter(model, held_out, checkpoint=checkpoint, plans_per_batch=plans_per_batch)
    table = meter.measure(selections, progress=progress)
    dense = meter.memory.values[DENSE][:, 1]
    return PlanTable(tuple(selections), table[..., 0], held_out.source, table[..., 1], dense)


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
        return float(standard_error(self.kl))


def compare_models(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    text: CalibrationSet,
    *,
    progress: Progress = False,
) -> Side:
    """Compare a model with the dense one at the scored positions of a text, full vocabulary.

    It is for students that are not a mask of the teacher: repaired or trained after pruning.

    Args:
        teacher: the dense model.
        student: a model with the same vocabulary.
        text: rows and scored positions.
        progress: show a bar; "lines" writes lines for a log file instead.
    """
    architecture = describe(student)
    engine, threads = _Engine(describe(teacher), text, 1), torch.get_num_threads()
    require_one_vocabulary(engine.architecture, architecture)
    require_measurable(student, text)
    bar = open_bar(progress, total=len(text), desc="KL", unit="row")
    rows = []
    with measuring(teacher, threads), measuring(student, threads), bar:
        for number in range(len(text)):
            rows.append(engine.measure_student(number, architecture))
            bar.update()
    found = np.array(rows)
    return Side(found[:, 0], found[:, 2], found[:, 1], float(found[:, 3].mean()))


def model_risk(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    text: CalibrationSet,
    *,
    progress: Progress = False,
) -> np.ndarray:
    """Return KL(teacher || student) of each row [rows], nats per token, as `compare_models`."""
    return compare_models(teacher, student, text, progress=progress).kl


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
        replay: run plans from the first layer that a batch of them touches, on a CPU in small
            batches. Results may differ in the last bits from those of whole passes.

    Attributes:
        memory: KL and nll of each plan by row, nats per token; on disk if there is a checkpoint.
        engine: measures one sequence.
    """

    kind = FileKind("cocurve-plans", 2, "plans measured")  # columns: KL and nll of a sequence

    def __init__(
        self,
        model: PreTrainedModel,
        text: CalibrationSet,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        plans_per_batch: int | None = None,
        keep_teacher: bool = False,
        replay: bool = False,
    ) -> None:
        self.model, self.text = model, text
        architecture = describe(model)
        self.memory = PlanMemory.open(
            self.kind,
            checkpoint,
            (len(text), 2),
            lambda: model_settings(model) | {"text_fingerprint": text.fingerprint},
        )
        small = replay and model_device(model).type == "cpu"
        batch = plans_per_batch or max(
            1, (_REPLAY_TOKENS if small else _BATCH_TOKENS) // text.seq_len
        )
        self.engine = _Engine(
            architecture, text, batch, {} if keep_teacher else None, replay=replay
        )

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
        """
        wanted = list(range(len(self.text)) if rows is None else rows)
        named = {plan.fingerprint: plan for plan in plans}
        self.fill(named, wanted, progress)
        return np.array([self.memory.values[plan.fingerprint][wanted] for plan in plans])

    def fill(self, plans: dict[str, Selection], rows: list[int], progress: Progress) -> None:
        """Measure what the memory lacks, row by row: many plans make one batch."""
        architecture, memory = self.engine.architecture, self.memory
        scales: dict[str, Scales] = {
            mark: plan_scales(architecture, plan) for mark, plan in plans.items()
        }
        lacking = len(memory.absent(plans, rows))
        wanted, scales[DENSE] = [*plans, DENSE], {}
        todo = {n: marks for n in rows if (marks := memory.absent(wanted, n))}
        label = f"KL of {lacking} plan{'' if lacking == 1 else 's'}"
        bar = open_bar(progress, total=len(todo), desc=label, unit="sequence")
        with measuring(self.model, torch.get_num_threads()), bar:
            for number, marks in todo.items():
                found = self.engine.measure(number, [scales[mark] for mark in marks])
                memory.add(marks, number, found)
                bar.update()


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
        kept: what `teacher` found by sequence, with the calls of its layers; None keeps none.
        most: of plans that advance together where weights come from elsewhere; halved likewise.
        replay: whether plans start at the first layer that their batch touches, instead of at 0.
        calls: of the layers, in the teacher's pass over the sequence at hand; for replay.
    """

    architecture: Architecture
    text: CalibrationSet
    batch: int
    kept: dict[int, tuple[Tensor, list[LayerCall]]] | None = None
    most: float = inf
    replay: bool = False
    calls: list[LayerCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        require_type(self.text, CalibrationSet, "the text")
        require_measurable(self.architecture.model, self.text)
        # for many plans, where weights come from elsewhere
        self.passes = weights_of(self.architecture.model).passes(self.architecture, self.text)

    def measure(self, number: int, plans: list[Scales]) -> np.ndarray:
        """Measure KL and nll [plans, 2] of one sequence, means over its scored positions."""
        ids, positions = row(self.architecture, self.text, number)
        # a plan that changes nothing is the dense model: KL 0 and its nll, without its own pass
        changed = [at for at, scales in enumerate(plans) if scales]
        if self.replay:  # a batch starts at the first layer of all its plans
            changed.sort(key=lambda at: -min(layer for layer, _ in plans[at]))
        size, done = self.batch, list[Tensor]()
        if self.passes is not None:  # more where weights come from elsewhere
            size = self.passes.most_together(self.batch, self.most)
        # where weights come from elsewhere, the dense model runs along with the plans
        teacher = self.teacher(number) if self.passes is None else None
        while teacher is None or len(done) < len(changed):
            rows = [plans[at] for at in changed[len(done) : len(done) + size]]
            found = unless_too_large(self._run, ids, positions, teacher, rows)
            if found is None:
                # half of what did not fit, which may be less than `size` at the end of the list;
                # kept for later sequences, since the next attempt would fail as well
                self.most = size = len(rows) // 2
                self.batch = min(self.batch, size)
                if size == 0:
                    raise too_large(f"one plan on sequence {number}")
                log.warning("out of memory: measuring %d plans at a time from here on", size)
                continue
            teacher, new = found
            done += new
        values = torch.empty(len(plans), 2, dtype=torch.float64, device=sums_on(ids.device))
        if len(changed) < len(plans):
            pair, labels = (self.architecture, self.architecture), ids[0, positions + 1]
            values[:] = _compared(pair, (teacher, teacher), labels)
        if done:
            values[changed] = torch.stack(done)
        measured = values.cpu().numpy()
        require_numbers(np.isfinite(measured[:, 0]).all(), f"sequence {number}")
        return measured

    def measure_student(self, number: int, student: Architecture) -> np.ndarray:
        """Compare another model on one sequence [4], as `_compared`."""
        ids, positions = row(self.architecture, self.text, number)
        hidden = (self.teacher(number), _scored_hidden(student, ids, positions, {}))
        pair, labels = (self.architecture, student), ids[0, positions + 1]
        measured: np.ndarray = _compared(pair, hidden, labels, both=True)[0].cpu().numpy()
        require_numbers(np.isfinite(measured[0]), f"sequence {number}")
        return measured

    def teacher(self, number: int) -> Tensor:
        """Final hidden states [1, P, d] of the dense model at the scored positions of a row."""
        if self.kept is not None and number in self.kept:
            found, self.calls = self.kept[number]
            return found
        ids, positions = row(self.architecture, self.text, number)
        if self.replay and self.passes is None:
            final, self.calls = capture_calls(self.architecture, ids)
            found = final[:, positions]
        else:
            found = _scored_hidden(self.architecture, ids, positions, {})
        if self.kept is not None:
            self.kept[number] = found, self.calls
        return found

    def _run(
        self, ids: Tensor, positions: Tensor, teacher: Tensor | None, rows: list[Scales]
    ) -> tuple[Tensor, list[Tensor]]:
        """The teacher's final hidden states, and mean KL and nll [2] of each plan."""
        if self.passes is not None:
            batches = [rows[at : at + self.batch] for at in range(0, len(rows), self.batch)]
            teacher, *masked = self.passes.run(ids, positions, batches)
        else:
            assert teacher is not None  # only passes bring their own
            masked = [self._masked(ids, positions, rows)]
        pair, labels = (self.architecture, self.architecture), ids[0, positions + 1]
        found = [_compared(pair, (teacher, hidden), labels) for hidden in masked]
        return teacher, [values for batch in found for values in batch]

    def _masked(self, ids: Tensor, positions: Tensor, rows: list[Scales]) -> Tensor:
        """Final hidden states [B, P, d] of B plans."""
        masks = stack_rows(self.architecture, rows)
        if not self.replay:
            repeated = ids.expand(len(rows), -1)
            return _scored_hidden(self.architecture, repeated, positions, masks)
        with scaled(self.architecture, masks):
            first = min(layer for layer, _ in masks)
            hidden = run_from(self.architecture, self.calls, first, len(rows))
        return self.architecture.final(hidden)[:, positions]


def _scored_hidden(
    architecture: Architecture, ids: Tensor, positions: Tensor, masks: Scales
) -> Tensor:
    """Final hidden states [B, P, d] at the scored positions, under masks."""
    with scaled(architecture, masks):
        return architecture.last_hidden(ids)[:, positions]


def _compared(
    pair: Sequence[Architecture], hidden: Sequence[Tensor], labels: Tensor, both: bool = False
) -> Tensor:
    """Compare two models over the whole vocabulary, means over positions [B, 2] float64.

    They are KL(first || second) and the nll of the second, nats per token. For `both` [B, 4] also
    the nll of the first, and the share of positions where both have the same first choice.
    """
    rows, positions, _ = hidden[1].shape
    total = torch.zeros(rows, 4 if both else 2, dtype=torch.float64, device=sums_on(labels.device))
    for part in pieces(positions, 4 * (rows + 2) * pair[0].vocabulary):
        logits, student = (
            widen(architecture.logits(states[:, part]))
            for architecture, states in zip(pair, hidden, strict=True)
        )
        wanted = labels[part].expand(rows, -1)
        found = [-log_likelihood(student, wanted)]
        if both:
            same = student.argmax(dim=-1) == logits.argmax(dim=-1)
            found += [-log_likelihood(logits, wanted[:1]).expand(rows, -1), same]
        # the shift of the logits, not a difference of log-probabilities: see estimator/fisher.py
        wide = torch.promote_types(logits.dtype, student.dtype)
        logits, shift = logits.to(wide), student.to(wide).sub_(logits)
        kl = kl_divergence(torch.softmax(logits, dim=-1), shift)
        total += torch.stack([in_double(each).sum(dim=-1) for each in (kl, *found)], dim=1)
    return total / positions
