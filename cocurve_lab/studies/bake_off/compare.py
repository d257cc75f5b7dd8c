"""The bake-off: methods at one budget, with one search of guards, on one text and its questions.

Every cell (method, ratio, search, calibration) is kept in the folder as soon as it is done, so a
killed run resumes. A method that fails leaves its reason in its own cells.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...errors import InfeasibleError, InputError
from ...estimator.estimate import load_or_estimate
from ...measuring.answers import answer_accuracy
from ...measuring.choosing import RELEASE_GUARDS
from ...measuring.choosing_gains import choose_gains
from ...measuring.generation import Question
from ...measuring.plan_memory import plans_file
from ...measuring.racing import ChoiceOptions
from ...measuring.risk import measure_plans, model_risk
from ...methods.base import Evidence, Method
from ...methods.cocurve import CoCurve, curvature_of
from ...methods.registry import get_method
from ...models.identity import fingerprint_model, model_dtype
from ...models.units import UnitSet, enumerate_units, units_like
from ...solver.guards import FREE, Guards
from ...solver.selection import Selection
from ...storage import fingerprint
from ...tables import Row, cached_table
from .comparison import COMPARABLE, Comparison

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NO_SEARCH, SEARCHED = "none", "searched"

# no guards; the release's cap; the first layer kept; both ends kept; cap and first layer; release
GUARDS = (
    FREE,
    Guards(layer_cap_factor=1.5),
    Guards(protect_first=1),
    Guards(protect_first=1, protect_last=1),
    Guards(layer_cap_factor=1.5, protect_first=1),
    RELEASE_GUARDS,
)


class Judges(NamedTuple):
    """Text that judges plans: rows to search guards on, other rows and questions to report on."""

    held_out: CalibrationSet
    test: CalibrationSet
    questions: Sequence[Question] = ()


@dataclass(frozen=True)
class CompareOptions:
    """Options of `compare`.

    Attributes:
        folder: keeps evidence, measurements and cells; None keeps nothing.
        guards: the grid in which every method's guards are searched, by its own held-out KL at its
            own lambda and options; empty: no search.
        ffn_groups: FFN groups per layer.
        progress: show progress bars.
        curvatures: folder in which H of CoCurve and its controls is looked for and kept; None:
            `folder`.
    """

    folder: str | os.PathLike[str] | None = None
    guards: Sequence[Guards] = GUARDS
    ffn_groups: int = 16
    progress: bool = True
    curvatures: str | os.PathLike[str] | None = None


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[str | Method] | Mapping[str, Method],
    ratios: Sequence[float],
    calibrations: CalibrationSet | Sequence[CalibrationSet],
    judges: Judges,
    options: CompareOptions | None = None,
) -> Comparison:
    """Measure every method at every ratio on every calibration, without guards and with the best.

    A plan runs as a mask on the dense model. Where a method repairs weights, the repaired model
    itself is measured. Gains of CoCurve are chosen on the held-out rows, and left out where none
    helps there.

    Args:
        model, tokenizer: the dense model.
        methods: names, Method objects, or {label: Method} where one method runs with several
            options. Random draws anew with each calibration.
        ratios: shares of removable cost, [0, 1).
        calibrations: one calibration set, or several (other seeds): each is a repetition.
        judges: text and questions that no method saw.
        options: folder, guards and progress; None keeps nothing and searches `GUARDS`.

    Returns:
        A Comparison with one row per cell, and one for the dense model.

    Raises:
        InputError: no method, no ratio, two methods of one label, an unknown name.
        MismatchError: a judge shares rows with a calibration.
    """
    options = options or CompareOptions()
    named = _named(methods)
    repeats = [calibrations] if isinstance(calibrations, CalibrationSet) else list(calibrations)
    if not named or not ratios or not repeats:
        raise InputError(
            f"compare got {len(named)} methods, {len(ratios)} ratios and {len(repeats)} "
            "calibration sets. Give at least one method, one ratio and one calibration set."
        )
    for calibration in repeats:
        judges.held_out.require_disjoint(calibration)
        judges.test.require_disjoint(calibration)
    judges.held_out.require_disjoint(judges.test)
    bench = Bench(model, enumerate_units(model, options.ffn_groups), judges, options, tokenizer)
    rows = [bench.dense()]
    cells = len(repeats) * len(named) * len(ratios)
    with tqdm(total=cells, desc="bake-off", unit="cell", disable=not options.progress) as bar:
        for repeat, calibration in enumerate(repeats):
            for label, method in named.items():
                bar.set_postfix_str(label)
                rows += bench.method(label, method, ratios, calibration, repeat, bar)
    return Comparison(rows)


def _named(methods: Sequence[str | Method] | Mapping[str, Method]) -> dict[str, Method]:
    if isinstance(methods, Mapping):
        return dict(methods)
    made = [get_method(method) if isinstance(method, str) else method for method in methods]
    named = {method.title: method for method in made}
    if len(named) < len(made):
        titles = ", ".join(method.title for method in made)
        raise InputError(f"two methods have one title among {titles}. Give {{label: Method}}.")
    return named


@dataclass
class Bench:
    """The model and judges of a bake-off, which measure its cells.

    Attributes:
        model: the dense model.
        units: its units, of which all methods choose.
        judges: text and questions.
        options: folder, guards and progress.
        tokenizer: of the model; None where no questions are asked.
        curvatures: H by calibration and support, once for CoCurve and its controls.
    """

    model: PreTrainedModel
    units: UnitSet
    judges: Judges
    options: CompareOptions
    tokenizer: PreTrainedTokenizerBase | None = None
    curvatures: dict[tuple[str, int], Curvature] = field(default_factory=dict)

    @cached_property
    def model_mark(self) -> str:
        """The model's fingerprint, read once, because reading an 8B takes seconds."""
        return fingerprint_model(self.model)

    @cached_property
    def search_file(self) -> Path | None:
        """The file that keeps plans measured on the held-out rows; None keeps nothing."""
        return plans_file(self.options.folder, self.model, self.judges.held_out)

    def dense(self) -> Row:
        """Measure the row of the dense model itself."""

        def compute() -> list[Row]:
            empty = Selection.from_pruned(self.units, [])
            measured = self._measure(empty)
            return [_cell("Dense", "dense", 0, 0.0) | _plan_columns(empty) | measured]

        return cached_table(self.options.folder, "cell", self._settings("dense"), compute)[0]

    def method(
        self,
        label: str,
        method: Method,
        ratios: Sequence[float],
        calibration: CalibrationSet,
        repeat: int,
        bar: Any,
    ) -> list[Row]:
        """Measure the cells of one method on one calibration; errors are written into them.

        Args:
            label: the method's name in the table.
            method: any pruning method.
            ratios: shares of removable cost, [0, 1).
            calibration: the text the method sees.
            repeat: number of the calibration, and the seed of methods that draw.
            bar: a tqdm bar, updated once per ratio.

        Raises:
            KeyboardInterrupt: the run was stopped; finished cells are kept.
        """
        rows = []
        searches = [NO_SEARCH]
        if method.honours_guards and self.options.guards:
            searches.append(SEARCHED)
        evidence: Evidence | None = None
        for ratio in ratios:
            for search in searches:
                cell = _cell(label, search, repeat, ratio)
                try:
                    if evidence is None:
                        evidence = self.evidence(method, calibration, repeat)
                    rows.append(self._row(cell, method, evidence, ratio, search))
                except KeyboardInterrupt:
                    raise
                except Exception as error:  # one cell must not cost the others
                    log.warning("%s at %.0f %%: %s", label, 100 * ratio, error)
                    rows.append(cell | {"failed": f"{type(error).__name__}: {error}"})
            bar.update()
        return rows

    def _row(self, cell: Row, method: Method, evidence: Evidence, ratio: float, search: str) -> Row:
        """Measure one cell, or read it from the folder."""

        gated = isinstance(method, CoCurve) and method.compensate

        def compute() -> list[Row]:
            try:
                plan = self.plan(method, evidence, ratio, search)
            # a fact about the method, worth keeping; other errors are not, and are tried again
            except InfeasibleError as error:
                return [cell | {"failed": str(error)}]
            if gated:
                plan = self._gated(plan, evidence)
            measured = self._measure(plan, method if method.repairs else None, evidence)
            return [cell | _plan_columns(plan) | measured]

        parts = (method.name, asdict(method), evidence.provenance, ratio, search)  # type: ignore[call-overload]
        # earlier releases took all gains, so their cells are not to be found
        settings = self._settings(*parts, *(["gains gated"] if gated else []))
        found = cached_table(self.options.folder, "cell", settings, compute)[0]
        # the file is named by what was measured, so another label or calibration may have made it
        return found | {name: cell[name] for name in ("method", "calibration")}

    def plan(self, method: Method, evidence: Evidence, ratio: float, search: str) -> Selection:
        """Select a method's plan: without guards, or with those of lowest KL on held-out rows.

        Args:
            method: the method.
            evidence: its evidence, from `evidence`.
            ratio: share of removable cost, [0, 1).
            search: `NO_SEARCH` or `SEARCHED`.

        Raises:
            InfeasibleError: the method does not reach the ratio, under any guards of the grid.
        """
        if search == NO_SEARCH:
            return method.select(evidence, self.units, ratio)
        plans, failures = [], []
        for guards in self.options.guards:
            try:
                plans.append(method.select(evidence, self.units, ratio, guards))
            except InfeasibleError as error:
                failures.append(error)
        if not plans:
            raise failures[0]
        table = measure_plans(
            self.model, plans, self.judges.held_out, checkpoint=self.search_file, progress=False
        )
        return plans[int(table.mean.argmin())]

    def _gated(self, plan: Selection, evidence: Evidence) -> Selection:
        """The plan with the gains that help on held-out rows, or without, as the paper has it."""
        options = ChoiceOptions(progress=False)
        held_out, curvature = self.judges.held_out, curvature_of(evidence)
        return choose_gains(self.model, curvature, plan, held_out, options=options).best

    def evidence(self, method: Method, calibration: CalibrationSet, repeat: int) -> Evidence:
        """Measure a method's evidence once per calibration, or read it from the folder.

        One H serves CoCurve and its controls.

        Args:
            method: the method.
            calibration: the text it sees.
            repeat: number of the calibration, and the seed of methods that draw.
        """
        show, folder = self.options.progress, self.options.folder
        place = self.options.curvatures or folder
        if isinstance(method, CoCurve) and place is not None:
            key = (calibration.fingerprint, method.top_r)
            if key not in self.curvatures:
                self.curvatures[key] = load_or_estimate(
                    place, self.model, self.units, calibration, method.top_r, progress=show
                )
            return method.adopt(self.curvatures[key])
        path = None
        if folder is not None:
            mark = fingerprint(
                *(method.name, asdict(method), repeat),  # type: ignore[call-overload]
                *(self.model_mark, model_dtype(self.model)),
                *(self.units.fingerprint, calibration.fingerprint),
            )
            path = Path(folder) / f"evidence_{method.name}_{mark[:10]}.pkl"
            if path.exists():
                return Evidence.load(path)
        evidence = method.measure(self.model, self.units, calibration, seed=repeat, progress=show)
        if path is not None:
            evidence.save(path)
        return evidence

    def _measure(
        self, plan: Selection, repairer: Method | None = None, evidence: Evidence | None = None
    ) -> Row:
        """Measure KL, perplexity and right answers of a plan, or of the model a method repaired."""
        model, tested = self.model, plan
        if repairer is not None and evidence is not None:
            model = repairer.repair(self.model, plan, evidence)
            tested = Selection.from_pruned(units_like(model, plan.units), [])
        table = measure_plans(model, [tested], self.judges.test, progress=False)
        assert table.nll is not None  # measure_plans fills it
        kl = table.kl[0] if model is self.model else model_risk(self.model, model, self.judges.test)
        row: Row = {
            "kl": float(kl.mean()),
            "kl_error": float(kl.std(ddof=1) / np.sqrt(len(kl))) if len(kl) > 1 else None,
            "perplexity": float(table.perplexity[0]),
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
            "guards": [asdict(guards) for guards in self.options.guards],
            "parts": list(parts),
        }


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
