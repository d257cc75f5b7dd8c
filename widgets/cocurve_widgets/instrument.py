"""The base of all instruments: keywords, errors, linking, re-run cells, code and files."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import anywidget
from ipywidgets import DOMWidget, Widget
from traitlets import Bool, Unicode, default, link

import cocurve_lab as cl
from cocurve_lab.base.atomic import write_atomically
from cocurve_lab.extensions.texts.records import read_text
from cocurve_lab.extensions.writing import as_csv

from .session import AnyCurvature, Session
from .still import Still
from .traits import UnitIndex, UnitIndices

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_IMPORT = re.compile(r"^import [^;]*? from \"\./([^\"]*)\";\n", re.M)
Method = TypeVar("Method", bound=Callable[..., Any])


def front(*names: str, render: str = "") -> str:
    """The front-end files as one string, each after those that it imports, without its imports.

    A string rather than a path, because widgets whose code is a path are never garbage-collected.
    There is no bundler: the files are plain modules, which `node --test` imports as they are.

    Args:
        names: of the files.
        render: the function among theirs that draws a widget.
    """
    texts: dict[str, str] = {}

    def add(name: str) -> None:
        text = read_text(Path(str(files("cocurve_widgets") / "front" / name)))
        for other in _IMPORT.findall(text):
            if other not in texts:
                add(other)
        texts[name] = _IMPORT.sub("", text)

    for name in names:
        add(name)
    entry = [f"export default {{ render: {render} }};\n"] if render else []
    return "\n".join([*texts.values(), *entry])


def guarded(method: Method) -> Method:
    """Decorate a callback: run it under the session's lock and show its error in the instrument.

    Callbacks arrive on different threads, and a notebook shows nothing of what they raise or print.
    """

    @functools.wraps(method)
    def run(self: Instrument, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.lock:
                return method(self, *args, **kwargs)
        except Exception as error:
            self.report(error)

    return run  # type: ignore[return-value]


class Instrument(Still, DOMWidget):
    """Base class of the instruments.

    Args:
        curvature: H [M, M], or the path of its file ("kept/H.npz").
        session: shared with other instruments; by default the curvature's own.
        model, tokenizer: added to the session; None keeps what it has.
        **controls: initial values of the traits.

    Attributes:
        selected_unit: index of the marked unit, shared by all views of a session; None for none.
        status: one line on what is shown: predicted or measured, how fresh, seconds taken.
        error: message of the last error; empty if there is none.
        matrix_name: what the matrix is: "H", or "measured KL" of measured interactions. Read-only.
        model_name: name of the model whose H it is; empty where H does not say. Read-only.
        session: the Session it belongs to.
        lock: the session's lock; held while callbacks change what is shown.
    """

    _closing = ExitStack()  # what is to be undone; this one stays empty, for a failed constructor

    selected_unit = UnitIndex(None, allow_none=True).tag(sync=True)
    status = Unicode().tag(sync=True)
    error = Unicode().tag(sync=True)
    matrix_name = Unicode(read_only=True).tag(sync=True)
    model_name = Unicode(read_only=True).tag(sync=True)

    def __init__(
        self,
        curvature: AnyCurvature,
        *,
        session: Session | None = None,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **controls: Any,
    ) -> None:
        self._require_known(controls)
        self.session = Session.bind(curvature, session, model, tokenizer)
        self.lock = self.session.lock
        self._closing = ExitStack()
        super().__init__(**self._opening(controls))
        self._close_earlier_runs()
        self.share("selected_unit")
        self.on_msg(self._heard)
        self._opened(controls)

    def _opening(self, controls: dict[str, Any]) -> dict[str, Any]:
        """The traits to open with, where these `controls` were given."""
        return controls

    def _opened(self, controls: dict[str, Any]) -> None:
        """What is done once all traits are there."""

    @classmethod
    def _require_known(cls, controls: Iterable[str]) -> None:
        known = [
            name
            for name, trait in cls.class_traits(sync=True).items()
            if not (name.startswith("_") or trait.read_only)
            and name not in DOMWidget.class_trait_names()
        ]
        for name in controls:
            if name not in (*known, "layout") and not name.startswith("_"):
                raise cl.InputError(
                    f"{cls.__name__} has no control {name!r}. It has {', '.join(known)}."
                )

    @property
    def curvature(self) -> cl.Curvature:
        """H of the session."""
        return self.session.curvature

    @default("matrix_name")
    def _named_matrix(self) -> str:
        return self.curvature.matrix_name

    @default("model_name")
    def _named_model(self) -> str:
        name = str(self.curvature.provenance.get("model_name", ""))
        rows = self.curvature.rows_of_unfinished
        return f"{name} ({rows})" if rows else name

    # Linking ------------------------------------------------------------------------------------

    def follow(self, handler: Callable[..., None], trait: str) -> None:
        """Observe a trait of the session until this instrument is closed."""
        self.session.observe(handler, trait)
        self._closing.callback(self.session.unobserve, handler, trait)

    def share(self, trait: str) -> None:
        """Keep a trait equal to the session's of that name; at first a value set here wins."""
        ends: list[Any] = [(self, trait), (self.session, trait)]  # the value of the first wins
        if getattr(self, trait) in (None, []):
            ends.reverse()
        self._closing.callback(link(*ends).unlink)

    def close(self) -> None:
        """Leave the session and the page."""
        self._closing.close()
        # models of their own, which would stay; none where the constructor failed
        parts = [] if self.comm is None else list(_parts(self))
        super().close()
        for part in parts:
            part.close()

    def _close_earlier_runs(self) -> None:
        """Close the instruments of this kind that earlier runs of the same cell made.

        Their output is gone from the page, but their widget models would stay in the kernel and be
        sent to the page again at every reload.
        """
        cell, run = _current_cell()
        self._made_in = cell, type(self).__name__, run  # its type would be its own
        for other in list(_LIVING):
            if cell and other._made_in[:2] == self._made_in[:2] and other._made_in[2] != run:
                other.close()
        _LIVING.add(self)

    # Errors -------------------------------------------------------------------------------------

    def report(self, error: Exception) -> None:
        """Show an error in the instrument; an error that is not ours is shown with its type."""
        ours = isinstance(error, cl.CocurveError)
        self.error = str(error) if ours else f"{type(error).__name__}: {error}"

    # Code and files -----------------------------------------------------------------------------

    def table(self) -> list[dict[str, Any]]:
        """The data of the picture, one dict per row."""
        raise NotImplementedError

    def save(self, path: str | Path) -> Path:
        """Write the data (`.csv`), the plan (`.json`) or the graph (`.gexf`, for Gephi) to a file.

        An existing file is replaced only when the new one is complete. For the picture press the
        PNG button: only the browser has drawn it.
        """
        path = Path(path)
        write_atomically(path, self._file(path.suffix))
        return path

    def _file(self, suffix: str) -> bytes:
        import networkx

        made: dict[str, Callable[[], str]] = {
            ".csv": lambda: as_csv(self.table()),
            ".json": lambda: self.session.require_plan().to_json(),
            ".gexf": lambda: "\n".join(networkx.generate_gexf(self._graph())),
        }
        if suffix not in made:
            raise cl.InputError(
                f"{suffix!r} is not a format of this instrument. Use {', '.join(made)}."
            )
        return made[suffix]().encode()

    def _graph(self) -> Any:
        return cl.edge_graph(self.curvature, top_k=10_000)

    @guarded
    def _heard(self, widget: Any, content: Any, buffers: Any) -> None:
        """Answer the front end's {"want": ".csv"} with a file to download."""
        if isinstance(content, dict) and "want" in content:
            self.send({"file": content["want"]}, [self._file(content["want"])])


