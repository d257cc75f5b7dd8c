"""Notebook 05 in JupyterLab: texts one below the other, by key and mouse, streaming and stopped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.lab import SMALL, Visit
from helpers.notebooks import NOTEBOOKS, Ran, cold, require_shown
from helpers.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    yield from cold(request, NOTEBOOKS[4], SMALL)


@pytest.fixture
def it(ran: Ran) -> Page:
    return Page(ran.shown_in_lab())


class Page:
    """The instrument on the page."""

    def __init__(self, visit: Visit) -> None:
        self.page, self.visit = visit.page, visit
        self.root = self.page.locator(".cocurve").first
        self.root.wait_for(timeout=60_000)
        self.root.scroll_into_view_if_needed()
        self.prompt = self.root.get_by_label("Prompt (Ctrl+Enter generates)")
        self.status = self.root.locator(".cc-status")
        self.dense = self.root.get_by_role("group", name="Dense text")
        self.pruned = self.root.get_by_role("group", name="B text")
        self.ribbon = self.root.locator("svg.cc-chart")

    def button(self, name: str) -> Any:
        return self.root.get_by_role("button", name=name, exact=True)

    def done(self, words: str = "written together") -> None:
        """Wait for a status line and for the work to end."""
        eventually(self.status.inner_text, lambda text: words in text, 60)
        self.root.locator("[aria-busy=false]").wait_for()

    def says(self, words: str) -> None:
        self.root.get_by_text(re.compile(words)).first.wait_for()


def test_it_says_what_was_measured(ran: Ran) -> None:
    assert "the pruned row is the masked model's own text: True" in ran.text
    measured = re.search(r"pruning_risk ([\d.]+), mean of the ribbon ([\d.]+)", ran.text)
    assert float(measured[1]) == pytest.approx(float(measured[2]), abs=2e-6)
    assert len(re.findall(r"^(?:dense|pruned) took '.+': dense [01]", ran.text, re.M)) == 2
    assert "right answers" not in ran.text  # before the reader has guessed
    assert "not yet: " in ran.text  # the exercise is the reader's


def test_it_can_be_read_and_has_its_first_text(ran: Ran, it: Page) -> None:
    it.done()
    assert it.ribbon.is_visible()
    require_shown(it.visit, 0)


def test_right_answers_show_after_a_guess(it: Page) -> None:
    it.page.get_by_role("button", name="arithmetic", exact=True).click()
    said = it.page.locator("pre", has_text="You: arithmetic. Here: ")
    rows = said.inner_text().splitlines()[2:]
    assert rows[0].split() == ["right", "answers", "0%", "20%", "40%", "55%"]
    assert min(int(row.split()[1]) for row in rows[1:6]) > 5  # the whole model can answer


def test_a_prompt_by_keyboard(it: Page) -> None:
    """Letters and arrows stay in the field."""
    keyboard = it.page.keyboard
    it.prompt.click()
    keyboard.press("Control+a")
    keyboard.type("The job of Wren and Kitt")
    keyboard.press("ArrowLeft")
    keyboard.press("Delete")
    assert it.prompt.input_value() == "The job of Wren and Kit"
    for _ in range(8):  # on to the button, past the number fields
        keyboard.press("Tab")
        if it.page.evaluate("document.activeElement.textContent") == "Generate":
            break
    keyboard.press("Enter")
    it.visit.becomes("compare.shown.get('prompt')", "'The job of Wren and Kit'")
    it.done()
    assert len(it.dense.inner_text()) > 3
    assert it.dense.inner_text() != it.pruned.inner_text()


def test_the_menu_by_keyboard_and_its_answers(it: Page) -> None:
    it.root.get_by_label("Choose a prompt").focus()
    it.page.keyboard.press("Home")
    it.page.keyboard.press("ArrowDown")
    assert it.root.get_by_label("Choose a prompt").input_value() == "0"
    eventually(it.prompt.input_value, lambda text: "=" in text)
    it.prompt.focus()
    it.page.keyboard.press("Control+Enter")
    eventually(it.root.get_by_text(re.compile("^[✓✗] ")).count, lambda count: count == 3)
    it.done()
    assert it.dense.bounding_box()["x"] == it.pruned.bounding_box()["x"]  # one below the other
    line = it.dense.inner_text().strip()
    assert len(line.splitlines()) == 1


def test_text_breaks_while_a_slider_is_dragged(it: Page) -> None:
    """Without a press of Generate; what follows the first divergence is underlined."""
    for ratio, keys in ((0.0, ["Home"]), (0.3, ["PageUp"] * 5)):
        it.root.get_by_label("share to remove (ratio)").focus()
        for key in keys:
            it.page.keyboard.press(key)
        it.visit.becomes(
            "(round(compare.ratio, 2), compare.stale, compare.busy)", f"({ratio}, '', False)"
        )
        same, apart = (it.pruned.locator(part).inner_text() for part in ("span >> nth=0", "u"))
        assert f"{same}{apart}".strip() == it.visit.ask("compare.pruned_text.strip()").strip("'\"")
        assert it.visit.ask(f"compare.dense_text.startswith({same!r})") == "True"
        assert bool(apart) == (ratio > 0)
        assert it.root.get_by_role("group", name="A text").is_visible() == (ratio > 0)


def test_the_ribbon_by_key_mouse_text_and_table(it: Page) -> None:
    it.says("measured, teacher-forced on the prompt and the dense")
    it.ribbon.locator("[tabindex='0']").focus()
    it.page.keyboard.press("End")
    reading = it.root.locator("div:has(> svg) + p")
    last = eventually(reading.inner_text, lambda text: "nats" in text)
    assert it.page.evaluate("document.activeElement.getAttribute('aria-label')") == last
    it.page.keyboard.press("ArrowLeft")
    before = eventually(reading.inner_text, lambda text: "nats" in text and text != last)
    box = it.ribbon.bounding_box()
    it.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    eventually(reading.inner_text, lambda text: "nats" in text and text != before)
    it.root.get_by_label("Both models read").select_option("custom")
    own = it.root.get_by_label(re.compile("^Your own text"))
    own.fill("One day Ben went to the barn.")
    own.blur()
    it.says("teacher-forced on your own text: mean")
    for kind in ("pruned", "dense"):
        it.root.get_by_label("Both models read").select_option(kind)
        it.says(f"on the prompt and the {kind} continuation")
    it.root.locator(".cc-table > summary").click()
    it.root.locator("tbody tr").nth(3).wait_for()
    it.root.locator(".cc-table > summary").click()


def test_errors_stand_in_the_instrument(it: Page) -> None:
    it.prompt.fill("")
    it.button("Generate").click()
    it.root.get_by_text("the prompt is empty").wait_for()


def test_text_streams_and_stop_keeps_what_there_is(it: Page) -> None:
    it.root.locator("summary", has_text="More").click()
    count, heat = (
        it.root.get_by_label(f) for f in ("New tokens, at most", "Temperature (0: greedy)")
    )
    it.prompt.fill("def f(x):")
    heat.fill("1.2")
    count.fill("230")
    it.page.evaluate(
        """root => {
          window.lengths = [];
          new MutationObserver(() => window.lengths.push(root.textContent.length))
            .observe(root, {childList: true, subtree: true});
        }""",
        it.dense.element_handle(),
    )
    with it.visit.slow_model(0.1):
        it.button("Generate").click()
        it.page.wait_for_function("() => window.lengths.length > 4")
        it.button("Stop").click()
        it.done("stopped:")
    assert len(set(it.page.evaluate("window.lengths"))) > 3, "it did not stream"
    eventually(it.root.inner_text, lambda text: "(stopped)" in text)
    tokens = int(re.search(r"dense (\d+) tokens", it.status.inner_text())[1])
    assert 0 < tokens < 230
    before = it.dense.inner_text()
    it.page.wait_for_timeout(300)
    assert it.dense.inner_text() == before
    heat.fill("0")
    count.fill("48")
    it.button("Generate").click()
    it.done("greedy")


def test_files(it: Page) -> None:
    for name, begin in (("JSON", '{"format": "cocurve-selection"'), ("CSV", "position,token")):
        with it.page.expect_download() as file:
            it.button(name).click()
        text = Path(file.value.path()).read_text()
        assert re.sub(r"\s+", " ", text).replace("{ ", "{").startswith(begin)


def test_nothing_sticks_out_and_text_of_another_prompt_is_marked(it: Page) -> None:
    for theme, width in (("Light", 1280), ("Dark", 1920)):
        it.page.set_viewport_size({"width": width, "height": 1000})
        it.visit.theme(theme)
        wide = it.root.evaluate(
            """root => [...root.querySelectorAll('*')].filter(e => e.clientWidth
              && e.getBoundingClientRect().right > root.getBoundingClientRect().right + 1).length"""
        )
        assert wide == 0
    it.root.get_by_label("Choose a prompt").select_option("8")
    it.root.get_by_text("This is text of another prompt.").wait_for()
    assert "def" in it.prompt.input_value()
    it.visit.require_clean()
    assert it.visit.received < 3_000_000
