"""`cocurve build` and `cocurve merge`: H, in one process, in shards, or on a Ray cluster."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import InputError
from ..curvature.matrix import Curvature, merge_shards
from ..curvature.merging import progress_of, shard_groups
from ..curvature.settings import BuildOptions, Shard, settings_of
from ..estimator.estimate import (
    checkpoint_of,
    files_in,
    kept_at,
    load_or_estimate,
    whole_path,
)
from ..extensions.device import report_device
from ..models.units import enumerate_units
from .common import Rows, StreamedModel, progress, require_counts, require_writable, rows_of
from .options import Verb, argument, as_path, flag, part

if TYPE_CHECKING:
    from ..extensions.big_models.cluster import RayWorkers


def shard(text: str) -> Shard:
    """Parse a shard such as "2/3" into (2, 3)."""
    try:
        number, count = (int(part) for part in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form I/N, such as 2/3") from None
    if not 1 <= number <= count:
        raise argparse.ArgumentTypeError(f"shards count from 1 to N; {text} is outside")
    return number, count


@dataclass(frozen=True, kw_only=True)
class Build(Verb):
    """Estimate H of a model: every unit is ablated alone on every row of the calibration text.

    This is the slow step. A checkpoint is written every minute. You can stop with Ctrl-C or SIGTERM
    at any time; running the same command again resumes. The result is named after the model, text
    and settings, so `load_or_estimate(folder, ...)` in a notebook loads it instead of building. To
    use several GPUs or nodes, run the command with --shard I/N on each, with the same settings and
    folder, and join the shards with `cocurve merge`. The result is the same as that of one build.

    Examples:
      cocurve build demo --sequences 64 --out H
      cocurve build meta-llama/Llama-3.1-8B-Instruct --calibration c4.jsonl --out H
      cocurve build LARGE_MODEL --stream --calibration c4.jsonl --out H
      CUDA_VISIBLE_DEVICES=0 cocurve build MODEL --calibration c4.jsonl --out H --shard 1/2 &
      CUDA_VISIBLE_DEVICES=1 cocurve build MODEL --calibration c4.jsonl --out H --shard 2/2 &
      wait; cocurve merge H
      cocurve build MODEL --calibration c4.jsonl --out H --ray 8 --ray-address auto
    """

    model: StreamedModel = part()
    text: Rows = rows_of("calibration", 128, "text to calibrate on", "C4 from the hub")
    out: Path = flag("folder for H", metavar="FOLDER")
    top_r: int = flag("r of the top-r support (256); a smaller vocabulary is taken whole", 256)
    ffn_groups: int = flag("FFN groups per layer (16)", 16)
    settings: BuildOptions = part(
        shard=flag("build only shard I of N", None, metavar="I/N", type=shard)
    )
    ray: int | None = flag("build on this number of Ray workers", metavar="WORKERS")
    ray_address: str | None = flag('the cluster, or "auto"; default: this machine')
    ray_source: str | None = flag(
        "folder or hub id from which the workers load the model; default: it is sent to them, or "
        "with --stream MODEL",
        metavar="PLACE",
    )

    def run(self) -> int:
        """Run `cocurve build`."""
        if self.settings.shard:
            shard_groups(self.settings.shard, min(self.settings.groups, self.text.sequences))
        require_writable(self.out)
        require_counts(self, "top_r", "ffn_groups", "ray")
        self.text.require()
        workers = self._workers()
        place = self.model.place
        print(report_device(self.model.device, self.model.dtype), flush=True)
        model, tokenizer = self.model.load(place)
        units = enumerate_units(model, self.ffn_groups)
        calibration = self.text.calibration(place, tokenizer)
        print(f"{place}: {units}\n{calibration}", flush=True)
        try:
            curvature = load_or_estimate(
                self.out,
                model,
                units,
                calibration,
                self.top_r,
                progress=progress(),
                options=self.settings,
                workers=workers,
            )
        except KeyboardInterrupt as stop:  # `main` prints this and exits with 130
            if not str(stop):  # nothing was done
                raise
            raise KeyboardInterrupt(f"{stop}. To resume: {self.again}") from None
        done, _ = progress_of(curvature)
        file = kept_at(whole_path(self.out, curvature), self.settings.shard)
        checkpoint = checkpoint_of(file)
        if file.exists():
            print(curvature)
            return 0
        kept = f"{checkpoint} keeps" if checkpoint.exists() else "nothing keeps"
        print(
            f"cocurve build: no H could be written into {self.out}, for the reason above; {kept} "
            f"the {done} finished sequences. Correct this, and run again:\n  {self.again}",
            file=sys.stderr,
        )
        return 1

    def _workers(self) -> RayWorkers | None:
        """The workers of --ray, or None to build in this process."""
        if self.ray is None:
            return None
        from ..extensions.big_models.cluster import RayWorkers

        source = self.ray_source
        if source is None and self.model.stream:
            source = self.model.place
            if as_path(source).is_dir():  # workers run in other folders
                source = str(as_path(source).resolve())
        return RayWorkers(self.ray, address=self.ray_address, source=source)


@dataclass(frozen=True, kw_only=True)
class Merge(Verb):
    """Join the shards of a build.

    The result is written beside them, under the name of the whole build, and the shards stay.
    Missing, unfinished, repeated and foreign shards are rejected by name.

    Examples:
      cocurve merge H
      cocurve merge H/H_demo_0123456789.shard-*.pkl
    """

    files: tuple[Path, ...] = argument("FOLDER or FILE", "the folder of the shards, or the shards")

    def run(self) -> int:
        """Run `cocurve merge`."""
        files = self._shards()
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

    def _shards(self) -> list[Path]:
        """The files that were named, and the shards in the folders that were named."""
        files: list[Path] = []
        for place in self.files:
            found = files_in(place).shards if place.is_dir() else [place]
            if not found or not found[0].exists():
                raise InputError(
                    f"{place} holds no finished shards. Build them: cocurve build ... --shard 1/2."
                )
            files += found
        return files