class Drawn(Instrument, anywidget.AnyWidget):
    """An instrument that its own front end draws."""

    _css = front("instrument.css")


class Explorer(Drawn):
    """An instrument on H that shares its brush and also lives in a page without a kernel.

    Attributes:
        brushed: indices of the units brushed in any view, ascending; shared with the session.
        kernel: whether a kernel answers; False in an exported page.
    """

    brushed = UnitIndices().tag(sync=True)
    kernel = Bool(True).tag(sync=True)

    def _opened(self, controls: dict[str, Any]) -> None:
        self.share("brushed")


def _parts(widget: Widget) -> Iterator[Widget]:
    """The widgets that a widget is made of, and their own."""
    for value in widget.trait_values().values():
        for part in value if isinstance(value, tuple) else [value]:
            if isinstance(part, Widget):
                yield from _parts(part)
                yield part


def plan_code(plan: cl.Selection, curvature: cl.Curvature) -> str:
    """A Python expression for a plan: its solve if that gives it again, otherwise its units."""
    guards = guards_code(plan.guards)
    ratio, strength = plan.requested_ratio, plan.interaction_strength
    if strength is not None and _solves_to(plan, curvature, strength):
        made = f"cl.solve_greedy(\n    curvature, {ratio!r}, {strength!r}, {guards}\n)"
    else:
        facts = f"requested_ratio={ratio!r}, ordered={plan.ordered!r}, guards={guards}"
        facts += "" if strength is None else f", interaction_strength={strength!r}"
        units = f"curvature.units, {list(plan.pruned)}, curvature"
        made = f"cl.Selection.from_pruned({units}, {facts})"
    return made + (f".with_gains({dict(plan.gains)!r})" if plan.gains else "")


def guards_code(guards: cl.Guards) -> str:
    """A Python expression for guards, without what they have by default."""
    default = cl.Guards()
    changed = {k: v for k, v in vars(guards).items() if v != getattr(default, k)}
    return f"cl.Guards({', '.join(f'{k}={v!r}' for k, v in changed.items())})"


def _solves_to(plan: cl.Selection, curvature: cl.Curvature, strength: float) -> bool:
    try:
        again = cl.solve_greedy(curvature, plan.requested_ratio, strength, plan.guards)
    except cl.CocurveError:
        return False
    return again.pruned == plan.pruned


_LIVING: WeakSet[Instrument] = WeakSet()


def _current_cell() -> tuple[str, str]:
    """Cell id and message id of the running cell; both empty outside a notebook."""
    try:
        from IPython import get_ipython

        parent = get_ipython().kernel.get_parent("shell")
        return parent["metadata"].get("cellId", ""), parent["header"].get("msg_id", "")
    except Exception:  # no kernel, or one that does not say
        return "", ""


def counted(number: int, noun: str) -> str:
    """A count with its noun: "1 unit", "1,024 units"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def named_matrix(curvature: cl.Curvature) -> str:
    """What a matrix is, within a sentence: "H", or "the measured KL"."""
    return "H" if curvature.matrix_name == "H" else f"the {curvature.matrix_name}"
