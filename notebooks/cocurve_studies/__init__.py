"""The paper's studies, one room per notebook: functions that return tidy tables, and charts.

    start.py      the H that a notebook starts from
    study.py      the runner: plans measured, tables kept, draws of H
    draws.py      errors of a difference between plans, over rows and draws of H
    findings.py   claims of the paper and the lab; a number and its interval beside each
    chart.py      series, axes and the common look of every chart
    tables.py     tables, kept and shown
    shared.py     the recipe of a build, marks of kept tables, comparisons, resampling
    sentences.py  what a picture shows, computed from this model
    exercises.py  the checks of the exercises of notebooks 01 to 05
    abilities.py  right answers by lambda and by edge variant
    trust/        notebook 06: when to trust the edges
    structure/    notebook 07: bridges and structure
    certainty/    notebook 08: how sure H is
    bake_off/     notebook 09: CoCurve against other methods
    paper/        `cocurve paper`: the paper's tables on other models

Arguments have one meaning in all studies: `model` is dense, `curvature` its H [M, M] in nats per
token, `held_out` text that H has not seen, `ratios` shares of removable cost in [0, 1),
`strengths` lambdas. `cache` is the folder of the table and of all that was measured for it: a
finished table is read back, an interrupted study goes on (None keeps nothing). `draws` is the
number of draws of H behind the error of every difference, made by solving all plans again (0: over
rows alone; a kept table of more draws is used). `progress` shows a bar. In tables, KL and risks
are nats per token, `<column>_error` is a standard error (None: unknown), and that of a difference
is paired over rows; with `draws` it has the columns of `Redrawn.columns`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bake_off.compare import compare as compare
    from .bake_off.contenders import CompareOptions as CompareOptions
    from .bake_off.contenders import Judges as Judges

# The bake-off in one call. It is imported on first use: the studies of H alone need no torch.
_HOMES = {"compare": "compare", "CompareOptions": "contenders", "Judges": "contenders"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:  # a study is its own module
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.bake_off.{_HOMES[name]}"), name)
