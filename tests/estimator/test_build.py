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
from helpers.builds import ROWS, build_of_seven, require_same_bits


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
    found = build_of_seven(workers=relay)
    require_same_bits(found, build_of_seven())
    assert found.provenance["device"] == "cpu 0, cpu 1"
    assert len(found.provenance["events"]) == ROWS
    assert [work.options.num_threads for work in relay.given] == [1]


def test_work_stays_when_all_workers_die_and_goes_on_here(tmp_path: Path) -> None:
    path = tmp_path / "build.ckpt"
    with pytest.raises(WorkerError):
        build_of_seven(checkpoint=path, workers=Relay(die_at=4))
    assert storage.load_plain(path, format_name="cocurve-build", version=1)["done"] == 4
    require_same_bits(build_of_seven(checkpoint=path), build_of_seven())


def test_a_finished_checkpoint_opens_no_workers(tmp_path: Path) -> None:
    path, relay = tmp_path / "build.ckpt", Relay()
    build_of_seven(checkpoint=path)
    require_same_bits(build_of_seven(checkpoint=path, workers=relay), build_of_seven())
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
    require_same_bits(build_of_seven(listeners=[largest]), build_of_seven())
    assert len(largest.found) == ROWS
    assert min(largest.found) > 0


@pytest.mark.parametrize(
    "given",
    [Largest(), [Largest], [print], [None]],
    ids=["no list", "a class", "a function", "None"],
)
def test_what_is_no_listener_is_refused(given: Any) -> None:
    with pytest.raises(cl.InputError):
        build_of_seven(listeners=given)
