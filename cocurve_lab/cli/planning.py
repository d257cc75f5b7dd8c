"""`cocurve solve`: from H and a budget to a plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import InputError
from ..solver.guards import FREE, Guards
from .common import DTYPES, add_verb, as_path, read_curvature, write_new

if TYPE_CHECKING:
    from ..curvature.matrix import Curvature
    from ..solver.selection import Selection
    from ..solver.targets import Target

SURROGATES = ("H", "pair-kl", "additive-kl")
DESCRIPTION = """\
Choose the units to remove within a budget, from H alone: no model is needed, and it takes
milliseconds. The budget is the share of removable parameters to remove (--ratio), or a limit on
what is left: --parameters, --size (bytes of weights) or --kv-cache (bytes per token). --lambda is
the weight of the edges of H: 1 takes them in full, 0 ignores them. --gate sets it by the FFN
redundancy of H. The plan is a JSON file for `cocurve prune`, the notebooks and
Selection.from_json."""
EXAMPLE = """\
  cocurve solve H --ratio 0.2 --out plan.json
  cocurve solve H/H_demo_0123456789.pkl --ratio 0.3 --gate --out plan.json
  cocurve solve H --parameters 6B --uniform --out plan.json
  cocurve solve H --ratio 0.3 --tensor-parallel 2 --align 64 --out plan.json
  cocurve solve H --size "12 GB" --dtype bfloat16 --protect-first 1 --out plan.json
  cocurve solve H --kv-cache "64 KiB" --dtype bfloat16 --out plan.json"""


def add_to(verbs: Any) -> None:
    """Add the verb `solve`."""
    parser = add_verb(verbs, "solve", run, DESCRIPTION, EXAMPLE)
    parser.add_argument("curvature", metavar="H", help="the file of H, or its folder")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--ratio", type=float, help="share of removable parameters to remove")
    budget.add_argument("--parameters", help='most parameters left: "6B", "350M"')
    budget.add_argument("--size", help='most bytes of weights left: "12 GB"')
    budget.add_argument("--kv-cache", help='most bytes of KV cache per token left: "64 KiB"')
    parser.add_argument("--dtype", choices=DTYPES, help="dtype for --size and --kv-cache")
    strength = parser.add_mutually_exclusive_group()
    strength.add_argument(
        "--lambda", dest="strength", type=float, default=1.0, help="weight of the edges (1.0)"
    )
    strength.add_argument("--gate", action="store_true", help="set lambda by the redundancy gate")
    parser.add_argument(
        "--surrogate",
        choices=SURROGATES,
        default="H",
        help="solve on H (default), on the KL of pairs, or on the KL of summed shifts; the last "
        "two need the .shifts.npz beside H",
    )
    parser.add_argument(
        "--uniform", action="store_true", help="remove the same counts from every layer"
    )
    parser.add_argument("--layer-cap", type=float, help="largest share removed from a layer")
    parser.add_argument(
        "--protect-first", type=int, default=0, help="number of first layers kept whole (0)"
    )
    parser.add_argument(
        "--protect-last", type=int, default=0, help="number of last layers kept whole (0)"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="DEVICES",
        help="KV heads and FFN channels left in a layer are multiples of it (1)",
    )
    parser.add_argument(
        "--align", type=int, default=1, help="FFN channels left are a multiple of it, such as 64"
    )
    parser.add_argument(
        "--depth", choices=("block", "layer"), help="remove only whole blocks, or whole layers"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=as_path, required=True, help="file for the plan"
    )


def run(options: argparse.Namespace) -> int:
    """Run `cocurve solve`."""
    budget = _budget(options)
    curvature = read_curvature(options.curvature)
    strength = options.strength
    if options.gate:
        strength = _by_gate(curvature)
    guards = Guards(
        layer_cap=options.layer_cap,
        protect_first=options.protect_first,
        protect_last=options.protect_last,
        tensor_parallel=options.tensor_parallel,
        align=options.align,
        depth=options.depth,
    )
    selection = solve_on(curvature, options.surrogate, budget, strength, guards, options.uniform)
    price = "" if curvature.shifts is None else _price(curvature, selection, options.surrogate)
    new = write_new(options.out, selection.to_json())
    print(f"{selection}\n{price}" + (f"Saved to {options.out}." if new else _same(options.out)))
    return 0


def solve_on(
    curvature: Curvature,
    surrogate: str,
    budget: float | Target,
    strength: float,
    guards: Guards = FREE,
    uniform: bool = False,
) -> Selection:
    """A plan solved on one of SURROGATES; on the shifts at the positions of the part "fit"."""
    from ..solver.solve import solve_greedy

    if surrogate == "additive-kl":
        if uniform:
            raise InputError(
                "--uniform does not go with additive-kl. Use --surrogate pair-kl, or H."
            )
        return curvature.additive().solve(budget, strength, guards, part="fit")
    solved_on = curvature if surrogate == "H" else curvature.pair_kl("fit")
    return solve_greedy(solved_on, budget, strength, guards, uniform=uniform)


def _price(curvature: Curvature, selection: Selection, surrogate: str) -> str:
    """The additive KL of a plan at the positions that its shifts were not solved on, in words."""
    additive = curvature.additive()
    kl, error = (f(selection, "price") for f in (additive.predict, additive.standard_error))
    # H was summed over all positions of its text, so none are left for a plan of it
    whose = "of the text of H" if surrogate == "H" else "that it was not solved on"
    return (
        f"Additive KL at {len(additive.shifts.of('price')):,} positions {whose}: "
        f"{kl:.4g} ± {error:.2g} nats per token.\n"
    )


def _budget(options: argparse.Namespace) -> Any:
    """The ratio, or a Target for what may be left."""
    from ..solver.targets import Target

    goal = "size" if options.size is not None else "kv_cache"
    in_bytes = getattr(options, goal) is not None
    if in_bytes and options.dtype is None:
        raise InputError(
            f"--{goal.replace('_', '-')} is in bytes, which depend on the dtype. Give it, for "
            "example --dtype bfloat16."
        )
    if options.dtype is not None and not in_bytes:
        raise InputError(
            f"--dtype {options.dtype} is only used with --size or --kv-cache; neither is given. "
            "Remove --dtype."
        )
    if options.ratio is not None:
        return options.ratio
    return Target(
        parameters=options.parameters,
        size=options.size,
        kv_cache=options.kv_cache,
        dtype=options.dtype,
    )


def _by_gate(curvature: Any) -> float:
    """The lambda that the redundancy gate recommends, also where undecided; prints its reason."""
    from ..solver.gate import redundancy_gate

    gate = redundancy_gate(curvature)
    print(gate.reason)
    if gate.recommended is None:
        raise InputError("the gate recommends no lambda for this H. Give --lambda instead.")
    return gate.recommended


def _same(path: Path) -> str:
    return f"{path} already holds this plan (nothing was written)."
