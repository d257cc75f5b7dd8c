"""CBO: whole attention and FFN blocks, chosen by a quadratic from gradients at the full model.

Jansen et al. 2026, "LLM Compression by Block Removal with Constrained Binary Optimization" (arXiv
2602.00161). A gate m_b multiplies what block b adds to the residual stream. At m = 1 the KL of the
gated model has gradient 0 and the Hessian

    F_bc = E_x E_{y ~ p(. | x)} [d log p(y | x) / d m_b  d log p(y | x) / d m_c]    (Fisher),

so removing the blocks with s_b = 1 costs about 1/2 s^T F s. The plan minimizes that.

Estimate: a label of each position of a row is drawn from the model's own prediction; g is the
gradient of the sum of their log probabilities. Given the text, the scores of two positions do not
correlate, so E[g g^T] is the sum of F over the positions.

Differences from the published method: it has one gate per layer, its labels are those of the text,
and the gradient of its loss is neglected. It removes exactly M layers, the best of all such sets;
here the budget is in parameters, and the set is greedy, then improved by exchanges. The last block
goes in part, its first units, so that all methods remove the same cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from torch import Tensor

from ..base.arguments import as_int
from ..base.progress import Bar
from ..base.storage import fingerprint
from ..curvature.matrix import Curvature
from ..estimator.support import widen
from ..extensions.analysis.refinement import refine
from ..models.architectures import Architecture, here
from ..models.identity import model_device
from ..models.logits import require_numbers
from ..models.masking import scaled
from ..models.runtime import measuring
from ..models.units import Unit, UnitSet
from ..solver.guards import FREE, Guards
from ..solver.selection import Selection
from ..solver.solve import solve_greedy
from .base import Arrays, Evidence, Scored, Subject
from .filling import Block, blocks, take_in_order


@dataclass(frozen=True)
class Cbo(Scored):
    """CBO; formula, estimate and differences are in the module's docstring.

    Attributes:
        passes: backward passes in all, at least one for each row. The diagonal of F has a relative
            error of about sqrt(2 / passes).
    """

    passes: int = 512

    name = "cbo"
    title = "CBO"
    needs_gradients = True
    draws = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", as_int(self.passes, "passes", 1))

    def scores(self, subject: Subject) -> Arrays:
        """Estimate "fisher": F [B, B] float64 in the order of `blocks`, nats per token.

        "scores" [M] is 1/2 F_bb of the unit's block.
        """
        architecture, text, parts = subject.architecture, subject.calibration, blocks(subject.units)
        each, total = ceil(self.passes / len(text)), np.zeros((len(parts), len(parts)))
        bar = Bar(text.input_ids, desc=self.title, unit="row", disable=not subject.progress)
        with measuring(subject.model, torch.get_num_threads()), differentiable(subject.model):
            for number, ids in enumerate(bar):
                seed = int(fingerprint(text.row_fingerprints[number], subject.seed)[:15], 16)
                found = gate_gradients(architecture, list(parts), ids, each, seed)
                total += found.T @ found
        fisher = total / (each * text.input_ids[:, 1:].numel())
        scores = np.zeros(len(subject.units))
        for place, members in enumerate(parts.values()):
            scores[members] = fisher[place, place] / 2
        return {"scores": scores, "fisher": fisher}

    def select(
        self, evidence: Evidence, units: UnitSet, ratio: float, guards: Guards = FREE
    ) -> Selection:
        """Minimize 1/2 s^T F s over sets of blocks, then fill the budget; caps bind in the fill."""
        self.require_own(evidence, units)
        fisher, parts = evidence.arrays["fisher"], blocks(units)
        costs = [int(units.costs[ids].sum()) for ids in parts.values()]
        facts = None, units.total_parameters, units.model_layers
        whole = [Unit(kind, n, 0, 0, 1, c) for (n, kind), c in zip(parts, costs, strict=True)]
        curvature = Curvature(fisher, UnitSet(tuple(whole), *facts))
        free = Guards(None, None, guards.protect_first, guards.protect_last, guards.kinds)
        chosen = refine(solve_greedy(curvature, ratio, 1.0, free), curvature).indicator
        # the chosen blocks first; of them, the one missed most comes last: it goes in part
        missed = fisher @ chosen + fisher.diagonal() * (0.5 - chosen)
        order, members = np.lexsort((missed / costs, 1 - chosen)), list(parts.values())
        turns = np.concatenate([members[place] for place in order]).tolist()
        return take_in_order(units, turns, ratio, guards, **evidence.source)


def gate_gradients(
    architecture: Architecture, parts: list[Block], ids: Tensor, draws: int, seed: int
) -> np.ndarray:
    """Return g of a row [T] for labels drawn anew [draws, B] float64; inside `differentiable`."""
    device = model_device(architecture.model)
    gates = torch.ones(len(parts), device=device, requires_grad=True)
    with gated(architecture, dict(zip(parts, gates, strict=True))):
        hidden = architecture.last_hidden(ids[None].to(device))[0, :-1]
    log_p = torch.log_softmax(widen(architecture.logits(hidden)), dim=-1)
    require_numbers(bool(log_p.isfinite().all()), "a row")
    generator = torch.Generator().manual_seed(seed)  # on the CPU: one choice of seed, any device
    labels = torch.multinomial(log_p.detach().exp().cpu(), draws, True, generator=generator)
    sums = log_p.gather(-1, labels.to(device)).sum(dim=0)
    found = [torch.autograd.grad(each, gates, retain_graph=True)[0] for each in sums]
    return torch.stack(found).double().cpu().numpy()


@contextmanager
def gated(architecture: Architecture, gates: Mapping[Block, Tensor]) -> Iterator[None]:
    """Multiply what blocks add to the residual stream by gates, inside the `with` block."""
    with ExitStack() as stack:
        for (layer, kind), gate in gates.items():
            module, width = architecture.layers[layer], architecture.width(layer, kind)
            if hasattr(module, "post_feedforward_layernorm"):
                # Gemma 2 and 3, OLMo2: a norm of what the block writes would undo a gate before it
                norm = module.get_submodule(f"post_{kind.replace('ffn', 'feedforward')}_layernorm")
                open_gate = here(lambda _, __, out, gate=gate: out * gate.to(out))
                hook = norm.register_forward_hook(open_gate)
                stack.callback(hook.remove)
            else:
                stack.enter_context(scaled(architecture, {(layer, kind): gate.expand(width)}))
        yield


@contextmanager
def differentiable(model: torch.nn.Module) -> Iterator[None]:
    """Allow gradients inside `measuring`, of activations but not of weights."""
    asking = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        for weight in asking:
            weight.requires_grad_(False)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for weight in asking:
            weight.requires_grad_(True)
