"""Risk split by position, perplexity and agreement, against naive passes and the definitions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.judging import gap
from cocurve_lab.extensions.judging.agreement import (
    DIAGONAL,
    EDGE_AWARE,
    RANDOM,
    SWAP,
    predictions,
    same_budget_pool,
)
from cocurve_lab.extensions.judging.gap import RiskSplit
from cocurve_lab.extensions.judging.perplexity import PerplexityOptions
from cocurve_lab.models import logits
from helpers.builds import plan_of
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import (
    CONTEXT,
    VOCAB,
    full_logits,
    masked_by_hand,
    nan_model,
    opening_tokenizer,
    sharper,
    tiny_double,
    tiny_model,
    tiny_text,
    units_by_hand,
    word_tokenizer,
)

PLAN = [1, 2, 8, 13, 17]
TEXT = tiny_text(3, 20, 9)
RISKS = (
    "quadratic_of_sum",
    "kl_of_sum",
    "quadratic_of_joint",
    "kl_of_joint",
    "units_predicted",
    "units_measured",
)


def split(
    model: PreTrainedModel, chosen: list[int] = PLAN, text: cl.CalibrationSet = TEXT
) -> RiskSplit:
    return cl.split_risk(model, plan_of(model, chosen), text, progress=False)


def naive(model: PreTrainedModel, chosen: list[int]) -> dict[str, np.ndarray]:
    """All arrays from full passes in float64, masks of our own, and F written out."""
    wide, units = tiny_double(model), units_by_hand(model)
    out: dict[str, list[Any]] = {name: [] for name in ("p_max", *RISKS)}
    for ids, positions in zip(TEXT.input_ids, TEXT.positions, strict=True):
        z_0 = full_logits(wide, ids[None])[0, positions]
        shifts = []
        for members in [[u] for u in chosen] + [chosen]:
            with masked_by_hand(wide, [units[u] for u in members]):
                shifts.append(full_logits(wide, ids[None])[0, positions] - z_0)
        *alone, joint = shifts
        summed = torch.stack(alone).sum(dim=0)
        p = torch.softmax(z_0, dim=-1)
        fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]

        def form(dz: torch.Tensor, fisher: torch.Tensor = fisher) -> np.ndarray:
            return torch.einsum("ti,tij,tj->t", dz, fisher, dz).numpy() / 2

        def exact(dz: torch.Tensor, z_0: torch.Tensor = z_0) -> np.ndarray:
            log_p, log_q = torch.log_softmax(z_0, -1), torch.log_softmax(z_0 + dz, -1)
            return (log_p.exp() * (log_p - log_q)).sum(dim=-1).numpy()

        out["p_max"].append(p.amax(dim=-1).numpy())
        for name, shift in (("sum", summed), ("joint", joint)):
            out[f"quadratic_of_{name}"].append(form(shift))
            out[f"kl_of_{name}"].append(exact(shift))
        out["units_predicted"].append(sum(map(form, alone)))
        out["units_measured"].append(sum(map(exact, alone)))
    return {name: np.array(values) for name, values in out.items()}


@pytest.mark.parametrize("model", [sharper(20), tiny_model("gemma2"), tiny_model("opt", "mha")])
def test_every_risk_is_that_of_naive_full_passes(model: PreTrainedModel) -> None:
    found, expected = split(model), naive(model, PLAN)
    for name, values in expected.items():
        assert values.shape == (3, 9)
        np.testing.assert_allclose(getattr(found, name), values, rtol=2e-3, atol=2e-5, err_msg=name)
        assert getattr(found, name).mean() == pytest.approx(values.mean(), rel=1e-4), name


@pytest.mark.parametrize(
    ("by", "edges"), [("p_max", (0.5, 0.9, 0.99)), ("shift", (1e-3, 1e-2, 1e-1, 1.0))]
)
def test_bins_add_up_to_the_whole(by: Any, edges: tuple[float, ...]) -> None:
    found = split(sharper(20))
    rows = found.bins(by).to_dict("records")
    values = found.p_max if by == "p_max" else found.quadratic_of_sum
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    names = {name: name for name in RISKS[1:] if name != "kl_of_joint"}
    names |= {"predicted": "quadratic_of_sum", "measured": "kl_of_joint"}
    for name, array in names.items():
        whole = getattr(found, array).mean()
        assert sum(row[name] for row in rows) == pytest.approx(whole), name
    for row, low, high in zip(rows, (-1, *edges), (*edges, np.inf), strict=True):
        inside = (values > low) & (values <= high)
        assert row["share"] == pytest.approx(inside.mean())
        by_row = np.where(inside, found.kl_of_joint, 0).mean(axis=1)
        assert row["measured"] == pytest.approx(by_row.mean())
        assert row["measured_error"] == pytest.approx(by_row.std(ddof=1) / np.sqrt(3))


def test_parts_joined_are_the_whole_and_batches_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    whole = split(model)
    joined = RiskSplit.join([split(model, PLAN, TEXT.rows(n, n + 1)) for n in range(3)])
    monkeypatch.setattr(gap, "_BATCH_TOKENS", 1)
    monkeypatch.setattr(logits, "LOGIT_BYTES", 4 * VOCAB * 3 * 2)  # two positions at a time
    small = split(model)
    for name in ("p_max", *RISKS):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
        np.testing.assert_allclose(getattr(small, name), getattr(whole, name), rtol=1e-3, atol=1e-8)
    with pytest.raises(cl.InputError):
        RiskSplit.join([whole, split(model, [3])])


def test_the_causes_multiply_to_the_gap_and_are_told_apart() -> None:
    found = split(sharper(20))
    ratio = found.measured / found.predicted
    assert found.expansion * found.adding_up == pytest.approx(ratio)
    a, b, c, d = np.full((4, 1, 2), [[[1.0]], [[10.0]], [[1.2]], [[20.0]]])
    names = ("quadratic_of_sum", "kl_of_sum", "quadratic_of_joint", "kl_of_joint")
    for values, cause in (
        ((a, b, c, d), "expansion"),
        ((a, c, b, d), "adding up"),
        ((a, b, b, 10 * b), "both"),
        ((a, c, c, 1.9 * a), "none"),
        ((0 * a, 0 * b, 0 * c, 0 * d), "none"),
    ):
        made = replace(found, **dict(zip(names, values, strict=True)))
        made = replace(made, **{n: np.ones((1, 2)) for n in ("p_max", *RISKS[4:])})
        assert made.cause == cause


def test_what_cannot_be_split_is_refused() -> None:
    model = tiny_model()
    plan = plan_of(model, PLAN)
    with pytest.raises(cl.InputError):
        cl.split_risk(model, plan.with_gains({3: 1.1}), TEXT)
    with pytest.raises(cl.MismatchError):
        cl.split_risk(tiny_model(layers=2), plan, TEXT)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(cl.NumericalError):
        split(model)


# Perplexity ---------------------------------------------------------------------------------------

QUIET = PerplexityOptions(progress=False)


def words(count: int, seed: int = 0) -> str:
    return " ".join(f"w{n}" for n in np.random.default_rng(seed).integers(90, size=count))


def naive_perplexity(model, ids: list[int], context: int, stride: int) -> tuple[float, int]:
    """Sum of nats and count: each token from the first window that holds it and a token before."""
    nats, count = 0.0, 0
    for token in range(1, len(ids)):
        start = next(s for s in range(0, len(ids), stride) if s <= token < s + context)
        if start == token:
            continue  # the first token of a window that begins where the one before it ended
        logits = full_logits(model, torch.tensor([ids[start:token]]))[0, -1]
        nats -= float(torch.log_softmax(logits, dim=-1)[ids[token]])
        count += 1
    return nats, count


@pytest.mark.parametrize(
    ("tokens", "context", "stride"),
    [(70, 16, 4), (71, 16, 5), (9, 16, 4), (64, 16, 16), (65, 16, 16), (20, 16, 1), (2, 2, 2)],
)
def test_equals_a_pass_per_token(
    tokens: int, context: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cocurve_lab.extensions.judging.perplexity._BATCH_TOKENS", 3 * 16)
    model, text = tiny_model(), words(tokens)
    nats, count = naive_perplexity(model, [int(w[1:]) + 2 for w in text.split()], context, stride)
    found = cl.perplexity(model, word_tokenizer(), text, context, stride, QUIET)
    assert found.tokens == count == sum(found.window_tokens)
    assert found.nll == pytest.approx(nats / count, abs=1e-5)
    assert found.value == pytest.approx(math.exp(nats / count), rel=1e-5)


def test_a_shorter_context_is_used() -> None:
    model, text = tiny_model(), words(200)
    asked = cl.perplexity(model, word_tokenizer(), text, options=QUIET)
    assert (asked.context, asked.stride) == (CONTEXT, CONTEXT // 4)
    own = cl.perplexity(model, word_tokenizer(), text, CONTEXT, CONTEXT // 4, QUIET)
    assert own.value == asked.value
    assert cl.perplexity(model, word_tokenizer(), text, 2048, 2048, QUIET).stride == CONTEXT


def test_documents_are_joined_by_a_blank_line() -> None:
    blank, whole = (
        cl.perplexity(tiny_model(), word_tokenizer(), text, 16, 4, QUIET)
        for text in (["w1 w2", "w3 w4 w5"], "w1 w2\n\nw3 w4 w5")
    )
    assert blank.nll == whole.nll


@pytest.mark.parametrize(("context", "stride"), [(16, 4), (16, 16), (3, 1)])
def test_every_window_begins_as_the_tokenizer_begins_a_text(context: int, stride: int) -> None:
    model, text, begins = tiny_model(), words(50), opening_tokenizer("<unk>", "w3")
    ids, room = [int(w[1:]) + 2 for w in text.split()], context - 2

    def found(tokenizer: Any, options: PerplexityOptions = QUIET, **more: str) -> Any:
        return cl.perplexity(model, tokenizer, text, context, stride, options, **more)

    nats = 0.0
    for token in range(50):
        starts = range(0, 50, min(stride, room))
        start = next(s for s in starts if s <= token < s + room)
        logits = full_logits(model, torch.tensor([[1, 5, *ids[start:token]]]))[0, -1]
        nats -= float(torch.log_softmax(logits, dim=-1)[ids[token]])
    assert (found(begins).tokens, found(begins).nll) == (50, pytest.approx(nats / 50, abs=1e-5))
    plain = found(word_tokenizer())
    assert found(begins, bos="") == plain
    assert found(word_tokenizer(), bos="<unk>") == found(opening_tokenizer("<unk>"))
    # the release's windows: one text, which the tokenizer begins as a whole
    settings = PerplexityOptions(progress=False, starts="first window")
    release = found(begins, settings)
    nats, count = naive_perplexity(model, [1, 5, *ids], context, stride)
    assert (release.tokens, release.nll) == (count, pytest.approx(nats / count, abs=1e-5))
    assert found(word_tokenizer(), settings) == plain


def test_the_standard_error_is_that_of_windows() -> None:
    one = cl.perplexity(tiny_model(), word_tokenizer(), words(300), 20, 20, QUIET)
    assert one.standard_error == pytest.approx(
        np.std(one.window_nll, ddof=1) / 19 / math.sqrt(15), rel=1e-9
    )


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *(
            (
                lambda a=given: cl.perplexity(tiny_model(), word_tokenizer(), *a, QUIET),
                cl.InputError,
            )
            for given in [
                *(("w1 w2", 16, 0), ("w1 w2", 16, 17), ("w1 w2", 1, 1)),
                *(("w1", 16, 4), ("", 16, 4), ([b"w1 w2"], 16, 4)),
            ]
        ),
        (lambda: PerplexityOptions(starts="both"), cl.InputError),  # type: ignore[arg-type]
        (
            lambda: cl.perplexity(tiny_model(), word_tokenizer(), "w1 w2", bos="absent"),
            cl.InputError,
        ),
        (
            lambda: cl.perplexity(tiny_model(), opening_tokenizer("w1", "w2"), "w1", 2, 1, QUIET),
            cl.InputError,
        ),
        (
            lambda: cl.perplexity(tiny_model(vocab_size=40), word_tokenizer(), words(50), 16, 4),
            cl.InputError,
        ),
        (
            lambda: cl.perplexity(nan_model(), word_tokenizer(), words(50), 16, 4, QUIET),
            cl.NumericalError,
        ),
        (lambda: cl.agreement([1.0, 2.0], [1.0, 2.0, 3.0]), cl.InputError),
        (lambda: cl.agreement(np.ones((2, 2)), np.ones((2, 2))), cl.InputError),
        (lambda: same_budget_pool(CURVATURE, 1.0), cl.InputError),
        (lambda: same_budget_pool(CURVATURE, 0.2, interaction_strength=-1), cl.InputError),
    ],
)
def test_bad_input_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


CURVATURE = random_curvature(make_units(6, 3, 8), seed=5)


# Agreement --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=3, max_size=20))
@settings(max_examples=60, deadline=None)
def test_agreement_equals_the_definitions(pairs: list[tuple[int, int]]) -> None:
    x, y = ([float(pair[i]) for pair in pairs] for i in (0, 1))
    found = cl.agreement(x, y)
    assert (found.points, found.left_out) == (len(pairs), 0)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(found.spearman)
    else:
        assert found.spearman == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-9)
        logs = stats.pearsonr(np.log(x), np.log(y)).statistic
        assert found.pearson_log == pytest.approx(logs, abs=1e-9)
    ratios = np.array(y) / np.array(x)
    assert found.median_ratio == pytest.approx(np.median(ratios))
    assert found.worst_ratio == pytest.approx(ratios[found.worst])
    assert abs(math.log(found.worst_ratio)) == pytest.approx(np.abs(np.log(ratios)).max())


def test_what_has_no_logarithm_is_left_out_and_counted() -> None:
    x = [0.0, 1.0, -1.0, 2.0, None, 4.0, math.nan, 8.0, 3.0]
    y = [1.0, 1.0, 1.0, 2.5, 1.0, 4.0, 1.0, 1.0, math.inf]
    found = cl.agreement(x, y)
    assert (found.points, found.left_out, found.worst) == (4, 5, 7)
    assert (found.worst_ratio, found.median_ratio) == pytest.approx((1 / 8, 1.0))
    for count in (0, 1, 2):  # too few for a correlation
        few = cl.agreement([1.0, 2.0][:count], [2.0, 3.0][:count])
        assert np.isnan([few.spearman, few.pearson_log]).all()
        assert (few.worst is None) == math.isnan(few.median_ratio) == (count == 0)


# Predictions ------------------------------------------------------------------------------------


def test_the_scores_of_h_are_their_sums() -> None:
    built = random_curvature(make_units(), seed=2, groups=4)
    chosen = [7, 1, 4]
    scores = predictions(built, chosen)
    assert scores["predicted"] == pytest.approx(built.matrix[np.ix_(chosen, chosen)].sum() / 2)
    assert scores["diagonal"] == pytest.approx(built.saliency[chosen].sum() / 2)
    alone = built.group_risks[:, chosen].sum() / built.group_positions.sum()
    assert scores["single_units"] == pytest.approx(alone)
    assert predictions(CURVATURE, chosen)["single_units"] is None
    assert set(predictions(built, []).values()) == {0.0}


# Pool -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.05, 0.5])
def test_the_pool_is_the_papers(ratio: float) -> None:
    pool = same_budget_pool(CURVATURE, ratio)
    methods, units = [method for method, _ in pool], CURVATURE.units
    greedy = cl.solve_greedy(CURVATURE, ratio, 1.0)
    assert len(pool) == len({frozenset(plan.pruned) for _, plan in pool}) == 26
    assert (methods[0], pool[0][1].pruned) == (EDGE_AWARE, greedy.pruned)
    if DIAGONAL in methods:
        assert pool[1][1].pruned == cl.solve_greedy(CURVATURE, ratio, 0.0).pruned
    assert methods.count(RANDOM) == 15 - methods.count(DIAGONAL)
    target = ratio * units.total_cost * (1 - 1e-9)
    for method, plan in pool:
        chosen = set(plan.pruned)
        assert plan.predicted_risk == pytest.approx(CURVATURE.risk(plan.pruned))
        assert plan.pruned_cost >= target
        if method == SWAP:
            gone, came = set(greedy.pruned) - chosen, chosen - set(greedy.pruned)
            assert plan.pruned_cost == greedy.pruned_cost
            assert len(gone) == max(1, round(len(greedy) / 10))
            assert sorted(units.kinds[list(came)]) == sorted(units.kinds[list(gone)])
        elif method == RANDOM:  # the last unit taken was needed
            assert any(plan.pruned_cost - units[u].cost < target for u in chosen)


def test_pools_follow_their_seed_and_end_where_there_are_no_more() -> None:
    sets = [
        {frozenset(plan.pruned) for _, plan in same_budget_pool(CURVATURE, 0.2, seed, size=9)}
        for seed in (3, 3, 4)
    ]
    assert sets[0] == sets[1] != sets[2]
    assert 1 <= len(same_budget_pool(random_curvature(make_units(1, 1, 1)), 0.2)) <= 3
    assert [len(plan) for _, plan in same_budget_pool(CURVATURE, 0.0)] == [0]
