"""A build on a Ray cluster: one model per worker, one sequence at a time for each worker.

Ray is only the transport. The build with its checkpoint, monitor and Ctrl-C stays in the calling
process (estimator/build.py), and adds the results in the order of the sequences. Ray starts a
worker that died anew and gives it its sequence again. In this file: `RayWorkers`, then what runs
inside a worker, then how a model travels to it.

Ray moves objects between its processes as pickles, and anyone who reaches the cluster can run code
there. Use it on a network you trust.
"""

from __future__ import annotations

import copy
import math
import os
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...base.errors import CocurveError, InputError, MismatchError, WorkerError
from ...estimator.batches import Tick
from ...estimator.build import Measured, Work, Worker
from ...models.identity import fingerprint_model, model_device, model_dtype
from ...models.layers import weights_of
from ...models.loading import load_model
from ...models.runtime import measuring, require_one_device


@dataclass(frozen=True)
class RayWorkers:
    """Measures the sequences of a build on Ray workers: `estimate_curvature(..., workers=...)`.

    The result has the bits of a build in one process on the same kind of device, with the same
    `BuildOptions(num_threads=..., units_per_batch=...)`; Ray reserves `num_threads` CPUs (1 by
    default) for each worker. If a worker dies, another one measures its sequence.

    Attributes:
        workers: number of workers, with one model each. Those for which the cluster has no room
            wait until it has.
        address: address of the cluster. None joins the one that `ray.init` finds (RAY_ADDRESS, or a
            running session), or else starts Ray on this machine for the duration of the build. For
            a token or TLS see Ray's own documentation.
        source: folder or hub id from which each worker loads the model itself. It must be the model
            you pass (the weights are compared). None copies the weights into Ray's object store
            once, and from there to every worker: give a source for large models. A streamed model
            needs one: each worker then reads the layers itself.
        gpus_per_worker: GPUs for each worker; None is 1 if the model is on a GPU, otherwise 0. With
            0 the workers use the CPU.
        start_seconds: the time to wait for the first worker.
        init: further arguments of `ray.init`.
    """

    workers: int = 2
    address: str | None = None
    source: str | os.PathLike[str] | None = None
    gpus_per_worker: float | None = None
    start_seconds: float = 600.0
    init: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InputError(f"workers is {self.workers}; it must be at least 1.")
        _import_ray()

    def __call__(
        self, model: PreTrainedModel, work: Work, numbers: Sequence[int], tick: Tick
    ) -> Generator[Measured, None, None]:
        """Measure sequences, and yield them in the order of `numbers`."""
        if work.listeners:
            raise InputError("listeners hear what this process measures. Omit them, or workers.")
        ray = _import_ray()
        joined = not ray.is_initialized()
        if joined:
            self._join(ray, work.options.num_threads or 1)
        actors: list[Any] = []
        try:
            # held here while they run: a worker that is started again reads both once more
            given = ray.put(parcel(model, self.source)), ray.put(work)
            actors += self._actors(ray, model, work, given)
            yield from self._in_order(ray, actors, numbers, tick)
        finally:
            for actor in actors:
                with suppress(Exception):  # it may be gone already
                    ray.kill(actor, no_restart=True)
            if joined:
                ray.shutdown()

    def _join(self, ray: Any, threads: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # the lab sends no usage data
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        settings: dict[str, Any] = {
            "address": self.address,
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        if self.address is None and "RAY_ADDRESS" not in os.environ:
            # a cluster of this machine alone must have room for all workers, whatever its cores
            cpus = max(os.cpu_count() or 1, self.workers * threads)
            settings |= {"include_dashboard": False, "num_cpus": cpus}
        try:
            ray.init(**settings | dict(self.init))
        except Exception as error:  # Ray also raises plain Exception
            ray.shutdown()
            raise WorkerError(
                f"Ray cannot be started or reached at {self.address or 'this machine'} ({error}). "
                "Start it with `ray start --head` and give its address=; if it asks for a token, "
                "set RAY_AUTH_MODE=token before Python starts; or try again: on a busy machine it "
                "may have taken too long."
            ) from error

    def _actors(
        self, ray: Any, model: PreTrainedModel, work: Work, given: tuple[Any, Any]
    ) -> list[Any]:
        """Start the workers; `given` are model and work in Ray's store."""
        gpus = self.gpus_per_worker
        if gpus is None:
            gpus = 1.0 if model_device(model).type == "cuda" else 0.0
        # memory of the CPU is shared by all workers of a machine
        nodes = max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
        sharing = max(1, math.ceil(1 / gpus if gpus else self.workers / nodes))
        remote = ray.remote(
            num_cpus=work.options.num_threads or 1,
            num_gpus=gpus,
            max_restarts=-1,
            max_task_retries=2,  # a sequence that killed three workers would kill the others too
        )(RemoteWorker)
        return [
            remote.remote(*given, "cuda" if gpus else "cpu", sharing) for _ in range(self.workers)
        ]

    def _in_order(
        self, ray: Any, actors: list[Any], numbers: Sequence[int], tick: Tick
    ) -> Generator[Measured, None, None]:
        """Hand sequences to workers that are free, and yield the results in order."""
        waiting, early = deque(numbers), dict[int, Measured]()
        idle: list[Any] = []
        running = {actor.start.remote(): (actor, -1) for actor in actors}
        batch = 0
        patience: float | None = self.start_seconds
        for number in numbers:
            while number not in early:
                # four results per worker may wait for an earlier sequence, to bound the memory
                while idle and waiting and len(early) < 4 * self.workers:
                    actor, next_one = idle.pop(), waiting.popleft()
                    running[actor.measure.remote(next_one, batch)] = actor, next_one
                answers = ray.wait(list(running), num_returns=1, timeout=patience)[0]
                if not answers:
                    raise WorkerError(
                        f"no worker was ready after {self.start_seconds:.0f} s. The cluster has "
                        f"{ray.cluster_resources()}. Ask for less, or add machines."
                    )
                patience = None
                actor, done = running.pop(answers[0])
                result = _result(ray, answers[0], done)
                idle.append(actor)
                if done < 0:  # the first worker that is ready decides the batch size of all
                    batch = batch or result
                    continue
                batch = min(batch, result.units_per_batch)
                early[done] = result
                tick(len(result.sums["risks"]))
            yield early.pop(number)


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError(
            "building on a cluster needs Ray, which is not installed. Run "
            "`pip install 'cocurve-lab[ray]'`, or omit workers."
        ) from None
    return ray


def _result(ray: Any, answer: Any, number: int) -> Any:
    """Return what a worker answered; raise its own error as it is."""
    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        raise (cause if isinstance(cause, CocurveError) else error) from None
    except ray.exceptions.RayError as error:  # the worker or its machine is gone, again and again
        raise WorkerError(
            f"three workers died {'while starting' if number < 0 else f'on sequence {number}'} "
            f"({type(error).__name__}). They may have run out of memory: use shorter rows, fewer "
            "positions, a smaller units_per_batch, or fewer workers per machine. Finished "
            "sequences are kept; run again to continue."
        ) from error


# Inside a worker ----------------------------------------------------------------------------------


class RemoteWorker:
    """A `Worker` in a Ray actor, made at the first call: also where Ray starts the actor anew."""

    def __init__(self, packed: Any, work: Work, place: str, sharing: int) -> None:
        self.packed, self.work, self.place, self.sharing = packed, work, place, sharing
        self.worker: Worker | None = None

    # not in __init__: an error there would arrive as a dead actor, whatever its type
    def start(self) -> int:
        """Load the model, and return the batch size that fits."""
        return self._ready().units_per_batch

    def measure(self, number: int, units_per_batch: int) -> Measured:
        """Measure a sequence."""
        worker = self._ready()
        worker.units_per_batch = units_per_batch
        with measuring(worker.architecture.model, self.work.options.num_threads or 1):
            return worker.measure_one(number, lambda _: None)

    def _ready(self) -> Worker:
        if self.worker is None:
            self.worker = Worker(unpack(self.packed, self.place), self.work, self.sharing)
        return self.worker


# How a model travels ------------------------------------------------------------------------------


def parcel(model: PreTrainedModel, source: str | os.PathLike[str] | None) -> Any:
    """Pack a model for sending: the model in main memory, or how to load it and its fingerprint."""
    streamed = bool(weights_of(model).devices)
    if streamed and source is None:
        raise InputError(
            "the model is streamed, so its weights are not in memory to be sent. Give "
            "RayWorkers(..., source=PLACE), a folder or hub id that every worker can read."
        )
    if not streamed:
        require_one_device(model)
    if source is not None:
        options: dict[str, Any] = {"dtype": model_dtype(model), "stream": streamed}
        attention = getattr(model.config, "_attn_implementation", None)
        if attention is not None:
            options["attn_implementation"] = attention
        return partial(load_model, os.fspath(source), **options), fingerprint_model(model)
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


def unpack(packed: Any, place: str) -> PreTrainedModel:
    """Unpack a model onto a device."""
    if not isinstance(packed, tuple):
        return packed.to(place)
    load, mark = packed
    model, _ = load(device=place)
    if fingerprint_model(model) != mark:
        raise MismatchError(
            f"{load.args[0]} on the worker's machine is not the model that was passed: its weights "
            "or configuration differ. Give the source of that model, or omit source."
        )
    return model
