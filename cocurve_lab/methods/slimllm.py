"""SlimLLM (Guo et al., 2025): Pearson similarity for heads, a PCA-weighted score for the FFN.

Attention, with o = sum_g o_g the output and o_g that of KV group g (the sum of its query heads):

    s_g = sum over output dimensions of (1 - |Pearson over tokens (o - o_g, o)|), lowest goes first.

A layer that loses k groups starts from the k lowest, then swaps one removed and one kept group as
long as that raises sum |Pearson(kept sum, o)|, the best swap first (`swaps`).

FFN channel j, with n the root mean square of the FFN's input channels, (V, l) the eigenvectors and
eigenvalues of the covariance of its output, w = sigmoid(|l| / mean |l|) and rms(X_j) that of input
channel j of W_down:

    s_j = ||W_gate[j] n|| + ||W_up[j] n|| + ||(W_down[:, j]^T V) w|| rms(X_j), lowest goes first,

without the first term where the FFN has no gate (GPT-2, GPT-NeoX, OPT).

Units: a KV group's output is that of all its query heads (published: single heads, MHA only); an
FFN group's score is the sum over its channels (published: single channels). The published norms
over tokens are root mean squares here, a common factor.

Allocation: a layer's share is proportional to softmax(alpha cos), cos the mean cosine between the
layer's input and output over tokens: layers that change little lose more. `pruned_layers` keeps
only the largest of these (published: 26 of 32 at 20 %). `as_published` counts units instead of
parameters: round(r_i n) of each block, r_i = ratio L softmax(alpha cos)_i, at most all of them,
which misses the ratio; the published code states r_i by the number of layers it prunes, so its
ratio argument is larger (0.25 for 20 %).

Selection only: the linear regression folded into weights and biases is left out (A = 1, B = 0).

Differences: statistics of the dense model in every layer (published: of the model pruned up to
there). The published code keeps the lowest 1 % of FFN channels and removes the next ones, which no
text mentions; off here, `keep_lowest` brings it back, in FFN groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from torch import Tensor

from ..architectures import describe
from ..calibration import CalibrationSet
from ..errors import InputError
from ..guards import Guards
from ..runtime import exclusive
from ..selection import Selection
from ..units import UnitSet, require_units
from .base import Evidence, Method
from .filling import blocks, take_counts, take_in_order, uniform_order
from .slimllm_scores import ffn_scores, group_products, pearson_scores, swap_search, watching
from .statistics import Block, collect_statistics, layer_passes, provenance_of, require_passes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class SlimLlm(Method):
    """SlimLLM; formula, units, allocation and differences are in the module's docstring.

    Attributes:
        swaps: improve each layer's set of groups by swaps; such a plan has no removal order.
        alpha: sharpness of the allocation, >= 0 (published: 10 at 20 %, 7 at 50 %).
        pruned_layers: how many layers are pruned, those of largest cosine; None: all.
        keep_lowest: share of FFN groups, lowest scores first, that go last (published: 0.01, which
            rounds down to none below 100 groups).
        as_published: counts rounded per block; may miss the ratio on either side.
        layers_per_pass: layers whose second moments are held at a time (8 of an 8B: 2 GB); each
            pass runs all rows. The scores do not depend on it.
    """

    name: ClassVar[str] = "slimllm"
    title: ClassVar[str] = "SlimLLM"

    swaps: bool = True
    alpha: float = 10.0
    pruned_layers: int | None = None
    keep_lowest: float = 0.0
    as_published: bool = False
    layers_per_pass: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf:
            raise InputError(f"alpha is {self.alpha}; it is finite and at least 0.")
        if self.pruned_layers is not None and self.pruned_layers < 1:
            raise InputError(f"pruned_layers is {self.pruned_layers}; prune at least one layer.")
        if not 0 <= self.keep_lowest < 1:
            raise InputError(f"keep_lowest is {self.keep_lowest}; it is a share in [0, 1).")
        require_passes(self.layers_per_pass)

    def measure(
        self,
        model: PreTrainedModel,
        units: UnitSet,
        calibration: CalibrationSet,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> Evidence:
        """Scores, swapped sets and cosines; see `Method.measure`. `seed` has no effect.

        "scores" [M]; "swapped" [K + 1, M] bool, row k the attention units that go when every layer
        loses k of them (K the most any layer has); "cosine" [layers].
        """
        require_units(model, units)
        architecture, members = describe(model), blocks(units)
        groups = [len(ids) for ids in members if units.kinds[ids[0]] == "attention"]
        arrays = {
            "scores": np.zeros(len(units)),
            "swapped": np.zeros((1 + max(groups, default=0), len(units)), dtype=bool),
            "cosine": np.zeros(len(architecture.layers)),
        }
        for layers in layer_passes(architecture, self.layers_per_pass):
            with exclusive(model), watching(architecture, layers) as sums:
                inputs = collect_statistics(
                    model,
                    calibration,
                    moments=True,
                    only=[(layer, "attention") for layer in layers],
                    progress=progress,
                    title=f"Outputs, layers {layers[0]}-{layers[-1]}",
                )
            for layer in layers:
                arrays["cosine"][layer] = sums[layer].cosine / inputs.tokens
            for ids in members:
                layer = int(units.layers[ids[0]])
                if layer not in layers:
                    continue
                if units.kinds[ids[0]] == "attention":
                    products = group_products(architecture, units, ids, inputs)
                    _score_groups(arrays, ids, products)
                else:
                    channels = ffn_scores(architecture, layer, sums[layer], inputs.tokens)
                    chosen = [units.units[u] for u in ids]
                    arrays["scores"][ids] = [channels[u.start : u.stop].sum() for u in chosen]
        return Evidence(self.name, units, arrays, provenance_of(self, model, calibration))

    def select(
        self,
        evidence: Evidence,
        units: UnitSet,
        ratio: float,
        guards: Guards = Guards(),  # noqa: B008  (frozen, so sharing the default is safe)
    ) -> Selection:
        """More of the layers that change little; see `Method.select`."""
        self.require_own(evidence, units)
        shares = layer_shares(evidence.arrays["cosine"], self.alpha, self.pruned_layers)
        scores = self._ranked_scores(evidence, units)
        if self.as_published:
            plan = take_counts(units, scores, published_counts(units, shares, ratio), ratio, guards)
        else:
            order = uniform_order(units, scores, shares[units.layers])
            plan = take_in_order(units, order, ratio, guards)
        return _swapped(plan, evidence.arrays["swapped"]) if self.swaps else plan

    def _ranked_scores(self, evidence: Evidence, units: UnitSet) -> np.ndarray:
        """Scores [M], with the FFN groups that `keep_lowest` spares behind the others."""
        scores = evidence.scores.copy()
        for ids in blocks(units):
            if units.kinds[ids[0]] == "ffn":
                order = ids[np.argsort(scores[ids], kind="stable")]
                spared = order[: int(self.keep_lowest * len(ids))]
                scores[spared] += scores[ids].max() + 1
        return scores


def _score_groups(arrays: dict[str, np.ndarray], ids: np.ndarray, products: Tensor) -> None:
    """Fill in the scores of one layer's attention units and its best set of every size."""
    scores = arrays["scores"][ids] = pearson_scores(products)
    for count, row in enumerate(arrays["swapped"]):
        row[ids[swap_search(products, scores, min(count, len(ids)))]] = True


