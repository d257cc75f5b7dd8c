"""The page before a class: five steps by Page keys, large text, and one sheet of paper."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.pretrained.kept import kept_curvature
from helpers.lab import Lab, in_browser
from helpers.waiting import eventually

PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "explore_smollm2.html"
# Sizes of the texts that are seen, as they are on the screen.
SIZES = """() => [...document.querySelectorAll('body *')]
  .filter(e => e.checkVisibility()
    && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
  .map(e => parseFloat(getComputedStyle(e).fontSize) * e.currentCSSZoom)"""
BOX = """() => { const box = document.querySelector('.cc-framed').getBoundingClientRect();
  return [box.top, box.bottom]; }"""
STATE = """() => [location.hash, scrollY, document.body.className,
  ...[...document.querySelectorAll('.cocurve')].map(one => one.dataset.pruned ?? ''),
  ...[...document.querySelectorAll('input[type=number]')].map(field => field.value)]"""


@in_browser
@pytest.mark.parametrize("size", [(1280, 900), (1024, 768)], ids=["1280", "1024"])
def test_five_steps_frame_what_they_name_and_end_where_they_began(
    lab: Lab, size: tuple[int, int]
) -> None:
    curvature = kept_curvature("smollm2")
    assert curvature is not None
    guards = cl.opening_guards(curvature.units)
    alone, full = (set(cl.solve_greedy(curvature, 0.3, x, guards).pruned) for x in (0, 1))
    address = "#interaction_strength=0.75&ratio=0.3"
    viewport = {"width": size[0], "height": size[1]}
    with lab.page(PAGE, address, viewport=viewport) as page:
        page.locator(".cc-more > summary").first.click()
        start = page.get_by_role("button", name="Present")
        start.focus()
        page.wait_for_timeout(500)
        before = page.evaluate(STATE)
        page.keyboard.press("Enter")
        said, framed, caption = [], [], page.locator(".cc-caption span")
        for step in range(1, 6):
            eventually(caption.text_content, lambda text, n=step: text.startswith(f"{n} of 5"))
            page.wait_for_timeout(400)
            top, bottom = page.evaluate(BOX)
            assert 0 <= top < bottom <= size[1], step
            assert min(page.evaluate(SIZES)) >= 18
            said.append(str(caption.text_content()))
            framed.append(page.locator(".cc-framed").first.inner_text())
            page.keyboard.press("PageDown")
        eventually(lambda: page.evaluate(STATE), lambda now: now == before)
        assert f"{len(alone)} units for 30 %" in said[0]
        assert f"{len(full - alone)} units (+) go instead of {len(alone - full)} others" in said[1]
        assert "What is the capital" in framed[3]
        assert "λ, weight of the edges" in framed[4]
        page.evaluate("location.hash += '&present=2'")  # a link to the steps; Escape ends anywhere
        eventually(caption.text_content, lambda text: text.startswith("2 of 5"))
        page.keyboard.press("PageUp")
        eventually(caption.text_content, lambda text: text.startswith("1 of 5"))
        page.keyboard.press("Escape")
        eventually(lambda: page.evaluate(STATE), lambda now: now[2:] == before[2:])
        eventually(lambda: page.evaluate("location.hash"), lambda text: text == before[0])


@in_browser
@pytest.mark.parametrize("address", ["", "#present=3"], ids=["page", "step"])
def test_it_prints_on_one_a4(lab: Lab, address: str) -> None:
    with lab.page(PAGE, address, color_scheme="dark") as page:
        page.locator(".cc-mark").first.wait_for()
        paper = page.pdf(prefer_css_page_size=True)
        assert len(re.findall(rb"/Type\s*/Page\b", paper)) == 1
        (sheet,) = re.findall(rb"/MediaBox\s*\[([\d. ]+)\]", paper)
        assert sorted(map(float, sheet.split()))[2:] == pytest.approx([595, 842], abs=1)
        page.emulate_media(media="print")
        shown = page.locator(".cocurve")
        assert shown.first.evaluate("e => getComputedStyle(e).backgroundColor") == (
            "rgb(255, 255, 255)"
        )
        ink: Any = page.locator(".cc-mark").first.evaluate("e => getComputedStyle(e).fill")
        assert ink == "rgb(0, 0, 0)"
        assert [one.is_visible() for one in shown.all()] == [True, False, False]
