"""The cells of a bake-off: evidence, plans, their choice, repairs, and what is measured."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from cocurve_lab.base.errors import InfeasibleError
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.choosing.gains import choose_gains
from cocurve_lab.extensions.choosing.racing import ChoiceOptions, race_plans
from cocurve_lab.extensions.choosing.racing import Contender as Runner
from cocurve_lab.extensions.choosing.search import SearchOptions, search_plan
from cocurve_lab.extensions.choosing.settings import loosest_first
from cocurve_lab.extensions.judging.answers import answer_accuracy
from cocurve_lab.extensions.judging.kept import plans_file
from cocurve_lab.extensions.repairing.recovery import RecoverOptions, recover
from cocurve_lab.extensions.repairing.repair import RepairOptions, repair
from cocurve_lab.measuring.risk import compare_models, measure_plans, model_risk, standard_error
from cocurve_lab.methods.base import Evidence, Method
from cocurve_lab.methods.cocurve import CoCurve, curvature_of
from cocurve_lab.models.architectures import Architecture, describe
from cocurve_lab.models.layer_calls import first_output
from cocurve_lab.models.units import UnitSet, units_like
from cocurve_lab.solver.guards import FREE
from cocurve_lab.solver.plan_json import guards_to_plain
from cocurve_lab.solver.selection import Selection

from ..lazy import PreTrainedModel, PreTrainedTokenizerBase
from ..shared import Recipe, marks
from ..tables import Row, kept_rows, pick
from .comparison import COMPARABLE
from .contenders import CompareOptions, Contender, Judges

log = logging.getLogger(__name__)

NO_SEARCH, SEARCHED = "none", "searched"
_RACE_SHARE = 0.25  # of the calibration, on which all plans of a row are refitted
_SEARCH_ROWS = 32  # rows of the calibration that a measured search uses


class Candidate(NamedTuple):
    """A plan that a method made for a cell."""

    method: Method
    evidence: Evidence
    plan: Selection


class Seen(NamedTuple):
    """What a contender knows: a calibration, its number, and its methods' evidence of it."""

    calibration: CalibrationSet
    repeat: int
    evidence: list[Evidence]

    def cost(self) -> Cost:
        """Sum what the evidence cost; H serves several methods and counts once."""
        known = {_source(e): e.provenance["cost"] for e in self.evidence}
        return sum((Cost(**cost) for cost in known.values()), Cost())


class Entry(NamedTuple):
    """What enters the table: a plan, the repaired model if there is one, and what it cost."""

    plan: Selection
    model: PreTrainedModel | None  # None: the plan runs as a mask on the dense model
    cost: Cost
    tried: int = 1  # settings of methods and guards
    out: int = 0  # those of them that do not reach the ratio


