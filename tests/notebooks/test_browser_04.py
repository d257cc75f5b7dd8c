"""Notebook 04 in a real JupyterLab and browser: points appear while they are measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from helpers.lab import CHROMIUM, IN_LAB, KEPT, NO_BROWSER, SMALL, Lab, Visit
from helpers.notebooks import SOLUTIONS, findings_of, run, text_of
from helpers.waiting import eventually

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "04_predicted_and_measured.ipynb"

browser = pytest.mark.browser
with_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER)

# the traces at the end of the figure are: equality, factor 2, single units, plans, rings, waiting
PLANS = "() => document.querySelector('[role=figure].js-plotly-plot').data.at(-3).x.length"
RINGS = "() => document.querySelector('[role=figure].js-plotly-plot').data.at(-2).x.length"
SINGLES = """() => {
  const figure = document.querySelector('[role=figure].js-plotly-plot');
  const traces = [...figure.querySelectorAll('.scatterlayer .trace')];
  return traces.map(t => t.querySelectorAll('path.point').length).filter(n => n)[0];
}"""
PLACE = """() => {
  const traces = document.querySelectorAll('[role=figure].js-plotly-plot .scatterlayer .trace');
  const points = [...traces].map(t => [...t.querySelectorAll('path.point')]);
  const plans = points.filter(p => p.length)[1];  // after the single units
  const box = plans.at(-1).getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""
# anywidget gives a widget two seconds to start; Plotly's code shall take longer than that here
SLOW_CODE = """() => {
  const place = URL.createObjectURL.bind(URL);
  URL.createObjectURL = blob => {
    if (blob.size < 1e6) return place(blob);
    const late = `await new Promise(resolve => setTimeout(resolve, 4000));
      export { default } from "${place(blob)}"`;
    return place(new Blob([late], { type: 'text/javascript' }));
  };
}"""
RUN_CELL = """number => {
  const notebook = jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = number;
  return jupyterapp.commands.execute('notebook:run-cell');
}"""


def test_notebook_04_lets_the_reader_predict_first() -> None:
    content = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell.source for cell in content.cells if cell.cell_type == "code"]
    prose = [cell for cell in content.cells if cell.cell_type == "markdown"]
    assert sum("Predict first" in cell.source for cell in prose) >= 4
    assert sum("FidelityScatter(" in source for source in code) == 1


@pytest.fixture
def solved(tmp_path: Path) -> Path:
    """The notebook with the solution of its exercise, checked, after the reader's attempt."""
    content = nbformat.read(NOTEBOOK, as_version=4)
    (check,) = (c for c in content.cells if "exercises.rank_correlation" in c.source)
    place = content.cells.index(check) + 1
    more = [nbformat.v4.new_code_cell(SOLUTIONS["04"]), nbformat.v4.new_code_cell(check.source)]
    content.cells[place:place] = more
    nbformat.write(content, tmp_path / NOTEBOOK.name)
    return tmp_path / NOTEBOOK.name


def require_told(done: nbformat.NotebookNode, folder: Path) -> None:
    """What the cells printed, and that the solution passes the check."""
    shown, said = [o for cell in done.cells for o in cell.get("outputs", [])], text_of(done)
    assert any("application/vnd.jupyter.widget-view+json" in o.get("data", {}) for o in shown)
    (saved,) = (folder / KEPT).glob("H_demo_*.pkl")
    assert f"Saved H to {KEPT}/{saved.name}" in said
    assert "measured / predicted" in said
    assert "not yet: 0 of " in said
    assert "\nright\n" in said
    claims = " ".join(findings_of(said))
    for claim in ("½ H_uu is the KL", "Spearman 0.81", "the joint prediction ½ sᵀHs is accurate"):
        assert claim in claims


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM.exists(), reason=IN_LAB)
def test_notebook_04_runs_and_its_solution_passes_the_check(solved: Path) -> None:
    require_told(run(solved, solved.parent, SMALL), solved.parent)


def wait(page: Any, plans: int) -> None:
    """Until the picture holds at least this many plans."""
    page.wait_for_function(f"n => ({PLANS})() >= n", arg=plans, timeout=120_000)


def idle(page: Any) -> None:
    """Until Cancel can no longer be pressed: nothing is being measured."""
    page.wait_for_selector("button:has-text('Cancel'):disabled", timeout=120_000)


def grown(page: Any, act: Callable[[], None], wanted: int) -> list[int]:
    """The numbers of plans in the picture from `act` on until there are `wanted`."""
    act()
    seen = []
    while not seen or seen[-1] < wanted:
        now = page.evaluate(PLANS)
        if not seen or now != seen[-1]:
            seen.append(now)
        page.wait_for_timeout(30)
    return seen


def cell_number(page: Any, text: str) -> int:
    found = page.evaluate(
        "text => jupyterapp.shell.currentWidget.content.widgets.findIndex("
        "c => c.model.type === 'code' && c.model.sharedModel.getSource().includes(text))",
        text,
    )
    assert found >= 0
    return int(found)


def type_into(page: Any, label: str, value: str) -> None:
    field = page.get_by_label(label, exact=True)
    field.fill(value)
    field.press("Tab")


def open_and_run(visit: Visit) -> Any:
    page = visit.page
    page.evaluate(SLOW_CODE)
    visit.run_all()
    page.wait_for_selector("[role=figure].js-plotly-plot .gtitle", state="attached", timeout=60_000)
    wait(page, 6)
    idle(page)
    page.locator("[role=figure].js-plotly-plot").scroll_into_view_if_needed()
    return page


