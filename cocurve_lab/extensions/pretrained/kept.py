"""What ships with a fetched model: H and measured interactions, built once; plans, measured once.

H takes a few megabytes: its upper triangle in float32, and for each group of rows how far its own
H is from the whole, in 8 bits. So H has its error bars, and the gate its doubts. Errors are within
one percent of those of the build. `python -m data.make.measure_smollm2` makes these files.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...base.atomic import write_atomically
from ...base.errors import FileFormatError, InputError, MismatchError
from ...base.files import demo_folder
from ...base.schema import (
    COUNT,
    OBJECT,
    TEXT,
    Field,
    Schema,
    array_of,
    dict_of,
    is_count,
    is_number,
    is_object,
    list_of,
    read_json,
    reading,
    require_fields,
)
from ...base.storage import SUM, dump_npz, seal_json, unseal_json
from ...curvature.groups import Groups
from ...curvature.matrix import Curvature
from ...models.sources import SOURCES, source_named
from ...models.units import UnitSet
from ...solver.guards import Guards
from ...solver.selection import Selection
from .smollm2 import NAME

if TYPE_CHECKING:
    from ..interactions.measured import Interactions

FORMAT, VERSION = "cocurve-kept-curvature", 1
PLANS = "cocurve-kept-plans"
KEPT_TEXTS = {"c4": "H.npz", "manual": "H_manual.npz"}
GUARDED = {", ends kept": Guards(protect_first=2, protect_last=2)}  # by the end of a plan's name
STEPS = 255  # between the two groups that are farthest from H at an entry, on either side of it
_REMEDY = "Use the file of the release, or make it again: `python -m data.make.measure_smollm2`."
_FILE: Schema = {
    "format": TEXT,
    "version": COUNT,
    "units": OBJECT,
    "provenance": OBJECT,
    "matrix": Field("finite float32 [M (M + 1) / 2]", array_of("float32", 1)),
    "reach": Field("finite float32 [M (M + 1) / 2]", array_of("float32", 1)),
    "apart": Field("uint8 [groups, M (M + 1) / 2]", array_of("uint8", 2)),
    "positions": Field("int64 [groups]", array_of("int64", 1)),
    "risks": Field("finite float32 [groups, M]", array_of("float32", 2)),
    "sure_positions": Field("int64 [groups]", array_of("int64", 1)),
    "sure_risks": Field("finite float32 [groups, M]", array_of("float32", 2)),
}
_BY_TEXT = Field("lists of finite numbers by text", dict_of(list_of(is_number)))
_PLANS: Schema = {
    "format": TEXT,
    "version": COUNT,
    "model_fingerprint": TEXT,
    "texts": Field("objects by text", dict_of(is_object)),
    "plans": Field("a list of objects", list_of(is_object)),
}
_PLAN: Schema = {
    "name": TEXT,
    "requested_ratio": Field("a share, or null", lambda x: x is None or is_number(x)),
    "interaction_strength": Field("a number, or null", lambda x: x is None or is_number(x)),
    "pruned": Field("a list of the numbers of units", list_of(is_count)),
    "kl": _BY_TEXT,
    "nll": _BY_TEXT,
    "right": Field("[right, asked] by ability", dict_of(list_of(is_count))),
}


def kept_folder() -> Path:
    """Return the folder of what ships with SmolLM2."""
    return demo_folder().parent / NAME


def kept_curvature(
    model_id: str | os.PathLike[str], text: Literal["c4", "manual"] = "c4"
) -> Curvature | None:
    """Open the H that ships with a model (as for `load_model`); None for one that has none.

    It is of 24 rows of C4, or of Python's manual, which is the model's default text.
    """
    if text not in KEPT_TEXTS:
        raise InputError(f"text is {text!r}. Choose from {', '.join(KEPT_TEXTS)}.")
    return Curvature.load(kept_folder() / KEPT_TEXTS[text]) if _is_smollm2(model_id) else None


def kept_interactions(
    model_id: str | os.PathLike[str], parts: Literal["layers", "blocks"]
) -> Interactions | None:
    """Open the measured interactions that ship with a model; None for one that has none."""
    from ..interactions.measured import Interactions  # it needs torch

    return Interactions.load(kept_folder() / f"{parts}.npz") if _is_smollm2(model_id) else None


def _is_smollm2(model_id: str | os.PathLike[str]) -> bool:
    return source_named(model_id) is SOURCES[NAME]


def write_curvature(curvature: Curvature, path: str | os.PathLike[str]) -> None:
    """Write an H in a short form, which `Curvature.load` reads: groups to 1/255 of their reach."""
    sums = curvature.grouped
    positions = sums["group_positions"]
    us, vs = np.triu_indices(len(curvature.units))
    matrix = curvature.matrix[us, vs]
    apart = sums["group_grams"][:, us, vs] / positions[:, None] - matrix
    reach = np.abs(apart).max(axis=0)
    levels = np.rint((apart / np.where(reach > 0, reach, 1) + 1) * (STEPS / 2))
    content = {
        "format": FORMAT,
        "version": VERSION,
        "units": curvature.units.to_plain(),
        "provenance": curvature.provenance,
        "matrix": matrix.astype(np.float32),
        "reach": reach.astype(np.float32),
        "apart": levels.astype(np.uint8),
        "positions": positions,
        "risks": sums["group_risks"].astype(np.float32),
        "sure_positions": sums["group_sure_positions"],
        "sure_risks": sums["group_sure_risks"].astype(np.float32),
    }
    write_atomically(path, dump_npz(content))


def curvature_of(content: dict[str, Any]) -> Curvature:
    """Return the H in the fields of a file; FileFormatError for other fields."""
    require_fields(content, _FILE)
    units = UnitSet.from_plain(content["units"])
    positions = content["positions"]
    groups = len(positions)
    us, vs = np.triu_indices(len(units))
    shapes = {name: content[name].shape for name in ("matrix", "reach", "apart")}
    wanted = dict.fromkeys(shapes, us.shape) | {"apart": (groups, len(us))}
    if shapes != wanted or not (positions > 0).all():
        raise FileFormatError(f"its arrays are {shapes}, but its units need {wanted}")
    apart = (content["apart"] / (STEPS / 2) - 1) * content["reach"].astype(np.float64)
    apart -= positions @ apart / positions.sum()  # what rounding left: the groups add up to H
    grams = np.empty((groups, len(units), len(units)))
    grams[:, us, vs] = grams[:, vs, us] = (content["matrix"] + apart) * positions[:, None]
    sums = Groups(
        grams,
        positions,
        content["risks"].astype(np.float64),
        content["sure_positions"],
        content["sure_risks"].astype(np.float64),
    )
    return Curvature.from_groups(units, sums, {"kept": NAME} | content["provenance"])


# Plans ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KeptPlan:
    """A plan and what it costs, measured once.

    Attributes:
        name: what made it, such as "H, lambda 0.5" or "ShortGPT".
        selection: the plan.
        kl: KL(dense || pruned) by text [rows], nats per token, full vocabulary; on the rows that
            every plan was judged on.
        nll: negative log-likelihood of the next token by text [rows], nats per token.
        further: KL by text [further rows], of the plans that were judged on more.
        right: right answers by ability, as (right, asked).
    """

    name: str
    selection: Selection
    kl: dict[str, np.ndarray]
    nll: dict[str, np.ndarray]
    right: dict[str, tuple[int, int]]
    further: dict[str, np.ndarray] = field(default_factory=dict)

    def every_row(self, text: str) -> np.ndarray:
        """KL on all rows of a text that it was judged on [rows]; empty for a text it was not."""
        return np.concatenate([part.get(text, np.zeros(0)) for part in (self.kl, self.further)])


@dataclass(frozen=True, eq=False)
class KeptPlans:
    """Plans of one model with their measurements; made by `kept_plans`.

    Attributes:
        plans: the first removes nothing.
        texts: by name the source, the fingerprint and the rows of each text.
    """

    plans: tuple[KeptPlan, ...]
    texts: dict[str, dict[str, Any]]


def kept_plans(curvature: Curvature) -> KeptPlans | None:
    """Open the measured plans that ship with the model of an H; None if there are none."""
    if curvature.provenance.get("kept") != NAME:
        return None
    path = kept_folder() / "plans.json"
    return read_plans(path, curvature) if path.exists() else None


def read_plans(path: str | os.PathLike[str], curvature: Curvature) -> KeptPlans:
    """Read measured plans, with the risk that an H predicts for each.

    Raises MismatchError if they are of another checkpoint.
    """
    path = Path(path)
    with reading(path, _REMEDY):
        content = read_json(path)
        unseal_json(content, "Nothing of it was used")
        require_fields(content, _PLANS)
        if (content["format"], content["version"]) != (PLANS, VERSION):
            raise FileFormatError(f"it is {content['format']!r} version {content['version']}")
        for plan in content["plans"]:
            require_fields(plan, _PLAN, inside="a plan")
        rows = {name: text.get("rows") for name, text in content["texts"].items()}
        plans = tuple(_kept_plan(plan, curvature, rows) for plan in content["plans"])
    found = content["model_fingerprint"]
    mine = curvature.provenance.get("model_fingerprint")
    if found != mine:
        raise MismatchError(
            f"{path} is of the model {str(found)[:12]}, and H is of {str(mine)[:12]}. {_REMEDY}"
        )
    return KeptPlans(plans, content["texts"])


def _kept_plan(plan: dict[str, Any], curvature: Curvature, rows: dict[str, Any]) -> KeptPlan:
    fields = {} if plan["requested_ratio"] is None else {"requested_ratio": plan["requested_ratio"]}
    selection = Selection.from_pruned(
        curvature.units,
        plan["pruned"],
        curvature,
        interaction_strength=plan["interaction_strength"],
        guards=next((g for end, g in GUARDED.items() if plan["name"].endswith(end)), Guards()),
        **fields,
    )
    kl, nll = ({k: np.array(v[: rows.get(k)]) for k, v in plan[x].items()} for x in ("kl", "nll"))
    further = {k: np.array(v[len(kl[k]) :]) for k, v in plan["kl"].items()}
    right = {ability: (int(n), int(asked)) for ability, (n, asked) in plan["right"].items()}
    return KeptPlan(plan["name"], selection, kl, nll, right, further)


def write_plans(
    path: str | os.PathLike[str],
    model_fingerprint: str,
    texts: dict[str, dict[str, Any]],
    plans: list[dict[str, Any]],
) -> None:
    """Write what `read_plans` reads; a plan is an object with the fields of its schema."""
    for plan in plans:
        require_fields(plan, _PLAN, inside="a plan")
    head: dict[str, Any] = {"format": PLANS, "version": VERSION}
    head["model_fingerprint"] = model_fingerprint
    lines = ",\n".join(json.dumps(plan, ensure_ascii=False) for plan in plans)  # a plan per line
    head |= {"texts": texts}
    head[SUM] = seal_json(head | {"plans": plans})[SUM]
    body = json.dumps(head, ensure_ascii=False, indent=1)
    write_atomically(path, f'{body[:-2]},\n "plans": [\n{lines}\n]}}\n'.encode())
