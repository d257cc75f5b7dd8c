"""Notebook 05: runs from top to bottom, and its instrument in a real JupyterLab and browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from helpers.lab import CHROMIUM, IN_LAB, NO_BROWSER, SMALL, Lab, Visit
from helpers.notebooks import run, text_of
from helpers.waiting import eventually

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "05_text_before_after.ipynb"
browser = pytest.mark.browser
with_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER)


def test_notebook_05_lets_the_reader_predict_first() -> None:
    content = nbformat.read(NOTEBOOK, as_version=4)
    prose = [cell.source for cell in content.cells if cell.cell_type == "markdown"]
    assert sum("redict" in text for text in prose) >= 4


def require_told(done: nbformat.NotebookNode) -> None:
    """What the cells printed."""
    text = text_of(done)
    assert "the pruned row is the masked model's own text: True" in text
    measured = re.search(r"pruning_risk ([\d.]+), mean of the ribbon ([\d.]+)", text)
    assert float(measured[1]) == pytest.approx(float(measured[2]), abs=2e-6)
    assert len(re.findall(r"^(?:dense|pruned) took '.+': dense [01]", text, re.M)) == 2
    table = re.search(r"^right of 8 +0% +20% +40% +60%\n((?:\w+ .*\n){5})", text, re.M)
    whole = [int(line.split()[1]) for line in table[1].splitlines()]
    assert min(whole) > 5  # the whole model can answer
    assert "not yet: " in text  # the exercise is the reader's


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM.exists(), reason=IN_LAB)
def test_notebook_05_runs(tmp_path: Path) -> None:
    require_told(run(NOTEBOOK, tmp_path, SMALL))


class Page:
    """The instrument on the page."""

    def __init__(self, visit: Visit) -> None:
        self.page = visit.page
        self.root = self.page.locator(".cocurve").first
        self.root.wait_for(timeout=60_000)
        self.root.scroll_into_view_if_needed()
        self.prompt = self.root.get_by_label("Prompt (Ctrl+Enter generates)")
        self.status = self.root.locator(".cc-status")
        self.dense = self.root.get_by_role("group", name="Dense text")
        self.pruned = self.root.get_by_role("group", name="Pruned text")
        self.canvas = self.root.locator("canvas.cc-picture")

    def button(self, name: str) -> Any:
        return self.root.get_by_role("button", name=name, exact=True)

    def done(self, words: str) -> None:
        """Wait for a status line and for the work to end."""
        self.page.wait_for_function(
            """([root, words]) => root.querySelector('.cc-status').textContent.includes(words)
            && root.querySelector('[aria-busy]').getAttribute('aria-busy') === 'false'""",
            arg=[self.root.element_handle(), words],
            timeout=60_000,
        )


@browser
@with_chromium
@pytest.mark.slow
def test_notebook_05_in_jupyterlab(lab: Lab) -> None:
    with lab.open(NOTEBOOK, SMALL) as visit:
        visit.run_all()
        require_told(visit.content())
        it = Page(visit)
        assert not it.canvas.is_visible()  # no empty picture before there is text
        page = it.page
        it.button("Generate").click()
        it.done("written together")
        assert it.dense.inner_text() != it.pruned.inner_text()
        assert it.root.locator(".cc-error").is_hidden()

        # a prompt by keyboard: letters and arrows stay in the field
        it.prompt.click()
        page.keyboard.press("Control+a")
        page.keyboard.type("The job of Wren and Kitt")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Delete")
        assert it.prompt.input_value() == "The job of Wren and Kit"
        for _ in range(8):  # on to the button, past the number fields
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "Generate":
                break
        page.keyboard.press("Enter")
        page.wait_for_function(
            "root => root.textContent.startsWith('The job of Wren and Kit')",
            arg=it.dense.element_handle(),
        )
        it.done("written together")
        assert len(it.dense.inner_text()) > len("The job of Wren and Kit") + 3
        assert it.pruned.inner_text().startswith("The job of Wren and Kit")

        # the menu by keyboard: answers are known
        it.root.get_by_label("Choose a prompt").focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowDown")
        chosen = it.root.get_by_label("Choose a prompt").input_value()
        assert chosen == "0"
        page.wait_for_function("field => field.value.includes('=')", arg=it.prompt.element_handle())
        it.prompt.focus()
        page.keyboard.press("Control+Enter")
        page.wait_for_function(
            "root => /[✓✗] /.test(root.textContent)", arg=it.root.element_handle()
        )
        it.done("written together")
        eventually(it.root.get_by_text(re.compile("^[✓✗] ")).count, lambda count: count == 2)
        assert it.dense.bounding_box()["y"] == it.pruned.bounding_box()["y"]  # one beside the other

        # the ribbon: arrow keys, hover, the other text, the table
        measured = "measured, teacher-forced on the prompt and the dense"
        eventually(it.root.inner_text, lambda text: measured in text)
        it.canvas.focus()
        page.keyboard.press("End")
        reading = it.root.locator("canvas + p")
        last = eventually(reading.inner_text, lambda text: "nats" in text)
        page.keyboard.press("ArrowLeft")
        before = eventually(reading.inner_text, lambda text: "nats" in text and text != last)
        box = it.canvas.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
        eventually(reading.inner_text, lambda text: "nats" in text and text != before)
        it.root.get_by_label("Both models read").select_option("pruned")
        it.root.get_by_text(re.compile("on the prompt and the pruned continuation")).wait_for()
        it.root.get_by_label("Both models read").select_option("custom")
        own = it.root.get_by_label(re.compile("^Your own text"))
        own.fill("One day Ben went to the barn.")
        own.press("Tab")
        it.root.get_by_text(re.compile("teacher-forced on your own text: mean")).wait_for()
        it.root.get_by_label("Both models read").select_option("dense")
        it.root.get_by_text(re.compile("on the prompt and the dense continuation")).wait_for()
        it.root.locator("summary").click()
        it.root.locator("tbody tr").nth(10).wait_for()
        it.root.locator("summary").click()

        errors_inside(it)
        streaming_and_stop(visit, it)
        with page.expect_download() as file:
            it.button("JSON").click()
        assert '"format": "cocurve-selection"' in Path(file.value.path()).read_text()
        with page.expect_download() as file:
            it.button("CSV").click()
        assert Path(file.value.path()).read_text().startswith("position,token")
        visit.require_clean()
        pictures(visit, it, "1280")
        wide_screen_and_a_code_prompt(visit, it)
        visit.require_clean()
        assert visit.received < 3_000_000


def errors_inside(it: Page) -> None:
    """Errors stand in the instrument."""
    it.prompt.fill("")
    it.button("Generate").click()
    it.root.get_by_text("the prompt is empty").wait_for()


def streaming_and_stop(visit: Visit, it: Page) -> None:
    """Text appears while it is written, and Stop keeps what there is."""
    count = it.root.get_by_label("New tokens, at most")
    it.prompt.fill("def f(x):")
    it.root.get_by_label("Temperature (0: greedy)").fill("1.2")
    count.fill("230")
    it.page.evaluate(
        """root => {
          window.lengths = [];
          const text = root.querySelector('[aria-live] , [role=group]');
          new MutationObserver(() => window.lengths.push(root.textContent.length))
            .observe(root, {childList: true, subtree: true});
        }""",
        it.dense.element_handle(),
    )
    with visit.slow_model(0.1):
        it.button("Generate").click()
        it.page.wait_for_function("() => window.lengths.length > 4")
        it.button("Stop").click()
        it.done("stopped:")
    lengths = it.page.evaluate("window.lengths")
    assert len(set(lengths)) > 3, "it did not stream"
    eventually(it.root.inner_text, lambda text: "(stopped)" in text)
    tokens = int(re.search(r"dense (\d+) tokens", it.status.inner_text())[1])
    assert 0 < tokens < 230
    before = it.dense.inner_text()
    it.page.wait_for_timeout(300)
    assert it.dense.inner_text() == before
    it.root.get_by_label("Temperature (0: greedy)").fill("0")
    count.fill("48")
    it.button("Generate").click()
    it.done("greedy")


def pictures(visit: Visit, it: Page, name: str) -> None:
    """Light and dark, for a person; nothing may stick out of the instrument."""
    for theme in ("Light", "Dark"):
        visit.theme(theme)
        it.root.scroll_into_view_if_needed()
        it.page.mouse.move(0, 0)
        visit.picture(f"05_{theme.lower()}_{name}", it.root)
        wide = it.root.evaluate(
            """root => [...root.querySelectorAll('*')].filter(e => e.clientWidth
              && e.getBoundingClientRect().right > root.getBoundingClientRect().right + 1).length"""
        )
        assert wide == 0


def wide_screen_and_a_code_prompt(visit: Visit, it: Page) -> None:
    """A page made wider draws itself anew; text of another prompt is marked as such."""
    it.page.set_viewport_size({"width": 1920, "height": 1000})
    it.root.get_by_label("Choose a prompt").select_option("8")
    it.page.wait_for_function(
        "field => field.value.includes('def')", arg=it.prompt.element_handle()
    )
    it.button("Generate").click()
    it.done("written together")
    pictures(visit, it, "1920")
    it.root.get_by_label("Choose a prompt").select_option("9")
    it.root.get_by_text("This is text of another prompt.").wait_for()
    visit.picture("05_stale_1920", it.root)
