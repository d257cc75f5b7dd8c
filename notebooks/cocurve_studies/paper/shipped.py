"""The paper on SmolLM2-135M: its central sentences beside what ships, with one verdict each.

No model runs: H, its plans and their KL by row of text are in data/smollm2/. Where two plans stand
in one sentence, the error is over rows and draws of H together (`draws.py`), and Student's t has
the degrees of freedom of both. The draws are of plans without guards, and stand in for those of
plans with guards. Where none were measured, a part of the error is unknown, and so is the verdict.

Plans that still answer are apart from broken ones: an edge may help only before the knee.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from scipy.stats import rankdata

from cocurve_lab.base.errors import InputError
from cocurve_lab.curvature.graph import bridge_units
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.analysis.gate import redundancy_gate
from cocurve_lab.extensions.pretrained.kept import KeptPlan, KeptPlans, kept_curvature, kept_plans
from cocurve_lab.extensions.writing import plus_minus
from cocurve_lab.measuring.results import mean_and_error
from cocurve_lab.methods.registry import get_method

from ..bake_off.contenders import BASELINES
from ..chart import add, chart, empty, share_axis
from ..draws import Redrawn
from ..findings import BELOW, NOT_ABOVE, Claim, Finding, Findings, Measured
from ..lazy import Figure
from ..structure.findings import DIFFERENT, LOW, POSITIVE, PROTECTED, more_than_half
from ..structure.geometry import proposition_table
from ..tables import pick
from ..trust.fidelity import POOL, correlations, resampled_means
from ..trust.findings import PREDICTIONS_HOLD, TRUST

ZERO, HALF, ONE = "H, lambda 0", "H, lambda 0.5", "H, lambda 1"
OWN, ENDS = ", own guards", ", ends kept"  # ends of a name
COMPARED = {"c4": "C4", "wikitext": "WikiText"}
TEXTS = COMPARED | {"manual": "the manual"}
ANSWERS = 1 / 3  # of the dense model's right answers: with fewer a plan is broken
_EDGES, _SCOPE = 'Section "Ablations: the edge term is decisive"', 'App. "Scope"'
RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
MEASURED = (0.1, 0.2, 0.3)  # ratios with guards and every method
ANSWERING, BROKEN = "plans answer", "plans are broken"
KNEE = Claim("regime", "degradation is graceful to 30%, and edges are for up to 20%", "Fig. pareto")
HELP = Claim(
    "edges",
    "to 20% the edges count in full: λ 1 beats λ 0 (Mistral: perplexity 13.26 to 8.10)",
    _EDGES,
    BELOW,
)
COLLAPSE = Claim("edges", "in collapse the best λ is below 1 (8B: 1, ½, 0 at 20, 40, 50%)", TRUST)
GATE = Claim(
    "gate", "below 0.12 λ = 1, from H alone, and no plan is the worse for it", _SCOPE, NOT_ABOVE
)
FLOOR = Claim(
    "floor",
    "at the redundancy floor (Falcon3: 0.028) abilities rise with λ (.583, .602, .603)",
    'Section "A perplexity-capability trade-off at the redundancy floor"',
)
GUARDS = Claim("guards", "guards chosen on held-out text help", 'App. "Solver"', BELOW)
NINE = Claim(
    "bake-off",
    "CoCurve beats each of nine methods (8B: perplexity 12.91, next 13.23)",
    "Table main-8b",
    BELOW,
)


@dataclass(frozen=True, eq=False)
class Shipped:
    """H of a model and its measured plans, by name and ratio."""

    curvature: Curvature
    kept: KeptPlans

    @cached_property
    def plans(self) -> dict[tuple[str, float], KeptPlan]:
        """The plans by name and requested ratio; the dense model has none, 0."""
        return {(p.name, p.selection.requested_ratio or 0.0): p for p in self.kept.plans}

    def rows(self, name: str, ratio: float, text: str) -> np.ndarray:
        """KL of a plan by row, nats per token; empty where it was not measured."""
        plan = self.plans.get((name, ratio))
        return np.zeros(0) if plan is None else plan.every_row(text)

    def less(
        self, name: str, other: str, ratio: float, text: str, of_one_h: bool = False
    ) -> Measured | None:
        """KL of a plan less that of another over their common rows; None where one is missing.

        Its error is over rows and draws of H; over rows alone where both are `of_one_h`.
        """
        both = [self.rows(each, ratio, text) for each in (name, other)]
        count = min(map(len, both))
        if count < 2:
            return None
        mean, error = mean_and_error(both[0][:count] - both[1][:count])
        degrees: float | None = count - 1
        if not of_one_h:
            kl: dict[Hashable, np.ndarray] = {
                each: self._drawn(each, ratio, text) for each in (name, other)
            }
            groups = len(self.curvature.grouped["group_positions"])
            drawn = Redrawn(max(map(len, kl.values())), kl, {}, count, groups)
            row = drawn.columns("gap", error, name, other)
            error, degrees = row["gap_error"], row.get("gap_degrees")
        known = " (one H)" if of_one_h else "" if degrees else " (rows alone)"
        return Measured(mean, error, degrees, plus_minus(mean, error) + known)

    def _drawn(self, name: str, ratio: float, text: str) -> np.ndarray:
        """Mean KL of the plans of resampled H [draws] over the rows that judged all of them.

        Fewer rows make the spread over draws wider, not narrower. A plan of no H does not vary.
        """
        begin, _, rest = name.partition(", lambda ")
        known = (f"draw {n} of H, lambda {rest.split(',')[0]}" for n in range(99))
        judged = [kl for each in known if len(kl := self.rows(each, ratio, text))]
        count = min(map(len, judged), default=0)  # draws share their first rows
        means = np.array([values[:count].mean() for values in judged])
        return means if begin == "H" else np.zeros(1)

    def right(self, name: str, ratio: float) -> tuple[int, int]:
        """Right answers of a plan, and questions asked."""
        plan = self.plans.get((name, ratio))
        counts = [] if plan is None else [*plan.right.values()]
        return sum(right for right, _ in counts), sum(asked for _, asked in counts)

    # The sentences --------------------------------------------------------------------------------

    def edges(
        self,
        ratios: Sequence[float],
        guards: Sequence[str] = ("", OWN),
        texts: Iterable[str] = TEXTS,
    ) -> list[Measured]:
        """KL at lambda 1 less that at lambda 0: each ratio, guards and text that was measured."""
        return [
            gap._replace(words=f"{ratio:.0%} {TEXTS[text]}{words}: {gap}")
            for ratio, words, text in product(ratios, guards, texts)
            if (gap := self.less(ONE + words, ZERO + words, ratio, text)) is not None
        ]

    def answered(self, ratio: float) -> tuple[str, float]:
        """The plan of a ratio with most right answers in words, and its share of the questions."""
        counts = {name: self.right(name, at) for name, at in self.plans if at == ratio}
        best = max(counts, key=lambda name: counts[name])
        right, asked = counts[best]
        return f"{ratio:.0%} {right} of {asked} ({best})", right / max(asked, 1)

    def bridges(self, ratio: float) -> Finding:
        """How many bridges the plans with both ends kept remove, and what keeping them costs."""
        units = set(bridge_units(self.curvature).indices)
        zero, one = (
            len(units & set(self.plans[each + ENDS, ratio].selection.pruned))
            for each in (ZERO, ONE)
        )
        price = "; ".join(map(str, self.edges((ratio,), (ENDS,))))
        counts = f"ends kept, {ratio:.0%}: of {len(units)} λ 0 removes {zero}, λ 1 {one}"
        ours = f"{counts}. KL(λ 1) - KL(λ 0): {price}"
        return PROTECTED.given(ours, more_than_half(zero, zero + one))

    def nine(self, ratio: float) -> Finding:
        """CoCurve with its own guards against each of the nine, with theirs where measured."""
        titles = ["random 0", *(get_method(n).title for n in BASELINES if n != "random")]
        own = {title: (title + OWN, ratio) in self.plans for title in titles}
        found = [
            gap._replace(words=f"{title}{'' if own[title] else ', no guards,'} on {where} {gap}")
            for (text, where), title in product(COMPARED.items(), titles)
            if (gap := self.less(ONE + OWN, title + OWN * own[title], ratio, text)) is not None
        ]
        lowest = sorted(found, key=lambda gap: -(gap.value or 0.0))[:3]
        ours = f"{ratio:.0%}, KL(CoCurve) less KL of the closest: {'; '.join(map(str, lowest))}"
        return NINE.on(*found, ours=ours)

    def pool(self, ratio: float = 0.2) -> list[Finding]:
        """Whether H orders plans of one budget: all that are of H or random, and along lambda."""
        claim, found = PREDICTIONS_HOLD[POOL, "spearman"][1], []
        along = ("H, lambda",)
        for words, begins in (("with random plans", ("draw", "random", *along)), ("", along)):
            plans = [
                plan
                for (name, at), plan in self.plans.items()
                if at == ratio and name.startswith(begins) and not name.endswith(OWN)
                if len(plan.kl["c4"]) == self.kept.texts["c4"]["rows"]
            ]
            means = resampled_means(np.array([plan.kl["c4"] for plan in plans]), 2000, 0)
            predicted = rankdata([plan.selection.predicted_risk for plan in plans])
            ranks = correlations(predicted, rankdata(means, axis=1))
            value = Measured(float(ranks[0]), float(ranks[1:].std(ddof=1)))
            about = words or "plans of H along lambda alone"
            found.append(claim.on(value, ours=f"Spearman {{}}, {len(plans)} plans, {about}"))
        return found

    def tradeoff(self, ratio: float) -> Finding:
        """Right answers at lambda 1/2 and 1 less those at lambda 0; questions as if unpaired."""
        found, (base, asked) = [], self.right(ZERO, ratio)
        for name in (HALF, ONE):
            shares = np.array([self.right(name, ratio)[0], base]) / asked
            error = float(np.sqrt((shares * (1 - shares)).sum() / asked))
            gap = float(shares[0] - shares[1])
            found.append(Measured(gap, error, words=f"{name} {plus_minus(gap, error)}"))
        return FLOOR.on(*found, ours=f"{ratio:.0%}, right answers less those at λ 0: {{}}")


def paper_findings(shipped: Shipped) -> Findings:
    """The central sentences of the paper beside what ships, each with one verdict."""
    gate = redundancy_gate(shipped.curvature)
    told = {ratio: shipped.answered(ratio) for ratio in RATIOS}
    broken = [ratio for ratio, (_, share) in told.items() if share < ANSWERS]
    works = [ratio for ratio in (0.05, *MEASURED) if ratio < min(broken)]
    ours = f"most right answers: {', '.join(words for words, _ in told.values())}"
    found = [KNEE.given(ours, min(broken) > 0.2)]
    found += [HELP.on(*shipped.edges([ratio]), ours=f"{ANSWERING}: {{}}") for ratio in works]
    helps = HELP.on(*shipped.edges([0.2]), ours=f"{BROKEN}: {{}}")
    collapse = shipped.edges((0.3, 0.4), ("",), COMPARED)
    followed = shipped.edges(MEASURED, (OWN,), ("c4",))
    advice = f"{'decided' if gate.decided else 'undecided'}: λ = {gate.recommended:g}"
    ours = f"{gate.redundancy:.3f}, {advice}. KL(λ 1) - KL(λ 0): {{}}"
    found += [helps, COLLAPSE.on(*collapse), GATE.on(*followed, ours=ours), shipped.tradeoff(0.1)]
    guards = [
        gap._replace(words=f"{name[3:]} at {ratio:.0%} {gap}")
        for name in (ZERO, ONE)
        for ratio in MEASURED
        if (gap := shipped.less(name + OWN, name, ratio, "c4", of_one_h=True)) is not None
    ]
    found += [GUARDS.on(*guards), shipped.bridges(0.2), shipped.bridges(0.4)]
    found += [shipped.nine(ratio) for ratio in MEASURED]
    found += shipped.pool()
    table = proposition_table(shipped.curvature, (0.2,))
    (sign,) = pick(table, quantity="share of positive edges")
    found.append(POSITIVE.on(Measured(sign["value"], sign["value_error"])))
    # these two say where edges help; on a model where they do not, the premise fails
    words = f"FFN redundancy {gate.redundancy:.3f}, and edges at 20%: {helps.verdict}"
    found.append(LOW.given(words, helps.agrees))
    (spread,) = pick(table, quantity="single-unit KL CV, FFN")
    words = f"CV {spread['value']:.2f} ± {spread['value_error']:.2f}; edges: {helps.verdict}"
    return Findings([*found, DIFFERENT.given(words, True if helps.agrees else None)])


def shipped() -> Shipped:
    """What ships with SmolLM2-135M."""
    curvature = kept_curvature("smollm2")
    kept = None if curvature is None else kept_plans(curvature)
    if curvature is None or kept is None:
        raise InputError("data/smollm2 has no H or no plans. Use the files of the release.")
    return Shipped(curvature, kept)


def plot_answers(shipped: Shipped) -> Figure:
    """Draw the share of right answers by ratio (Figure "CoCurve across pruning ratios")."""
    figure, dense = empty(), {"ratio": 0.0, "share": 1.0}
    for number, name in enumerate((ZERO, ONE, "searched", "SlimLLM", "ShortGPT")):
        counts = [(ratio, shipped.right(name, ratio)) for ratio in RATIOS]
        rows = [{"ratio": r, "share": n / asked} for r, (n, asked) in counts if asked]
        add(figure, [dense, *rows], "ratio", "share", name, number, line="solid")
    x, y = share_axis("removed"), share_axis("right answers")
    return chart(figure, "SmolLM2: right answers by ratio", x, y)
