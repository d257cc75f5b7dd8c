"""A build in shards and a build on workers: the bits of one build, and what may go wrong."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import sys
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.base import storage
from cocurve_lab.base.errors import WorkerError
from cocurve_lab.curvature.matrix import merge_shards
from cocurve_lab.curvature.merging import shard_sequences
from cocurve_lab.curvature.settings import SETTINGS, BuildOptions
from cocurve_lab.estimator import algorithm1 as features
from cocurve_lab.estimator import batches
from cocurve_lab.estimator.batches import Tick
from cocurve_lab.estimator.build import Measured, Work, Worker
from cocurve_lab.estimator.estimate import build_settings, complete_shards, files_in
from cocurve_lab.estimator.teacher import AblationPass, Ablations
from cocurve_lab.extensions.big_models import cluster as distributed
from cocurve_lab.extensions.big_models.cluster import RayWorkers, RemoteWorker, parcel, unpack
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.identity import fingerprint_model
from cocurve_lab.models.layers import weights_of
from cocurve_lab.models.runtime import measuring
from helpers import builds
from helpers.builds import require_same_bits, stop_after
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer
from helpers.waiting import eventually

ROWS = 7


def build(
    model: PreTrainedModel | None = None, text: cl.CalibrationSet | None = None, **options: Any
) -> cl.Curvature:
    return builds.build(model, text or tiny_text(ROWS, 20, 6), **({"groups": 5} | options))


def shards(count: int, **options: Any) -> list[cl.Curvature]:
    return [build(shard=(number, count), **options) for number in range(1, count + 1)]


# Shards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "count"), [(16, 1), (16, 3), (5, 5), (4, 3)])
def test_shards_share_the_sequences_and_split_no_group(groups: int, count: int) -> None:
    parts = [shard_sequences((i, count), groups, 23) for i in range(1, count + 1)]
    assert sorted(number for part in parts for number in part) == list(range(23))
    owned = [{number % groups for number in part} for part in parts]
    assert sum(map(len, owned)) == groups
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    assert all(part == sorted(part) for part in parts)


def test_every_setting_of_a_build_is_compared_between_shards() -> None:
    model, text = tiny_model(), tiny_text(2, 20, 6)
    units = cl.enumerate_units(model, GROUPS)
    settings = build_settings(model, units, text, 32, BuildOptions())
    assert sorted(settings) == sorted(SETTINGS)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_merged_shards_are_one_build_to_the_bit(count: int) -> None:
    whole = build()
    merged = cl.Curvature.merge(shards(count)[::-1])  # in any order
    require_same_bits(merged, whole)
    assert merged.fingerprint == whole.fingerprint
    for key in (*SETTINGS, "row_fingerprints", "sequences_done", "complete", "runtime", "seed"):
        assert merged.provenance[key] == whole.provenance[key], key
    assert len(merged.provenance["sequence_seconds"]) == ROWS
    assert "shard" not in merged.provenance


def test_a_shard_says_what_it_is_and_is_h_over_its_rows() -> None:
    part = build(shard=(2, 3))
    text = tiny_text(ROWS, 20, 6)
    assert "(shard 2 of 3)" in repr(part)
    assert part.provenance["complete"] is False
    mine = shard_sequences((2, 3), 5, ROWS)
    assert mine == [2, 3]
    assert part.provenance["row_fingerprints"] == [text.row_fingerprints[n] for n in mine]
    np.testing.assert_allclose(part.matrix, build(text=text.rows(2, 4)).matrix, rtol=1e-12)


def test_the_merged_build_merges_with_a_build_on_other_rows() -> None:
    text = tiny_text(9, 20, 6)
    merged = merge_shards(shards(2, text=text.rows(0, 7)))
    both = cl.Curvature.merge([merged, build(text=text.rows(7, 9))])
    assert both.provenance["sequences_done"] == 9


SHARDS = [
    ((), cl.InputError),
    (({"shard": (1, 3)},), cl.InputError),
    (({"shard": (1, 2)}, {"shard": (1, 2)}), cl.MismatchError),
    (({"shard": (1, 2)}, {"shard": (1, 3)}), cl.MismatchError),
    (({"shard": (1, 2)}, {}), cl.InputError),
    *(
        (({"shard": (1, 2)}, {"shard": (2, 2), **change}), cl.MismatchError)
        for change in (
            {"model": tiny_model(seed=1)},
            {"text": tiny_text(ROWS, 20, 6, seed=1)},
            {"groups": 4},
            {"full_vocabulary": True},
        )
    ),
]


@pytest.mark.parametrize("case", range(len(SHARDS)))
def test_shards_that_are_not_all_of_one_build_are_refused(case: int) -> None:
    options, error = SHARDS[case]
    parts = [build(**each) for each in options]
    with pytest.raises(error):
        merge_shards(parts)
    if parts:
        with pytest.raises(error):
            cl.Curvature.merge(parts)


def test_an_interrupted_shard_is_refused_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "shard.ckpt"
    part = build(checkpoint=path, shard=(1, 2), on_sequence=stop_after(2))
    other = build(shard=(2, 2))
    with pytest.raises(cl.InputError):
        merge_shards([part, other])
    resumed = build(checkpoint=path, shard=(1, 2))
    assert resumed.provenance["sequences_done"] == 5
    require_same_bits(merge_shards([resumed, other]), build())


def test_shards_run_differently_are_merged_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    one, two = build(shard=(1, 2), units_per_batch=2), build(shard=(2, 2), units_per_batch=3)
    with caplog.at_level(logging.WARNING):
        merged = merge_shards([one, two])
    assert "units_per_batch 2, 3" in caplog.text
    assert any("units_per_batch 2, 3" in event for event in merged.provenance["events"])
    whole = build()
    scale = np.sqrt(np.outer(whole.matrix.diagonal(), whole.matrix.diagonal()))
    assert (np.abs(merged.matrix - whole.matrix) < 1e-6 * scale).all()  # float32 features


def estimate_in(folder: Path, **options: Any) -> cl.Curvature:
    model = tiny_model()
    return cl.load_or_estimate(
        folder,
        model,
        cl.enumerate_units(model, GROUPS),
        tiny_text(ROWS, 20, 6),
        32,
        options=BuildOptions(groups=5, **options),
    )


def test_a_notebook_finds_the_shards_of_its_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        estimate_in(tmp_path, shard=(number, 2))
    names = sorted(path.name.split(".", 1)[1] for path in tmp_path.iterdir())
    assert names == [f"shard-{i}-of-2.pkl" for i in (1, 2)]  # no checkpoint left behind
    monkeypatch.setattr(features, "gram_matrix", None)  # nothing may be built from here on
    capsys.readouterr()
    estimate_in(tmp_path, shard=(2, 2))
    assert "Merged the 2 shards" in capsys.readouterr().out
    found = estimate_in(tmp_path)
    assert "nothing was rebuilt" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.pkl"))) == 3  # the shards stay
    monkeypatch.undo()
    require_same_bits(found, build())


def test_a_damaged_shard_matters_only_where_its_set_is_whole(tmp_path: Path) -> None:
    estimate_in(tmp_path, shard=(1, 2))
    (damaged,) = tmp_path.glob("*.pkl")
    damaged.write_bytes(b"damaged")
    estimate_in(tmp_path, shard=(2, 3))
    require_same_bits(estimate_in(tmp_path), build())
    (whole,) = files_in(tmp_path).whole
    whole.unlink()
    estimate_in(tmp_path, shard=(2, 2))
    with pytest.raises(cl.FileFormatError, match=damaged.name):
        estimate_in(tmp_path)


@pytest.mark.parametrize(
    ("names", "complete"),
    [
        ([], []),
        (["H_a_1f.shard-1-of-2.pkl", "H_a_1f.shard-1-of-3.pkl", "H_a_1f.shard-2-of-3.pkl"], []),
        (["H_a_1f.shard-2-of-2.pkl", "H_b_1f.shard-2-of-2.pkl"], []),  # one shard, two names
        (["H_a_1f.shard-1-of-2.pkl", "H_a_2f.shard-2-of-2.pkl"], []),  # of two builds
        (["H_a_1f.shard-1-of-2.pkl", "H_a_1f.shard-2-of-2.ckpt"], []),
        (["H_a_1f.shard-1-of-2.pkl", "H_a_1f.shard-2-of-2 copy.pkl"], []),
        (["H_a_1f.shard-0-of-1.pkl", "H_a_1f.shard-1-of-1.pkl.previous"], []),
        (["H_x-3.1_a_1f.shard-1-of-2.pkl", "H_b_1f.shard-2-of-2.pkl", "H_b_1f.ckpt"], [0, 1]),
        ([f"H_a_1f.shard-{number}-of-11.pkl" for number in range(1, 12)], list(range(11))),
    ],
    ids=["none", "missing", "twice", "foreign", "unfinished", "copy", "odd", "two", "eleven"],
)
def test_names_tell_what_lies_in_a_folder(
    tmp_path: Path, names: list[str], complete: list[int]
) -> None:
    for name in [*names, "mine.pkl"]:
        (tmp_path / name).touch()
    found = complete_shards(tmp_path / "H_a_1f.pkl")
    assert sorted(path.name for path in found) == sorted(names[number] for number in complete)
    files = files_in(tmp_path)
    assert files.whole == []
    assert [path.name for path in files.checkpoints] == [n for n in names if n.endswith(".ckpt")]
    (tmp_path / "H_a_1f.pkl").touch()
    assert files_in(tmp_path).whole == [tmp_path / "H_a_1f.pkl"]


# Workers ----------------------------------------------------------------------------------------


class Relay:
    """A worker that may die: what a build asks of any."""

    def __init__(self, die_at: int | None = None) -> None:
        self.die_at = die_at
        self.given: list[Work] = []

    def __call__(
        self, model: PreTrainedModel, work: Work, numbers: Sequence[int], tick: Tick
    ) -> Generator[Measured, None, None]:
        self.given.append(work)
        with measuring(model, 1):
            worker = Worker(model, work)
        for number in numbers:
            if number == self.die_at:
                raise WorkerError("all of them died")
            with measuring(model, 1):
                found = worker.measure_one(number, tick)
            yield found._replace(device=f"cpu {number % 2}", notes=("a worker died",))


def test_a_build_takes_its_sequences_from_the_workers() -> None:
    relay = Relay()
    found = build(workers=relay)
    require_same_bits(found, build())
    assert found.provenance["device"] == "cpu 0, cpu 1"
    assert found.provenance["events"] == [f"sequence {n}: a worker died" for n in range(ROWS)]
    assert [work.options.num_threads for work in relay.given] == [1]


def test_work_stays_when_all_workers_die_and_goes_on_here(tmp_path: Path) -> None:
    path = tmp_path / "build.ckpt"
    with pytest.raises(WorkerError):
        build(checkpoint=path, workers=Relay(die_at=4))
    assert storage.load_plain(path, format_name="cocurve-build", version=1)["done"] == 4
    require_same_bits(build(checkpoint=path), build())


def test_a_finished_checkpoint_opens_no_workers(tmp_path: Path) -> None:
    path, relay = tmp_path / "build.ckpt", Relay()
    build(checkpoint=path)
    require_same_bits(build(checkpoint=path, workers=relay), build())
    assert relay.given == []


class Largest:
    """A listener: the largest shift of a logit, by sequence."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def begin(self, start: AblationPass) -> None:
        self.found.append(0.0)

    def hear(self, batch: Ablations) -> None:
        self.found[-1] = max(self.found[-1], float(batch.shift.abs().max()))


