"""A build on a Ray cluster: one model per worker, sequences handed out, Grams added in order.

Ray is only the transport. The build, its checkpoint, its monitor and its Ctrl-C are those of
build.py, in the process that asked; workers hold nothing that a new one is not given again. Ray
moves objects between its processes as pickles and lets whoever reaches the cluster run code there:
use it on a network you trust.
"""

from __future__ import annotations

import copy
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import CocurveError, InputError, MismatchError, WorkerError
from ..models.identity import fingerprint_model, model_device, model_dtype
from ..models.loading import load_model
from ..models.runtime import measuring
from .worker import Job, Measured, Note, Tick, Worker

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_LOSSES = 3  # a sequence that took this many workers with it will take the others too
_AHEAD = 4  # results per worker that may wait for an earlier sequence


@dataclass(frozen=True)
class RayExecutor:
    """Workers on a Ray cluster, one model each; see `ray_executor`."""

    workers: int = 2
    address: str | None = None
    source: str | None = None
    cpus_per_worker: int = 1
    gpus_per_worker: float | None = None
    start_seconds: float = 600.0
    init: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("workers", "cpus_per_worker"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1.")

    def threads(self) -> int:
        return self.cpus_per_worker

    @contextmanager
    def open(self, model: PreTrainedModel, job: Job) -> Iterator[RayCrew]:
        ray = _import_ray()
        joined = not ray.is_initialized()
        if joined:
            self._join(ray)
        crew = None
        try:
            crew = RayCrew(ray, self, model, job)
            yield crew
        finally:
            if crew is not None:
                crew.close()
            if joined:
                ray.shutdown()

    def _join(self, ray: Any) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a lab that calls nobody
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        settings: dict[str, Any] = {
            "address": self.address,
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        if self.address is None and "RAY_ADDRESS" not in os.environ:
            settings["include_dashboard"] = False
            # a cluster of this machine alone: as many workers as were asked for must find room
            settings["num_cpus"] = max(os.cpu_count() or 1, self.workers * self.cpus_per_worker)
        try:
            ray.init(**settings | dict(self.init))
        except Exception as error:  # Ray raises bare ones too
            ray.shutdown()
            raise WorkerError(
                f"Ray cannot be started or reached at {self.address or 'this machine'} ({error}). "
                "Start it with `ray start --head` and give its address=, or try again: on a busy "
                "machine it may have taken too long."
            ) from error


def ray_executor(
    workers: int = 2,
    *,
    address: str | None = None,
    source: str | os.PathLike[str] | None = None,
    cpus_per_worker: int = 1,
    gpus_per_worker: float | None = None,
    **settings: Any,
) -> RayExecutor:
    """Measure the sequences of a build on Ray workers, one model per worker.

    The result has the bits of a build in one process on the same kind of device, with
    `BuildOptions(num_threads=cpus_per_worker)` and the same `units_per_batch`. A worker that dies
    costs the sequence it was doing: another one does it, and a new worker takes its place.

    Args:
        workers: how many. Those for which the cluster has no room wait until it has.
        address: of the cluster; None joins what `ray.init` finds (RAY_ADDRESS, or a session already
            begun), else starts Ray on this machine for the time of the build. What the cluster asks
            for beyond that (a token, TLS) is set up as Ray's own pages say.
        source: folder or hub id from which each worker reads the model itself, which must then be
            the one you pass (its weights are compared). For large models: None puts a copy of the
            model's weights in Ray's object store, once, and every worker copies it from there.
        cpus_per_worker: CPUs Ray reserves for a worker, and its number of threads.
        gpus_per_worker: None = 1 where the model is on a GPU, else 0. With 0 workers use the CPU.
        **settings: `start_seconds`, how long to wait for the first worker (600); `init`, more
            arguments for `ray.init`.

    Raises:
        InputError: Ray is not installed, or a number is below 1.
    """
    _import_ray()
    place = None if source is None else os.fspath(source)
    return RayExecutor(workers, address, place, cpus_per_worker, gpus_per_worker, **settings)


class Turns:
    """Which sequence goes out next, and which results wait for their turn; knows nothing of Ray.

    Attributes:
        left: numbers whose results were not taken yet, in order.
    """

    def __init__(self, numbers: Sequence[int], ahead: int) -> None:
        self.left, self.ahead = deque(numbers), ahead
        self._waiting = deque(numbers)  # not handed out, or lost since
        self._early: dict[int, Measured] = {}
        self._losses: Counter[int] = Counter()

    def hand_out(self) -> int | None:
        """The next sequence; None where none is left, or too many results wait already."""
        if not self._waiting or len(self.left) - len(self._waiting) >= self.ahead:
            return None
        return self._waiting.popleft()

    def lost(self, number: int) -> None:
        """A worker died on a sequence: it goes out again, before all others.

        Raises:
            WorkerError: the sequence has killed workers before, so it is the sequence's fault.
        """
        self._losses[number] += 1
        if self._losses[number] >= _MOST_LOSSES:
            raise WorkerError(
                f"{_MOST_LOSSES} workers died on sequence {number}, so more would. They may run "
                "out of memory: use shorter rows, fewer positions, a smaller units_per_batch, or "
                "fewer workers per machine. What is done is kept; run again to go on."
            )
        self._waiting.appendleft(number)

    def finished(self, measured: Measured) -> None:
        self._early[measured.number] = measured

    def take(self) -> Iterator[Measured]:
        """Results whose turn has come."""
        while self.left and self.left[0] in self._early:
            yield self._early.pop(self.left.popleft())


class RayCrew:
    """Ray actors with a model each, from the first that is ready until the build ends."""

    def __init__(self, ray: Any, executor: RayExecutor, model: PreTrainedModel, job: Job) -> None:
        self.ray, self.executor = ray, executor
        gpus = executor.gpus_per_worker
        if gpus is None:
            gpus = 1.0 if model_device(model).type == "cuda" else 0.0
        self._remote = ray.remote(num_cpus=executor.cpus_per_worker, num_gpus=gpus)(RemoteWorker)
        self._place = "cuda" if gpus else "cpu"
        self._model = ray.put(parcel(model, executor.source))
        self._job = ray.put(job)
        self._running: dict[Any, tuple[Any, int | None]] = {}  # answer to come -> actor, sequence
        self._idle: list[Any] = []
        self._died: list[str] = []
        self._spare = executor.workers  # each worker may be replaced once, in the mean
        self._devices: set[str] = set()
        self.units_per_batch = job.units_per_batch or 0
        self.device_kind = self._place
        for _ in range(executor.workers):
            self._begin()
        self._wait_for_one()

    @property
    def device(self) -> str:
        return ", ".join(sorted(self._devices))

    def seconds(self) -> float | None:
        return None  # workers may still be starting

    def measure(self, numbers: Sequence[int], tick: Tick, note: Note) -> Iterator[Measured]:
        turns = Turns(numbers, _AHEAD * self.executor.workers)
        while turns.left:
            while self._idle and (number := turns.hand_out()) is not None:
                actor = self._idle.pop()
                answer = actor.measure.remote(number, self.units_per_batch)
                self._running[answer] = (actor, number)
            for answer in self._answers():
                self._take(answer, turns, tick, note)
            yield from turns.take()

    def close(self) -> None:
        for actor in [*self._idle, *(actor for actor, _ in self._running.values())]:
            with suppress(Exception):  # it may be gone already
                self.ray.kill(actor, no_restart=True)

    # Actors -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        actor = self._remote.remote()
        answer = actor.start.remote(self._model, self._job, self._place)
        self._running[answer] = (actor, None)

    def _wait_for_one(self) -> None:
        """Wait until a worker is ready; the first one settles the batch for all."""
        turns = Turns([], 0)
        while not self._idle:
            answers = self._answers(self.executor.start_seconds)
            if not answers:
                raise WorkerError(
                    f"no worker was ready after {self.executor.start_seconds:.0f} s. Each asks for "
                    f"{self.executor.cpus_per_worker} CPUs and {self._place}; the cluster has "
                    f"{self.ray.cluster_resources()}. Ask for less, or add machines."
                )
            for answer in answers:
                self._take(answer, turns, lambda _: None, lambda _: None)

    def _answers(self, seconds: float | None = None) -> list[Any]:
        return self.ray.wait(list(self._running), num_returns=1, timeout=seconds)[0]

    def _take(self, answer: Any, turns: Turns, tick: Tick, note: Note) -> None:
        """What came of a start or of a sequence; a dead worker's work goes back."""
        actor, number = self._running.pop(answer)
        try:
            result = self.ray.get(answer)
        except self.ray.exceptions.RayTaskError as error:
            self._idle.append(actor)  # the worker lives, and is ended with the others
            raise _what_happened(error) from None
        except self.ray.exceptions.RayError as error:  # the worker or its machine is gone
            with suppress(Exception):
                self.ray.kill(actor, no_restart=True)
            self._lost(number, error, turns, note)
            return
        self._idle.append(actor)
        if number is None:
            batch, device = result
            self.units_per_batch = self.units_per_batch or batch
            self._devices.add(device)
            return
        self.units_per_batch = min(self.units_per_batch, result.units_per_batch)
        turns.finished(result)
        tick(len(result.risks))

    def _lost(self, number: int | None, error: Exception, turns: Turns, note: Note) -> None:
        reason = type(error).__name__
        self._died.append(f"{reason}: {str(error).strip().splitlines()[0]}")
        if number is None:
            note(f"a worker died while starting ({reason})")
        else:
            note(f"a worker died on sequence {number} ({reason}); another one does it")
            turns.lost(number)
        if self._spare:
            self._spare -= 1
            self._begin()
        if not self._running and not self._idle:
            raise WorkerError(
                f"all {len(self._died)} workers died, the last one of {self._died[-1]}. What is "
                "done is kept in the checkpoint; see to the cluster and run again to go on."
            )


def _what_happened(error: Any) -> Exception:
    """A worker's own exception: ours as it is, any other with the worker's traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, (CocurveError, torch.OutOfMemoryError)):
        return cause
    return error


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError(
            "building on a cluster needs Ray, which is not installed. Run "
            "`pip install cocurve-lab[ray]`, or leave executor out."
        ) from None
    return ray


class RemoteWorker:
    """What runs in a Ray actor. Starting is a method, so that errors arrive as what they are."""

    def start(self, parcel: Any, job: Job, place: str) -> tuple[int, str]:
        """Unpack or read the model; the batch that fits in memory here, and the device's name."""
        torch.set_num_threads(job.num_threads)
        self.model = unpack(parcel, place)
        self.job, self.worker = job, Worker(self.model, job)
        return self.worker.units_per_batch, self.worker.device

    def measure(self, number: int, units_per_batch: int) -> Measured:
        self.worker.units_per_batch = units_per_batch
        with measuring(self.model, self.job.num_threads):
            return self.worker.measure_one(number, lambda _: None)


@dataclass(frozen=True)
class _Source:
    """A model that workers read themselves."""

    place: str
    dtype: str
    attention: str | None
    fingerprint: str


def parcel(model: PreTrainedModel, source: str | None) -> Any:
    """What to send of a model: where to read it, or itself in main memory."""
    if source is not None:
        attention = getattr(model.config, "_attn_implementation", None)
        return _Source(source, model_dtype(model), attention, fingerprint_model(model))
    if model_device(model).type == "cpu":
        return model
    # a copy in main memory; a deep copy takes what it finds in its memo for copied already
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        moved = tensor.detach().cpu()
        parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(moved, requires_grad=False) if parameter else moved
    return copy.deepcopy(model, memo)


def unpack(parcel: Any, place: str) -> PreTrainedModel:
    """The model of a parcel on a device.

    Raises:
        InputError: the place it should be read from is not there.
        MismatchError: another model is.
    """
    if not isinstance(parcel, _Source):
        return parcel.to(place)
    options = {"attn_implementation": parcel.attention} if parcel.attention else {}
    model, _ = load_model(parcel.place, device=place, dtype=parcel.dtype, **options)
    if fingerprint_model(model) != parcel.fingerprint:
        raise MismatchError(
            f"{parcel.place} on the worker's machine is not the model that was passed: its weights "
            "or configuration differ. Give the place it came from, or leave source out."
        )
    return model
