"""The controls of FidelityScatter and the HTML around its figure, all core ipywidgets.

Every control has a label and can be reached with the keyboard.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from functools import partial
from html import escape
from typing import Any

import ipywidgets as W

import cocurve_lab as cl
from cocurve_lab.base.tables import as_csv
from cocurve_lab.figures import COLORS

from .fidelity_points import METHODS, RIVAL_RANKS, SINGLE_UNITS, SURROGATES, Rows
from .glossary import words_html
from .instrument import Instrument, counted, front

WRAP = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "0 10px"}
BUTTONS = {  # label -> tooltip
    "Measure this plan": "the plan that all instruments of this session show",
    "Lambda sweep": "greedy plans at the ratio, one for each λ to sweep, under the opening guards",
    "Ratio sweep": "greedy plans at λ, one for each ratio to sweep, under the opening guards",
    "Same-budget pool": "26 sets at the ratio, no guards: greedy, diagonal, 14 random, 10 swaps",
    "Cancel": "stop measuring; measured plans are kept",
}
MOST_ROWS = 300  # of the table in the page; the CSV has all
COLUMNS = {  # of the table in the page: heading -> key of a row
    "point": "name",
    "method": "method",
    "λ": "interaction_strength",
    "asked": "requested_ratio",
    "removed": "realized_ratio",
    "units": "units",
    "predicted by H": "predicted_risk",
    "pair KL": "pair_kl_risk",
    "additive KL": "additive_kl_risk",
    "measured": "measured_risk",
    "±": "measured_risk_error",
    "text": "text",
}


class FidelityControls:
    """The widgets around the figure; each input follows one trait of the instrument and sets it.

    Args:
        owner: the instrument, with the traits that the inputs are named after.
        actions: the function behind each of BUTTONS.
        choose: makes the plan of a name the session's; raises InputError on an unknown name.
        redraw: brings what is shown up to date.
    """

    def __init__(
        self,
        owner: Instrument,
        actions: Mapping[str, Callable[[], Any]],
        choose: Callable[[str], None],
        redraw: Callable[[], Any],
    ) -> None:
        self.owner, self.redraw = owner, redraw
        # True while the program writes into a control, so that its callback does not take that for
        # a person's doing and set the trait again. Read and written under the owner's lock.
        self.filling = False
        self.ratio = self._field(W.FloatText, "Ratio", "ratio", "130px", step=0.05)
        self.strengths = self._field(W.Text, "Lambdas (λ) to sweep", "strengths", "300px")
        self.strength = self._field(
            W.FloatText,
            "Lambda (λ) of ratio sweep and pool",
            "interaction_strength",
            "300px",
            step=0.1,
        )
        self.ratios = self._field(W.Text, "Ratios to sweep", "ratios", "330px")
        self.seed = self._field(W.IntText, "Seed", "seed", "110px")
        self.rows = self._field(W.IntText, "Rows of text (0: all)", "rows", "210px")
        self.surrogate = self._field(
            W.ToggleButtons, "Predicted by", "surrogate", "auto", options=list(SURROGATES)
        )
        self.unit = self._field(W.Text, "Mark unit", "selected_unit", "220px")
        self.unit.placeholder = "such as L0.ffn[3]"
        self.buttons = {label: self._button(label, actions[label]) for label in BUTTONS}
        self.boxes = self._method_boxes()
        self.progress = W.IntProgress(description="Progress", layout=W.Layout(width="300px"))
        self.plan = self._menu("Show plan", choose)
        self.plan.placeholder = "name of a measured plan"
        self.text = self._menu("Text", self._choose_text)
        self.text.placeholder = "all texts"
        self.twin = W.ToggleButton(description="Table and files", layout=W.Layout(width="auto"))
        self.twin.observe(self._by_user(lambda _: redraw()), "value")
        self.moving, self.caption, self.scores, self.error, self.status = (
            W.HTML() for _ in range(5)
        )
        self.table = W.HTML(layout=W.Layout(width="100%", overflow="auto"))
        owner.observe(self._tell, ["status", "error"])

    def around(self, figure: Any) -> list[Any]:
        """All widgets, from top to bottom."""

        def row(*controls: Any) -> W.HBox:
            return W.HBox(controls, layout=WRAP)

        return [
            W.HTML(f"<style>{front('instrument.css')}</style>", layout={"display": "none"}),
            W.HTML(words_html()),
            *([W.HTML(_preview_html(note))] if (note := self.owner.preview) else []),
            row(self.ratio, self.strengths, self.strength, self.ratios, self.seed, self.rows),
            row(*self.buttons.values(), self.progress, self.moving),
            row(*self.boxes.values(), self.surrogate),
            figure,
            self.caption,
            row(self.plan, self.unit, self.text),
            self.scores,
            self.error,
            self.status,
            row(self.twin),
            self.table,
        ]

    # Both ways ----------------------------------------------------------------------------------

    def _fill(self, control: Any, **values: Any) -> None:
        """Write into a control, marked as the program's doing; equal values are not sent."""
        with self.owner.lock:
            before, self.filling = self.filling, True
            try:
                for name, value in values.items():
                    if getattr(control, name) != value:
                        setattr(control, name, value)
            finally:
                self.filling = before

    def _by_user(self, act: Callable[[Any], Any]) -> Callable[[Any], None]:
        """A callback for a person's input alone, which shows its errors in the instrument.

        It does not hold the lock while it acts: it may change the session, and then other
        instruments take their locks.
        """

        def run(change: Any) -> None:
            with self.owner.lock:
                if self.filling:
                    return
            try:
                self.owner.error = ""
                act(change)
            except Exception as error:
                self.owner.report(error)

        return run

    def _field(self, kind: Any, label: str, name: str, width: str, **more: Any) -> Any:
        """A labeled input and a trait of the instrument, each following the other."""
        if kind is W.Text:
            more["continuous_update"] = False
        style = {"description_width": "initial"}
        control = kind(description=label, style=style, layout=W.Layout(width=width), **more)

        def show(_: Any = None) -> None:
            self._fill(control, value=self._spelled(name))

        def read(change: Any) -> None:
            try:
                setattr(self.owner, name, self._parsed(name, change.new))
            finally:
                show()  # a refused value goes back to the one in force

        control.observe(self._by_user(read), "value")
        self.owner.observe(show, name)
        show()
        return control

    def _spelled(self, name: str) -> Any:
        """A trait as its input shows it."""
        value = getattr(self.owner, name)
        if name == "selected_unit":
            return "" if value is None else self.owner.session.curvature.units[value].name
        return ", ".join(f"{v:g}" for v in value) if isinstance(value, list) else value

    def _parsed(self, name: str, value: Any) -> Any:
        """An input as its trait expects it."""
        if name == "selected_unit":
            units = self.owner.session.curvature.units
            return units.index(value.strip()) if value.strip() else None
        if name == "surrogate" or not isinstance(value, str):
            return value
        try:
            return [float(part) for part in value.replace(",", " ").split()]
        except ValueError:
            raise cl.InputError(
                f"{value!r} is not a list of numbers. Separate them with commas: 0, 0.5, 1."
            ) from None

    def _button(self, label: str, action: Callable[[], Any]) -> W.Button:
        layout = W.Layout(width="auto")
        button = W.Button(description=label, tooltip=BUTTONS[label], layout=layout)
        button.on_click(self._by_user(lambda _: action()))
        return button

    def _method_boxes(self) -> dict[str, W.Checkbox]:
        boxes = {}
        for name in METHODS:
            box = W.Checkbox(description=name, indent=False, layout=W.Layout(width="auto"))
            box.observe(self._by_user(partial(self._toggle, name)), "value")
            boxes[name] = box

        def show(_: Any = None) -> None:
            for name, box in boxes.items():
                self._fill(box, value=name in self.owner.methods)

        self.owner.observe(show, "methods")
        show()
        return boxes

    def _toggle(self, name: str, change: Any) -> None:
        shown = {*self.owner.methods, name} if change.new else {*self.owner.methods} - {name}
        self.owner.methods = [method for method in METHODS if method in shown]

    def _menu(self, label: str, choose: Callable[[str], None]) -> W.Combobox:
        """A text field with suggestions: in a drop-down list the notebook takes the arrow keys."""
        style, layout = {"description_width": "initial"}, W.Layout(width="430px")
        menu = W.Combobox(description=label, style=style, layout=layout, continuous_update=False)

        def read(change: Any) -> None:
            try:
                choose(change.new.strip())
            finally:
                self.redraw()  # a refused name goes back to the one in force

        menu.observe(self._by_user(read), "value")
        return menu

    def _choose_text(self, name: str) -> None:
        known = [*dict.fromkeys(record.text for record in self.owner.session.measured), ""]
        if name not in known:
            raise cl.InputError(f"nothing was measured on {name!r}. Clear the field for all texts.")
        self.owner.text = name

    # What the instrument says -------------------------------------------------------------------

    def _tell(self, change: Any) -> None:
        role = 'role="status" aria-live="polite"' if change.name == "status" else 'role="alert"'
        line = f'<p class="cc-{change.name}" {role}>{escape(change.new)}</p>' if change.new else ""
        getattr(self, change.name).value = line and f'<div class="cocurve">{line}</div>'

    def show_work(self, reason: str, done: int, total: int, moving: str) -> None:
        """Show progress, and disable the buttons that have no effect now.

        Args:
            reason: why nothing can be measured; empty where it can.
            done, total: plans of the present work; total is 0 when idle.
            moving: the same in words.
        """
        for name, button in self.buttons.items():
            off = total == 0 if name == "Cancel" else bool(reason)
            self._fill(button, disabled=off)
        self._fill(self.progress, max=max(total, 1), value=done)
        self.progress.layout.visibility = "visible" if total else "hidden"
        self._fill(self.moving, value=escape(reason or moving))

    def show_menus(self, plans: list[str], chosen: str, texts: list[str]) -> None:
        """Show the names of the measured plans, the chosen one (or empty), and the texts."""
        self._fill(self.plan, options=tuple(plans), value=chosen)
        self._fill(self.text, options=tuple(texts), value=self.owner.text)

    def show_words(self, scores: dict[str, dict[str, Any]], text: str | None) -> None:
        """Show the statistics, and the caption for plans measured on this text (None: no text)."""
        self._fill(self.scores, value=_scores_table(scores))
        self._fill(
            self.caption, value=_caption(self.owner.session.curvature, self.owner.surrogate, text)
        )

    def show_table(self, rows: Rows, plan: str | None) -> None:
        """Show the table and files while their button is pressed; otherwise nothing is sent."""
        text = _points_table(rows, plan) if self.twin.value else ""
        self._fill(self.table, value=text)


