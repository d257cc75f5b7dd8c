"""Building H (Alg. 1): every unit ablated alone, features on a shared support, one Gram.

Sequences outside, units inside: the Gram of one sequence is added to a running sum and its features
are dropped, so memory does not grow with the calibration, an interrupted build is already an
estimate, and builds over other sequences can be merged.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..calibration import CalibrationSet
from ..curvature.matrix import Curvature
from ..curvature.merging import merge_shards
from ..errors import InputError
from ..models.architectures import describe
from ..models.identity import fingerprint_model, model_dtype, model_name
from ..models.runtime import require_measurable
from ..models.units import UnitSet, enumerate_units, require_units
from ..progress import Progress
from ..storage import previous
from .build import Build, BuildOptions, remedy
from .files import build_path, checkpoint_of, complete_shards, files_in, kept_at
from .probing import ProbeOptions, probe_curvature
from .worker import Executor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger(__name__)


def estimate_curvature(
    model: PreTrainedModel,
    units: UnitSet | None,
    calibration: CalibrationSet,
    top_r: int = 256,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    method: Literal["ablation", "probe"] = "ablation",
    options: BuildOptions | ProbeOptions | None = None,
    executor: Executor | None = None,
) -> Curvature:
    """Estimate H by single-unit ablations (eq. huv, eq. gram, Alg. 1).

    Each unit is masked alone, its logits are gathered on the teacher's top-r support with
    renormalised probabilities, and the whitened shifts form a Gram matrix. Replay is exact: the
    result agrees with naive full passes to 1e-5 in relative Frobenius norm in float32.

    Weights and layers run in the model's dtype; the head on the support, the whitening and the Gram
    run in float32 (float64 for a float64 model), sums over positions in float64. On the embedded
    model (CPU, 6 rows, all positions), against float64 on the same weights: float32 differs by
    4e-6 in Frobenius norm, float16 by 0.2 %, bfloat16 by 1.6 % and by up to 14 % on single diagonal
    entries: weak units are differences of nearly equal logits.

    With method "probe" it is a preview instead (`Curvature.is_preview`): the infinitesimal H* of
    probing.py, by random probes of about three passes each whatever M is, unbiased for H* and not
    for H. It keeps no checkpoint.

    Args:
        model: a supported causal language model; measured in eval mode, left as it was.
        units: from `enumerate_units(model)`; None does that.
        calibration: rows and scored positions.
        top_r: r, size of the shared support, at most the vocabulary.
        checkpoint: file to resume from and to write to; None keeps nothing.
        progress: show the estimate and a progress bar; "lines" writes lines for a log file instead.
        method: "ablation", the paper's; "probe", a preview from random probes.
        options: see BuildOptions; for a preview, ProbeOptions.
        executor: where sequences are measured: here, or `ray_executor(...)`. The result is the same
            to the bit on devices of one kind.

    Returns:
        A Curvature [M, M] in nats per token. After Ctrl-C with at least one sequence done, the
        estimate over the sequences done, with provenance["complete"] False.

    Raises:
        InputError: top_r above the vocabulary, token ids or row length outside the model, or
            options, a checkpoint or an executor that the method does not take.
        MismatchError: the units are not the model's, or the checkpoint is of another build.
        NumericalError: the model gives NaN or infinite logits.
        WorkerError: no worker of the executor is left; what is done is in the checkpoint.
    """
    if method not in ("ablation", "probe"):
        raise InputError(f"method is {method!r}; this release knows 'ablation' and 'probe'.")
    units = units or enumerate_units(model)
    if method == "probe":
        options = options or ProbeOptions()
        if not isinstance(options, ProbeOptions):
            raise _wrong_options(method, options, "ProbeOptions")
        if checkpoint is not None:
            raise InputError(
                f"checkpoint is {str(checkpoint)!r}, but a preview takes seconds and keeps none. "
                "Leave checkpoint out, and save the result with save(path)."
            )
        if executor is not None:
            raise InputError(
                f"executor is {executor}, but a preview takes seconds and runs here. Leave it out."
            )
        settings = build_settings(model, units, calibration, top_r, method, options)
        return probe_curvature(model, units, calibration, settings, options, progress)
    options = options or BuildOptions()
    if not isinstance(options, BuildOptions):
        raise _wrong_options(method, options, "BuildOptions")
    settings = build_settings(model, units, calibration, top_r, method, options)
    build = Build.start(
        settings, model_name(model), units, calibration, options, checkpoint, executor
    )
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
    executor: Executor | None = None,
) -> Curvature:
    """Load H from `folder` if this very build is there, else build it and save it.

    The file is named by the model and the fingerprint of all settings, so another model,
    calibration or r never overwrites it. An interrupted build resumes from the checkpoint beside
    it. Where all shards of the build lie there, they are merged; with `BuildOptions(shard=...)`
    and no whole H there, the shard is loaded or built, into a file of its own.

    Raises: as `estimate_curvature` and `Curvature.load`.
    """
    options = options or BuildOptions()
    settings = build_settings(model, units, calibration, top_r, "ablation", options)
    whole = build_path(folder, model_name(model), settings)
    if not whole.exists():
        _merge_beside(whole, progress)
    path = kept_at(whole, options.shard)
    if path.exists():
        shard = None if path == whole or options.shard is None else list(options.shard)
        curvature = Curvature.load(path, expected=settings | {"shard": shard})
        if progress:
            print(f"Loaded H from {path} (nothing was rebuilt).")
        return curvature
    checkpoint = checkpoint_of(path)
    if progress and not checkpoint.exists():
        _tell_of_others(folder, whole)
    build = Build.start(
        settings, model_name(model), units, calibration, options, checkpoint, executor
    )
    curvature = build.run(model, progress=progress)
    if build.done < build.total:
        return curvature  # the checkpoint stays; running again goes on from there
    try:
        curvature.save(path)
    except OSError as error:  # hours of work: hand them over, whatever the disk says
        advice = f"To keep H, {remedy(error)} and call save(...) on the result."
        log.warning("%s could not be written (%s). %s", path, error, advice)
        return curvature
    for leftover in (checkpoint, previous(checkpoint)):
        leftover.unlink(missing_ok=True)
    if progress:
        print(f"Saved H to {path}.")
    return curvature


def _tell_of_others(folder: str | os.PathLike[str], whole: Path) -> None:
    """Say which unfinished builds this one does not go on with: a setting may be mistyped."""
    files = files_in(folder).checkpoints
    others = [file.name for file in files if not file.name.startswith(whole.stem)]
    if others:
        print(
            f"Unfinished in {folder}, of another model, text or setting, and left as it is: "
            f"{', '.join(others)}."
        )


def _merge_beside(path: Path, progress: Progress) -> None:
    """Where all shards of the build at `path` are there, put them together; they stay."""
    files = complete_shards(path)
    if not files:
        return
    merge_shards([Curvature.load(file) for file in files]).save(path)
    if progress:
        print(f"Merged the {len(files)} shards of {path}.")


def build_settings(
    model: PreTrainedModel,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int,
    method: str,
    options: BuildOptions | ProbeOptions,
) -> dict[str, Any]:
    """Everything that decides what H is; stored with it and compared on resuming and loading.

    Reads all weights once (about 10 s for an 8B), after checking that the parts fit together.

    Raises:
        InputError, MismatchError: as `estimate_curvature`.
    """
    require_units(model, units)
    _require_fit(model, calibration, top_r)
    probes = (
        {"probes_per_sequence": options.probes, "probe_seed": options.seed}
        if isinstance(options, ProbeOptions)
        else {}
    )
    return probes | {
        "model_fingerprint": fingerprint_model(model),
        "model_dtype": model_dtype(model),
        "units_fingerprint": units.fingerprint,
        "calibration_fingerprint": calibration.fingerprint,
        "num_sequences": len(calibration),
        "seq_len": calibration.seq_len,
        "positions_per_sequence": calibration.positions_per_sequence,
        "top_r": top_r,
        "method": method,
        "groups": min(options.groups, len(calibration)),
    }


def _wrong_options(method: str, options: object, wanted: str) -> InputError:
    return InputError(
        f"options is {type(options).__name__}, but method {method!r} takes {wanted}. Pass that, or "
        "None."
    )


def _require_fit(model: PreTrainedModel, calibration: CalibrationSet, top_r: int) -> None:
    vocabulary = describe(model).vocabulary
    if not 1 <= top_r <= vocabulary:
        raise InputError(
            f"top_r is {top_r}; it lies between 1 and the vocabulary size {vocabulary}."
        )
    require_measurable(model, calibration)
