"""`estimate_curvature`: from a model to H by ablations.

`load_or_estimate` keeps H in a folder, in a file whose name contains a fingerprint of the settings:
builds with other settings never share a file. The algorithm itself is in algorithm1.py, the sum
over sequences in build.py.
"""

from __future__ import annotations

import logging
import os
import re
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..base.arguments import as_int, as_list, require_choice, require_type
from ..base.atomic import clean, previous
from ..base.errors import CocurveError, InputError
from ..base.origin import LOADED
from ..base.progress import Progress
from ..base.storage import fingerprint
from ..calibration import CalibrationSet
from ..curvature.matrix import Curvature, merge_shards
from ..curvature.settings import MAY_BE_ABSENT, BuildOptions, Shard, settings_of
from ..models.architectures import describe
from ..models.identity import known_record, model_dtype, model_name, short_name
from ..models.runtime import require_measurable
from ..models.units import UnitSet, enumerate_units, require_units
from .algorithm1 import Listener
from .build import Build, Measure, remedy, tell_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
_NAME = re.compile(r"_(?P<mark>[^_.]+)\.shard-(?P<number>\d+)-of-(?P<count>\d+)\.pkl$")


def estimate_curvature(
    model: PreTrainedModel,
    units: UnitSet | None,
    calibration: CalibrationSet,
    top_r: int = 256,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    method: Literal["ablation"] = "ablation",
    options: BuildOptions | None = None,
    workers: Measure | None = None,
    listeners: Sequence[Listener] = (),
) -> Curvature:
    """Estimate H by single-unit ablations (eq. huv, eq. gram, Alg. 1).

    Each unit is masked alone, its logits are gathered on the teacher's top-r support with
    renormalized probabilities, and the whitened shifts form a Gram matrix. Replay is exact: in
    float32 the result agrees with naive full passes to 1e-5 in relative Frobenius norm.

    Weights and layers run in the model's dtype; the head on the support, the whitening and the Gram
    in float32 (float64 for a float64 model), and sums over positions in float64. On the embedded
    model, compared with float64 on the same weights, float32 differs by 4e-6 in Frobenius norm,
    float16 by 0.2 % and bfloat16 by 1.6 %; single diagonal entries by up to 14 % in bfloat16.

    Args:
        model: a supported causal language model; measured in eval mode, left as it was.
        units: from `enumerate_units(model)`; None does that.
        calibration: rows and scored positions.
        top_r: r, size of the shared support; a smaller vocabulary is taken whole.
        checkpoint: file to resume from and to write to; None keeps nothing.
        progress: show a progress bar; "lines" writes lines for a log file instead.
        method: "ablation", the paper's and the only one.
        options: further settings of the build; None takes the paper's.
        workers: what measures the sequences: None is this process, or give `RayWorkers(...)`. The
            result has the same bits on devices of one kind.
        listeners: what else hears each batch of ablations (`algorithm1.Listener`), in this process.

    Raises:
        MismatchError: the units are not the model's, or the checkpoint is of another build.
        NumericalError: the model gives NaN or infinite logits.
        WorkerError: the workers died; finished sequences are in the checkpoint.
        KeyboardInterrupt: Ctrl-C; finished sequences are in the checkpoint.

    Returns:
        A Curvature [M, M] in nats per token. If `on_sequence` stopped the build, it is the estimate
        over the sequences done, with provenance["complete"] False.
    """
    require_choice(method, Literal["ablation"], "method")
    options = BuildOptions() if options is None else options
    require_type(options, BuildOptions, "options")
    listeners = as_list(listeners, "listeners")
    for each in listeners:
        if isinstance(each, type) or not isinstance(each, Listener):
            raise InputError(
                f"{each!r} is no listener. Give objects with begin(start) and hear(batch), such as "
                "listeners=[Mine()]."
            )
    units = units or enumerate_units(model)
    settings = build_settings(model, units, calibration, top_r, options)
    name = model_name(model)
    build = Build(settings, name, units, calibration, options, checkpoint, workers, listeners)
    return build.run(model, progress=progress)


def load_or_estimate(
    folder: str | os.PathLike[str],
    model: PreTrainedModel,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int = 256,
    *,
    progress: Progress = True,
    options: BuildOptions | None = None,
    workers: Measure | None = None,
) -> Curvature:
    """Load H from `folder` if the same build is there; otherwise build it and save it.

    The file name contains the model and a fingerprint of all settings, so another model,
    calibration or r never overwrites it. An interrupted build resumes from the checkpoint beside
    it. If all shards of the build are there, they are merged. With `BuildOptions(shard=...)` and no
    whole H, the shard is loaded, or built and saved in a file of its own. The other arguments are
    those of `estimate_curvature`, method "ablation".
    """
    options = options or BuildOptions()
    settings = build_settings(model, units, calibration, top_r, options)
    clean(folder)
    whole = build_path(folder, model_name(model), settings)
    if not whole.exists():
        _merge_beside(whole, progress)
    path = kept_at(whole, options.shard)  # the whole H if it is there, even if a shard is asked for
    if path.exists():
        shard = None if path == whole or options.shard is None else list(options.shard)
        curvature = Curvature.load(path, expected=MAY_BE_ABSENT | settings | {"shard": shard})
        _discard(checkpoint_of(path))  # there if a build was killed right after it saved H
        if progress:
            print(f"Loaded H from {path} (nothing was rebuilt).")
            tell_text(curvature, model, progress)
        return curvature
    checkpoint = checkpoint_of(path)
    if progress and not checkpoint.exists():
        _tell_nearest(folder, settings)
    name = model_name(model)
    build = Build(settings, name, units, calibration, options, checkpoint, workers)
    curvature = build.run(model, progress=progress)
    if build.done < build.total:
        return curvature  # the checkpoint stays, and running again resumes from it
    try:
        curvature.save(path)
    except OSError as error:  # return hours of work even if the disk is full
        advice = f"To keep H, {remedy(error)} and call save(...) on the result."
        log.warning("%s could not be written (%s). %s", path, error, advice)
        return curvature
    _discard(checkpoint)
    if progress:
        print(f"Saved H to {path}.")
    return curvature


