"""Builds in other processes: on the workers of a cluster, and in a quarter of the memory."""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.estimator.build import Measured
from cocurve_lab.extensions.big_models import cluster as distributed
from cocurve_lab.extensions.big_models.cluster import RayWorkers, RemoteWorker, parcel, unpack
from cocurve_lab.models.identity import fingerprint_model, fingerprint_tensor
from helpers.builds import ROWS, build_of_seven, require_same_bits
from helpers.tiny_models import tiny_model, tiny_text, write_model
from helpers.waiting import eventually


class Answer:
    """What a call of an actor will give: the arguments of the call."""

    def __init__(self, *given: int) -> None:
        self.given = given


class FewAnswers:
    """Enough of Ray to hand sequences out: the newest call is answered first."""

    most = 0

    def wait(self, answers: list[Answer], **_: Any) -> tuple[list[Answer], list[Answer]]:
        self.most = max(self.most, len(answers))
        return answers[-1:], answers[:-1]

    def get(self, answer: Answer) -> Any:
        if not answer.given:  # of `start`
            return 7
        number, batch = answer.given
        return Measured(number, {"risks": np.zeros(2)}, 0.0, batch, "cpu", "cpu")


def test_results_of_ray_come_in_order() -> None:
    call = SimpleNamespace(remote=Answer)
    actors = [SimpleNamespace(start=call, measure=call) for _ in range(3)]
    ray, asked, ticks = FewAnswers(), [2, 3, 5, 8, 9, *range(10, 40)], list[int]()
    found = list(RayWorkers(3)._in_order(ray, actors, asked, ticks.append))
    assert [measured.number for measured in found] == asked
    assert {measured.units_per_batch for measured in found} == {7}
    assert ticks == [2] * len(asked)
    assert ray.most == 3


# transformers gives a Qwen2 folder its own class of tokenizer, whatever its tokenizer.json
@pytest.mark.filterwarnings("ignore:the tokenizer of:UserWarning")
def test_a_model_travels_whole_or_by_its_place(tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    write_model(tmp_path / "model", model)
    sent = pickle.loads(pickle.dumps(parcel(model, str(tmp_path / "model"))))
    assert fingerprint_model(unpack(sent, "cpu")) == fingerprint_model(model)
    whole = unpack(pickle.loads(pickle.dumps(parcel(model, None))), "cpu")
    assert fingerprint_model(whole) == fingerprint_model(model)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    with pytest.raises(cl.MismatchError):
        unpack(parcel(tiny_model("qwen2", seed=1), str(tmp_path / "model")), "cpu")
    with pytest.raises(cl.InputError):
        unpack(parcel(model, str(tmp_path / "no-such")), "cpu")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(cl.InputError):
        RayWorkers(workers=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(cl.InputError):
        RayWorkers()


# Ray --------------------------------------------------------------------------------------------


def with_ray(test: Any) -> Any:
    """Slow, and blind to what Ray leaves behind of attempts to start."""
    blind = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    return pytest.mark.slow(blind(test))


def patient(find: Any, seconds: float = 240) -> Any:
    """`find`, asked again for a while where it finds nothing."""

    def found(*args: Any, **options: Any) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return find(*args, **options)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray on this machine, with two CPUs."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'cocurve-lab[ray]'")
    os.environ.pop("RAY_ADDRESS", None)  # of a cluster that is not ours
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_niceness": "0",  # else 15: its workers would wait for all other tests
        "RAY_agent_register_timeout_ms": "240000",
    }
    with warnings.catch_warnings():  # Ray does not wait for the processes it has told to end
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.MonkeyPatch.context() as patch:
            # Ray gives itself 30 seconds, too few on a busy machine
            patch.setattr(
                ray._private.services, "get_node", patient(ray._private.services.get_node)
            )
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=100 << 20,
                log_to_driver=False,
                logging_level="ERROR",
            )
        gc.collect()
    yield ray
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        ray.shutdown()
        gc.collect()


