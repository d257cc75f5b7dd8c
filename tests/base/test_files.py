"""Every way into the lab for a file, with files that nobody should wait for or believe."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cocurve_lab as cl
from cocurve_lab.base.files import read_regular
from cocurve_lab.cli.common import read_plan
from cocurve_lab.evaluation.task_files import local_tasks
from cocurve_lab.extensions.big_models.on_disk import open_model, prune_to_folder
from cocurve_lab.extensions.texts.documents import read_documents
from cocurve_lab.extensions.texts.records import read_objects
from cocurve_lab.models.loading import load_tokenizer
from cocurve_studies.paper.published import reference_metrics
from helpers.problems import make_units, random_curvature
from helpers.release import Shape, write_release
from helpers.tiny_models import CONTEXT, tiny_model, word_tokenizer


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """A test that waits for a file ends."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each: a dense and a pruned model, H, a plan, a table, a release."""
    folder = tmp_path_factory.mktemp("kept")
    model, tokenizer = tiny_model(), word_tokenizer(CONTEXT)
    model.save_pretrained(folder / "dense")
    tokenizer.save_pretrained(folder / "dense")
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, 4), [1])
    cl.save_pruned(cl.prune(model, plan), folder / "pruned", tokenizer=tokenizer)
    (folder / "plan.json").write_text(plan.to_json())
    for name in ("H.pkl", "H.npz"):
        random_curvature(make_units(), 0).save(folder / name)
    write_release(folder / "release", Shape())
    return folder


# name of the file -> what reads it, given the folder around it
ENTRIES: dict[str, Callable[[Path], Any]] = {
    "text.txt": lambda folder: read_documents(folder / "text.txt"),
    "text.jsonl": lambda folder: read_documents(folder / "text.jsonl"),
    "text.csv": lambda folder: read_objects(folder / "text.csv"),
    "text.jsonl.gz": lambda folder: read_documents(folder / "text.jsonl.gz"),
    "task.jsonl": lambda folder: local_tasks([folder / "task.jsonl"]),
    "plan.json": lambda folder: read_plan(folder / "plan.json"),
    "H.pkl": lambda folder: cl.Curvature.load(folder / "H.pkl"),
    "H.npz": lambda folder: cl.Curvature.load(folder / "H.npz"),
    "release/registry.json": lambda folder: cl.Curvature.from_release(folder / "release"),
    "release/matrices/H.npy": lambda folder: cl.Curvature.from_release(folder / "release"),
    "release/r20/reference_metrics.json": lambda f: reference_metrics(f / "release", 0.2),
    "pruned/cocurve_manifest.json": lambda folder: cl.load_pruned(folder / "pruned"),
    "pruned/config.json": lambda folder: cl.load_pruned(folder / "pruned"),
    "pruned/model.safetensors": lambda folder: cl.load_pruned(folder / "pruned"),
    "pruned/generation_config.json": lambda folder: cl.load_pruned(folder / "pruned"),
    "pruned/tokenizer.json": lambda folder: load_tokenizer(folder / "pruned"),
    "dense/config.json": lambda folder: cl.load_model(folder / "dense"),
    "dense/model.safetensors": lambda folder: open_model(str(folder / "dense")),
    "dense/tokenizer.json": lambda folder: cl.load_model(folder / "dense"),
    "dense/model.safetensors.index.json": lambda folder: cl.load_model(folder / "dense"),
}
BAD: dict[str, Callable[[Path], Any]] = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "too large": lambda path: (path.touch(), os.truncate(path, 1 << 37)),
    "nested": lambda path: path.write_bytes(b"[" * 100_000),
    "infinite": lambda path: path.write_bytes(b'{"a": 1e400, "wikitext": -Infinity}'),
    "surrogate": lambda path: path.write_bytes(b'{"prompt": "\\ud800", "answer": "b"}'),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_bad_file_is_refused_at_once(entry: str, bad: str, kept: Path, tmp_path: Path) -> None:
    for path in kept.rglob("*"):  # linked, not copied: only the bad file is another
        there = tmp_path / path.relative_to(kept)
        there.mkdir() if path.is_dir() else there.symlink_to(path)
    path = tmp_path / entry
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True, parents=True)
    BAD[bad](path)
    if bad == "too large" and entry.endswith(".safetensors"):
        return  # read tensor by tensor, and its header is wrong, which others test
    if bad == "folder" and entry.endswith("index.json"):
        return  # not read, because the weights are in one file
    if entry == "text.txt" and bad in ("nested", "infinite", "surrogate"):
        assert ENTRIES[entry](tmp_path)  # text is text
        return
    if ("tokenizer" in entry or "generation" in entry) and bad in ("infinite", "surrogate"):
        return  # JSON that transformers judges
    with pytest.raises((cl.CocurveError, OSError)):
        ENTRIES[entry](tmp_path)


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    for place, most in ((tmp_path / "file", 4), ("a\0b", 5)):
        with pytest.raises(cl.CocurveError):
            read_regular(place, most)


ROADS: dict[str, Callable[[Path, Path], Any]] = {
    "memory": lambda folder, _: cl.load_model(folder),
    "stream": lambda folder, _: passed(cl.load_model(folder, stream=True)[0]),
    "disk": lambda folder, out: cut(folder, out),
}


def passed(model: Any) -> None:
    with torch.inference_mode():
        model(input_ids=torch.arange(3)[None])


def cut(folder: Path, out: Path) -> None:
    model: Any = open_model(str(folder))
    prune_to_folder(model, cl.Selection.from_pruned(cl.enumerate_units(model, 4), [1]), out)


@pytest.mark.parametrize("fault", ["nan", "infinite", "foreign", "missing"])
@pytest.mark.parametrize("road", ROADS)
def test_the_roads_to_the_weights_agree(road: str, fault: str, kept: Path, tmp_path: Path) -> None:
    """A weight that is not finite, not the model's, or not there, is named on every road."""
    folder = tmp_path / "dense"
    folder.mkdir()
    for path in (kept / "dense").iterdir():
        (folder / path.name).symlink_to(path)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.self_attn.k_proj.weight"))
    if fault == "missing":
        del weights[name]
    elif fault == "foreign":
        weights[name.replace("layers.1", "layers.9")] = torch.zeros(2, 2)
    else:
        weights[name].view(-1)[3] = float("nan" if fault == "nan" else "-inf")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(cl.CocurveError):
        ROADS[road](folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
