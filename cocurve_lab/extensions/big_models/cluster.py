"""A build on a Ray cluster: one model per worker, one sequence at a time for each worker.

Ray is only the transport. The build with its checkpoint, monitor and Ctrl-C stays in the calling
process (build.py). Workers keep no state, so a new one can replace any of them. In this file:
`ray_executor` and its pool (which worker does what), then what runs inside a worker, then how a
model travels to it.

Ray moves objects between its processes as pickles, and anyone who reaches the cluster can run code
there. Use it on a network you trust.
"""

from __future__ import annotations

import copy
import math
import os
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...base.errors import CocurveError, InputError, MismatchError, WorkerError
from ...estimator.worker import Measured, Note, Tick, Worker, WorkItem
from ...models.identity import fingerprint_model, model_device, model_dtype
from ...models.layers import weights_of
from ...models.loading import load_model
from ...models.runtime import measuring, require_one_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_LOSSES = 3  # a sequence that killed this many workers would kill the others too
_AHEAD = 4  # results per worker that may wait for an earlier sequence, to bound the memory


# The executor -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RayExecutor:
    """An executor on a Ray cluster, with one model per worker; made by `ray_executor`."""

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
    def open(self, model: PreTrainedModel, item: WorkItem) -> Iterator[RayPool]:
        ray = _import_ray()
        joined = not ray.is_initialized()
        if joined:
            self._join(ray)
        pool = None
        try:
            pool = RayPool(ray, self, model, item)
            yield pool
        finally:
            if pool is not None:
                pool.close()
            if joined:
                ray.shutdown()

    def _join(self, ray: Any) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # the lab sends no usage data
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        settings: dict[str, Any] = {
            "address": self.address,
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        if self.address is None and "RAY_ADDRESS" not in os.environ:
            settings["include_dashboard"] = False
            # a cluster of this machine alone must have room for all workers, whatever its cores
            settings["num_cpus"] = max(os.cpu_count() or 1, self.workers * self.cpus_per_worker)
        try:
            ray.init(**settings | dict(self.init))
        except Exception as error:  # Ray also raises plain Exception
            ray.shutdown()
            place = self.address or "this machine"
            if "AuthToken" in "".join(traceback.format_exception(error)):
                raise WorkerError(
                    f"the Ray cluster at {place} asks for a token, as those of `ray start` do. "
                    "Set RAY_AUTH_MODE=token in the environment before Python starts; on another "
                    "machine, first give it the cluster's token (Ray's page on authentication)."
                ) from error
            raise WorkerError(
                f"Ray cannot be started or reached at {place} ({error}). "
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
    """Make an executor that measures the sequences of a build on Ray workers.

    The result has the bits of a build in one process on the same kind of device, with
    `BuildOptions(num_threads=cpus_per_worker)` and the same `units_per_batch`. If a worker dies,
    only the sequence it was measuring is lost: another worker measures it, and a new one is
    started.

    Args:
        workers: number of workers, with one model each. Those for which the cluster has no room
            wait until it has.
        address: address of the cluster. None joins the one that `ray.init` finds (RAY_ADDRESS, or a
            running session), or else starts Ray on this machine for the duration of the build. For
            a token or TLS see Ray's own documentation.
        source: folder or hub id from which each worker loads the model itself. It must be the model
            you pass (the weights are compared). None copies the weights into Ray's object store
            once, and from there to every worker: give a source for large models. A streamed model
            needs one: each worker then reads the layers itself.
        cpus_per_worker: CPUs that Ray reserves for each worker, and its number of threads.
        gpus_per_worker: GPUs for each worker; None is 1 if the model is on a GPU, otherwise 0. With
            0 the workers use the CPU.
        **settings: `start_seconds`, the time to wait for the first worker, in seconds (600);
            `init`, further arguments of `ray.init`.
    """
    _import_ray()
    place = None if source is None else os.fspath(source)
    return RayExecutor(workers, address, place, cpus_per_worker, gpus_per_worker, **settings)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError(
            "building on a cluster needs Ray, which is not installed. Run "
            "`pip install 'cocurve-lab[ray]'`, or omit executor."
        ) from None
    return ray


# The pool -----------------------------------------------------------------------------------------


class Turns:
    """Order of the sequences: the next one to hand out, and results that wait for earlier ones.

    Workers finish in any order, but sums must be added in the order of the sequences, or their last
    bits would change from run to run.

    Attributes:
        left: numbers whose results were not taken yet, in order.
        ahead: the most sequences that may be out or finished early at a time.
    """

    def __init__(self, numbers: Sequence[int], ahead: int) -> None:
        self.left, self.ahead = deque(numbers), ahead
        self._waiting = deque(numbers)  # not handed out yet, or lost with a worker
        self._early: dict[int, Measured] = {}
        self._losses: Counter[int] = Counter()

    def hand_out(self) -> int | None:
        """Return the next sequence; None if none is left or too many results are waiting."""
        if not self._waiting or len(self.left) - len(self._waiting) >= self.ahead:
            return None
        return self._waiting.popleft()

    def lost(self, number: int) -> None:
        """Put back the sequence of a worker that died; it goes out again before all others."""
        self._losses[number] += 1
        if self._losses[number] >= _MOST_LOSSES:
            raise WorkerError(
                f"{_MOST_LOSSES} workers died on sequence {number}, so more would. They may have "
                "run out of memory: use shorter rows, fewer positions, a smaller units_per_batch, "
                "or fewer workers per machine. Finished sequences are kept; run again to continue."
            )
        self._waiting.appendleft(number)  # results of later sequences wait for this one

    def finished(self, measured: Measured) -> None:
        self._early[measured.number] = measured

    def take(self) -> Iterator[Measured]:
        while self.left and self.left[0] in self._early:
            yield self._early.pop(self.left.popleft())


class RayPool:
    """Ray actors with a model each, from the first that is ready until the build ends."""

    def __init__(
        self, ray: Any, executor: RayExecutor, model: PreTrainedModel, item: WorkItem
    ) -> None:
        self.ray, self.executor = ray, executor
        gpus = executor.gpus_per_worker
        if gpus is None:
            gpus = 1.0 if model_device(model).type == "cuda" else 0.0
        # memory of the CPU is shared by all workers of a machine
        nodes = max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
        self._sharing = max(1, math.ceil(1 / gpus if gpus else executor.workers / nodes))
        self._remote = ray.remote(num_cpus=executor.cpus_per_worker, num_gpus=gpus)(RemoteWorker)
        self._place = "cuda" if gpus else "cpu"
        self._model = ray.put(parcel(model, executor.source))
        self._item = ray.put(item)
        self._running: dict[Any, tuple[Any, int | None]] = {}  # answer to come -> actor, sequence
        self._idle: list[Any] = []
        self._died: list[str] = []
        self._spare = executor.workers  # replacements: one for each worker, on average
        self._devices: set[str] = set()
        self.units_per_batch, self.block = item.options.units_per_batch or 0, 1
        self.device_kind = self._place
        for _ in range(executor.workers):
            self._begin()
        self._wait_for_one()

    @property
    def device(self) -> str:
        return ", ".join(sorted(self._devices))

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
        answer = actor.start.remote(self._model, self._item, self._place, self._sharing)
        self._running[answer] = (actor, None)

    def _wait_for_one(self) -> None:
        """Wait until a worker is ready; the first one decides the batch size of all."""
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
        """Take the answer to a start or to a sequence; put back the work of a dead worker."""
        actor, number = self._running.pop(answer)
        try:
            result = self.ray.get(answer)
        except self.ray.exceptions.RayTaskError as error:
            # an exception in the measurement itself: the worker lives, and `close` ends it
            self._idle.append(actor)
            raise _what_happened(error) from None
        except self.ray.exceptions.RayError as error:  # the worker or its machine is gone
            with suppress(Exception):
                self.ray.kill(actor, no_restart=True)
            self._lost(number, error, turns, note)
            return
        self._idle.append(actor)
        if number is None:
            batch, block, device = result
            self.units_per_batch = self.units_per_batch or batch
            self.block = max(self.block, block)
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
                f"all {len(self._died)} workers died, the last one of {self._died[-1]}. Finished "
                "sequences are kept in the checkpoint. Repair the cluster and run again."
            )


def _what_happened(error: Any) -> Exception:
    """The exception to raise: one of ours as it is, any other with the worker's traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, (CocurveError, torch.OutOfMemoryError)):
        return cause
    return error


# Inside a worker ----------------------------------------------------------------------------------


class RemoteWorker:
    """A `Worker` in a Ray actor."""

    # not in __init__: an error there would arrive as a dead actor, whatever its type
    def start(self, parcel: Any, item: WorkItem, place: str, sharing: int) -> tuple[int, int, str]:
        self.threads = item.options.num_threads or 1
        torch.set_num_threads(self.threads)
        self.model = unpack(parcel, place)
        self.worker = Worker(self.model, item, sharing)
        return self.worker.units_per_batch, self.worker.block, self.worker.device

    def measure(self, number: int, units_per_batch: int) -> Measured:
        self.worker.units_per_batch = units_per_batch
        with measuring(self.model, self.threads):
            return self.worker.measure_one(number, lambda _: None)


# How a model travels ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A model that each worker loads itself, and the fingerprint it must have."""

    place: str
    dtype: str
    attention: str | None
    fingerprint: str
    stream: bool


def parcel(model: PreTrainedModel, source: str | None) -> Any:
    """Pack a model for sending: a reference to its source, or the model itself in main memory."""
    streamed = bool(weights_of(model).devices)
    if streamed and source is None:
        raise InputError(
            "the model is streamed, so its weights are not in memory to be sent. Give "
            "ray_executor(..., source=PLACE), a folder or hub id that every worker can read."
        )
    if not streamed:
        require_one_device(model)
    if source is not None:
        attention = getattr(model.config, "_attn_implementation", None)
        mark = fingerprint_model(model)
        return _Source(source, model_dtype(model), attention, mark, streamed)
    if model_device(model).type == "cpu":
        return model
    # copy to main memory without a second copy on the GPU: deepcopy takes a tensor that is in its
    # memo for one already copied
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        moved = tensor.detach().cpu()
        parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(moved, requires_grad=False) if parameter else moved
    return copy.deepcopy(model, memo)


def unpack(parcel: Any, place: str) -> PreTrainedModel:
    """Unpack a model onto a device."""
    if not isinstance(parcel, _Source):
        return parcel.to(place)
    options: dict[str, Any] = {"attn_implementation": parcel.attention} if parcel.attention else {}
    options["stream"] = parcel.stream
    model, _ = load_model(parcel.place, device=place, dtype=parcel.dtype, **options)
    if fingerprint_model(model) != parcel.fingerprint:
        raise MismatchError(
            f"{parcel.place} on the worker's machine is not the model that was passed: its weights "
            "or configuration differ. Give the source of that model, or omit source."
        )
    return model
