"""The exported page: one file, offline, its plans equal to the Python solver's on what it holds."""

from __future__ import annotations

import base64
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ipywidgets.widgets.widget import _instances
from playwright.sync_api import expect

import cocurve_lab as cl
from cocurve_lab.extensions.pretrained.kept import kept_curvature, kept_plans
from cocurve_lab.solver.guards import reachable_ratio
from cocurve_lab.solver.path import LambdaPath
from cocurve_widgets import Measured, Session, export_html, refresh_html
from cocurve_widgets.instrument import front
from cocurve_widgets.packing import pack_problem, plan_mark
from helpers.lab import Lab, in_browser
from helpers.pages import data_of, matrix_of
from helpers.problems import llama_8b_units, make_units, random_curvature
from helpers.waiting import eventually

SHIPPED = Path(__file__).resolve().parents[2] / "notebooks" / "explore_demo.html"
SMALL = random_curvature(make_units(6, 3, 8), seed=5)
expect.set_options(timeout=10_000)  # the page draws when it finds the time


def test_page_of_an_8b_is_one_small_file(tmp_path: Path) -> None:
    curvature = random_curvature(llama_8b_units(), positions=300)
    path = export_html(curvature, tmp_path / "page.html")
    assert path.stat().st_size < 2_500_000
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    assert "src=" not in text.split("<body>")[0]
    assert "default-src 'none'" in text
    packed = data_of(path)["lambda"]["_problem"]["matrix"]["$bytes"]
    triangle = np.frombuffer(base64.b64decode(packed), "<f4")
    np.testing.assert_array_equal(triangle, curvature.matrix[np.triu_indices(768)].astype("<f4"))


def test_a_refreshed_page_keeps_what_it_holds_and_gets_the_present_front_end(
    tmp_path: Path,
) -> None:
    name = "<!-- \\1 {css} & </script> </title>"  # nothing in a title is taken for a place to fill
    path = export_html(SMALL, tmp_path / "page.html", title=name)
    new, script = path.read_text(encoding="utf-8"), front("page.js")
    assert new.count(script) == 1
    path.write_text(new.replace(script, "old()"), encoding="utf-8")
    assert refresh_html(path).read_text(encoding="utf-8") == new
    foreign = new.replace("<title>", "<title><svg onload=a()>").replace("<small>", "<small><b>")
    path.write_text(foreign, encoding="utf-8")
    text = refresh_html(path).read_text(encoding="utf-8")
    assert "<svg onload" not in text
    assert "<small><b>" not in text
    path.write_text("<title>x</title>", encoding="utf-8")
    with pytest.raises(cl.InputError, match="not a page of export_html"):
        refresh_html(path)


def test_the_page_of_the_real_model_is_of_this_front_end_and_what_is_kept() -> None:
    page = SHIPPED.with_name("explore_smollm2.html")
    text = page.read_text(encoding="utf-8")
    for part in (front("page.js"), front("instrument.css")):
        assert part in text, "python -m cocurve_widgets.export notebooks/explore_*.html"
    assert page.stat().st_size < 2_000_000
    curvature = kept_curvature("smollm2")
    assert curvature is not None
    marks = data_of(page)["lambda"]["_marks"]["measured"]
    assert len(marks) == len({m["plan"] for m in marks}) > 200
    plan = cl.solve_greedy(curvature, 0.2, 0.0)
    known = kept_plans(curvature)
    assert known is not None
    (kept, *_) = [k for k in known.plans if k.selection.fingerprint == plan.fingerprint]
    (found,) = (m for m in marks if m["plan"] == plan_mark(plan.pruned))
    assert found["risk"] == pytest.approx(kept.kl["c4"].mean())
    assert found["by_row"] == pytest.approx(kept.kl["c4"].tolist(), rel=1e-4)
    assert (found["replies"], found["abilities"]) == (
        list(kept.replies),
        {name: list(pair) for name, pair in kept.right.items()},
    )


