"""What every instrument promises: controls, errors, session, model, closing and files."""

from __future__ import annotations

import csv
import gc
import re
import weakref
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from ipywidgets.widgets.widget import _instances
from nbconvert import HTMLExporter
from traitlets import TraitError

import cocurve_lab as cl
from cocurve_widgets import (
    BridgeExplorer,
    BuildMonitor,
    FidelityScatter,
    GenerationCompare,
    LambdaExplorer,
    Session,
)
from cocurve_widgets.still import ROWS, table_html
from helpers.instruments import say
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer
from helpers.waiting import eventually

MODEL, TOKENIZER = tiny_model(), word_tokenizer()
UNITS = cl.enumerate_units(MODEL, 4)  # 18
REAL = random_curvature(UNITS, seed=3)
OTHERS = (random_curvature(UNITS, seed=5), random_curvature(make_units()))


def generation(curvature: cl.Curvature, **given: Any) -> GenerationCompare:
    model, tokenizer = given.pop("model", MODEL), given.pop("tokenizer", TOKENIZER)
    return GenerationCompare(model, tokenizer, curvature, **given)


EXPLORERS = [LambdaExplorer, BridgeExplorer]
EVERY: list[Callable[..., Any]] = [*EXPLORERS, FidelityScatter, generation]
every = pytest.mark.parametrize("make", EVERY, ids=lambda make: make.__name__)


@pytest.fixture
def session() -> Session:
    return Session(REAL)


BAD = [  # a value that a control refuses
    (BuildMonitor, "ratio", 1.0),
    (BuildMonitor, "interaction_strength", -1),
    *[(LambdaExplorer, "interaction_strength", value) for value in (1.5, float("nan"))],
    *[(LambdaExplorer, "ratio", value) for value in (0.61, -0.1)],
    *[(LambdaExplorer, "layer_cap", value) for value in (0.0, 1.2)],
    (LambdaExplorer, "protect_first", -1),
    *[(LambdaExplorer, "kinds", value) for value in ([], ["heads"])],
    *[(LambdaExplorer, "pair", value) for value in ([1, 1], [1, 2, 3], [99], [-1])],
    *[(BridgeExplorer, "threshold", value) for value in (1.5, float("nan"), "much")],
    (BridgeExplorer, "saliency_quantile", -0.1),
    (BridgeExplorer, "connectivity_quantile", 2),
    (BridgeExplorer, "sign", "up"),
    (BridgeExplorer, "blocks", ["cross", "mlp"]),
    *[(make, "brushed", value) for make in EXPLORERS for value in ([0, 99], [-1])],
    *[(make, "selected_unit", value) for make in EVERY for value in (18, -1)],
    *[(FidelityScatter, "ratio", value) for value in (1.2, 0.0)],
    (FidelityScatter, "methods", ["magic"]),
]


@pytest.mark.parametrize(("make", "name", "value"), BAD)
def test_a_bad_value_is_refused_by_name_and_changes_nothing(
    session: Session, make: Callable[..., Any], name: str, value: Any
) -> None:
    wrong = (TraitError, cl.InputError)
    if make is BuildMonitor:
        with pytest.raises(cl.InputError, match=name):
            BuildMonitor(**{name: value})
        return
    instrument = make(REAL, session=session)
    before = getattr(instrument, name)
    with pytest.raises(wrong, match=name):
        setattr(instrument, name, value)
    assert getattr(instrument, name) == before
    with pytest.raises(wrong, match=name):
        make(REAL, session=Session(REAL), **{name: value})


@pytest.mark.parametrize("control", ["selected_unti", "matrix_name"])
@every
def test_a_misspelt_control_is_refused_and_attaches_nothing(
    make: Callable[..., Any], control: str
) -> None:
    session = Session(REAL)
    with pytest.raises(cl.InputError, match=control):
        make(REAL, session=session, model=MODEL, **{control: 0})
    assert session.model is None


@every
def test_the_chosen_unit_is_the_sessions(make: Callable[..., Any], session: Session) -> None:
    one, two = make(REAL, session=session), BridgeExplorer(REAL, session=session)
    one.set_state({"selected_unit": 7})  # as the page does
    assert two.selected_unit == session.selected_unit == 7
    session.selected_unit = None
    assert one.selected_unit is None
    with pytest.raises(TraitError, match="selected_unit"):
        session.selected_unit = 18


@every
def test_a_plan_of_other_units_is_refused_and_changes_nothing(
    make: Callable[..., Any], session: Session
) -> None:
    instrument = make(REAL, session=session)
    session.selection = plan = cl.solve_greedy(REAL, 0.1)
    with pytest.raises(cl.MismatchError, match="plan"):
        session.selection = cl.Selection.from_pruned(make_units(2, 2, 2), [0])
    assert (session.selection, instrument.error) == (plan, "")


@every
def test_it_joins_the_session_given_or_the_curvatures_own(
    make: Callable[..., Any], session: Session
) -> None:
    made = make(REAL, session=session, model=MODEL, tokenizer=TOKENIZER)
    assert (made.session, made.matrix_name) == (session, "H")
    BridgeExplorer(REAL, session=session)  # what is not given stays
    assert (session.model, session.tokenizer) == (MODEL, TOKENIZER)
    measured = random_curvature(UNITS, seed=4).with_provenance(surrogate="measured KL")
    own = make(measured, model=MODEL)
    assert own.session is Session.of(measured)
    assert (own.session.model, own.matrix_name) == (MODEL, "measured KL")


@every
def test_a_session_or_model_of_another_h_is_refused_and_left_alone(
    make: Callable[..., Any],
) -> None:
    for other in OTHERS:
        session = Session(other)
        with pytest.raises(cl.MismatchError):
            make(REAL, session=session, model=MODEL)
        assert session.model is None
    session = Session(REAL)
    with pytest.raises(cl.MismatchError):
        make(REAL, session=session, model=tiny_model(layers=2))
    assert session.model is None