# HTML -------------------------------------------------------------------------------------------


def _preview_html(note: str) -> str:
    """The note of a preview of H, above everything else."""
    line = f'<p class="cc-preview" style="border-left-color:{COLORS["bridge"]}" role="note">'
    return f'<div class="cocurve">{line}{escape(note)}</p></div>'


def _caption(curvature: cl.Curvature, surrogate: str, text: str | None) -> str:
    """The support and text that predictions and measurements are on."""
    known = curvature.provenance
    top_r = known.get("top_r")
    support = "top-r support (r unknown)" if top_r is None else f"top-{top_r} support"
    by, alone = f"on the teacher's {support}, from the calibration text", "½ H_uu"
    if surrogate != "H":
        count, tokens = curvature.require_shifts().of("price").probabilities.shape
        by = (
            f"by the {surrogate} of the shifts at {counted(count, 'position')}, on "
            f"{counted(tokens, 'token')} each. A "
            'plan solved on part "fit" of the shifts has not seen these positions; H has'
        )
        alone = "its KL there"
    parts = [
        f"Predicted: {by}. Measured: over the full vocabulary, on "
        f"{text or 'the text each point names'}."
    ]
    if curvature.single_unit_risk is None:
        parts.append("This curvature does not hold the KL of single units: no gray points.")
    else:
        parts.append(
            f"Gray: each unit alone, {alone} against its KL in the build, on the calibration text; "
            f"that KL is over {curvature.risk_support}."
        )
    if text and "row_fingerprints" not in known:
        parts.append("H does not record its calibration rows, so overlap cannot be checked.")
    return f'<div class="cocurve"><p class="cc-muted">{escape(" ".join(parts))}</p></div>'