def test_the_shipped_page_is_of_this_front_end_and_this_model() -> None:
    text = SHIPPED.read_text(encoding="utf-8")
    for part in (front("page.js"), front("instrument.css")):
        assert part in text, "run: python -m data.make.measure_curvature --page-only"
    assert SHIPPED.stat().st_size < 1_000_000
    packed = data_of(SHIPPED)["lambda"]["_problem"]
    assert len(packed["costs"]) == 160


def test_the_shipped_page_has_the_damage_of_every_plan_at_its_ratios() -> None:
    state = data_of(SHIPPED)["lambda"]
    packed = state["_problem"]
    packed["matrix"] = base64.b64decode(packed["matrix"]["$bytes"])
    units = cl.enumerate_units(cl.load_model("demo")[0])
    curvature = cl.Curvature(matrix_of(packed), units)
    known = {m["plan"]: m for m in state["_marks"]["measured"]}
    ratios = {round(m["ratio"], 4) for m in known.values() if m["strength"] is not None}
    assert ratios == {0.05, 0.1, 0.2, 0.3, 0.4, 0.5}
    assert (state["protect_first"], state["protect_last"]) == (1, 1)
    opening = cl.opening_guards(units)
    for ratio, guards in itertools.product(ratios, (cl.Guards(), opening)):
        for segment in cl.lambda_path(curvature, ratio, guards).segments:
            found = known[plan_mark(segment.selection.pruned)]
            assert found["rows"] == 64
            assert found["risk"] > found["error"] > 0
            assert {asked for _, asked in found["abilities"].values()} == {20}
    edges = [m["edge"] for m in known.values() if m["edge"] is not None]
    assert len(edges) == 40
    for edge in edges:
        u, v = edge["units"]
        one, two, both = (known[plan_mark(part)]["risk"] for part in ([u], [v], [u, v]))
        assert edge["difference"] == pytest.approx(both - one - two)
        assert edge["error"] > 0
    dense = known[plan_mark([])]
    assert dense["risk"] == 0
    assert len(dense["abilities"]) == 5


def test_titles_and_measured_plans_are_escaped_and_kept(tmp_path: Path) -> None:
    session = Session(SMALL)
    plan = cl.solve_greedy(SMALL, 0.2, 0.5)
    session.add_measured(Measured(plan, 0.25, float("nan"), "</script>"))
    path = export_html(SMALL, tmp_path / "a.html", title="<b>H & co</b>", session=session)
    assert "&lt;b&gt;H &amp; co" in path.read_text(encoding="utf-8")
    (mark,) = data_of(path)["lambda"]["_marks"]["measured"]
    assert (mark["risk"], mark["strength"]) == (0.25, 0.5)


@pytest.mark.parametrize("name", ["<!--<script>", "</script>", "<!--", "a < b \u2028"])
def test_no_name_changes_where_the_data_ends(tmp_path: Path, name: str) -> None:
    session = Session(SMALL)
    export_html(SMALL, tmp_path / "a.html", session=session)  # leaves the plan that it shows
    session.add_measured(Measured(session.selection, 0.25, 0.1, name))
    path = export_html(SMALL, tmp_path / "a.html", session=session)
    assert f"on {name}" in data_of(path)["lambda"]["status"]
    # "<!--<script>" makes </script> a part of the data, so the page would end with it
    _, _, rest = path.read_text(encoding="utf-8").partition('id="cocurve-data">')
    assert "<" not in rest[: rest.index("</script>")]


def test_a_bare_matrix_is_enough_and_no_widget_is_left_behind(tmp_path: Path) -> None:
    before = set(_instances)
    bare = cl.Curvature(SMALL.matrix, SMALL.units)  # no groups, no provenance
    assert export_html(bare, tmp_path / "page.html").exists()
    assert set(_instances) == before


# In a browser -----------------------------------------------------------------------------------


def enter(root: Any, label: str, value: object) -> None:
    root.get_by_label(label, exact=True).fill(str(value))
    root.get_by_label(label, exact=True).press("Enter")


