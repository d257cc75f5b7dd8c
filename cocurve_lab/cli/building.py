"""`cocurve build` and `cocurve merge`: H, in one process, in shards, or on a Ray cluster."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import InputError
from ..curvature.matrix import merge_shards
from ..curvature.merging import progress_of, shard_groups
from ..curvature.settings import BuildOptions, settings_of
from ..estimator.files import checkpoint_of, files_in, kept_at, whole_path
from .common import (
    add_model,
    add_text,
    add_verb,
    as_path,
    calibration_rows,
    progress,
    read_model,
    require_text,
    require_writable,
)

if TYPE_CHECKING:
    from ..curvature.settings import Shard
    from ..estimator.worker import Executor

BUILD = """\
Estimate H of a model: every unit is ablated alone on every row of the calibration text. This is the
slow step. A checkpoint is written every minute. You can stop with Ctrl-C or SIGTERM at any time;
running the same command again resumes. The result is named after the model, text and settings, so
`load_or_estimate(folder, ...)` in a notebook loads it instead of building. To use several GPUs or
nodes, run the command with --shard I/N on each, with the same settings and folder, and join the
shards with `cocurve merge`. The result is the same as that of one build."""
BUILD_EXAMPLE = """\
  cocurve build demo --sequences 64 --out H
  cocurve build meta-llama/Llama-3.1-8B-Instruct --calibration c4.jsonl --out H
  cocurve build LARGE_MODEL --stream --calibration c4.jsonl --out H
  CUDA_VISIBLE_DEVICES=0 cocurve build MODEL --calibration c4.jsonl --out H --shard 1/2 &
  CUDA_VISIBLE_DEVICES=1 cocurve build MODEL --calibration c4.jsonl --out H --shard 2/2 &
  wait; cocurve merge H
  cocurve build MODEL --calibration c4.jsonl --out H --ray 8 --ray-address auto"""
MERGE = """\
Join the shards of a build. The result is written beside them, under the name of the whole build,
and the shards stay. Missing, unfinished, repeated and foreign shards are rejected by name."""
MERGE_EXAMPLE = """\
  cocurve merge H
  cocurve merge H/H_demo_0123456789.shard-*.pkl"""


def add_to(verbs: Any) -> None:
    """Add the verbs `build` and `merge`."""
    parser = add_verb(verbs, "build", build, BUILD, BUILD_EXAMPLE)
    add_model(parser, stream=True)
    add_text(parser, "calibration", 128, "text to calibrate on", "C4 from the hub")
    parser.add_argument("--out", metavar="FOLDER", type=as_path, required=True, help="folder for H")
    parser.add_argument(
        "--top-r",
        type=int,
        default=256,
        help="r of the top-r support (256); a smaller vocabulary is taken whole",
    )
    parser.add_argument("--ffn-groups", type=int, default=16, help="FFN groups per layer (16)")
    parser.add_argument("--shard", metavar="I/N", type=shard, help="build only shard I of N")
    for option, name, default, text in BuildOptions.flags():
        kind: Any = {"action": "store_true"}
        if default is not False:
            kind = {"type": float if isinstance(default, float) else int, "default": default}
        parser.add_argument(f"--{name}", dest=option, help=text, **kind)
    parser.add_argument(
        "--ray", metavar="WORKERS", type=int, help="build on this number of Ray workers"
    )
    parser.add_argument("--ray-address", help='the cluster, or "auto"; default: this machine')
    parser.add_argument(
        "--ray-source",
        metavar="PLACE",
        help="folder or hub id from which the workers load the model; default: it is sent to them, "
        "or with --stream MODEL",
    )
    parser = add_verb(verbs, "merge", merge, MERGE, MERGE_EXAMPLE)
    parser.add_argument(
        "files",
        metavar="FOLDER or FILE",
        type=as_path,
        nargs="+",
        help="the folder of the shards, or the shards",
    )


def shard(text: str) -> Shard:
    """Parse a shard such as "2/3" into (2, 3)."""
    try:
        number, count = (int(part) for part in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form I/N, such as 2/3") from None
    if not 1 <= number <= count:
        raise argparse.ArgumentTypeError(f"shards count from 1 to N; {text} is outside")
    return number, count


def build(options: argparse.Namespace) -> int:
    """Run `cocurve build`."""
    from ..estimator.estimate import load_or_estimate
    from ..models.loading import report_device
    from ..models.units import enumerate_units

    # whatever can be wrong with the options is found before minutes of loading
    chosen = {option: getattr(options, option) for option, *_ in BuildOptions.flags()}
    settings = BuildOptions(shard=options.shard, **chosen)
    if options.shard:
        shard_groups(options.shard, min(options.groups, options.sequences))
    require_writable(options.out)
    require_text(options)
    executor = _executor(options)
    print(report_device(options.device, options.dtype), flush=True)
    model, tokenizer = read_model(options)
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
    if done < wanted and checkpoint.exists():  # `main` prints this and exits with 130
        raise KeyboardInterrupt(
            f"interrupted; {done} of {wanted} sequences are kept in {options.out}. To resume:\n"
            f"  {options.again}"
        )
    if not file.exists():
        return _not_kept(options, done, checkpoint)
    print(curvature)
    return 0


def _not_kept(options: argparse.Namespace, done: int, checkpoint: Path) -> int:
    """Say that H could not be written, and what is kept of it."""
    kept = f"None of the {done} finished sequences is kept. Correct this, and build again:"
    if checkpoint.exists():
        kept = f"{checkpoint} keeps the finished sequences. Correct this, and resume:"
    print(
        f"cocurve build: no H could be written into {options.out}, for the reason above. {kept}\n"
        f"  {options.again}",
        file=sys.stderr,
    )
    return 1


def _executor(options: argparse.Namespace) -> Executor | None:
    """The workers of --ray, or None to build in this process."""
    if options.ray is None:
        return None
    from ..extensions.big_models.cluster import ray_executor

    return ray_executor(
        options.ray,
        address=options.ray_address,
        source=options.ray_source or (_place(options.model) if options.stream else None),
        cpus_per_worker=options.num_threads or 1,
    )


def _place(model: str) -> str:
    """A model's place as workers in other folders find it."""
    place = as_path(model)
    return str(place.resolve()) if place.is_dir() else model


