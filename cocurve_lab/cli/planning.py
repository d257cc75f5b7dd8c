"""`cocurve solve`: from H and a budget to a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..base.errors import InputError
from ..curvature.matrix import Curvature
from ..extensions.analysis.gate import redundancy_gate
from ..extensions.machine import Machine, solve_aligned
from ..solver.guards import Guards
from ..solver.solve import solve_greedy
from ..solver.targets import Target, flop_costs
from .common import Dtype, read_curvature, write_new
from .options import Verb, argument, flag, part


@dataclass(frozen=True, kw_only=True)
class Solve(Verb):
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
    """

    curvature: str = argument("H", "the file of H, or its folder")
    ratio: float | None = flag("share of removable parameters to remove", one_of="budget")
    parameters: str | None = flag('most parameters left: "6B", "350M"', one_of="budget")
    size: str | None = flag('most bytes of weights left: "12 GB"', one_of="budget")
    kv_cache: str | None = flag('most bytes of KV cache per token left: "64 KiB"', one_of="budget")
    dtype: Dtype | None = flag("dtype for --size and --kv-cache")
    cost: Literal["parameters", "flops"] = flag(
        "what --ratio counts: parameters, or floating-point operations per token (%(default)s)",
        "parameters",
    )
    context: int = flag("with --cost flops: tokens that a token attends to (2048)", 2048)
    strength: float = flag(
        "weight of the edges (1.0)", 1.0, name="lambda", at_most_one_of="strength"
    )
    gate: bool = flag("set lambda by the redundancy gate", at_most_one_of="strength")
    uniform: bool = flag("remove the same counts from every layer")
    guards: Guards = part(
        layer_cap="largest share removed from a layer",
        protect_first="number of first layers kept whole (0)",
        protect_last="number of last layers kept whole (0)",
    )
    machine: Machine = part(
        tensor_parallel=flag(
            "KV heads and FFN channels left in a layer are multiples of it (1)",
            1,
            metavar="DEVICES",
        ),
        align="FFN channels left are a multiple of it, such as 64",
        depth="remove only whole blocks, or whole layers",
    )
    out: Path = flag("file for the plan", metavar="FILE")

    def run(self) -> int:
        """Run `cocurve solve`."""
        budget = self._budget()
        curvature = read_curvature(self.curvature)
        if self.cost == "flops":
            budget = Target(ratio=self.ratio, costs=flop_costs(curvature.units, self.context))
        strength = _by_gate(curvature) if self.gate else self.strength
        if self.machine == Machine():
            uniform = self.uniform or None
            selection = solve_greedy(curvature, budget, strength, self.guards, uniform=uniform)
        else:
            selection = solve_aligned(
                curvature,
                budget,
                strength,
                self.guards,
                machine=self.machine,
                uniform=self.uniform,
            )
        said = f"{self.out} already holds this plan (nothing was written)."
        if write_new(self.out, selection.to_json()):
            said = f"Saved to {self.out}."
        print(f"{selection}\n{said}")
        return 0

    def _budget(self) -> float | Target:
        """The ratio, or a Target for what may be left."""
        in_bytes = self.size is not None or self.kv_cache is not None
        if in_bytes != (self.dtype is not None):
            raise InputError(
                f"--dtype is {self.dtype}. Give it with --size or --kv-cache, whose bytes depend "
                "on it, such as --dtype bfloat16, and leave it out otherwise."
            )
        if self.ratio is not None:
            return self.ratio
        if self.cost == "flops":
            raise InputError("--cost flops counts a share. Give --ratio, or leave out --cost.")
        return Target(
            parameters=self.parameters, size=self.size, kv_cache=self.kv_cache, dtype=self.dtype
        )


def _by_gate(curvature: Curvature) -> float:
    """The lambda that the redundancy gate recommends, also where undecided; prints its reason."""
    gate = redundancy_gate(curvature)
    print(gate.reason)
    if gate.recommended is None:
        raise InputError("the gate recommends no lambda for this H. Give --lambda instead.")
    return gate.recommended
