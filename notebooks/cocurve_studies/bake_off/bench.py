"""The cells of a bake-off: evidence, plans, their choice, repairs, and what is measured."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cocurve_lab.base.errors import InfeasibleError
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.base.tables import Row, cached_table
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.settings import BuildOptions
from cocurve_lab.estimator.estimate import estimate_curvature, load_or_estimate
from cocurve_lab.extensions.choosing.gains import choose_gains
from cocurve_lab.extensions.choosing.racing import ChoiceOptions
from cocurve_lab.extensions.choosing.search import SearchOptions, search_plan
from cocurve_lab.extensions.repairing.recovery import RecoverOptions, recover
from cocurve_lab.extensions.repairing.repair import RepairOptions, repair
from cocurve_lab.measuring.answers import answer_accuracy
from cocurve_lab.measuring.plan_memory import plans_file
from cocurve_lab.measuring.risk import compare_models, measure_plans, model_risk, standard_error
from cocurve_lab.methods.base import Evidence, Method
from cocurve_lab.methods.cocurve import CoCurve, curvature_of
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.identity import fingerprint_model, model_dtype
from cocurve_lab.models.units import UnitSet, units_like
from cocurve_lab.solver.guards import FREE
from cocurve_lab.solver.selection import Selection

from .comparison import COMPARABLE
from .contenders import Contender
from .costs import Cost, build_evaluations, counted
from .settings import CompareOptions, Judges

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NO_SEARCH, SEARCHED = "none", "searched"
_UNKNOWN = {"evaluations": np.nan, "seconds": np.nan}  # of evidence kept by earlier versions
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
        """What the evidence cost; H serves several methods and counts once."""
        known = {_source(e): e.provenance.get("cost", _UNKNOWN) for e in self.evidence}
        return sum((Cost(**cost) for cost in known.values()), Cost())


class Entry(NamedTuple):
    """What enters the table: a plan, the repaired model if there is one, and what it cost."""

    plan: Selection
    model: PreTrainedModel | None  # None: the plan runs as a mask on the dense model
    cost: Cost


@dataclass
class Bench:
    """The model and judges of a bake-off, which measure its cells.

    Attributes:
        model: the dense model.
        units: its units, of which all methods choose.
        judges: text and questions.
        options: folder, guards and progress.
        tokenizer: of the model; None where no questions are asked.
        curvatures: H by calibration, support and refit ratio, once for CoCurve and its controls.
    """

    model: PreTrainedModel
    units: UnitSet
    judges: Judges
    options: CompareOptions
    tokenizer: PreTrainedTokenizerBase | None = None
    curvatures: dict[tuple[str, int, float], Curvature] = field(default_factory=dict)

    @cached_property
    def model_mark(self) -> str:
        """The model's fingerprint, read once, because reading an 8B takes seconds."""
        return fingerprint_model(self.model)

    @cached_property
    def search_file(self) -> Path | None:
        """The file that keeps plans measured on the held-out rows; None keeps nothing."""
        return plans_file(self.options.folder, self.model, self.judges.held_out)

    # Cells ----------------------------------------------------------------------------------------

    def dense(self) -> Row:
        """Measure the row of the dense model itself."""

        def compute() -> list[Row]:
            empty = Selection.from_pruned(self.units, [])
            measured = self._measure(Entry(empty, None, Cost()))
            return [_cell("Dense", "dense", 0, 0.0) | _plan_columns(empty) | measured]

        return cached_table(self.options.folder, "cell", self._settings("dense"), compute)[0]

    def contender(
        self,
        label: str,
        contender: Contender,
        ratios: Sequence[float],
        calibration: CalibrationSet,
        repeat: int,
        bar: Any,
    ) -> list[Row]:
        """Measure the cells of one contender on one calibration; errors are written into them.

        Args:
            label: its name in the table.
            contender: its methods, search and repair.
            ratios: shares of removable cost, [0, 1).
            calibration: the text the methods and a refit see.
            repeat: number of the calibration, and the seed of methods that draw.
            bar: a tqdm bar, updated once per ratio.
        """
        rows = []
        seen: Seen | None = None
        for ratio in ratios:
            for search in self.searches(contender):
                cell = _cell(label, search, repeat, ratio)
                try:
                    seen = seen or self.seen(contender, calibration, repeat)
                    rows.append(self._row(cell, contender, seen))
                except KeyboardInterrupt:
                    raise
                except Exception as error:  # one cell must not cost the others
                    log.warning("%s at %.0f %%: %s", label, 100 * ratio, error)
                    rows.append(cell | {"failed": f"{type(error).__name__}: {error}"})
            bar.update()
        return rows

    def searches(self, contender: Contender) -> list[str]:
        """The searches of a contender's cells; that of guards, where there is one, comes last."""
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

        def compute() -> list[Row]:
            try:
                entry = self.enter(contender, seen, ratio, search)
            # a fact about the method, worth keeping; other errors are not, and are tried again
            except InfeasibleError as error:
                return [cell | {"failed": str(error)}]
            return [cell | _plan_columns(entry.plan) | self._measure(entry)]

        evidence = [_settled(evidence) for evidence in seen.evidence]
        parts = [contender.mark(), evidence, ratio, search]
        if contender.repair != "own" or contender.evaluations:
            # these read the text too, not only the evidence
            parts += [seen.calibration.fingerprint, seen.repeat]
        if contender.repairs:
            parts.append(self.options.repaired)
        found = cached_table(self.options.folder, "cell", self._settings(*parts), compute)[0]
        # the file is named by what was measured, so another label or calibration may have made it
        return found | {name: cell[name] for name in ("method", "calibration")}

    def enter(self, contender: Contender, seen: Seen, ratio: float, search: str) -> Entry:
        """Make a contender's plan and repaired model, chosen on the held-out rows as judged.

        The cost is that of the evidence, the measured search and the repair. The choice of guards
        is left out: plans that another row has measured would cost nothing there.

        Args:
            contender: its methods, search and repair.
            seen: what it knows of one calibration, from `seen`.
            ratio: share of removable cost, [0, 1).
            search: `NO_SEARCH` or `SEARCHED`: whether the guards are chosen.
        """
        candidates = self._candidates(contender, seen, ratio, search)
        if contender.evaluations:
            # the search starts from the plan that is best as pruned, and a repair comes after it
            start = self._ranked(candidates)[0]
            best, spent = self._searched(contender, start, seen)
            entry = self._repaired(contender, best, seen)
            return entry._replace(cost=seen.cost() + spent + entry.cost)
        entry = self._chosen(contender, candidates, seen)
        return entry._replace(cost=seen.cost() + entry.cost)

    # Plans ----------------------------------------------------------------------------------------

    def _candidates(
        self, contender: Contender, seen: Seen, ratio: float, search: str
    ) -> list[Candidate]:
        """The distinct plans of the methods, without guards or with those of the grid."""
        grid = [FREE] if search == NO_SEARCH else self.options.guards
        found: dict[tuple[int, tuple[int, ...]], Candidate] = {}
        failures = []
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
        return list(found.values())

    def _ranked(self, candidates: list[Candidate]) -> list[Candidate]:
        """The candidates by their held-out KL as pruned, lowest first."""
        if len(candidates) == 1:
            return candidates
        plans = [candidate.plan.with_gains({}) for candidate in candidates]
        table = measure_plans(
            self.model, plans, self.judges.held_out, checkpoint=self.search_file, progress=False
        )
        return [candidates[place] for place in table.mean.argsort(kind="stable")]

    def _chosen(self, contender: Contender, candidates: list[Candidate], seen: Seen) -> Entry:
        """The candidate of lowest held-out KL, after its repair if there is one."""
        if contender.repair in ("refit", "dense refit", "refit and training"):
            tried = self._raced(contender, candidates, seen)
        else:
            ranked = self._ranked(candidates)
            tried = ranked[: self.options.repaired] if contender.repairs else ranked[:1]
        best, lowest = self._repaired(contender, tried[0], seen), math.inf
        if len(tried) > 1:
            lowest = self._held_out_risk(best)
        for candidate in tried[1:]:
            entry = self._repaired(contender, candidate, seen)
            if (risk := self._held_out_risk(entry)) < lowest:
                best, lowest = entry, risk
        return best

    def _raced(
        self, contender: Contender, candidates: list[Candidate], seen: Seen
    ) -> list[Candidate]:
        """The `repaired` candidates of lowest held-out KL after a refit on a part of the rows."""
        if self.options.repaired is None or len(candidates) <= self.options.repaired:
            return candidates
        # the KL as pruned tells little of that after a refit, and a refit on few rows tells much
        rows = max(1, round(_RACE_SHARE * len(seen.calibration)))
        few = seen._replace(calibration=seen.calibration.rows(0, rows))
        if contender.repair == "refit and training":  # few rows are too few to train on
            contender = replace(contender, repair="refit")
        found = [
            self._held_out_risk(self._repaired(contender, candidate, few))
            for candidate in candidates
        ]
        return [candidates[place] for place in np.argsort(found)[: self.options.repaired]]

    def _held_out_risk(self, entry: Entry) -> float:
        """The held-out KL of an entry, nats per token."""
        held_out = self.judges.held_out
        if entry.model is not None:
            return float(model_risk(self.model, entry.model, held_out).mean())
        return float(measure_plans(self.model, [entry.plan], held_out, progress=False).mean[0])

    def _searched(
        self, contender: Contender, start: Candidate, seen: Seen
    ) -> tuple[Candidate, Cost]:
        """The plan that a measured search finds from this one, and what the search cost."""
        rows = seen.calibration.rows(0, min(_SEARCH_ROWS, len(seen.calibration)))
        path = None
        if self.options.folder is not None:
            mark = fingerprint(
                *(self.model_mark, model_dtype(self.model), rows.fingerprint),
                *(sorted(start.plan.pruned), seen.repeat),
            )
            path = Path(self.options.folder) / f"search_{mark[:10]}.ckpt"
        with counted(describe(self.model), seen.calibration.seq_len) as cost:
            found = search_plan(
                self.model,
                start.plan.with_gains({}),
                rows,
                held_out=self.judges.held_out,
                evaluations=contender.evaluations,
                checkpoint=path,
                progress=False,
                options=SearchOptions(seed=seen.repeat),
            )
        return start._replace(plan=found.selection), replace(cost, evaluations=found.evaluations)

    # Repairs --------------------------------------------------------------------------------------

    def _repaired(self, contender: Contender, candidate: Candidate, seen: Seen) -> Entry:
        """The entry of a candidate after its repair, with what the repair cost."""
        with counted(describe(self.model), seen.calibration.seq_len) as cost:
            plan, model = self._mended(contender, candidate, seen)
        return Entry(plan, model, cost)

    def _mended(
        self, contender: Contender, candidate: Candidate, seen: Seen
    ) -> tuple[Selection, PreTrainedModel | None]:
        """The plan and the repaired model; None for the model where a mask is the same."""
        method, evidence, plan = candidate
        bare, wanted = plan.with_gains({}), contender.repair
        if wanted == "own" and not isinstance(method, CoCurve):
            return plan, method.repair(self.model, plan, evidence) if method.repairs else None
        if wanted == "own":
            return self._gated(bare, curvature_of(evidence)) if method.repairs else plan, None
        if wanted == "gains":
            return self._gated(bare, self._curvature(seen.calibration)), None
        gains = None
        if wanted == "gains and refit":
            gains = (self._curvature(seen.calibration), self.judges.held_out)
        model = repair(
            self.model,
            bare,
            seen.calibration,
            sequential=wanted != "dense refit",
            gains=gains,
            options=RepairOptions(progress=False),
        )
        if wanted == "refit and training":
            texts = (seen.calibration, self.judges.held_out)
            model = recover(self.model, model, *texts, options=RecoverOptions(progress=False))
        return bare, model

    def _gated(self, plan: Selection, curvature: Curvature) -> Selection:
        """The plan with the gains that help on held-out rows, or without, as the paper has it."""
        options, held_out = ChoiceOptions(progress=False), self.judges.held_out
        return choose_gains(self.model, curvature, plan, held_out, options=options).best

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
            curvature = self._curvature(calibration, method.top_r, method.refit_ratio)
            return _priced(method.adopt(curvature), self._build_cost(curvature))
        path = None
        if self.options.folder is not None:
            mark = fingerprint(
                *(method.name, asdict(method), repeat),  # type: ignore[call-overload]
                *(self.model_mark, model_dtype(self.model)),
                *(self.units.fingerprint, calibration.fingerprint),
            )
            path = Path(self.options.folder) / f"evidence_{method.name}_{mark[:10]}.pkl"
            if path.exists():
                return Evidence.load(path)
        with counted(describe(self.model), calibration.seq_len) as cost:
            evidence = method.measure(
                self.model, self.units, calibration, seed=repeat, progress=self.options.progress
            )
        evidence = _priced(evidence, cost)
        if path is not None:
            evidence.save(path)
        return evidence

    def _curvature(
        self, calibration: CalibrationSet, top_r: int = 256, refit_ratio: float = 0.0
    ) -> Curvature:
        """H of a calibration, from memory, from the folder of H or built."""
        key = (calibration.fingerprint, top_r, refit_ratio)
        if key not in self.curvatures:
            place, show = self.options.curvatures or self.options.folder, self.options.progress
            inputs = (self.model, self.units, calibration, top_r)
            how: dict[str, Any] = {"progress": show}
            how["options"] = BuildOptions(refit_ratio=refit_ratio)
            self.curvatures[key] = (
                estimate_curvature(*inputs, **how)
                if place is None
                else load_or_estimate(place, *inputs, **how)
            )
        return self.curvatures[key]

    def _build_cost(self, curvature: Curvature) -> Cost:
        """What H cost, also where it was built before this run."""
        known, layers = curvature.provenance, len(describe(self.model).layers)
        rows = int(known.get("sequences_done") or 0)
        seconds = float(known.get("seconds") or 0.0)
        return Cost(build_evaluations(self.units, layers, rows), seconds)

    # Measuring ------------------------------------------------------------------------------------

    def _measure(self, entry: Entry) -> Row:
        """Measure KL, perplexity and right answers of a plan, or of the repaired model."""
        model, tested, test = self.model, entry.plan, self.judges.test
        if entry.model is None:
            table = measure_plans(model, [tested], test, progress=False)
            assert table.nll is not None  # measure_plans fills it
            kl, loss = table.kl[0], table.nll[0]
        else:
            side = compare_models(model, entry.model, test)
            kl, loss = side.kl, side.loss
            model = entry.model
            tested = Selection.from_pruned(units_like(model, tested.units), [])
        row: Row = {
            "kl": float(kl.mean()),
            "kl_error": float(standard_error(kl[None])[0]) if len(kl) > 1 else None,
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
            row |= {f"accuracy {r['capability']}": r["accuracy"] for r in answers.by_capability()}
        return row

    def _settings(self, *parts: Any) -> dict[str, Any]:
        judges = self.judges
        return {
            "model": self.model_mark,
            "dtype": model_dtype(self.model),
            "units": self.units.fingerprint,
            "held_out": judges.held_out.fingerprint,
            "test": judges.test.fingerprint,
            "questions": fingerprint([asdict(question) for question in judges.questions]),
            "guards": [guards.to_plain() for guards in self.options.guards],
            "parts": list(parts),
        }


def _priced(evidence: Evidence, cost: Cost) -> Evidence:
    return replace(evidence, provenance=evidence.provenance | {"cost": asdict(cost)})


def _source(evidence: Evidence) -> str:
    """What the work of an evidence was: H of one support, or a method's own."""
    known = evidence.provenance
    if "curvature" not in known:
        return evidence.method
    return f"H {known.get('top_r')} {known['curvature'].get('refit_ratio')}"


def _settled(evidence: Evidence) -> dict[str, Any]:
    """What an evidence is of, without what it cost: that is another number in every run."""
    return {name: value for name, value in evidence.provenance.items() if name != "cost"}


def _cell(label: str, search: str, repeat: int, ratio: float) -> Row:
    return {
        "method": label,
        "search": search,
        "calibration": repeat,
        "requested_ratio": float(ratio),
        "failed": "",
    }


def _plan_columns(plan: Selection) -> Row:
    return {
        "guards": str(plan.guards),
        "realized_ratio": plan.realized_ratio,
        "params_removed_fraction": plan.params_removed_fraction,
        "comparable": abs(plan.realized_ratio - plan.requested_ratio) <= COMPARABLE,
        "units": len(plan),
    }