def _tell_nearest(folder: str | os.PathLike[str], settings: dict[str, Any]) -> None:
    """Say in which settings the most similar kept H of this model differs from the one asked."""
    named = [name for name in settings if not name.endswith("fingerprint")]
    found: list[tuple[list[str], Path]] = []
    for path in files_in(folder).whole:
        with suppress(CocurveError, OSError):
            facts = Curvature.load(path).provenance
            if facts.get("model_fingerprint") == settings["model_fingerprint"]:
                differing = [
                    f"{name} ({facts.get(name)}, not {settings[name]})"
                    for name in named
                    if facts.get(name) != settings[name]
                ]
                found.append((differing or ["its text or its units"], path))
    if found:
        differing, path = min(found, key=lambda each: len(each[0]))
        text = f"{path} is another H of this model: it differs in {', '.join(differing)}."
        print(textwrap.fill(text, 100))


def _discard(checkpoint: Path) -> None:
    for leftover in (checkpoint, previous(checkpoint)):
        leftover.unlink(missing_ok=True)


def _merge_beside(path: Path, progress: Progress) -> None:
    """Merge the shards of the build at `path` if all are there; their files stay."""
    files = complete_shards(path)
    if files:
        merge_shards([Curvature.load(file) for file in files]).save(path)
    if files and progress:
        print(f"Merged the {len(files)} shards of {path}.")


def build_settings(
    model: PreTrainedModel,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int,
    options: BuildOptions,
) -> dict[str, Any]:
    """Collect all settings that decide H; they are stored with it and compared on loading.

    Reads all weights once (about 10 s for an 8B model), after checking that model, units and
    calibration fit together.
    """
    require_type(units, UnitSet, "units")
    require_type(calibration, CalibrationSet, "calibration")
    top_r = as_int(top_r, "top_r", 1)
    require_units(model, units)
    require_measurable(model, calibration)
    return options.marks() | {
        "model_fingerprint": known_record(model, fresh=True)["checkpoint"][LOADED],
        "model_dtype": model_dtype(model),
        "units_fingerprint": units.fingerprint,
        "calibration_fingerprint": calibration.fingerprint,
        "num_sequences": len(calibration),
        "seq_len": calibration.seq_len,
        "positions_per_sequence": calibration.positions_per_sequence,
        # as it is used, so that any r above the vocabulary is one build
        "top_r": min(top_r, describe(model).vocabulary),
        "method": "ablation",
        "groups": min(options.groups, len(calibration)),
    }


# The files of H -----------------------------------------------------------------------------------


def build_path(folder: str | os.PathLike[str], name: str, settings: dict[str, Any]) -> Path:
    """Return the file of the H with these settings in a folder; a new name if there is none.

    Args:
        folder: where files of H are kept.
        name: name of the model, for the reader; a `short_name` is made of it.
        settings: from `estimate.build_settings`; their fingerprint ends the name.
    """
    # only the fingerprint counts: the same weights may have been loaded under another name
    mark = fingerprint(settings)[:10]
    path = Path(folder) / f"H_{short_name(name)}_{mark}.pkl"
    return next(Path(folder).glob(f"H_*_{mark}.pkl"), path)


def kept_at(path: Path, shard: Shard | None) -> Path:
    """Return the file of the whole H if there is one or no shard is asked for, else the shard's.

    The file of a shard is named like `H_demo_1f2e.shard-2-of-3.pkl`.
    """
    if shard is None or path.exists():
        return path
    return path.with_name(f"{path.stem}.shard-{shard[0]}-of-{shard[1]}{path.suffix}")


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint of the build whose result is kept at `path`."""
    return path.with_suffix(".ckpt")


@dataclass(frozen=True)
class Files:
    """The files of H in a folder, sorted by name: whole, finished shards, and checkpoints."""

    whole: list[Path]
    shards: list[Path]
    checkpoints: list[Path]


def files_in(folder: str | os.PathLike[str]) -> Files:
    """List the files of H in a folder, by their names alone."""
    results = sorted(Path(folder).glob("H_*.pkl"))
    return Files(
        # only what follows the fingerprint counts: a model may be called x.shard-1-of-2
        whole=[file for file in results if ".shard-" not in file.name.rpartition("_")[2]],
        shards=[file for file in results if _NAME.search(file.name)],
        checkpoints=sorted(Path(folder).glob("H_*.ckpt")),
    )


def complete_shards(path: Path) -> list[Path]:
    """Return the files of all shards of the build at `path`; empty if one is missing."""
    # by name only: a damaged file matters only once its set is complete. Sets are told apart by
    # their number of shards: one build may lie there in two shards and in three
    sets: dict[int, dict[int, Path]] = {}
    for file in files_in(path.parent).shards:
        name = _NAME.search(file.name)
        if name and path.stem.endswith(f"_{name['mark']}"):
            sets.setdefault(int(name["count"]), {})[int(name["number"])] = file
    for count, found in sorted(sets.items()):
        if set(found) == set(range(1, count + 1)):
            return list(found.values())
    return []


def whole_path(folder: str | os.PathLike[str], part: Curvature) -> Path:
    """Return the file of the whole build to which a shard belongs."""
    return build_path(
        folder, str(part.provenance.get("model_name", "model")), settings_of(part.provenance)
    )
