"""The rows of a bake-off: which plans compete, what is searched, and how the rest is repaired."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from cocurve_lab.base.errors import InputError
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.choosing.settings import guards_grid
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.methods.base import Method
from cocurve_lab.methods.cocurve import CoCurve, Diagonal
from cocurve_lab.methods.registry import get_method, method_names
from cocurve_lab.methods.slimgpt import SlimGpt
from cocurve_lab.methods.slimllm import SlimLlm
from cocurve_lab.solver.guards import Guards

Repairing = Literal["own", "refit", "refit and training"]

BASELINES = (
    "random",
    "magnitude",
    "wanda-sp",
    "flap",
    "amp",
    "llm-pruner",
    "slimgpt",
    "slimllm",
    "2ssp",
)  # the paper's nine
DEPTH = ("shortgpt", "blockpruner", "finercut", "cbo")  # whole layers or blocks; not in the paper
OURS_CHOSEN = "CoCurve, λ chosen"
_FROM_H = ("cocurve", "diagonal", "head-only", "ffn-only")


@dataclass(frozen=True)
class Contender:
    """A row of a bake-off.

    Attributes:
        methods: one method, or several among whose plans the held-out KL chooses.
        repair: what happens to the remaining weights. "own": what the method itself does, for most
            nothing. The others repair any plan, and are chosen by the KL after it: "refit" as
            `repair`, "refit and training" as `recover` after `repair`. Both read the calibration,
            and training chooses its epoch on the held-out rows.
        evaluations: row evaluations of a measured search that starts from the plan; 0: no search.
            The search judges plans as pruned; a repair comes after it.
    """

    methods: tuple[Method, ...]
    repair: Repairing = "own"
    evaluations: int = 0

    @property
    def honours_guards(self) -> bool:
        """Whether layer cap and protection bind at least one of the methods."""
        return any(method.honours_guards for method in self.methods)

    @property
    def repairs(self) -> bool:
        """Whether weights that stay are changed."""
        return self.repair != "own" or any(method.repairs for method in self.methods)

    @property
    def needs_whole_model(self) -> bool:
        """Whether all weights must be on one device: for gradients, or a repair of weights."""
        own = any(m.repairs and not isinstance(m, CoCurve) for m in self.methods)
        repaired = own if self.repair == "own" else True
        return repaired or any(method.needs_gradients for method in self.methods)

    def mark(self) -> list[Any]:
        """Everything that tells this contender from another, as JSON values."""
        methods = [[m.name, asdict(m)] for m in self.methods]  # type: ignore[call-overload]
        return [methods, self.repair, self.evaluations]


Competitor = str | Method | Contender


def _as_contender(value: Competitor) -> Contender:
    if isinstance(value, Contender):
        return value
    return Contender((get_method(value) if isinstance(value, str) else value,))


def named(methods: Sequence[str | Method] | Mapping[str, Competitor]) -> dict[str, Contender]:
    """Give every contender its label."""
    if isinstance(methods, Mapping):
        return {label: _as_contender(value) for label, value in methods.items()}
    made = [_as_contender(method) for method in methods]
    titles = [contender.methods[0].title for contender in made]
    if len(set(titles)) < len(titles):
        raise InputError(
            f"two methods have one title among {', '.join(titles)}. Give {{label: Method}}."
        )
    return dict(zip(titles, made, strict=True))


# Line-ups -----------------------------------------------------------------------------------------


def all_methods(top_r: int = 256) -> dict[str, Method]:
    """Make all of `method_names()` but DEPTH, and four more that explain or repair, by label.

    "CoCurve, measured diagonal" solves on the measured KL of single units; "SlimLLM, layers alike"
    takes the same share of every layer (alpha 0); "CoCurve + gains" and "SlimGPT + refit" change
    the remaining weights. `top_r` is the teacher's support of CoCurve and its controls.
    """
    names = [name for name in method_names() if name not in DEPTH]
    made = [get_method(n, **({"top_r": top_r} if n in _FROM_H else {})) for n in names]
    return {method.title: method for method in made} | {
        "CoCurve, measured diagonal": CoCurve(top_r=top_r, measured_diagonal=True),
        "SlimLLM, layers alike": SlimLlm(alpha=0.0),
        "CoCurve + gains": CoCurve(top_r=top_r, compensate=True),
        "SlimGPT + refit": SlimGpt(reconstruct=True),
    }


def alike(
    repair: Repairing = "own", *, evaluations: int = 0, top_r: int = 256
) -> dict[str, Contender]:
    """Make the nine baselines, DEPTH, CoCurve, and CoCurve with lambda chosen, all treated alike.

    Lambda is chosen among 0, 0.5, 1 and 2, and with the measured diagonal among 0 and 1. Labels
    are `treated(title, repair, evaluations)`.

    Args:
        repair, evaluations: of every row; see `Contender`.
        top_r: size of the teacher's support, for CoCurve.
    """
    rows: dict[str, tuple[Method, ...]] = {
        method.title: (method,) for method in map(get_method, (*BASELINES, *DEPTH))
    }
    with_edges = [CoCurve(strength, top_r) for strength in (0.5, 1.0, 2.0)]
    measured = [CoCurve(strength, top_r, measured_diagonal=True) for strength in (0.0, 1.0)]
    rows["CoCurve"] = (CoCurve(top_r=top_r),)
    rows[OURS_CHOSEN] = (Diagonal(top_r=top_r), *with_edges, *measured)
    return {
        treated(label, repair, evaluations): Contender(methods, repair, evaluations)
        for label, methods in rows.items()
    }


def treated(label: str, repair: Repairing = "own", evaluations: int = 0) -> str:
    """Return the label of a row after its treatment: "FLAP, searched, refitted"."""
    words = {"own": "", "refit": ", refitted", "refit and training": ", refitted, trained"}
    searched = ", searched" if evaluations > 0 else ""
    return f"{label}{searched}{words[repair]}"


# Judges and options -------------------------------------------------------------------------------
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
        guards: the grid in which every row's guards are searched, by its own held-out KL with its
            own options and repair; empty: no search. It is that of `choose_guards`.
        ffn_groups: FFN groups per layer.
        progress: show progress bars.
        curvatures: H that CoCurve and its controls take where they are of the same calibration and
            support; another H is built, and kept in `folder`.
        unguarded: also measure rows without guards, where their guards are searched.
        repaired: where weights are repaired, how many of a row's plans are repaired on the whole
            calibration and compared on the held-out rows: those of lowest held-out KL, refitted on
            a quarter of it, or as pruned where the repair is no refit. None: all of them.
    """

    folder: str | os.PathLike[str] | None = None
    guards: Sequence[Guards] = guards_grid()
    ffn_groups: int = 16
    progress: bool = True
    curvatures: Sequence[Curvature] = ()
    unguarded: bool = True
    repaired: int | None = None
