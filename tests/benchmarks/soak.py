"""A soak: for minutes on end, what must hold on every run: kills, two builds, threads, instruments.

python tests/benchmarks/soak.py --minutes 10        # exit code 1 if anything failed
python tests/benchmarks/soak.py --minutes 0         # one round, for checking the script

Each round tries everything once, with random times and values drawn from --seed:

- killed: `cocurve build` is killed (SIGKILL) up to three times and run again. H must be that of an
  uninterrupted build to the bit, and the folder must hold nothing else.
- two at once: two builds in one folder, one of which may be killed; the same must hold.
- threads: four threads build H of one model and measure plans on it; all bits must be the same.
- instruments: all instruments are made, moved and left or closed, as by running a cell again. The
  plan must be that of the solver, the text the same every time, and no widget may be left over.

At the end it prints what was tried and held, and memory and open files after the first round and at
the end. Open files may not grow, and memory by no more than MOST_GROWTH.
"""

from __future__ import annotations

import gc
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import torch
from ipywidgets.widgets.widget import _instances

from cocurve_widgets import BridgeExplorer, FidelityScatter, GenerationCompare, LambdaExplorer
from cocurve_widgets import instrument as instruments

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.estimator.estimate import files_in
from helpers.benchmarks import arguments, flag, seconds
from helpers.demo_rows import demo_rows

BUILD = (
    "cocurve_lab build demo --device cpu --threads 1 --sequences 8 --length 64 "
    "--checkpoint-seconds 0 --out"
)
MOST_GROWTH = 150e6  # bytes: a model or the activations of a build left behind in a few rounds
PATIENCE = 300.0  # seconds after which something hangs


