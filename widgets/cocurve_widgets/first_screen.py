"""What the first screen shows of a model beside its plans; measured once and kept in a file.

Five sentences with the likeliest next words of the whole model and of each plan along lambda; marks
on the scale of KL, which say what a number of nats means for this model; and for a few plans the
factors between predicted and measured KL. `python -m cocurve_widgets.make_first_screen` makes the
files that ship.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import cocurve_lab as cl
from cocurve_lab.base.files import demo_folder
from cocurve_lab.base.schema import read_json
from cocurve_lab.extensions.pretrained.kept import kept_folder

if TYPE_CHECKING:
    from cocurve_lab.extensions.judging.generation import Question

FILE = "first_screen.json"


def kept_first_screen(curvature: cl.Curvature) -> dict[str, Any]:
    """What ships for the model of this H; empty for any other model."""
    mine = source_of(curvature)
    for path in (demo_folder() / FILE, kept_folder() / FILE):
        if path.is_file():
            found: dict[str, Any] = read_json(path)
            if mine == {name: found.pop(name) for name in mine}:
                return found
    return {}


def source_of(curvature: cl.Curvature) -> dict[str, Any]:
    """The fields of the file that say which model and units it is of."""
    return {
        "model_fingerprint": curvature.provenance.get("model_fingerprint"),
        "units_fingerprint": curvature.units.fingerprint,
    }


def as_sentence(question: Question) -> str:
    """The beginning of a sentence that the answer ends; of a question "What is the ...?"."""
    return re.sub(r"^What is (the .*)\?$", lambda found: f"T{found[1][1:]} is", question.prompt)