def merge(options: argparse.Namespace) -> int:
    """Run `cocurve merge`."""
    from ..curvature.matrix import Curvature

    files = _shards_in(options.files)
    parts = [Curvature.load(file) for file in files]
    merged = merge_shards(parts)
    path = whole_path(files[0].parent, merged)
    if path.exists():  # loaded, to be sure that it is this result
        Curvature.load(path, expected=settings_of(merged.provenance) | {"shard": None})
        print(f"{path} exists already (nothing was rebuilt).")
        return 0
    merged.save(path)
    for event in merged.provenance["events"]:
        print(event, file=sys.stderr)
    print(f"{merged}\nSaved H to {path}. The {len(parts)} shards are unchanged.")
    return 0


def _shards_in(places: list[Path]) -> list[Path]:
    """The files that were named, and the shards in the folders that were named."""
    files: list[Path] = []
    for place in places:
        if not place.exists():
            raise InputError(f"there is no {place}. Give the folder of the shards, or their files.")
        found = files_in(place).shards if place.is_dir() else [place]
        if not found:
            raise InputError(
                f"{place} holds no finished shards. Build them: cocurve build ... --shard 1/2."
            )
        files += found
    marks = sorted({file.name.rsplit(".shard-", 1)[0] for file in files})
    if len(marks) > 1 and any(place.is_dir() for place in places):
        raise InputError(
            f"there are shards of {len(marks)} builds: {', '.join(marks)}. Name the files of one: "
            f"cocurve merge {shlex.quote(str(files[0].parent / marks[0]))}.shard-*"
        )
    return files