def _scores_table(scores: dict[str, dict[str, Any]]) -> str:
    heads = ["", "points", "Spearman", "of ½ Σ H_uu", "of Σ KL alone"]
    heads += ["Pearson of logs", "median measured / predicted", "worst"]
    lines = []
    for name, score in scores.items():
        known = score["points"] > 0
        worst = f"{escape(score['worst'])} ({score['worst_ratio']:.3g} x)" if known else "-"
        ranks = [_number(score[key]) for key in ("spearman", *RIVAL_RANKS, "pearson_log")]
        if score["note"]:
            ranks = [escape(score["note"]), "-", "-", "-"]
        if name == SINGLE_UNITS:  # of one unit, either score is an axis of the picture
            ranks[1:3] = "-", "-"
        median = f"{score['median_ratio']:.3g}" if known else "-"
        lines.append([escape(name), str(score["points"]), *ranks, median, worst])
    return f'<div class="cocurve"><h4>Agreement</h4>{_html(heads, lines)}</div>'


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.3f}"


def _points_table(rows: Rows, plan: str | None) -> str:
    """The points, with links to save them and the plan (JSON text; None: no plan)."""
    files = _download("CSV", "fidelity.csv", "text/csv", as_csv(rows))
    files += "" if plan is None else _download("JSON", "plan.json", "application/json", plan)
    shown = [[_cell(row[key]) for key in COLUMNS.values()] for row in rows[:MOST_ROWS]]
    more = len(rows) - len(shown)
    note = (
        f"<p>{counted(more, 'more row')} {'is' if more == 1 else 'are'} in the CSV.</p>"
        if more
        else ""
    )
    table = _html(list(COLUMNS), shown) if rows else "<p>no points yet</p>"
    return f'<div class="cocurve"><p>{files}</p><div class="cc-scroll">{table}</div>{note}</div>'


def _html(heads: list[str], lines: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in line)}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.4g}"
    return "-" if value is None else escape(str(value))


def _download(label: str, name: str, kind: str, content: str) -> str:
    data = base64.b64encode(content.encode()).decode()
    link = f'download="{name}" href="data:{kind};base64,{data}" style="text-decoration: underline"'
    return f"<a {link}>{label}</a> &nbsp; "