@dataclass
class Bench:
    """The model and judges of a bake-off, which measure its cells.

    Attributes:
        model, tokenizer: the dense model; no tokenizer is needed where no questions are asked.
        units: its units, of which all methods choose.
        judges: text and questions.
        options: folder, guards and progress.
        curvatures: H by calibration and support, once for CoCurve and its controls.
    """

    model: PreTrainedModel
    units: UnitSet
    judges: Judges
    options: CompareOptions
    tokenizer: PreTrainedTokenizerBase | None = None
    curvatures: dict[tuple[str, int], Curvature] = field(default_factory=dict)

    @cached_property
    def mark(self) -> dict[str, Any]:
        """Fingerprint and dtype of the model, read once: reading an 8B takes seconds."""
        return marks(self.model)

    # Cells ----------------------------------------------------------------------------------------

    def dense(self) -> Row:
        """Measure the row of the dense model itself."""
        empty = Selection.from_pruned(self.units, [])
        return self._kept(
            ["dense"],
            lambda: _cell("Dense", "dense", 0, 0.0) | self._measure(Entry(empty, None, Cost())),
        )

    def cells(
        self,
        label: str,
        contender: Contender,
        ratios: Sequence[float],
        calibration: CalibrationSet,
        repeat: int,
    ) -> Iterable[Row]:
        """Measure the cells of one contender on one calibration; errors are written into them.

        Args:
            label: its name in the table.
            contender: its methods, search and repair.
            ratios: shares of removable cost, [0, 1).
            calibration: the text the methods and a refit see.
            repeat: number of the calibration, and the seed of methods that draw.
        """
        seen: Seen | None = None
        for ratio in ratios:
            for search in self.searches(contender):
                cell = _cell(label, search, repeat, ratio)
                try:
                    seen = seen or self.seen(contender, calibration, repeat)
                    yield self._row(cell, contender, seen)
                except Exception as error:  # one cell must not cost the others
                    log.warning("%s at %.0f %%: %s", label, 100 * ratio, error)
                    yield cell | {"failed": f"{type(error).__name__}: {error}"}

    def searches(self, contender: Contender) -> list[str]:
        """List the searches of a contender's cells; that of guards, if there is one, is last."""
        if not (contender.honours_guards and self.options.guards):
            return [NO_SEARCH]
        return [NO_SEARCH, SEARCHED] if self.options.unguarded else [SEARCHED]

    def seen(self, contender: Contender, calibration: CalibrationSet, repeat: int) -> Seen:
        """Gather what a contender knows of one calibration; see `evidence`."""
        evidence = [self.evidence(method, calibration, repeat) for method in contender.methods]
        return Seen(calibration, repeat, evidence)

    def _row(self, cell: Row, contender: Contender, seen: Seen) -> Row:
        """Measure one cell, or read it from the folder."""
        ratio, search = cell["requested_ratio"], cell["search"]

        def compute() -> Row:
            try:
                return cell | self._measure(self.enter(contender, seen, ratio, search))
            # a fact about the method, worth keeping; other errors are not, and are tried again
            except InfeasibleError as error:
                return cell | {"failed": str(error)}

        evidence = [_without_cost(evidence) for evidence in seen.evidence]
        parts = [contender.mark(), evidence, ratio, search]
        if contender.repair != "own" or contender.evaluations:
            # these read the text too, not only the evidence
            parts += [seen.calibration.fingerprint, seen.repeat]
        if contender.repairs:
            parts.append(self.options.repaired)
        # the file is named by what was measured, so another label or calibration may have made it
        return self._kept(parts, compute) | {name: cell[name] for name in ("method", "calibration")}

    def _kept(self, parts: list[Any], compute: Any) -> Row:
        """Read a cell from the folder, or compute and keep it."""
        judges = self.judges
        settings = self.mark | {
            "units": self.units.fingerprint,
            "held_out": judges.held_out.fingerprint,
            "test": judges.test.fingerprint,
            "questions": fingerprint([asdict(question) for question in judges.questions]),
            "guards": [guards_to_plain(guards, self.units) for guards in self.options.guards],
            "parts": parts,
        }
        return kept_rows(self.options.folder, "cell", settings, lambda: [compute()])[0]

    def enter(self, contender: Contender, seen: Seen, ratio: float, search: str) -> Entry:
        """Make a contender's plan and repaired model, chosen on the held-out rows as judged.

        The cost is that of the evidence, the measured search and the repair. The choice of guards
        is omitted: plans that another row has measured would cost nothing there.

        Args:
            contender: its methods, search and repair.
            seen: what it knows of one calibration, from `seen`.
            ratio: share of removable cost, [0, 1).
            search: `NO_SEARCH` or `SEARCHED`: whether the guards are chosen.
        """
        candidates, tried, out = self._candidates(contender, seen, ratio, search)
        spent = seen.cost()
        if contender.evaluations:
            # the search starts from the plan that is best as pruned, and a repair comes after it
            best, cost = self._searched(contender, self._ranked(candidates)[0], seen)
            candidates, spent = [best], spent + cost
        entry = self._chosen(contender, candidates, seen)
        return entry._replace(cost=spent + entry.cost, tried=tried, out=out)

    # Plans ----------------------------------------------------------------------------------------

    def _candidates(
        self, contender: Contender, seen: Seen, ratio: float, search: str
    ) -> tuple[list[Candidate], int, int]:
        """Make the distinct plans of the methods, without guards or with those of the grid.

        Guards go from the loosest on. Also returns how many settings were tried, and how many of
        them do not reach the ratio.
        """
        found: dict[tuple[int, tuple[int, ...]], Candidate] = {}
        failures = []
        grid = [FREE]
        if search != NO_SEARCH:
            grid = loosest_first(self.units, ratio, self.options.guards)
        for place, (method, evidence) in enumerate(
            zip(contender.methods, seen.evidence, strict=True)
        ):
            for guards in grid:
                try:
                    plan = method.select(evidence, self.units, ratio, guards)
                except InfeasibleError as error:
                    failures.append(error)
                    continue
                # two methods with one plan may repair it in two ways
                key = (place if method.repairs else -1, tuple(sorted(plan.pruned)))
                found.setdefault(key, Candidate(method, evidence, plan))
        if not found:
            raise failures[0]
        return list(found.values()), len(contender.methods) * len(grid), len(failures)

    def _ranked(self, candidates: list[Candidate]) -> list[Candidate]:
        """Sort the candidates by their held-out KL as pruned, in a race as `choose_guards` runs it.

        Plans that the race dropped come last. Of one method's plans the first is the loosest of
        those that cannot be told from the lowest, as there.
        """
        if len(candidates) == 1:
            return candidates
        held_out = self.judges.held_out
        if len(held_out) < 2:  # a single row has no error, so nothing can be dropped
            return sorted(
                candidates, key=lambda one: self._held_out_risk(Entry(one.plan, None, Cost()))
            )
        plans = [Runner(c.plan.with_gains({}), (), (c.plan.guards,)) for c in candidates]
        path = plans_file(self.options.folder, self.model, held_out)
        raced = race_plans(
            self.model, plans, held_out, ChoiceOptions(checkpoint=path, progress=False)
        )
        places = sorted(range(len(raced)), key=lambda n: (raced[n].stopped_early, raced[n].kl))
        if len({id(candidate.method) for candidate in candidates}) == 1:
            loosest = next(place for place, one in enumerate(raced) if one.tied)
            places.remove(loosest)
            places.insert(0, loosest)
        return [candidates[place] for place in places]

    def _chosen(self, contender: Contender, candidates: list[Candidate], seen: Seen) -> Entry:
        """Return the candidate of lowest held-out KL, after its repair if there is one."""
        most = self.options.repaired
        if contender.repair == "own":
            candidates = self._ranked(candidates)[: most if contender.repairs else 1]
        elif most is not None and len(candidates) > most:
            candidates = self._raced(contender, candidates, seen)[:most]
        entries = (self._repaired(contender, candidate, seen) for candidate in candidates)
        # one after another: only the best repaired model so far stays in memory
        return next(entries) if len(candidates) == 1 else min(entries, key=self._held_out_risk)

    def _raced(
        self, contender: Contender, candidates: list[Candidate], seen: Seen
    ) -> list[Candidate]:
        """Sort the candidates by their held-out KL after a refit on a part of the rows.

        The KL as pruned predicts little of that after a refit, and a refit on few rows much.
        """
        rows = max(1, round(_RACE_SHARE * len(seen.calibration)))
        few = seen._replace(calibration=seen.calibration.rows(0, rows))
        if contender.repair == "refit and training":  # few rows are too few to train on
            contender = replace(contender, repair="refit")
        risks = [self._held_out_risk(self._repaired(contender, c, few)) for c in candidates]
        return [candidates[place] for place in np.argsort(risks)]

    def _held_out_risk(self, entry: Entry) -> float:
        """Measure the held-out KL of an entry, nats per token."""
        held_out = self.judges.held_out
        if entry.model is not None:
            return float(model_risk(self.model, entry.model, held_out).mean())
        return float(measure_plans(self.model, [entry.plan], held_out, progress=False).mean[0])

    def _searched(
        self, contender: Contender, start: Candidate, seen: Seen
    ) -> tuple[Candidate, Cost]:
        """Run a measured search from a plan; return its best plan and what the search cost."""
        rows = seen.calibration.rows(0, min(_SEARCH_ROWS, len(seen.calibration)))
        with counted(describe(self.model), seen.calibration.seq_len) as cost:
            found = search_plan(
                self.model,
                start.plan.with_gains({}),
                rows,
                held_out=self.judges.held_out,
                evaluations=contender.evaluations,
                checkpoint=self._file(
                    "search_{}.ckpt",
                    *self.mark.values(),
                    rows.fingerprint,
                    sorted(start.plan.pruned),
                    seen.repeat,
                ),
                progress=False,
                options=SearchOptions(seed=seen.repeat),
            )
        return start._replace(plan=found.selection), replace(cost, evaluations=found.evaluations)

    def _file(self, name: str, *parts: Any) -> Path | None:
        """Name a file of the folder by a fingerprint; None where nothing is kept."""
        folder = self.options.folder
        return None if folder is None else Path(folder) / name.format(fingerprint(*parts)[:10])

    # Repairs --------------------------------------------------------------------------------------

    def _repaired(self, contender: Contender, candidate: Candidate, seen: Seen) -> Entry:
        """Repair a candidate, if its contender does, and count what the repair cost."""
        with counted(describe(self.model), seen.calibration.seq_len) as cost:
            plan, model = self._mended(contender, candidate, seen)
        return Entry(plan, model, cost)

    def _mended(
        self, contender: Contender, candidate: Candidate, seen: Seen
    ) -> tuple[Selection, PreTrainedModel | None]:
        """Return the plan and the repaired model; None for the model where a mask is the same."""
        method, evidence, plan = candidate
        bare, held_out = plan.with_gains({}), self.judges.held_out
        if contender.repair == "own" and not method.repairs:
            return plan, None
        if contender.repair == "own" and isinstance(method, CoCurve):
            # only the gains that help on held-out rows, as in the paper
            quiet = ChoiceOptions(progress=False)
            curvature = curvature_of(evidence)
            return choose_gains(self.model, curvature, bare, held_out, options=quiet).best, None
        if contender.repair == "own":
            return plan, method.repair(self.model, plan, evidence)
        model = repair(self.model, bare, seen.calibration, options=RepairOptions(progress=False))
        if contender.repair == "refit and training":
            options = RecoverOptions(progress=False)
            model = recover(self.model, model, seen.calibration, held_out, options=options)
        return bare, model

    # Evidence -------------------------------------------------------------------------------------

    def evidence(self, method: Method, calibration: CalibrationSet, repeat: int) -> Evidence:
        """Measure a method's evidence once per calibration, or read it from the folder.

        One H serves CoCurve and its controls. What the measurement cost is in `provenance["cost"]`.

        Args:
            method: the method.
            calibration: the text it sees.
            repeat: number of the calibration, and the seed of methods that draw.
        """
        if isinstance(method, CoCurve):
            curvature = self._curvature(calibration, method.top_r)
            return _with_cost(method.adopt(curvature), self._build_cost(curvature))
        path = self._file(
            f"evidence_{method.name}_{{}}.pkl",
            method.name,
            asdict(method),  # type: ignore[call-overload]
            repeat,
            *self.mark.values(),
            self.units.fingerprint,
            calibration.fingerprint,
        )
        if path is not None and path.exists():
            return Evidence.load(path)
        with counted(describe(self.model), calibration.seq_len) as cost:
            how: dict[str, Any] = {"seed": repeat, "progress": self.options.progress}
            evidence = method.measure(self.model, self.units, calibration, **how)
        evidence = _with_cost(evidence, cost)
        if path is not None:
            evidence.save(path)
        return evidence

    def _curvature(self, calibration: CalibrationSet, top_r: int = 256) -> Curvature:
        """Return H of a calibration: a given one, from memory, from the folder or built."""
        key = (calibration.fingerprint, top_r)
        for given in self.options.curvatures:
            if (given.provenance["calibration_fingerprint"], given.provenance["top_r"]) == key:
                return given
        if key not in self.curvatures:
            options = self.options
            recipe = Recipe(calibration, top_r, cache=options.folder, progress=options.progress)
            self.curvatures[key] = recipe.build(self.model, self.units)
        return self.curvatures[key]

    def _build_cost(self, curvature: Curvature) -> Cost:
        """Return what H cost, also where it was built before this run."""
        known, layers = curvature.provenance, len(describe(self.model).layers)
        rows = int(known.get("sequences_done") or 0)
        return Cost(build_evaluations(self.units, layers, rows), float(known.get("seconds") or 0.0))

    # Measuring ------------------------------------------------------------------------------------

    def _measure(self, entry: Entry) -> Row:
        """Measure KL, perplexity and right answers of a plan, or of the repaired model."""
        model, plan, test = self.model, entry.plan, self.judges.test
        tested = plan
        if entry.model is None:
            table = measure_plans(model, [plan], test, progress=False)
            assert table.nll is not None  # measure_plans fills it
            kl, loss = table.kl[0], table.nll[0]
        else:
            side = compare_models(model, entry.model, test)
            kl, loss, model = side.kl, side.loss, entry.model
            tested = Selection.from_pruned(units_like(model, plan.units), [])
        row: Row = {
            "guards": str(plan.guards),
            "settings_tried": entry.tried,
            "settings_out": entry.out,
            "realized_ratio": plan.realized_ratio,
            "params_removed_fraction": plan.params_removed_fraction,
            "comparable": abs(plan.realized_ratio - plan.requested_ratio) <= COMPARABLE,
            "units": len(plan),
            "kl": float(kl.mean()),
            "kl_error": float(standard_error(kl)) if len(kl) > 1 else None,
            "kl_rows": json.dumps(kl.tolist()),
            "perplexity": float(np.exp(loss.mean())),
            "evaluations": entry.cost.evaluations,
            "seconds": entry.cost.seconds,
        }
        if self.judges.questions:
            assert self.tokenizer is not None  # compare gives one
            answers = answer_accuracy(
                model, self.tokenizer, [tested], self.judges.questions, progress=False
            )
            row |= {f"accuracy {r['capability']}": r["accuracy"] for r in pick(answers.table)}
        return row


