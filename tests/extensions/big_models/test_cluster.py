"""A build on the workers of a cluster: the bits of one build, and what may go wrong."""

from __future__ import annotations

import gc
import os
import pickle
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
from cocurve_lab.models.identity import fingerprint_model
from cocurve_lab.models.layers import weights_of
from helpers import builds
from helpers.builds import require_same_bits, stop_after
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer
from helpers.waiting import eventually

ROWS = 7


def build(
    model: PreTrainedModel | None = None, text: cl.CalibrationSet | None = None, **options: Any
) -> cl.Curvature:
    return builds.build(model, text or tiny_text(ROWS, 20, 6), **({"groups": 5} | options))


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
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    sent = pickle.loads(pickle.dumps(parcel(model, str(tmp_path / "model"))))
    assert fingerprint_model(unpack(sent, "cpu")) == fingerprint_model(model)
    whole = unpack(pickle.loads(pickle.dumps(parcel(model, None))), "cpu")
    assert fingerprint_model(whole) == fingerprint_model(model)
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    with pytest.raises(cl.MismatchError):
        unpack(parcel(tiny_model("qwen2", seed=1), str(tmp_path / "model")), "cpu")
    with pytest.raises(cl.InputError):
        unpack(parcel(model, str(tmp_path / "no-such")), "cpu")


def test_a_streamed_model_travels_by_its_place(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    streamed, _ = cl.load_model(tmp_path, device="cpu", stream=True)
    with pytest.raises(cl.InputError):
        parcel(streamed, None)
    sent = unpack(pickle.loads(pickle.dumps(parcel(streamed, str(tmp_path)))), "cpu")
    assert weights_of(sent).devices
    assert fingerprint_model(sent) == fingerprint_model(tiny_model())
    assert not weights_of(unpack(parcel(tiny_model(), str(tmp_path)), "cpu")).devices


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
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_agent_register_timeout_ms"] = "240000"  # noqa: SIM112  (Ray's spelling)
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


def workers(count: int = 2, **settings: Any) -> RayWorkers:
    return RayWorkers(count, start_seconds=240.0, **settings)


@with_ray
def test_workers_read_a_streamed_model_from_its_place_and_ctrl_c_keeps_what_is_done(
    cluster: Any, tmp_path: Path
) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    streamed, _ = cl.load_model(tmp_path / "model", device="cpu", stream=True)
    path, there = tmp_path / "build.ckpt", workers(1, source=tmp_path / "model")
    partial = build(streamed, checkpoint=path, workers=there, on_sequence=stop_after(3))
    assert partial.provenance["sequences_done"] == 3
    require_same_bits(build(checkpoint=path, num_threads=1), build(num_threads=1))
    # the actor is ended: its CPU comes back
    eventually(lambda: cluster.available_resources().get("CPU"), lambda free: free == 2, seconds=30)


@with_ray
def test_a_worker_killed_in_the_middle_costs_its_sequence_only(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, log = tmp_path / "killed", tmp_path / "log"
    log.mkdir()

    class Mortal(RemoteWorker):  # defined here, so that it travels whole
        def measure(self, number: int, units_per_batch: int) -> Measured:
            (log / f"{number}-{os.getpid()}").touch()
            if number == 3 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), 9)
            return super().measure(number, units_per_batch)

    monkeypatch.setattr(distributed, "RemoteWorker", Mortal)
    seen: list[int] = []
    found = build(workers=workers(), on_sequence=lambda b: seen.append(b.done))
    require_same_bits(found, build(num_threads=1))
    assert seen == list(range(1, ROWS + 1))
    assert killed.exists()
    runs = [path.name.split("-") for path in log.iterdir()]
    assert sorted(int(number) for number, _ in runs) == [0, 1, 2, 3, 3, 4, 5, 6]
    assert len({process for _, process in runs}) >= 2


@with_ray
def test_an_error_of_a_worker_arrives_as_what_it_is(cluster: Any) -> None:
    poisoned = tiny_model()
    poisoned.model.embed_tokens.weight[:] = float("nan")
    with pytest.raises(cl.NumericalError):
        build(poisoned, workers=workers(1))
