"""Both explorers in one HTML file, to mail to a class: no kernel, no network."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cocurve_lab as cl
from cocurve_lab.base.atomic import write_atomically
from cocurve_lab.base.files import read_regular

from .bridge_explorer import BridgeExplorer
from .instrument import counted, front, named_matrix
from .lambda_explorer import LambdaExplorer
from .packing import plain
from .page_measuring import measure_for_page
from .session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cocurve_lab.extensions.interactions.measured import Interactions
    from cocurve_lab.extensions.judging.generation import Question

# The policy blocks every request, so the page can neither load nor send anything.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; worker-src blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{css}
</style>
</head>
<body>
<header><h1>{title}</h1>
<p>Remove parts of a language model, and see what it still says. λ weighs what parts cost
<em>together</em>.</p></header>
<p id="blocked">Scripts are blocked here. Open this file in a browser that allows them.</p>
<main><div id="lambda"></div><div id="bridge"></div></main>
<footer><small>{about}</small></footer>
<script type="application/json" id="cocurve-data">{data}</script>
<script type="application/json" id="cocurve-model">{model}</script>
<script type="module">
{script}
</script>
</body>
</html>
"""

# what a page without the model says of itself
ALONE = "Only the notebooks measure plans that you make by clicks, other pairs, and next tokens."
_OPENING = {"interaction_strength": 0.5}  # favors neither end
_HELD = (
    re.compile(  # what a page holds of its own: title, about, data, and the model where it has one
        "<title>(.*?)</title>.*?<footer><small>(.*?)</small></footer>.*?"
        '<script type="application/json" id="cocurve-data">(.*?)</script>'
        '(?:\n<script type="application/json" id="cocurve-model">(.*?)</script>)?',
        re.DOTALL,
    )
)


def export_html(
    curvature: cl.Curvature,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    session: Session | None = None,
    scales: Mapping[str, Interactions] | None = None,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    held_out: cl.CalibrationSet | None = None,
    questions: Sequence[Question] = (),
    cache: str | os.PathLike[str] | None = "kept",
) -> Path:
    """Write both explorers into one HTML file, which works without a kernel.

    The greedy solver runs in the page. H is stored in float64 up to 512 units and in float32 above
    (about 2 MB at M = 768, growing with M squared).

    Args:
        curvature: H [M, M].
        path: file to write; an existing one is replaced once the new one is complete.
        title: heading; by default the model's name.
        session: its measured plans are shown under the slider; by default there are none.
        scales: measured interactions of the same model's larger parts, by name ("layers"); the page
            then has a switch between them and the units.
        model, tokenizer, held_out, questions: with a model and text, what the page shows is
            measured first: plans along lambda at five ratios, the strongest pairs, and right
            answers (`measure_for_page`). The cost is printed before.
        cache: folder of what was measured: a stopped export resumes. None keeps nothing.

    Returns:
        The path.
    """
    own = Session(curvature) if session is None else session
    if held_out is not None:
        own.attach(model or own.require_model(), tokenizer)
        measure_for_page(own, held_out, questions, cache=cache)
    elif model is not None or questions:
        raise cl.InputError(
            "export_html got a model or questions, but no text to measure on. Pass held_out=."
        )
    states = _states(own, **_OPENING)
    if scales:
        states["scales"] = {name: _at_scale(parts, own) for name, parts in scales.items()}
    name = curvature.provenance.get("model_name", "a model")
    heading = title or f"Co-pruning curvature of {name}"
    if curvature.matrix_name != "H":
        heading += f" ({curvature.matrix_name})"
    # no "<" at all: names may hold </script>, <!-- and <script, and each changes what follows
    data = json.dumps(plain(states), separators=(",", ":")).replace("<", "\\u003c")
    return _write(Path(path), html.escape(heading), html.escape(_about(curvature)), data)


def refresh_html(path: str | os.PathLike[str]) -> Path:
    """Write a page of `export_html` again: the present front end around the data that it holds.

    Raises:
        InputError: the file is not a page of `export_html`.
    """
    held = _HELD.search(read_regular(path).decode())
    if held is None:
        raise cl.InputError(f"{path} is not a page of export_html. Write one with export_html.")
    title, about, data, model = held.groups("")
    # the page may not be ours: what was inert text there stays text
    title, about = (html.escape(html.unescape(text)) for text in (title, about))
    data, model = (text.replace("<", "\\u003c") for text in (data, model))
    return _write(Path(path), title, about, data, model)


def _write(path: Path, title: str, about: str, data: str, model: str = "") -> Path:
    css, script = front("instrument.css", "page.css"), front("page.js")
    text = _PAGE.format(title=title, about=about, data=data, model=model, css=css, script=script)
    write_atomically(path, text.encode())
    return path


def _states(session: Session, **controls: Any) -> dict[str, Any]:
    """What the two instruments on a session open with."""
    with (
        closing(LambdaExplorer(session.curvature, session=session, **controls)) as plan,
        closing(BridgeExplorer(session.curvature, session=session)) as bridge,
    ):
        return {"lambda": plan.state(), "bridge": bridge.state()}


def _at_scale(interactions: Interactions, session: Session) -> dict[str, Any]:
    """The same of larger parts, with what was measured of plans that are made of whole ones.

    Ratios are shares of the parts; the first is 20 % of the model.
    """
    curvature = interactions.curvature
    units = curvature.units
    alone = (cl.Selection.from_pruned(units, [k], curvature) for k in range(len(units)))
    parts = [frozenset(interactions.expand(plan).pruned) for plan in alone]
    found, part_of = Session(curvature), session.curvature.units.total_cost / units.total_cost
    for record in session.measured:
        plan, pruned = record.selection, frozenset(record.selection.pruned)
        inside = [k for k, part in enumerate(parts) if part <= pruned]
        if frozenset().union(*(parts[k] for k in inside)) == pruned:
            ratio = plan.requested_ratio * part_of
            facts = {"requested_ratio": ratio} if inside and ratio < 1 else {}
            same = cl.Selection.from_pruned(
                units, inside, curvature, interaction_strength=plan.interaction_strength, **facts
            )
            found.add_measured(replace(record, selection=same))
    return _states(found, ratio=min(0.6, 0.2 * part_of), **_OPENING)


def _about(curvature: cl.Curvature) -> str:
    facts = curvature.provenance
    rows, length = facts.get("sequences_done"), facts.get("seq_len")
    text = (
        f" from {counted(rows, 'sequence')} of {counted(length, 'token')}"
        if rows and length
        else ""
    )
    return (
        f"{counted(len(curvature.units), 'unit')}; {named_matrix(curvature)}, the matrix of all "
        f"pairs, estimated{text}. KL is how far the pruned model's predictions are from the whole "
        "model's, in nats per token. Plans are solved and predicted in your browser; what is "
        f"called measured was measured before. {ALONE} The address of the page holds what you set: "
        "copy it to show others the same."
    )