def _with_cost(evidence: Evidence, cost: Cost) -> Evidence:
    return replace(evidence, provenance=evidence.provenance | {"cost": asdict(cost)})


def _without_cost(evidence: Evidence) -> dict[str, Any]:
    """Return the provenance without what the evidence cost: another number in every run."""
    return {name: value for name, value in evidence.provenance.items() if name != "cost"}


def _source(evidence: Evidence) -> str:
    """Name the work behind an evidence: H of one support, or a method's own."""
    known = evidence.provenance
    if "curvature" not in known:
        return evidence.method
    return f"H {known.get('top_r')}"


def _cell(label: str, search: str, repeat: int, ratio: float) -> Row:
    return {
        "method": label,
        "search": search,
        "calibration": repeat,
        "requested_ratio": float(ratio),
        "failed": "",
    }


# Costs --------------------------------------------------------------------------------------------
@dataclass
class Cost:
    """Work done so far.

    Attributes:
        evaluations: forward passes of one row through all layers; some of the layers count as that
            part of a pass. Backward passes and the language model's head do not count.
        seconds: wall clock.
    """

    evaluations: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.evaluations + other.evaluations, self.seconds + other.seconds)


@contextmanager
def counted(architecture: Architecture, row_length: int) -> Iterator[Cost]:
    """Count what runs inside, in this model and in copies of it, pruned or not.

    `row_length` tokens make one row. The Cost is filled on leaving.
    """
    kinds, lock, tokens = {type(layer) for layer in architecture.layers}, threading.Lock(), [0]

    def count(module: nn.Module, _: Any, output: Any) -> None:
        if type(module) in kinds:
            with lock:  # workers of a build run side by side
                tokens[0] += first_output(output).shape[:-1].numel()

    cost, begun = Cost(), time.monotonic()
    # for all modules, because a copy does not have the hooks set on the original's layers later
    hook = register_module_forward_hook(count)
    try:
        yield cost
    finally:
        hook.remove()
        cost.evaluations = tokens[0] / (len(architecture.layers) * row_length)
        cost.seconds = time.monotonic() - begun


def build_evaluations(units: UnitSet, layers: int, rows: int) -> float:
    """Count the forward passes of H: the teacher, and for each unit the layers from its own on.

    That is slightly too much: within its own layer a unit's ablation starts at the projection.
    """
    return rows * (1 + sum(layers - unit.layer for unit in units) / layers)
