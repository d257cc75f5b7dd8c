"""How fast the instruments answer, in a real JupyterLab and Chromium.

    python tests/benchmarks/bench_widgets.py

Kernel side: what one slider event costs in Python. Key to painted: from the key press in the page
to the first frame after the picture was drawn. Curvatures are random, in the shapes of an 8B (768
units) and a 70B (1,920 units, where the kernel solves). Times are of this machine, in one run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_widgets import LambdaExplorer, Session
from helpers.lab import Lab, Visit, running_lab
from helpers.problems import make_units, random_curvature

SHAPES = {768: (32, 8, 16), 1920: (80, 8, 16), 1000: (40, 9, 16)}

# Remembers when a key went down, and the first frame after the next painting.
PROBE = """root => {
  window.probe = {down: 0, times: [], stop: null};
  document.addEventListener('keydown', () => { probe.down = performance.now(); }, true);
  const seen = new MutationObserver(() => {
    // what is drawn while the kernel still solves is not the answer
    if (!probe.down || root.dataset.stale === 'true') return;
    const down = probe.down;
    probe.down = 0;
    requestAnimationFrame(() => setTimeout(() => probe.times.push(performance.now() - down)));
  });
  seen.observe(root, {attributes: true, subtree: true,
    attributeFilter: ['data-paints', 'data-draws']});
}"""

# Seconds from running the third cell to the frame after its first picture.
FIRST_PICTURE = """async () => {
  const old = document.querySelector('.cocurve canvas[data-draws]');
  const begun = performance.now();
  jupyterapp.shell.currentWidget.content.activeCellIndex = 2;
  jupyterapp.commands.execute('notebook:run-cell');
  let found = null;
  while (!found || found === old) {
    await new Promise(done => requestAnimationFrame(done));
    found = document.querySelector('.cocurve canvas[data-draws]');
  }
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  return (performance.now() - begun) / 1000;
}"""
FIRST = 7  # runs of the cell of a map
RATIO = 0.2  # of the plan that it plays


def main() -> None:
    options = parser().parse_args()
    print(f"{options.repeats} events each; median (min to max)\n")
    for size in (768, 1920):
        kernel_side(size, options.repeats)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_lab(Path(folder)) as lab,
    ):
        for size in (768, 1920):
            in_browser(lab, "LambdaExplorer", size, options.repeats)
        in_browser(lab, "BridgeExplorer", 1000, options.repeats)
        for size in (768, 1920):
            map_in_browser(lab, size, options.repeats)


def curvature_of(size: int) -> cl.Curvature:
    layers, attention, ffn = SHAPES[size]
    units = make_units(layers, attention, ffn, 5_242_880, 11_010_048)
    return random_curvature(units, positions=2 * size, shared=0.8)


def kernel_side(size: int, repeats: int) -> None:
    """One event of each slider: selection, curves, map."""
    curvature = curvature_of(size)
    explorer = LambdaExplorer(curvature, session=Session(curvature))
    rng = np.random.default_rng(0)
    for name, high in (("interaction_strength", 1.0), ("ratio", 0.6)):
        times = []
        for value in rng.uniform(0, high, repeats + 1):
            begun = time.perf_counter()
            setattr(explorer, name, float(value))
            times.append(1000 * (time.perf_counter() - begun))
        print(f"LambdaExplorer, M = {size:>4}: kernel side of one {name} event {show(times[1:])}")
    explorer.session.worker.join(120)
    explorer.close()


def in_browser(lab: Lab, name: str, size: int, repeats: int) -> None:
    """First picture, payload, key to painted, bytes per step, and a drag of 60 moves."""
    with lab.open(notebook(lab.folder.parent, name, size)) as visit:
        page = visit.page
        run_cells(visit, 0, 2)
        before = visit.received
        begun = time.perf_counter()
        run_cells(visit, 2, 3)
        root = page.locator(".cocurve")
        page.wait_for_selector("[data-paints], [data-draws]")
        first = time.perf_counter() - begun
        page.wait_for_timeout(1500)
        print(
            f"{name}, M = {size:>4}: first picture {first:.2f} s after the cell was run, "
            f"{(visit.received - before) / 1e6:.2f} MB received"
        )
        page.evaluate(PROBE, root.element_handle())
        slider = root.locator("input[type=range]").first
        slider.focus()
        before = visit.received
        for step in range(repeats):
            page.keyboard.press("ArrowLeft" if step % 20 < 10 else "ArrowRight")
            page.wait_for_function(f"() => probe.times.length > {step}", timeout=10_000)
            page.wait_for_timeout(60)
        times = page.evaluate("() => probe.times")
        steps = (visit.received - before) / 1000 / repeats
        print(f"{name}, M = {size:>4}: key to painted {show(times)}; {steps:.1f} kB per step")
        if name == "LambdaExplorer":
            drag(visit, root, slider, size)


def map_in_browser(lab: Lab, size: int, repeats: int) -> None:
    """CurvatureMap: first picture over several runs, and key to painted by kind of key."""
    with lab.open(notebook(lab.folder.parent, "CurvatureMap", size)) as visit:
        page = visit.page
        run_cells(visit, 0, 2)
        before = visit.received
        times = [1000 * page.evaluate(FIRST_PICTURE) for _ in range(FIRST)]
        page.wait_for_timeout(1500)
        received = (visit.received - before) / 1e6 / FIRST
        print(
            f"CurvatureMap, M = {size:>4}: first picture {show(times)} after the cell was run, "
            f"{FIRST} runs, {received:.2f} MB received each"
        )
        plan = f"setattr(w.session, 'selection', bench_widgets.cl.solve_greedy(c, {RATIO}))"
        assert visit.ask(plan) == "None"
        root = page.locator(".cocurve")
        page.evaluate(PROBE, root.element_handle())
        canvas = root.locator("canvas")
        order = root.get_by_label("order of rows and columns")
        step = root.get_by_label("step of the plan")
        for what, target, keys in (
            ("zoom", canvas, ("+", "-")),
            ("move", canvas, ("Shift+ArrowRight", "Shift+ArrowLeft")),
            ("step of the plan", step, ("ArrowLeft", "ArrowRight")),
            ("order", order, ("ArrowDown", "ArrowUp")),
        ):
            if what == "move":
                canvas.press("+")
            page.wait_for_timeout(500)
            target.focus()
            page.evaluate("() => { probe.times = []; probe.down = 0; }")
            for k in range(repeats):
                page.keyboard.press(keys[k % 2])
                page.wait_for_function(f"() => probe.times.length > {k}", timeout=10_000)
                page.wait_for_timeout(60)
            times = show(page.evaluate("() => probe.times"))
            print(f"CurvatureMap, M = {size:>4}: {what}, key to painted {times}")


def drag(visit: Visit, root: Any, slider: Any, size: int) -> None:
    """60 moves in two seconds; how long the kernel takes to hold the last value."""
    page, box = visit.page, slider.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 20, middle)
    page.mouse.down()
    begun = time.perf_counter()
    for move in range(60):
        page.mouse.move(box["x"] + 20 + (box["width"] - 60) * move / 60, middle)
        time.sleep(max(0.0, begun + (move + 1) / 30 - time.perf_counter()))
    page.mouse.up()
    released = time.perf_counter()
    wanted = root.evaluate("root => root.dataset.pruned") if size <= 1200 else None
    code = "' '.join(map(str, w.selection.pruned)) if w.selection else ''"
    while True:
        found = visit.ask(code).strip("'")
        shown = root.evaluate("root => root.dataset.pruned")
        if found == shown and (wanted is None or found == wanted):
            break
        if time.perf_counter() - released > 20:
            raise SystemExit("kernel and page did not agree within 20 s of the release")
    waited = 1000 * (time.perf_counter() - released)
    print(
        f"LambdaExplorer, M = {size:>4}: 60 moves in {released - begun:.2f} s; kernel and page on "
        f"the same plan {waited:.0f} ms after the release (first look; a look takes tens of ms)"
    )


def notebook(folder: Path, name: str, size: int) -> Path:
    """A notebook that makes the curvature in one cell and the instrument in another."""
    here = Path(__file__).resolve().parent
    cells = [
        f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]",
        f"import bench_widgets, cocurve_widgets\n"
        f"c = bench_widgets.curvature_of({size}); c.risk([0])",
        f"w = cocurve_widgets.{name}(c)\nw",
    ]
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    content.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    path = folder / f"{name}_{size}.ipynb"
    nbformat.write(content, path)
    return path


def run_cells(visit: Visit, first: int, last: int) -> None:
    """Run some cells by number and wait for them."""
    for number in range(first, last):
        visit.page.evaluate(
            """async number => {
          jupyterapp.shell.currentWidget.content.activeCellIndex = number;
          await jupyterapp.commands.execute('notebook:run-cell');
        }""",
            number,
        )


def show(times: list[float]) -> str:
    return f"{np.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    return parser


if __name__ == "__main__":
    main()