def numbers(root: Any, selector: str, words: str, column: int) -> float:
    """A number in the first row with some words of a table."""
    row = root.locator(f"{selector} tr", has_text=words).first
    return float(str(row.locator("td").nth(column).text_content()).replace("−", "-"))


def every_part_of_the_slider_has_a_plan_of_its_own(
    slider: Any, root: Any, path: LambdaPath
) -> None:
    most = int(slider.get_attribute("max"))
    for k, segment in enumerate(path.segments):
        place = round((k + 0.5) / len(path) * most)
        slider.evaluate(
            "(s, place) => { s.value = place; s.dispatchEvent(new Event('input')); }", place
        )
        shown = root.get_attribute("data-pruned").split()
        assert sorted(map(int, shown)) == sorted(segment.selection.pruned)
    assert len(path) > 3
    slider.focus()
    root.page.keyboard.press("ArrowLeft")  # one key press is one plan
    shown = root.get_attribute("data-pruned").split()
    assert sorted(map(int, shown)) == sorted(path.segments[-2].selection.pruned)


@in_browser
@pytest.mark.parametrize("size", ["small", "8b"])
def test_the_page_solves_offline_as_python_does(lab: Lab, tmp_path: Path, size: str) -> None:
    curvature = SMALL if size == "small" else random_curvature(llama_8b_units(), positions=300)
    seen = cl.Curvature(matrix_of(pack_problem(curvature)), curvature.units)
    guards = cl.opening_guards(curvature.units)
    with lab.page(export_html(curvature, tmp_path / "page.html")) as page:
        root = page.locator(".cocurve").first
        root.wait_for()
        for strength, percent in ((0, 50), (1, 35), (0.3, 20)):
            enter(root, "lambda, typed", strength)
            enter(root, "ratio in percent, typed", percent)
            plan = cl.solve_greedy(seen, percent / 100, strength, guards)
            wanted = " ".join(map(str, plan.pruned))
            expect(root).to_have_attribute("data-pruned", wanted)
        root.locator(".cc-more > summary").click()
        cap = root.get_by_label("layer cap", exact=True)
        cap.select_option("share")
        enter(root, "size of the cap", 0.1)
        limit = reachable_ratio(curvature.units, replace(guards, layer_cap=0.1), 0.2)
        expect(root.locator(".cc-error")).to_contain_text(f"{100 * limit:.2f} %")
        expect(root.locator(".cc-error")).to_contain_text("or loosen “layer cap”.")
        cap.select_option("none")
        expect(root).to_have_attribute("data-pruned", wanted)

        slider = root.get_by_label("lambda, weight of the edges")
        slider.focus()
        key = root.locator(".cc-key")
        eventually(key.text_content, lambda text: "being computed" not in text, 90)
        page.keyboard.press("PageUp")
        expect(root).not_to_have_attribute("data-pruned", wanted)
        if size == "small":
            every_part_of_the_slider_has_a_plan_of_its_own(
                slider, root, cl.lambda_path(seen, 0.2, guards)
            )
        root.locator("canvas[role=img]").first.focus()
        page.keyboard.press("ArrowDown")
        name = curvature.units[0].name
        expect(root.locator(".cc-card")).to_contain_text(name)
        expect(page.locator(".cocurve").nth(1)).to_contain_text(name)  # the other view follows


