"""The bake-off: methods at one budget, with one search of guards, on one text and its questions.

Every cell (method, ratio, search, calibration) is kept in the folder as soon as it is done, so a
killed run resumes. A method that fails leaves its reason in its own cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.progress import Bar
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.methods.base import Method
from cocurve_lab.models.runtime import require_one_device
from cocurve_lab.models.units import enumerate_units

from ..lazy import PreTrainedModel, PreTrainedTokenizerBase
from .bench import Bench
from .comparison import Comparison
from .contenders import CompareOptions, Competitor, Judges, named


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[str | Method] | Mapping[str, Competitor],
    ratios: Sequence[float],
    calibrations: CalibrationSet | Sequence[CalibrationSet],
    judges: Judges,
    options: CompareOptions | None = None,
) -> Comparison:
    """Measure every method at every ratio on every calibration, without guards and with the best.

    A plan runs as a mask on the dense model. Where weights are repaired, the repaired model itself
    is measured, and guards are chosen by its KL. Gains of CoCurve are chosen on the held-out rows,
    and omitted if none helps there.

    Args:
        model, tokenizer: the dense model.
        methods: names, Method objects, or {label: Method or Contender} where one method runs with
            several options, a repair or a measured search. Random draws anew with each calibration.
        ratios: shares of removable cost, [0, 1).
        calibrations: one calibration set, or several (other seeds): each is a repetition.
        judges: text and questions that no method saw.
        options: folder, guards and progress; None keeps nothing and searches the grid of
            `choose_guards`.

    Returns:
        A Comparison with one row per cell, and one for the dense model.

    Raises:
        InputError: no method, no ratio, two methods of one label, an unknown name; weights that are
            streamed or spread over devices, and a method that needs all of them.
        MismatchError: a judge shares rows with a calibration.
    """
    options = options or CompareOptions()
    contenders = named(methods)
    repeats = [calibrations] if isinstance(calibrations, CalibrationSet) else list(calibrations)
    if not contenders or not ratios or not repeats:
        raise InputError(
            f"compare got {len(contenders)} methods, {len(ratios)} ratios and {len(repeats)} "
            "calibration sets. Give at least one method, one ratio and one calibration set."
        )
    if any(contender.needs_whole_model for contender in contenders.values()):
        require_one_device(model)
    for text in repeats:
        judges.held_out.require_disjoint(text)
        judges.test.require_disjoint(text)
    judges.held_out.require_disjoint(judges.test)
    bench = Bench(model, enumerate_units(model, options.ffn_groups), judges, options, tokenizer)
    rows = [bench.dense()]
    columns = sum(len(bench.searches(contender)) for contender in contenders.values())
    total = len(repeats) * len(ratios) * columns
    with Bar(total=total, desc="bake-off", unit="cell", disable=not options.progress) as bar:
        for repeat, text in enumerate(repeats):
            for label, contender in contenders.items():
                bar.set_postfix_str(label)
                for row in bench.cells(label, contender, ratios, text, repeat):
                    rows.append(row)
                    bar.update()
    return Comparison(rows)