@every
def test_files_hold_the_table_and_the_plan(
    make: Callable[..., Any], session: Session, tmp_path: Path
) -> None:
    instrument = make(REAL, session=session)
    session.selection = plan = cl.solve_greedy(REAL, 0.3)
    text = instrument.save(tmp_path / "table.csv").read_text("utf-8")
    rows, wanted = list(csv.DictReader(StringIO(text))), instrument.table()
    assert len(rows) == len(wanted)
    assert not rows or list(rows[0]) == list(wanted[0])
    saved = instrument.save(tmp_path / "plan.json").read_text("utf-8")
    assert cl.Selection.from_json(saved).pruned == plan.pruned
    assert b"<gexf" in instrument.save(tmp_path / "graph.gexf").read_bytes()
    with pytest.raises(cl.InputError, match=r"\.png"):
        instrument.save(tmp_path / "picture.png")
    sent: list[dict[str, str]] = []
    instrument.send = lambda content, buffers=None: sent.append(content)
    for name in (".csv", ".json", ".gexf", ".exe"):
        say(instrument, want=name)
    assert sent == [{"file": ".csv"}, {"file": ".json"}, {"file": ".gexf"}]
    assert "'.exe'" in instrument.error


def test_code_reproduces_the_graph_and_the_bridges(session: Session) -> None:
    shown = BridgeExplorer(REAL, session=session, threshold=0.2, saliency_quantile=0.75)
    found: dict[str, Any] = {"curvature": REAL}
    exec(shown.code(), found)
    assert list(found["bridges"]) == shown.bridges["indices"]
    rho = [abs(x) for *_, x in found["graph"].edges(data="correlation")]
    assert len(rho) == sum(abs(shown._rho) >= 0.2) > 0
    assert min(rho) >= 0.2


@every
def test_nothing_is_left_of_a_closed_instrument(make: Callable[..., Any]) -> None:
    session = Session(REAL, MODEL, TOKENIZER)
    gc.collect()
    before = set(_instances)
    instrument = make(REAL, session=session)
    instrument.selected_unit = 3
    if make is generation:
        say(instrument, do="generate", set={})  # and is closed while it writes
    gone = weakref.ref(instrument)
    instrument.close()
    assert session.worker.join(60)
    session.selection = cl.solve_greedy(REAL, 0.2)  # nobody listens any more
    del instrument

    def collected() -> bool:  # a redraw that was put off holds the picture for a moment
        gc.collect()
        return gone() is None

    eventually(collected)
    assert set(_instances) <= before  # no model of ours is left in the kernel


@every
def test_a_cell_that_runs_again_closes_what_its_first_run_made(
    make: Callable[..., Any], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(cell: str, message: str) -> Any:
        parent = {"metadata": {"cellId": cell}, "header": {"msg_id": message}}
        kernel = SimpleNamespace(get_parent=lambda channel: parent)
        monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=kernel))
        return make(REAL, session=session)

    first, twin, other, again = run("a", "1"), run("a", "1"), run("b", "2"), run("a", "3")
    assert [made.comm is None for made in (first, twin, other, again)] == [True, True, False, False]


def test_text_and_held_out_rows_are_checked() -> None:
    session = Session(REAL)
    with pytest.raises(cl.InputError, match="no model"):
        GenerationCompare(None, TOKENIZER, REAL, session=session)  # type: ignore[arg-type]
    with pytest.raises(cl.InputError, match="no model"):
        LambdaExplorer(REAL, session=session, held_out=tiny_text())
    rows = tiny_text()
    build = cl.estimate_curvature(MODEL, UNITS, rows, 16, progress=False)
    with pytest.raises(cl.MismatchError):
        FidelityScatter(build, MODEL, rows)


# What stays of it in a saved notebook: its numbers, without a kernel


def test_a_table_is_short_and_escaped() -> None:
    rows = [{"unit": f"<{k}>", "risk": k / 3} for k in range(ROWS + 1)]
    text = table_html(rows)
    assert text.count("<tr") == ROWS + 1
    assert re.findall("<td>(.*?)</td>", text)[2:4] == ["&lt;1&gt;", "0.3333"]
    assert table_html([]) == ""


def each_shown() -> list[Any]:
    """One of each instrument, with something to show."""
    session = Session(REAL, MODEL, TOKENIZER)
    session.selection = cl.solve_greedy(REAL, 0.3)
    monitor = BuildMonitor()
    monitor.overlap, monitor.status = [[2, 0.5], [4, 0.75]], "<script>"
    compare = GenerationCompare(MODEL, TOKENIZER, REAL, session=session, prompt="w1")
    compare.generate()
    scatter = FidelityScatter(REAL, MODEL, tiny_text(2), session=session)
    scatter.measure_ratio_sweep(1.0, [0.1, 0.2])
    return [*(make(REAL, session=session) for make in EXPLORERS), monitor, compare, scatter]


def test_every_instrument_leaves_its_numbers_in_a_notebook_and_its_html(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    instruments = each_shown()
    for instrument in instruments:
        instrument._ipython_display_()
        note, widget = shown[-2:]
        text = note["text/html"]
        assert f"<b>{type(instrument).__name__}</b>" in text
        assert "<table" in text
        assert "<script" not in text
        assert "application/vnd.jupyter.widget-view+json" in widget
    data = [nbformat.v4.new_output("display_data", dict(data)) for data in shown]
    cell = nbformat.v4.new_code_cell("made", outputs=data)
    page, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert page.count('<div class="cocurve-still">') == len(instruments)