@with_ray
def test_workers_read_a_streamed_model_and_what_is_done_outlasts_a_kill_and_an_error(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill costs its sequence alone; an error arrives as what it is, and the rest is kept."""
    killed, log, path = tmp_path / "killed", tmp_path / "log", tmp_path / "build.ckpt"
    log.mkdir()

    class Mortal(RemoteWorker):  # defined here, so that it travels whole
        def measure(self, number: int, units_per_batch: int) -> Measured:
            (log / f"{number}-{os.getpid()}").touch()
            if number == 2 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), 9)
            if number == ROWS - 1:
                raise cl.NumericalError("not finite")
            return super().measure(number, units_per_batch)

    monkeypatch.setattr(distributed, "RemoteWorker", Mortal)
    write_model(tmp_path / "model")
    streamed, _ = cl.load_model(tmp_path / "model", device="cpu", stream=True)
    there, seen = RayWorkers(1, start_seconds=240.0, source=tmp_path / "model"), list[int]()
    with pytest.raises(cl.NumericalError):
        build_of_seven(
            streamed, checkpoint=path, workers=there, on_sequence=lambda b: seen.append(b.done)
        )
    assert seen == list(range(1, ROWS))
    runs = [file.name.split("-") for file in log.iterdir()]
    assert sorted(int(number) for number, _ in runs) == [0, 1, 2, *range(2, ROWS)]
    assert len({process for _, process in runs}) == 2
    monkeypatch.undo()
    require_same_bits(build_of_seven(checkpoint=path, num_threads=1), build_of_seven(num_threads=1))
    # the actor is ended: its CPU comes back
    eventually(lambda: cluster.available_resources().get("CPU"), lambda free: free == 2, seconds=30)


# Memory -------------------------------------------------------------------------------------------
#
# Limits and peaks are a process's own, so each run has one. What is imported late, and the thread
# that reads, are there before it starts. Files mapped into memory do not count.


needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux limits and counts like this"
)
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 512}


def in_a_process(script: str, folder: Path, *more: str) -> str:
    """What a script prints on the model of a folder."""
    command = [sys.executable, "-c", script, str(Path(__file__).parents[2]), str(folder), *more]
    # glibc keeps freed blocks below a size that grows to 32 MB: much here, nothing of a real model
    place = {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "1"}
    place["MALLOC_MMAP_THRESHOLD_"] = str(1 << 18)
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | place)
    assert done.returncode == 0, done.stderr
    return done.stdout


def saved(folder: Path, **changes: Any) -> PreTrainedModel:
    model = tiny_model("llama", "mqa", initializer_range=0.02, **SIZES | changes)
    write_model(folder, model)
    return model


LIMITED = """
import resource, sys, tempfile
sys.path.insert(0, sys.argv[1])
import psutil, torch
import cocurve_lab as cl
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.identity import fingerprint_tensor
from cocurve_lab.models.layers import present
from cocurve_lab.extensions.big_models.on_disk import open_model
from cocurve_lab.pruner.saving import open_pruned
from helpers.tiny_models import tiny_model, tiny_text, write_model
torch.set_num_threads(1)
def measured(model, out):
    units = cl.enumerate_units(model, 1)
    plans = [cl.Selection.from_pruned(units, [at, at + 2]) for at in range(4)]
    curvature = cl.estimate_curvature(model, units, tiny_text(1, 17), 16, progress=False)
    found = cl.measure_plans(model, plans, tiny_text(1, 17)).mean
    small = describe(cl.load_pruned(cl.prune(model, plans[1], out=out), stream=True))
    with present(small, 1):
        marks = [fingerprint_tensor(w) for _, w in sorted(small.layers[1].named_parameters())]
    stored = open_model(model.config._name_or_path)
    cl.export_gguf(open_pruned(cl.prune(stored, plans[1], out=out + "2")), None, out + ".gguf")
    return float(curvature.matrix.trace()), found, marks
with tempfile.TemporaryDirectory() as folder:
    write_model(folder, tiny_model("llama", "mqa"))
    measured(cl.load_model(folder, device="cpu", stream=True)[0], folder + "/small")
taken, weights = psutil.Process().memory_info().data, int(sys.argv[4])
# transformers maps all files while it loads, which would count; nothing of them is mapped later
model, _ = cl.load_model(sys.argv[2], device="cpu", stream=True)
resource.setrlimit(resource.RLIMIT_DATA, (taken + weights // 4, resource.RLIM_INFINITY))
found = measured(model, sys.argv[3])
try:
    whole, _ = cl.load_model(sys.argv[2])
    copies = [weight.clone() for _, weight in sorted(whole.named_parameters())]
except Exception as error:
    print("too large:", type(error).__name__)
print("found", found[0], *found[1])
print("marks", *found[2])
"""


@pytest.mark.slow
@needs_linux
def test_a_model_four_times_larger_than_the_memory_goes_through(tmp_path: Path) -> None:
    """One row of H, KL of four plans, prune on both roads, a GGUF, and reload of one layer."""
    wide = {"hidden_size": 512, "intermediate_size": 2048}
    model = saved(tmp_path / "model", layers=16, **wide)  # 240 MB
    weights = sum(weight.nbytes for weight in model.parameters())
    said = in_a_process(LIMITED, tmp_path / "model", str(tmp_path / "small"), str(weights))
    assert "too large" in said
    found = [float(word) for word in said.split("found ")[1].split("marks")[0].split()]
    units, text = cl.enumerate_units(model, 1), tiny_text(1, 17)
    plans = [cl.Selection.from_pruned(units, [at, at + 2]) for at in range(4)]
    trace = cl.estimate_curvature(model, units, text, 16, progress=False).matrix.trace()
    expected = [trace, *cl.measure_plans(model, plans, text, progress=False).mean]
    assert np.allclose(found, expected, rtol=1e-5)
    layer: Any = cl.prune(model, plans[1]).get_submodule("model.layers.1")
    marks = [fingerprint_tensor(weight) for _, weight in sorted(layer.named_parameters())]
    assert said.split("marks ")[1].split() == marks
    written = (tmp_path / name / "model.safetensors" for name in ("small", "small2"))
    assert all(file.stat().st_size > weights / 2 for file in written)


WATCHED = """
import json, sys, tempfile, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import psutil, torch
import cocurve_lab as cl
from cocurve_lab.estimator.batches import Room
from cocurve_lab.models.architectures import describe
from helpers.tiny_models import tiny_model, tiny_text, write_model
torch.set_num_threads(1)
load = {"stream": False, "dtype": "float32", "attn_implementation": "sdpa"}
load |= json.loads(sys.argv[3])
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
def build(place, tokens):
    model, _ = cl.load_model(place, device="cpu", **load)
    for weight in model.parameters():
        weight.data = weight.data.clone()  # else it is a part of a mapped file
    units, text = cl.enumerate_units(model, 4), tiny_text(1, tokens)
    found = cl.estimate_curvature(model, units, text, 256, progress=False)
    batch = found.provenance["runtime"]["units_per_batch"]
    block = len(units) if load["stream"] else 0
    needed = Room.of(describe(model), units, text, 256).needed(batch, block)
    return needed + sum(weight.nbytes for weight in model.parameters() if not weight.is_meta)
with tempfile.TemporaryDirectory() as folder:
    write_model(folder, tiny_model("llama", "mqa"))
    build(folder, 17)
before, most, over = anonymous(), [0], threading.Event()
def watch():
    while not over.wait(0.002):
        most[0] = max(most[0], anonymous() - before)
thread = threading.Thread(target=watch)
thread.start()
needed = build(sys.argv[2], 128)
over.set()
thread.join()
print(json.dumps([most[0], needed]))
"""


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize(
    "options",
    [{}, {"stream": True, "dtype": "bfloat16"}, {"attn_implementation": "eager"}],
    ids=str,
)
def test_a_build_keeps_within_its_estimate(tmp_path: Path, options: dict[str, Any]) -> None:
    saved(tmp_path, layers=8, max_position_embeddings=128)
    said = in_a_process(WATCHED, tmp_path, json.dumps(options))
    most, needed = json.loads(said.splitlines()[-1])
    assert 0.4 * needed < most < 1.2 * needed, most / needed
