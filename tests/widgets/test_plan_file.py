"""A plan goes into the offline page as a file and out of it as code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_lab.cli import main
from helpers.lab import Lab, in_browser
from helpers.waiting import eventually

PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "explore_demo.html"
DROP = """text => {
  const data = new DataTransfer();
  data.items.add(new File([text], "dropped.json"));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
}"""
FAULTS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "format": ("format", lambda plan: plan.update(format="cocurve-H")),
    "version": ("format", lambda plan: plan.update(version=2)),
    "units-fewer": ("units", lambda plan: plan["units"]["units"].pop()),
    "units-other": ("units[3]", lambda plan: plan["units"]["units"][3].__setitem__(5, 7)),
    "pruned-none": ("pruned", lambda plan: plan.pop("pruned")),
    "pruned-beyond": ("pruned[1]", lambda plan: plan["pruned"].__setitem__(1, 160)),
    "pruned-twice": ("pruned[1]", lambda plan: plan["pruned"].__setitem__(1, plan["pruned"][0])),
    "pruned-name": ("pruned[0]", lambda plan: plan["pruned"].__setitem__(0, "L9.ffn[0]")),
    "gains": ("gains", lambda plan: plan["gains"].update({"5": 1.1})),
    "strength": ("interaction_strength", lambda plan: plan.update(interaction_strength="0.3")),
}


def plan_of_demo(units: cl.UnitSet) -> cl.Selection:
    pruned = [3, 30, 31, 77, 150]
    return cl.Selection.from_pruned(units, pruned, interaction_strength=0.3, requested_ratio=0.05)


@in_browser
def test_a_file_becomes_plan_a_or_is_refused_by_its_field(lab: Lab, tmp_path: Path) -> None:
    plan = plan_of_demo(cl.enumerate_units(cl.load_model("demo")[0]))
    (file := tmp_path / "plan.json").write_text(plan.to_json())
    with lab.page(PAGE) as page:
        root = page.locator(".cocurve").first
        heads, said = root.locator(".cc-four thead"), root.locator(".cc-error")
        root.locator(".cc-more > summary").click()
        page.get_by_label("plan A from a file").set_input_files(file)
        eventually(heads.inner_text, lambda text: "A: pinned, λ 0.3, 5 %" in text)
        root.locator("canvas").first.wait_for()
        joined = {int(u) for u in root.get_attribute("data-joined").split()}
        left = {int(u) for u in root.get_attribute("data-left").split()}
        shown = {int(u) for u in root.get_attribute("data-pruned").split()}
        assert (shown - joined) | left == set(plan.pruned)
        for field, damage in FAULTS.values():
            damage(content := json.loads(plan.to_json()))
            page.evaluate(DROP, json.dumps(content))
            eventually(said.inner_text, lambda text, name=field: f"“{name}”" in text)
            assert "dropped.json is refused" in said.inner_text()
            assert "A: pinned, λ 0.3, 5 %" in heads.inner_text()
        page.evaluate(DROP, "{pruned")
        eventually(said.inner_text, lambda text: "not JSON" in text)
        page.evaluate(DROP, json.dumps({"pruned": ["L0.attention[0]"]}))  # as the page writes one
        eventually(said.is_visible, lambda seen: not seen)
        left = eventually(lambda: root.get_attribute("data-left") or "", lambda text: text == "0")


@in_browser
def test_what_is_copied_makes_the_plan_and_prunes(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab.page(PAGE, "#ratio=0.3&interaction_strength=0.4") as page:
        root = page.locator(".cocurve").first
        root.locator(".cc-more > summary").click()
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Take this plan").click()
        copied = page.evaluate("() => navigator.clipboard.readText()")
        assert copied == page.get_by_label("Python and command of this plan").input_value()
        shown = {int(u) for u in root.get_attribute("data-pruned").split()}
    monkeypatch.chdir(tmp_path)
    exec(copied, {})
    plan = cl.Selection.from_json(Path("plan.json").read_text())
    assert set(plan.pruned) == shown
    assert (plan.requested_ratio, plan.interaction_strength) == (0.3, 0.4)
    (command,) = re.findall(r"^# cocurve (prune .*)$", copied, re.M)
    assert main(command.split()) == 0
    smaller, dense = cl.load_pruned("smaller"), cl.load_model("demo")[0]
    assert smaller.num_parameters() < dense.num_parameters()