# Allocation ---------------------------------------------------------------------------------------


def layer_shares(cosine: np.ndarray, alpha: float, pruned_layers: int | None) -> np.ndarray:
    """L softmax(alpha cos) [L] over the pruned layers, 0 elsewhere; mean 1."""
    chosen = np.argsort(-cosine, kind="stable")[: pruned_layers or len(cosine)]
    shares = np.zeros(len(cosine))
    powers = np.exp(alpha * (cosine[chosen] - cosine[chosen].max()))
    shares[chosen] = len(cosine) * powers / powers.sum()
    return shares


def published_counts(units: UnitSet, shares: np.ndarray, ratio: float) -> dict[Block, int]:
    """round(r_i n) units of every block, by (layer, kind)."""
    counts: dict[Block, int] = {}
    for ids in blocks(units):
        unit = units.units[ids[0]]
        counts[unit.layer, unit.kind] = round(min(1.0, ratio * shares[unit.layer]) * len(ids))
    return counts


def _swapped(plan: Selection, swapped: np.ndarray) -> Selection:
    """The plan with each layer's attention units replaced by its best set of the same number.

    Attention units of a layer cost the same, so budget and guards are as before.
    """
    units = plan.units
    pruned = plan.indicator.copy()
    for ids in blocks(units):
        if units.kinds[ids[0]] == "attention":
            pruned[ids] = swapped[int(pruned[ids].sum()), ids]
    chosen = tuple(np.flatnonzero(pruned).tolist())
    return replace(plan, pruned=chosen, ordered=False)
