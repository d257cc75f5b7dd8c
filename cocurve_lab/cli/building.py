"""`cocurve build` and `cocurve merge`: H, in one process, in shards, or on a Ray cluster."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..curvature.matrix import merge_shards
from ..curvature.merging import progress_of, settings_of, shard_groups
from ..errors import InputError
from ..estimator.build import BuildOptions
from ..estimator.files import checkpoint_of, files_in, kept_at, whole_path
from .common import (
    add_model,
    add_text,
    add_verb,
    as_path,
    calibration_rows,
    progress,
    require_text,
    require_writable,
)

if TYPE_CHECKING:
    from ..curvature.merging import Shard
    from ..estimator.worker import Executor

BUILD = """\
Estimate H of a model: every unit is ablated alone on every row of the calibration text. This is the
slow step. The checkpoint in the folder is written every minute; interrupt the command (Ctrl-C, or
the SIGTERM of a batch queue) and give it again to go on. The result is named by model, text and
settings, so `load_or_estimate(folder, ...)` in a notebook loads it instead of building. On several
GPUs or nodes, give each --shard i/n with the same settings and folder, then `cocurve merge` it: the
sum has the bits of one build."""
BUILD_EXAMPLE = """\
  cocurve build demo --sequences 64 --out H
  cocurve build meta-llama/Llama-3.1-8B-Instruct --calibration c4.jsonl --out H
  CUDA_VISIBLE_DEVICES=0 cocurve build MODEL --calibration c4.jsonl --out H --shard 1/2 &
  CUDA_VISIBLE_DEVICES=1 cocurve build MODEL --calibration c4.jsonl --out H --shard 2/2 &
  wait; cocurve merge H
  cocurve build MODEL --calibration c4.jsonl --out H --ray 8 --ray-address auto"""
MERGE = """\
Put the shards of a build together. The result is written beside them, under the name of the whole
build; the shards stay. Missing, unfinished, repeated and foreign shards are refused by name."""
MERGE_EXAMPLE = """\
  cocurve merge H
  cocurve merge H/H_demo_0123456789.shard-*.pkl"""


def add_to(verbs: Any) -> None:
    parser = add_verb(verbs, "build", build, BUILD, BUILD_EXAMPLE)
    add_model(parser)
    add_text(parser, "calibration", 128, "text to calibrate on", "C4, from the hub")
    parser.add_argument(
        "--out", metavar="FOLDER", type=as_path, required=True, help="where H is kept"
    )
    parser.add_argument("--top-r", type=int, default=256, help="size of the shared support (256)")
    parser.add_argument("--ffn-groups", type=int, default=16, help="FFN groups per layer (16)")
    parser.add_argument(
        "--groups", type=int, default=16, help="groups of rows kept apart, for error bars (16)"
    )
    parser.add_argument("--shard", metavar="I/N", type=shard, help="do only share I of N")
    parser.add_argument(
        "--units-per-batch", type=int, help="ablations per forward; default: what fits"
    )
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    parser.add_argument(
        "--checkpoint-seconds", type=float, default=60.0, help="between checkpoints (60)"
    )
    parser.add_argument("--ray", metavar="WORKERS", type=int, help="build on so many Ray workers")
    parser.add_argument("--ray-address", help='of the cluster, or "auto"; default: this machine')
    parser.add_argument(
        "--ray-source",
        metavar="PLACE",
        help="folder or hub id workers read the model from themselves; default: it is sent to them",
    )
    parser = add_verb(verbs, "merge", merge, MERGE, MERGE_EXAMPLE)
    parser.add_argument(
        "files", metavar="FOLDER or FILE", type=as_path, nargs="+", help="the shards"
    )


def shard(text: str) -> Shard:
    """Read "2/3"."""
    try:
        number, count = (int(part) for part in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form I/N, such as 2/3") from None
    if not 1 <= number <= count:
        raise argparse.ArgumentTypeError(f"shards count from 1: {text} is not in 1/{count} ...")
    return number, count


def build(options: argparse.Namespace) -> int:
    from ..estimator.estimate import load_or_estimate
    from ..models.loading import load_model, report_device
    from ..models.units import enumerate_units

    settings = BuildOptions(  # all this before minutes of loading
        units_per_batch=options.units_per_batch,
        groups=options.groups,
        checkpoint_seconds=options.checkpoint_seconds,
        num_threads=options.threads,
        shard=options.shard,
    )
    if options.shard:
        shard_groups(options.shard, min(options.groups, options.sequences))
    require_writable(options.out)
    require_text(options)
    executor = _executor(options)
    print(report_device(options.device, options.dtype), flush=True)
    model, tokenizer = load_model(options.model, device=options.device, dtype=options.dtype)
    units = enumerate_units(model, options.ffn_groups)
    calibration = calibration_rows(options, tokenizer)
    print(f"{options.model}: {units}\n{calibration}", flush=True)
    curvature = load_or_estimate(
        options.out,
        model,
        units,
        calibration,
        options.top_r,
        progress=progress(),
        options=settings,
        executor=executor,
    )
    done, wanted = progress_of(curvature)
    file = kept_at(whole_path(options.out, curvature), options.shard)
    checkpoint = checkpoint_of(file)
    if done < wanted and checkpoint.exists():
        raise KeyboardInterrupt(
            f"interrupted; {done} of {wanted} sequences are kept in {options.out}. To go on:\n"
            f"  {options.again}"
        )
    if not file.exists():
        return _not_kept(options, done, checkpoint)
    print(curvature)
    return 0


def _not_kept(options: argparse.Namespace, done: int, checkpoint: Path) -> int:
    """Say that H could not be written, and what of it there is."""
    kept = f"Nothing of the {done} sequences done is kept. Correct that, and build again:"
    if checkpoint.exists():
        kept = f"{checkpoint} keeps what is done. Correct that, and go on:"
    print(
        f"cocurve build: no H could be written into {options.out}, for the reason above. {kept}\n"
        f"  {options.again}",
        file=sys.stderr,
    )
    return 1


def _executor(options: argparse.Namespace) -> Executor | None:
    if options.ray is None:
        return None
    from ..estimator.cluster import ray_executor

    return ray_executor(
        options.ray,
        address=options.ray_address,
        source=options.ray_source,
        cpus_per_worker=options.threads or 1,
    )


def merge(options: argparse.Namespace) -> int:
    from ..curvature.matrix import Curvature

    files = _shards_in(options.files)
    parts = [Curvature.load(file) for file in files]
    merged = merge_shards(parts)
    path = whole_path(files[0].parent, merged)
    if path.exists():
        Curvature.load(path, expected=settings_of(merged) | {"shard": None})
        print(f"{path} is there already (nothing was rebuilt).")
        return 0
    merged.save(path)
    for event in merged.provenance["events"]:
        print(event, file=sys.stderr)
    print(f"{merged}\nSaved H to {path}. The {len(parts)} shards were left where they are.")
    return 0


def _shards_in(places: list[Path]) -> list[Path]:
    """The files named, and those of the folders named."""
    files: list[Path] = []
    for place in places:
        if not place.exists():
            raise InputError(f"there is no {place}. Give the --out of the shards, or their files.")
        found = files_in(place).shards if place.is_dir() else [place]
        if not found:
            raise InputError(
                f"{place} holds no finished shards. Build them: cocurve build ... --shard 1/2."
            )
        files += found
    marks = sorted({file.name.split(".shard-")[0] for file in files})
    if len(marks) > 1 and any(place.is_dir() for place in places):
        raise InputError(
            f"there are shards of {len(marks)} builds: {', '.join(marks)}. Name the files of one: "
            f"cocurve merge {files[0].parent / marks[0]}.shard-*"
        )
    return files
