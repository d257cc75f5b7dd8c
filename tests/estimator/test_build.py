"""The loop of a build: who measures its sequences, and who hears them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.base import storage
from cocurve_lab.base.errors import WorkerError
from cocurve_lab.estimator.batches import Tick
from cocurve_lab.estimator.build import Measured, Work, Worker
from cocurve_lab.estimator.teacher import AblationPass, Ablations
from cocurve_lab.models.runtime import measuring
from helpers import builds
from helpers.builds import require_same_bits
from helpers.tiny_models import tiny_text

ROWS = 7


def build(
    model: PreTrainedModel | None = None, text: cl.CalibrationSet | None = None, **options: Any
) -> cl.Curvature:
    return builds.build(model, text or tiny_text(ROWS, 20, 6), **({"groups": 5} | options))


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
    assert len(found.provenance["events"]) == ROWS
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
    with pytest.raises(cl.InputError):
        build(listeners=given)