class Bench:
    """What the trials share: a model, texts, and an uninterrupted build of its H."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.draw = place, np.random.default_rng(seed)
        self.counts: Counter[str] = Counter()
        folder = self.folder()
        self.seconds, _ = seconds(lambda: wait_for(self.start(folder)))
        self.files, self.whole = content(folder)
        self.model, self.tokenizer = cl.load_model("demo", device="cpu")
        self.units = cl.enumerate_units(self.model)
        self.rows = demo_rows("calibration", 2, self.tokenizer)
        self.held_out = demo_rows("held_out", 2, self.tokenizer)
        self.plans = [cl.solve_greedy(self.whole, ratio) for ratio in (0.1, 0.3)]
        self.expected = [self.measure(task) for task in range(3)]
        self.text: tuple[str, str] | None = None  # of the first cell
        self.widgets = 0

    def folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.place))

    def start(self, folder: Path) -> subprocess.Popen[str]:
        """Start a build of the demo model in a process of its own."""
        self.counts["builds"] += 1
        command = [sys.executable, "-m", *shlex.split(BUILD), str(folder)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, **quiet)

    def kill(self, build: subprocess.Popen[str], folder: Path) -> None:
        """Kill a build at a random time of its run, unless it is done before."""
        # half of its time it loads packages and leaves nothing: three of four kills come later
        if self.draw.random() < 0.75:
            while build.poll() is None and not any(folder.iterdir()):
                time.sleep(0.01)
        try:
            build.wait(self.draw.uniform(0, 0.5) * self.seconds)
        except subprocess.TimeoutExpired:
            build.kill()
            build.communicate()
            self.counts["killed"] += 1
            self.counts["resumable"] += any(folder.glob("*.ckpt"))

    def measure(self, task: int) -> bytes:
        """The bits of H (task 0), or of the measured KL of a plan."""
        if task == 0:
            found = cl.estimate_curvature(self.model, self.units, self.rows, progress=False)
            return found.matrix.tobytes()
        return np.float64(cl.pruning_risk(self.model, self.plans[task - 1], self.rows)).tobytes()


# Trials -------------------------------------------------------------------------------------------


def killed(bench: Bench) -> None:
    folder = bench.folder()
    for _ in range(bench.draw.integers(1, 4)):
        bench.kill(bench.start(folder), folder)
    wait_for(bench.start(folder))
    require_same(bench, folder)


def two_at_once(bench: Bench) -> None:
    folder = bench.folder()
    first, second = bench.start(folder), bench.start(folder)
    if bench.draw.random() < 0.5:
        bench.kill(first, folder)
        first = bench.start(folder)
    wait_for(first)
    wait_for(second)
    require_same(bench, folder)


def threads(bench: Bench) -> None:
    tasks = bench.draw.permutation([0, 0, 1, 2]).tolist()
    with ThreadPoolExecutor(len(tasks)) as pool:
        found = list(pool.map(bench.measure, tasks))
    for task, bits in zip(tasks, found, strict=True):
        require(bits == bench.expected[task], f"task {task} has other bits on four threads")


def rerun_cell(bench: Bench) -> None:
    bench.counts["cells"] += 1
    run = str(bench.counts["cells"])
    instruments._current_cell = lambda: ("cell", run)  # as in a notebook, where the kernel says it
    curvature, model = bench.whole, bench.model
    strength, ratio = bench.draw.uniform(0, 1), bench.draw.uniform(0.05, 0.5)
    plan = cl.solve_greedy(curvature, ratio, strength)

    explorer = LambdaExplorer(curvature)
    for _ in range(20):
        explorer.interaction_strength = bench.draw.uniform(0, 1)
        explorer.ratio = bench.draw.uniform(0.05, 0.5)
    explorer.interaction_strength, explorer.ratio = strength, ratio
    shown = explorer.selection
    require(shown.pruned == plan.pruned, f"the explorer shows {shown}, the solver finds {plan}")
    bridges = BridgeExplorer(curvature)
    bridges.selected_unit = int(bench.draw.integers(len(bench.units)))
    scatter = FidelityScatter(curvature, model, bench.held_out)
    scatter.measure(plan)
    given = {"selection": bench.plans[1], "max_new_tokens": 8}
    writer = GenerationCompare(model, bench.tokenizer, curvature, **given)
    text = writer.generate()
    made = [explorer, bridges, scatter, writer]
    require(explorer.session.worker.join(PATIENCE), "the instruments' thread hangs")
    for one in made:
        require(not one.error, f"{type(one).__name__} says {one.error!r}")
    require(explorer.selected_unit == bridges.selected_unit, "the views mark other units")
    bench.text = bench.text or text
    require(text == bench.text, f"the text is {text}, not {bench.text}")
    gc.collect()
    open_now = len(_instances)
    bench.widgets = bench.widgets or open_now
    require(open_now <= bench.widgets, f"{open_now} widgets, not {bench.widgets}: some were left")
    if bench.draw.random() < 0.5:
        for one in made:
            one.close()


TRIALS: dict[str, Callable[[Bench], object]] = {
    "killed": killed,
    "two at once": two_at_once,
    "threads": threads,
    "instruments": lambda bench: [rerun_cell(bench) for _ in range(5)],
}


# Checks -------------------------------------------------------------------------------------------


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def wait_for(build: subprocess.Popen[str]) -> None:
    try:
        _, said = build.communicate(timeout=PATIENCE)
    finally:
        build.kill()  # does nothing to one that has ended
    require(build.returncode == 0, f"a build ends with {build.returncode}: {said[-500:]}")


def content(folder: Path) -> tuple[list[str], cl.Curvature]:
    """The names in the folder of a build, and its H."""
    names, found = sorted(file.name for file in folder.iterdir()), files_in(folder).whole
    require(len(found) == 1, f"one H was expected in {names}")
    return names, cl.Curvature.load(found[0])


def require_same(bench: Bench, folder: Path) -> None:
    names, curvature = content(folder)
    same = np.array_equal(curvature.matrix, bench.whole.matrix)
    same &= np.array_equal(curvature.group_grams, bench.whole.group_grams)
    require(same, "H has other bits than that of an uninterrupted build")
    require(names == bench.files, f"left behind: {sorted(set(names) - set(bench.files))}")


def resources() -> tuple[int, int]:
    """Bytes of memory and number of open files of this process."""
    gc.collect()
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds()


# The run ------------------------------------------------------------------------------------------


def main() -> int:
    options = arguments(
        __doc__,
        minutes=flag(10.0, "least time (%(default)s)"),
        seed=flag(0, "of the random times and values (0)"),
    )
    torch.set_num_threads(1)  # bits depend on the number of threads
    end = time.monotonic() + 60 * options.minutes
    tried, held = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        bench, before = Bench(Path(place), options.seed), None
        while before is None or time.monotonic() < end:
            for name, trial in TRIALS.items():
                tried[name] += 1
                try:
                    trial(bench)
                    held[name] += 1
                except Exception:
                    print(f"{name}, round {tried[name]}: {traceback.format_exc()}", flush=True)
            before = before or resources()
    after = resources()
    for name in TRIALS:
        print(f"{name}: {tried[name]} tried, {held[name]} held")
    builds, kills, resumable = (bench.counts[name] for name in ("builds", "killed", "resumable"))
    print(f"{builds} builds, {kills} killed, of which {resumable} left a checkpoint to go on from")
    print(f"memory: {before[0] / 1e6:.0f} MB after one round, {after[0] / 1e6:.0f} MB at the end")
    print(f"open files: {before[1]} after one round, {after[1]} at the end")
    grown = after[0] - before[0] > MOST_GROWTH or after[1] > before[1]
    return int(grown or held != tried)


if __name__ == "__main__":
    sys.exit(main())
