"""How fast the instruments answer, in a real JupyterLab and Chromium.

    python tests/benchmarks/bench_widgets.py

    python tests/benchmarks/bench_widgets.py --parts damage

Kernel side: what one slider event costs in Python. Key to painted: from the key press in the page
to the first frame after the picture was drawn. Curvatures are random, in the shapes of an 8B (768
units) and a 70B (1,920 units, where the kernel solves). Times are of this machine, in one run.

The part "damage" has a model: a random Llama of 768 units, tiny in width, so that KL and right
answers of plans A and B are really measured while keys are pressed. Its H is random, which the page
cannot tell. First KL: on the demo model, from the key press to the first measured KL of the new
plan on the screen.

The part "kept" moves lambda on SmolLM2, whose measured plans ship: in the page and in a notebook.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nbformat
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.models.identity import demo_folder
from cocurve_widgets import LambdaExplorer, Session
from helpers.benchmarks import arguments, flag, seconds
from helpers.lab import Lab, Visit, running_lab
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer
from helpers.waiting import eventually

SLIDER = "lambda, weight of the edges"
PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "explore_smollm2.html"
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

# Remembers when a key went down, and when the damage panel first shows a KL of the plan it led to.
FIRST_KL = """root => {
  window.first = {down: 0, before: '', times: []};
  const panel = root.querySelector('.cc-four');
  document.addEventListener('keydown', () => {
    first.before = root.dataset.pruned;
    first.down = performance.now();
  }, true);
  new MutationObserver(() => {
    if (!first.down || root.dataset.pruned === first.before) return;
    const cell = panel.querySelectorAll('tbody tr:first-child td')[2];  // the KL of B
    if (!/[0-9]/.test(cell.textContent) || cell.className) return;  // not one that stands in
    const down = first.down;
    first.down = 0;
    requestAnimationFrame(() => setTimeout(() => first.times.push(performance.now() - down)));
  }).observe(root, {attributes: true, childList: true, characterData: true, subtree: true});
}"""
# From a key or a move to the frame after the rows of another plan are there; frames in which a
# measured cell is empty.
KEPT = """root => {
  window.kept = {down: 0, times: [], empty: 0};
  let before = root.dataset.pruned;
  for (const name of ['keydown', 'input']) {
    root.addEventListener(name, () => { kept.down = performance.now(); }, true);
  }
  new MutationObserver(() => {
    if (root.dataset.pruned === before) return;
    before = root.dataset.pruned;
    const rows = root.querySelectorAll('.cc-four tbody tr');
    const cells = [0, 2].flatMap(row => [...rows[row].querySelectorAll('td')].slice(1, 3));
    const whole = cells.every(cell => /[^\\s–…]/.test(cell.textContent));
    kept.empty += whole ? 0 : 1;
    const { down } = kept;
    requestAnimationFrame(() => setTimeout(() => kept.times.push(performance.now() - down)));
  }).observe(root, {attributes: true});
}"""
PACE = 900  # ms between keys: the next one comes after a plan is measured


def main() -> None:
    parts = ["kernel", "explorers", "damage", "kept"]
    options = arguments(__doc__, repeats=40, parts=flag(parts, choices=parts))
    repeats = options.repeats
    print(f"{repeats} events each; median (min to max)\n")
    if "kernel" in options.parts:
        for size in (768, 1920):
            kernel_side(size, repeats)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_lab(Path(folder)) as lab,
    ):
        if "explorers" in options.parts:
            for size in (768, 1920):
                in_browser(lab, "LambdaExplorer", size, repeats)
            in_browser(lab, "BridgeExplorer", 1000, repeats)
        if "damage" in options.parts:
            damage_in_browser(lab, repeats)
            first_kl_in_browser(lab, repeats)
        if "kept" in options.parts:
            with lab.page(PAGE) as page:
                page.get_by_role("button", name="Skip").click()
                kept_values(page, "page", repeats)
            cell = "from cocurve_lab.extensions.pretrained.kept import kept_curvature\n"
            cell += "w = bench_widgets.LambdaExplorer(kept_curvature('smollm2'))\nw"
            with lab.open(notebook(Path(folder), "kept", [cell])) as visit:
                page, _, _ = explorer_of(visit)
                kept_values(page, "notebook", repeats)


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
            took, _ = seconds(lambda: setattr(explorer, name, float(value)))  # noqa: B023
            times.append(1000 * took)
        print(f"LambdaExplorer, M = {size:>4}: kernel side of one {name} event {show(times[1:])}")
    explorer.session.worker.join(120)
    explorer.close()


def in_browser(lab: Lab, name: str, size: int, repeats: int) -> None:
    """First picture, payload, key to painted, bytes per step, and a drag of 60 moves."""
    with lab.open(of_random(lab.folder.parent, name, size)) as visit:
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
        of_lambda = name == "LambdaExplorer"
        slider = root.get_by_label(SLIDER) if of_lambda else root.locator("input[type=range]").first
        slider.focus()
        before = visit.received
        times = pressed(page, [*["ArrowLeft"] * 10, *["ArrowRight"] * 10], repeats)
        steps = (visit.received - before) / 1000 / repeats
        print(f"{name}, M = {size:>4}: key to painted {show(times)}; {steps:.1f} kB per step")
        if of_lambda:
            drag(visit, root, slider, size)


def pressed(
    page: Any, keys: Sequence[str], repeats: int, pace: int = 60, probe: str = "probe"
) -> list[float]:
    """Press keys in turn, each once the one before is painted and `pace` ms went by; the times."""
    for step in range(repeats):
        page.keyboard.press(keys[step % len(keys)])
        page.wait_for_function(f"() => {probe}.times.length > {step}", timeout=10_000)
        page.wait_for_timeout(pace)
    return page.evaluate(f"() => {probe}.times")


def damaged_explorer() -> LambdaExplorer:
    """A random Llama of 24 layers with 16 heads and 16 FFN groups each: 768 units; A is pinned."""
    model = tiny_model(
        heads="mha",
        layers=24,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    units = cl.enumerate_units(model, ffn_groups=16)
    curvature = random_curvature(units, positions=2 * len(units), shared=0.8)
    text, tokenizer = tiny_text(16, 48), word_tokenizer()
    asked = [Question(name, f"w{n}", f"w{n + 1}") for name in ("one", "two") for n in range(4)]
    explorer = LambdaExplorer(
        curvature, model=model, tokenizer=tokenizer, held_out=text, questions=asked, ratio=0.4
    )  # 40 % has more plans than there are moves
    explorer.pinned = explorer.selection
    return explorer


def demo_explorer() -> LambdaExplorer:
    """The explorer of notebook 02, on the H that ships; plan A is pinned."""
    curvature = cl.Curvature.load(demo_folder() / "H_16_rows.npz")
    model, tokenizer = cl.load_model("demo")
    _, held_out = cl.default_calibration("demo", tokenizer, 16, 16, positions_per_sequence="all")
    questions = cl.demo_questions(4)
    explorer = LambdaExplorer(
        curvature, model=model, tokenizer=tokenizer, held_out=held_out, questions=questions
    )
    explorer.pinned = explorer.selection
    return explorer


def damage_in_browser(lab: Lab, repeats: int) -> None:
    """Key to painted at M = 768 with A pinned, while the damage of A and B is measured."""
    with lab.open(
        notebook(lab.folder.parent, "damage", ["w = bench_widgets.damaged_explorer()\nw"])
    ) as visit:
        page, root, slider = explorer_of(visit)
        size = int(visit.ask("len(w.curvature.units)"))
        page.evaluate(PROBE, root.element_handle())
        visit.becomes("w.damage.busy", "False")
        slider.focus()
        times = pressed(page, ["ArrowLeft"], repeats, PACE)  # plans that nothing has measured
        print(
            f"LambdaExplorer, M = {size:>4}, plan A pinned, damage panel: key to painted "
            f"{show(times)}"
        )


def first_kl_in_browser(lab: Lab, repeats: int) -> None:
    """From a key press to the first measured KL of the plan it leads to, on the demo model."""
    with lab.open(
        notebook(lab.folder.parent, "first_kl", ["w = bench_widgets.demo_explorer()\nw"])
    ) as visit:
        page, root, slider = explorer_of(visit)
        page.evaluate(FIRST_KL, root.element_handle())
        done = 0
        for ratio in (0.2, 0.3, 0.4, 0.25, 0.35, 0.5, 0.15, 0.45):  # each has plans of its own
            assert visit.ask(f"setattr(w, 'ratio', {ratio})") == "None"
            assert visit.ask("setattr(w, 'interaction_strength', 1.0)") == "None"
            page.wait_for_timeout(500)
            visit.becomes("w.flips_stale", "False")
            # without the last plan, the diagonal one, which may have been plan A
            for _ in range(min(repeats - done, int(visit.ask("len(w.flips)")) - 1)):
                visit.becomes("w.damage.busy", "False")
                slider.focus()
                page.keyboard.press("ArrowLeft")
                page.wait_for_function(f"() => first.times.length > {done}", timeout=30_000)
                done += 1
        times = page.evaluate("() => first.times")
        print(f"LambdaExplorer, demo model: key to first measured KL {show(times)}, {done} moves")


def kept_values(page: Any, where: str, repeats: int) -> None:
    """SmolLM2's kept values: from a key to the rows of the next plan, and in a drag of 60 moves."""
    root = page.locator(".cocurve").first
    key = root.locator(".cc-key")
    eventually(key.text_content, lambda text: "being computed" not in text, 120)
    page.evaluate(KEPT, root.element_handle())
    slider = root.get_by_label(SLIDER)
    slider.focus()
    before = str(root.get_attribute("data-pruned"))
    page.keyboard.press("End")
    eventually(lambda: root.get_attribute("data-pruned"), lambda now: now != before)
    page.evaluate("() => { kept.times.length = 0; }")
    keys = [*["ArrowLeft"] * 5, *["ArrowRight"] * 5]
    times = pressed(page, keys, repeats, pace=0, probe="kept")
    page.evaluate("() => { kept.times.length = 0; }")
    sixty_moves(page, slider, lambda move: 0.5 + 0.4 * np.sin(move / 9))
    dragged, empty = page.evaluate("() => [kept.times, kept.empty]")
    print(
        f"LambdaExplorer, SmolLM2, {where}: key to kept values {show(times)}; drag of 60 moves "
        f"{show(dragged)}, {len(dragged)} plans; {empty} frames with an empty cell"
    )


