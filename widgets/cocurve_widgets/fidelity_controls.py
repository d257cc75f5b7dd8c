"""The controls of FidelityScatter: core ipywidgets with labels, which the keyboard reaches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets as W

from cocurve_lab import InputError

from .fidelity_points import METHODS
from .fidelity_words import points_table, preview_html
from .instrument import front

if TYPE_CHECKING:
    from .fidelity_scatter import FidelityScatter

WRAP = {"flex_flow": "row wrap", "align_items": "center"}
HINTS = {
    "Measure this plan": "the plan that all instruments of this session show",
    "Lambda sweep": "greedy plans at the ratio, one for each λ to sweep",
    "Ratio sweep": "greedy plans at λ, one for each ratio to sweep",
    "Same-budget pool": "26 sets at the ratio: greedy, diagonal, 14 random, 10 swaps",
    "Cancel": "stop measuring; what is measured stays",
}


class FidelityControls:
    """Widgets around the figure; each control is one trait of the instrument.

    What the program writes into a control is told from what a person does by `filling`, which is
    only read and written under the instrument's lock.
    """

    def __init__(self, owner: FidelityScatter) -> None:
        self.owner, self.filling = owner, False
        self.ratio = self._field(W.FloatText, "Ratio", "ratio", "130px", step=0.05)
        self.strengths = self._field(W.Text, "λ to sweep", "strengths", "250px")
        self.strength = self._field(
            W.FloatText, "λ of ratio sweep and pool", "interaction_strength", "250px", step=0.1
        )
        self.ratios = self._field(W.Text, "Ratios to sweep", "ratios", "330px")
        self.seed = self._field(W.IntText, "Seed", "seed", "110px")
        self.rows = self._field(W.IntText, "Rows of text (0: all)", "rows", "210px")
        self.unit = self._field(W.Text, "Mark unit", "selected_unit", "220px")
        self.unit.placeholder = "such as L0.ffn[3]"
        self.buttons = self._buttons()
        self.boxes = self._method_boxes()
        self.progress = W.IntProgress(description="Progress", layout=W.Layout(width="300px"))
        self.plan = self._menu("Show plan", owner.choose)
        self.plan.placeholder = "name of a measured plan"
        self.text = self._menu("Text", self._choose_text)
        self.text.placeholder = "all texts"
        self.twin = W.ToggleButton(description="Table and files", layout=W.Layout(width="auto"))
        self.twin.observe(self._by_user(lambda _: owner.refresh()), "value")
        self.moving, self.caption, self.scores, self.error, self.status = (
            W.HTML() for _ in range(5)
        )
        self.table = W.HTML(layout=W.Layout(width="100%", overflow="auto"))
        owner.observe(self._tell, ["status", "error"])

    def around(self, figure: Any) -> list[Any]:
        """All widgets from top to bottom."""

        def row(*controls: Any) -> W.HBox:
            return W.HBox(controls, layout=WRAP)

        return [
            W.HTML(f"<style>{front('instrument.css')}</style>", layout={"display": "none"}),
            *([W.HTML(preview_html(note))] if (note := self.owner.preview) else []),
            row(self.ratio, self.strengths, self.strength, self.ratios, self.seed, self.rows),
            row(*self.buttons.values()),
            row(self.progress, self.moving),
            row(*self.boxes.values()),
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

    def fill(self, control: Any, **values: Any) -> None:
        """Write into a control without its callback taking it for a person's doing."""
        with self.owner.lock:
            before, self.filling = self.filling, True
            try:
                for name, value in values.items():
                    if getattr(control, name) != value:
                        setattr(control, name, value)
            finally:
                self.filling = before

    def _by_user(self, act: Callable[[Any], Any]) -> Callable[[Any], None]:
        """A callback that acts on a person's doing only and shows what goes wrong.

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
        """A labelled control that follows a trait of the instrument, and the trait it."""
        if kind is W.Text:
            more["continuous_update"] = False
        style = {"description_width": "initial"}
        control = kind(description=label, style=style, layout=W.Layout(width=width), **more)

        def show(_: Any = None) -> None:
            self.fill(control, value=self._spelled(name))

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
        """A trait as its control shows it."""
        value = getattr(self.owner, name)
        if name == "selected_unit":
            return "" if value is None else self.owner.curvature.units[value].name
        return ", ".join(f"{v:g}" for v in value) if isinstance(value, list) else value

    def _parsed(self, name: str, value: Any) -> Any:
        """What a person typed, as the trait wants it."""
        if name == "selected_unit":
            return self.owner.curvature.units.index(value.strip()) if value.strip() else None
        if not isinstance(value, str):
            return value
        try:
            return [float(part) for part in value.replace(",", " ").split()]
        except ValueError:
            raise InputError(
                f"{value!r} is not a list of numbers. Write them with commas: 0, 0.5, 1."
            ) from None

    def _buttons(self) -> dict[str, W.Button]:
        owner = self.owner
        actions: list[Callable[[], Any]] = [
            lambda: owner.measure(owner.require_plan(), wait=False),
            lambda: owner.measure_lambda_sweep(wait=False),
            lambda: owner.measure_ratio_sweep(wait=False),
            lambda: owner.measure_pool(wait=False),
            owner.cancel,
        ]
        buttons = {}
        for (name, hint), action in zip(HINTS.items(), actions, strict=True):
            button = W.Button(description=name, tooltip=hint, layout=W.Layout(width="auto"))
            button.on_click(self._by_user(partial(_call, action)))
            buttons[name] = button
        return buttons

    def _method_boxes(self) -> dict[str, W.Checkbox]:
        boxes = {}
        for name in METHODS:
            box = W.Checkbox(description=name, indent=False, layout=W.Layout(width="auto"))
            box.observe(self._by_user(partial(self._toggle, name)), "value")
            boxes[name] = box

        def show(_: Any = None) -> None:
            for name, box in boxes.items():
                self.fill(box, value=name in self.owner.methods)

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
                self.owner.refresh()  # a refused name goes back to the one in force

        menu.observe(self._by_user(read), "value")
        return menu

    def _choose_text(self, name: str) -> None:
        known = [*dict.fromkeys(record.text for record in self.owner.session.measured), ""]
        if name not in known:
            raise InputError(f"nothing was measured on {name!r}. Leave the field empty for all.")
        self.owner.text = name

    # What the instrument says -------------------------------------------------------------------

    def _tell(self, change: Any) -> None:
        role = 'role="status" aria-live="polite"' if change.name == "status" else 'role="alert"'
        line = f'<p class="cc-{change.name}" {role}>{escape(change.new)}</p>' if change.new else ""
        getattr(self, change.name).value = line and f'<div class="cocurve">{line}</div>'

    def show_work(self, reason: str, done: int, total: int, moving: str) -> None:
        """Progress, and which buttons can be pressed; `reason` says why nothing can be measured."""
        for name, button in self.buttons.items():
            off = total == 0 if name == "Cancel" else bool(reason)
            self.fill(button, disabled=off)
        self.fill(self.progress, max=max(total, 1), value=done)
        self.fill(self.moving, value=escape(reason or moving))

    def show_menus(self, plans: list[str], chosen: str, texts: list[str]) -> None:
        """Names of the measured plans, of the chosen one (or empty), and of the texts."""
        self.fill(self.plan, options=tuple(plans), value=chosen)
        self.fill(self.text, options=tuple(texts), value=self.owner.text)

    def show_table(self, rows: list[dict[str, Any]], plan: str | None) -> None:
        """The table twin with the files, while its button is pressed; else nothing, unsent."""
        text = points_table(rows, plan) if self.twin.value else ""
        self.fill(self.table, value=text)


def _call(action: Callable[[], Any], _: Any) -> None:
    action()
