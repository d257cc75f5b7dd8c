"""Generate: the text before and after, side by side, streamed and stopped."""

from __future__ import annotations

import ast
from typing import Any

from helpers.lab import SMALL, Lab, Visit, in_browser
from helpers.notebooks import NOTEBOOKS
from helpers.waiting import eventually

# Keeps how long the text of an element was after each change.
WATCH = """root => {
  window.lengths = [];
  new MutationObserver(() => window.lengths.push(root.textContent.length))
    .observe(root, {childList: true, subtree: true});
}"""


def same_in_the_kernel(visit: Visit, group: Any, trait: str) -> None:
    """The page shows the text that the kernel has."""
    text = ast.literal_eval(visit.ask(f"' '.join(compare.{trait}.split())"))

    def shown() -> str:
        return " ".join(group.inner_text().split()).removesuffix("<eos>").strip()

    eventually(shown, lambda found: found == text)


@in_browser
def test_both_texts_follow_prompt_and_slider_and_can_be_stopped(lab: Lab) -> None:
    with lab.open(NOTEBOOKS[4], SMALL) as visit:
        visit.run_all()
        page, root = visit.page, visit.page.locator(".cocurve").first
        root.wait_for(timeout=60_000)
        root.scroll_into_view_if_needed()
        dense, pruned = (root.get_by_role("group", name=f"{n} text") for n in ("Dense", "Pruned"))
        prompt = root.get_by_label("Prompt (Ctrl+Enter generates)")
        visit.becomes("compare.busy, bool(compare.dense_text)", "(False, True)")  # after Run all
        assert visit.ask("compare.shown['right']['dense']") == "True"  # chosen by computation

        prompt.click()
        page.keyboard.press("Control+a")
        page.keyboard.type("The job of Wren and Kit")  # letters stay in the field
        page.keyboard.press("Control+Enter")
        visit.becomes("compare.shown.get('prompt')", "'The job of Wren and Kit'")
        visit.becomes("compare.busy", "False")
        same_in_the_kernel(visit, dense, "dense_text")
        same_in_the_kernel(visit, pruned, "pruned_text")
        assert len(dense.inner_text()) > 3

        # without a press of Generate; the first word that differs is marked
        for ratio, keys in ((0.0, ["Home"]), (0.3, ["PageUp"] * 5)):
            for key in keys:
                root.get_by_label("share to remove (ratio)").press(key)
            now = "(round(compare.ratio, 2), compare.stale, compare.busy)"
            visit.becomes(now, f"({ratio}, '', False)")
            same_in_the_kernel(visit, pruned, "pruned_text")
            assert pruned.locator("mark").count() == (ratio > 0)

        root.locator("summary", has_text="More").click()
        prompt.fill("def f(x):")
        root.get_by_label("Temperature (0: greedy)").fill("1.2")
        root.get_by_label("New tokens, at most").fill("230")
        page.evaluate(WATCH, dense.element_handle())
        with visit.slow_model(0.1):
            root.get_by_role("button", name="Generate", exact=True).click()
            page.wait_for_function("() => new Set(window.lengths).size > 3")  # it streams
            root.get_by_role("button", name="Stop", exact=True).click()
            visit.becomes("compare.shown.get('stopped'), compare.busy", "(True, False)")
        eventually(root.inner_text, lambda text: "(stopped)" in text)
        assert 0 < int(visit.ask("len(compare.tokens['dense'])")) < 230
        same_in_the_kernel(visit, dense, "dense_text")
        visit.require_clean()