def explorer_of(visit: Visit) -> tuple[Any, Any, Any]:
    """Run the cells; the page, the explorer and its slider once all its plans are known."""
    run_cells(visit, 0, 2)
    root = visit.page.locator(".cocurve")
    visit.page.wait_for_selector("[data-paints]")
    visit.becomes("w.flips_stale", "False")
    return visit.page, root, root.get_by_label(SLIDER)


def drag(visit: Visit, root: Any, slider: Any, size: int) -> None:
    """60 moves in two seconds; how long the kernel takes to hold the last value."""
    begun = time.perf_counter()
    sixty_moves(visit.page, slider, lambda move: 0.05 + 0.85 * move / 60)
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


def sixty_moves(page: Any, slider: Any, place: Callable[[int], float]) -> None:
    """Drag a slider for two seconds: `place` is where a move goes, from 0 to 1 of its width."""
    box = slider.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * place(0), middle)
    page.mouse.down()
    begun = time.perf_counter()
    for move in range(60):
        page.mouse.move(box["x"] + box["width"] * place(move), middle)
        time.sleep(max(0.0, begun + (move + 1) / 30 - time.perf_counter()))
    page.mouse.up()


def of_random(folder: Path, name: str, size: int) -> Path:
    """A notebook that makes a random curvature in one cell and the instrument in another."""
    made = f"import cocurve_widgets\nc = bench_widgets.curvature_of({size}); c.risk([0])"
    return notebook(folder, f"{name}_{size}", [made, f"w = cocurve_widgets.{name}(c)\nw"])


def notebook(folder: Path, name: str, cells: list[str]) -> Path:
    """A notebook of these cells, after one that imports this file."""
    here = Path(__file__).resolve().parent
    first = (
        f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\nimport bench_widgets"
    )
    cells = [first, *cells]
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    content.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    path = folder / f"{name}.ipynb"
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


if __name__ == "__main__":
    main()