@browser
@with_chromium
@pytest.mark.slow
def test_notebook_04_in_jupyterlab(lab: Lab, solved: Path) -> None:
    folder = lab.bring(solved.parent)
    with lab.open(solved, SMALL | {"HELD_OUT": 6}, inside=folder) as visit:
        page = open_and_run(visit)
        require_told(visit.content(), folder)
        assert page.locator("[role=figure].js-plotly-plot").count() == 1
        assert visit.received <= 6e6, visit.received
        buttons = page.locator(".modebar-btn").evaluate_all(
            "all => all.map(b => b.getAttribute('data-title') || '')"
        )
        assert buttons
        assert not [title for title in buttons if re.search("cloud|share|edit in", title, re.I)]
        named = page.locator("[role=figure][aria-label]")
        assert "measured KL" in (named.first.get_attribute("aria-label") or "")

        # by keyboard: the pool; one of its 26 sets was in the ratio sweep
        pool = page.get_by_role("button", name="Same-budget pool")
        pool.focus()
        seen = grown(page, lambda: page.keyboard.press("Enter"), 6 + 25)
        assert len(seen) >= 4, f"points came in {len(seen)} steps: {seen}"
        idle(page)
        scores = page.locator(".cocurve table").first
        scores.filter(has_text="same-budget pool, ratio 0.2").wait_for()

        # by mouse: another ratio, a lambda sweep (lambda 1 at 0.4 is known)
        type_into(page, "Ratio", "0.4")
        before = page.evaluate(PLANS)
        page.get_by_role("button", name="Lambda sweep").click()
        wait(page, before + 2)
        idle(page)

        # cancel keeps what it has
        before = page.evaluate(PLANS)
        type_into(page, "Seed", "7")
        with visit.slow_model(0.05):
            grown(page, pool.click, before + 3)
            visit.picture("04_measuring", instrument(page))
            page.get_by_role("button", name="Cancel").click()
            idle(page)
        page.wait_for_timeout(500)
        kept = page.evaluate(PLANS)
        assert before + 3 <= kept < before + 20
        page.wait_for_timeout(1500)
        assert page.evaluate(PLANS) == kept

        # a click on a point is the session's plan, seen by another cell
        assert page.evaluate(RINGS) == 0
        page.locator("[role=figure].js-plotly-plot").scroll_into_view_if_needed()
        page.wait_for_timeout(300)
        page.mouse.move(*page.evaluate(PLACE))
        page.locator(".hoverlayer .hovertext").first.wait_for()
        page.mouse.down()
        page.mouse.up()
        page.wait_for_function(f"() => ({RINGS})() === 1", timeout=20_000)
        menu = page.get_by_label("Show plan", exact=True)
        # the ring is drawn first, the words follow
        name = eventually(menu.input_value, bool)
        assert "random" in name or "swap" in name or "λ" in name
        page.get_by_text(f"chosen: {name}").wait_for(state="attached")
        number = cell_number(page, "print(f.session.selection)")
        page.evaluate(RUN_CELL, number)
        page.get_by_text(re.compile(r"^Selection of \d+ of 160 units")).first.wait_for()

        # the same by keyboard
        before = visit.settled()
        type_into(page, "Show plan", "λ 1, ratio 0.2")
        page.get_by_text("chosen: λ 1, ratio 0.2").wait_for(state="attached")
        assert visit.settled() - before <= 20_000
        type_into(page, "Mark unit", "L1.ffn[3]")
        page.wait_for_function(f"() => ({RINGS})() === 2", timeout=20_000)
        type_into(page, "Mark unit", "L77.ffn[3]")
        page.locator(".cc-error", has_text="L77.ffn[3]").wait_for()
        type_into(page, "Mark unit", "L1.ffn[4]")
        page.locator(".cc-error").wait_for(state="detached")

        # a method less, and the table twin with its file
        shown = page.evaluate(PLANS)
        page.get_by_label("random", exact=True).focus()
        page.keyboard.press("Space")
        page.wait_for_function(f"n => ({PLANS})() < n", arg=shown)
        page.get_by_role("button", name="Table and files").click()
        with page.expect_download() as download:
            page.get_by_role("link", name="CSV").click()
        lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("kind,method,name,")
        assert len(lines) == 1 + page.evaluate(PLANS) + 160
        visit.picture("04_table", page.locator(".cocurve", has=page.locator(".cc-scroll")))
        page.get_by_role("button", name="Table and files").click()
        page.get_by_label("random", exact=True).click()
        wait(page, shown)

        assert page.evaluate(SINGLES) == 160
        visit.require_clean()
        for width, height in ((1920, 1600), (1280, 1900)):  # the whole instrument in one view
            page.set_viewport_size({"width": width, "height": height})
            figure = page.locator("[role=figure].js-plotly-plot .main-svg").first
            eventually(  # it follows the window, in both directions
                lambda figure=figure: figure.bounding_box()["width"],
                lambda found, width=width: 0.75 * width < found < width,
            )
            for theme in ("Light", "Dark"):
                visit.theme(theme)
                page.locator("[role=figure].js-plotly-plot").scroll_into_view_if_needed()
                visit.picture(f"04_{theme.lower()}_{width}", instrument(page))
        visit.require_clean()


def instrument(page: Any) -> Any:
    """The output area that holds the whole instrument."""
    return page.locator(
        ".jp-OutputArea-output", has=page.locator("[role=figure].js-plotly-plot")
    ).first