def test_a_listener_hears_every_sequence_and_changes_nothing() -> None:
    largest = Largest()
    require_same_bits(build(listeners=[largest]), build())
    assert len(largest.found) == ROWS
    assert min(largest.found) > 0


@pytest.mark.parametrize(
    "given",
    [Largest(), [Largest], [print], [None]],
    ids=["no list", "a class", "a function", "None"],
)
def test_what_is_no_listener_is_refused(given: Any) -> None:
    with pytest.raises(cl.InputError, match="listener"):
        build(listeners=given)


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
    pytest.importorskip("accelerate")
    tiny_model().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    streamed, _ = cl.load_model(tmp_path, device="cpu", stream=True)
    with pytest.raises(cl.InputError):
        parcel(streamed, None)
    sent = unpack(pickle.loads(pickle.dumps(parcel(streamed, str(tmp_path)))), "cpu")
    assert weights_of(sent).devices
    assert fingerprint_model(sent) == fingerprint_model(tiny_model())
    assert not weights_of(unpack(parcel(tiny_model(), str(tmp_path)), "cpu")).devices


def test_workers_of_a_machine_share_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    tiny_model().save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    model, _ = cl.load_model(tmp_path, device="cpu", stream=True)
    units, text = cl.enumerate_units(model, GROUPS), tiny_text(2, 20, 6)
    work = Work(units, text, 16, BuildOptions(num_threads=1, units_per_batch=1))
    needed = batches.Room.of(describe(model), units, text, 16).needed(1)
    state = 20 * 32 * 4
    monkeypatch.setattr(batches, "free_memory", lambda _: 2 * (needed + 8 * state))
    assert Worker(model, work).block == 18  # all of them
    assert Worker(model, work, sharing=2).block == 4


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(cl.InputError):
        RayWorkers(workers=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(cl.InputError, match="ray"):
        RayWorkers()


class FakeRay:
    """Records what Ray is started with, and does not start."""

    def __init__(self, error: Exception) -> None:
        self.error, self.ended = error, 0

    def is_initialized(self) -> bool:
        return False

    def init(self, **settings: Any) -> None:
        self.settings = settings
        raise self.error

    def shutdown(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_ray_is_started_quietly_and_what_it_raises_is_a_worker_error(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    error = ConnectionError("The current node timed out during startup.")
    fake = FakeRay(error)
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    workers = RayWorkers(300, address, init={"object_store_memory": 5})
    with pytest.raises(WorkerError) as caught:
        build(workers=workers, num_threads=2)
    assert "RAY_AUTH_MODE" in str(caught.value)
    assert fake.ended == 1
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    own = {"num_cpus": 600, "include_dashboard": False}  # a cluster has its own
    wanted = {"address": address, "object_store_memory": 5} | ({} if address else own)
    assert fake.settings.items() >= wanted.items()
    assert ("num_cpus" in fake.settings) is (address is None)


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
    pytest.importorskip("accelerate")
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
def test_a_sequence_that_kills_every_worker_leaves_a_checkpoint(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doomed(RemoteWorker):
        def measure(self, number: int, units_per_batch: int) -> Measured:
            if number == 4:
                os.kill(os.getpid(), 9)
            return super().measure(number, units_per_batch)

    path = tmp_path / "build.ckpt"
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "RemoteWorker", Doomed)
        with pytest.raises(WorkerError):
            build(checkpoint=path, workers=workers(1), checkpoint_seconds=0)
    assert storage.load_plain(path, format_name="cocurve-build", version=1)["done"] == 4
    require_same_bits(build(checkpoint=path), build(num_threads=1))  # and goes on without Ray


@with_ray
def test_an_error_of_a_worker_arrives_as_what_it_is(cluster: Any) -> None:
    poisoned = tiny_model()
    poisoned.model.embed_tokens.weight[:] = float("nan")
    with pytest.raises(cl.NumericalError):
        build(poisoned, workers=workers(1))