@in_browser
def test_damage_plans_by_hand_and_pairs_need_no_kernel(lab: Lab, tmp_path: Path) -> None:
    session, path = Session(SMALL), cl.lambda_path(SMALL, 0.3, cl.opening_guards(SMALL.units))
    plans = [cl.Selection.from_pruned(SMALL.units, []), *(s.selection for s in path.segments)]
    for k, plan in enumerate(plans):
        right = {"sums": (20 - k, 20)}
        session.add_measured(Measured(plan, 0.1 * k, 0.01, "a text", abilities=right, rows=64))
    for part, risk, edge in (([2], 0.1, None), ([9], 0.2, None), ([2, 9], 0.7, (0.4, 0.05))):
        plan = cl.Selection.from_pruned(SMALL.units, part)
        session.add_measured(Measured(plan, risk, 0.01, "a text", rows=64, edge=edge))
    with lab.page(export_html(SMALL, tmp_path / "page.html", session=session)) as page:
        root, keyboard = page.locator(".cocurve").first, page.keyboard
        rows = root.locator(".cc-four tbody tr")
        kl, right = (rows.nth(k).locator("td") for k in (0, 2))
        enter(root, "lambda, typed", 1)
        expect(kl.nth(2)).to_contain_text("off")  # nobody measured at 20 %: the nearest plan
        expect(kl.nth(2)).to_have_class("cc-stand-in")
        root.get_by_label("ratio, share of cost to remove").press("ArrowRight")  # the next measured
        last = len(plans) - 1
        expect(kl.nth(2)).to_have_text(f"{0.1 * last:.3f} ± 0.010kept, 64 rows")
        expect(right.nth(0)).to_contain_text("20 of 20")
        expect(right.nth(2)).to_contain_text(f"{20 - last} of 20")
        root.locator(".cc-more > summary").click()
        expect(root.get_by_label("measure automatically")).to_be_hidden()

        unit_map = root.locator("canvas[role=img]").first
        clicks = root.get_by_label("a click on a unit")

        def take_two() -> None:
            unit_map.click(position={"x": 80, "y": 8})
            unit_map.focus()
            keyboard.press("ArrowDown")
            keyboard.press("Enter")

        clicks.select_option("remove")
        root.get_by_role("button", name="Start empty").click()
        take_two()
        expect(root.locator(".cc-four thead")).to_contain_text("A: your plan")
        predicted = numbers(root, ".cc-four tbody", "predicted", 1)
        assert predicted == pytest.approx(SMALL.risk([0, 1]), rel=5e-3)

        clicks.select_option("pair")
        keyboard.press("Escape")
        take_two()
        edge = root.locator(".cc-edge")
        expect(edge).to_contain_text(f"{SMALL.units[0].name} and {SMALL.units[1].name}")
        label = str(edge.locator("svg").get_attribute("aria-label"))
        found = re.search(r"edge: together − sum: predicted (−?[\d.e-]+)", label)
        assert found is not None
        said = float(found[1].replace("−", "-"))
        assert said == pytest.approx(SMALL.matrix[0, 1], rel=5e-3)
        expect(edge).to_contain_text("not measured")
        page.evaluate("() => { location.hash += '&pair=2,9'; }")
        expect(edge).to_contain_text("measured +0.400 ± 0.050")
        expect(edge).to_contain_text("Together they cost more than alone")


@in_browser
def test_map_and_bridges_follow_the_plan_and_a_brush_is_seen_everywhere(
    lab: Lab, tmp_path: Path
) -> None:
    file = export_html(SMALL, tmp_path / "page.html")
    assert "pairs" not in data_of(file)["map"]  # made from H, which is there
    with lab.page(file) as page:
        plan, bridges, heat = page.locator(".cocurve").all()
        enter(plan, "ratio in percent, typed", 30)
        wanted = cl.solve_greedy(SMALL, 0.3, 0.5, cl.opening_guards(SMALL.units))
        count = len(wanted)
        expect(heat).to_contain_text(f"plan: {count} of {count} units removed")
        risk = numbers(heat, ".cc-card table", "predicted risk so far", 1)
        assert risk == pytest.approx(wanted.predicted_risk, rel=5e-3)
        heat.get_by_role("button", name="◀ step").click()
        expect(heat).to_contain_text(f"plan: {count - 1} of {count} units removed")

        legend = plan.locator(".cc-legend", has_text="only in B").get_by_text("brushed")
        expect(legend).to_be_hidden()
        unit_map = plan.locator("canvas[role=img]").first
        before = unit_map.evaluate("canvas => canvas.toDataURL()")
        heat.get_by_role("button", name="Brush the plan").click()
        expect(legend).to_be_visible()
        expect(bridges).to_contain_text(f"{count - 1} units brushed")
        assert unit_map.evaluate("canvas => canvas.toDataURL()") != before
