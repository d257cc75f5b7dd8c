"""The words that the instruments explain: one table for page and Python, on hover and focus."""

from __future__ import annotations

from pathlib import Path

import pytest

from cocurve_widgets import export_html
from cocurve_widgets.glossary import terms, words_html
from helpers.lab import CHROMIUM, NO_BROWSER, Lab
from helpers.problems import make_units, random_curvature
from helpers.waiting import eventually

SMALL = random_curvature(make_units(6, 3, 8), seed=5)


def test_python_reads_the_words_of_the_page() -> None:
    found = terms()
    assert list(found) == ["unit", "saliency", "edge", "bridge", "nats"]
    html = words_html()
    assert all(f">{word}</span>" in html for word in found)
    assert "H_uv" in html


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER)
def test_a_word_is_explained_on_hover_and_on_focus(lab: Lab, tmp_path: Path) -> None:
    path = export_html(SMALL, tmp_path / "page.html")
    with lab.browser.new_page(viewport={"width": 1280, "height": 900}) as page:
        page.goto(path.as_uri())
        word = page.locator(".cc-words .cc-term", has_text="saliency").first

        def tip() -> str:
            return str(word.evaluate("w => getComputedStyle(w, '::after').content"))

        assert tip() == "none"
        word.hover()
        eventually(tip, lambda text: "H_uu" in text)
        page.mouse.move(0, 0)
        eventually(tip, lambda text: text == "none")
        word.focus()
        eventually(tip, lambda text: "H_uu" in text)
        page.keyboard.press("Escape")
        eventually(tip, lambda text: text == "none")
        for width in (600, 1280):  # no tip makes the page wider than the window
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(400)  # pictures follow the width
            for other in page.locator(".cc-term").all():
                other.focus()
                assert page.evaluate("document.documentElement.scrollWidth") <= width
