"""The far end of a build on a cluster: how a model gets to a worker, and what runs there."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import MismatchError
from .loading import fingerprint_model, load_model, model_device, model_dtype
from .runtime import measuring
from .worker import Job, Measured, Worker

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
