"""What every pruning method promises, checked on every method and every family."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.repairing import projection_inputs as inputs
from cocurve_lab.methods.base import Evidence, Method
from cocurve_lab.methods.registry import method_names
from cocurve_lab.models.identity import fingerprint_model, known_record
from helpers.tiny_models import GROUPS, VOCAB, tiny_model, tiny_text, write_model

RATIO = 0.25
MODELS = [("llama", "gqa"), ("mistral", "gqa"), ("qwen2", "gqa"), ("phi3", "mha")]
NO_TEXT = {"random", "magnitude"}  # they never run the model


FIRST_ROW = {"2ssp", "blockpruner", "finercut"}  # they read the first rows, so the order matters

NAMES = method_names()
WIDE = tiny_text(vocab=3 * VOCAB)  # of another tokenizer
READERS = [name for name in NAMES if name not in NO_TEXT]


@lru_cache
def dense(family: str, heads: str) -> PreTrainedModel:
    return tiny_model(family, heads)


@lru_cache
def measured(name: str, family: str, heads: str) -> Evidence:
    """Each method once per model; tests that need a second measurement make it themselves."""
    return measure(cl.get_method(name), dense(family, heads))


def measure(
    method: Method, model: PreTrainedModel, calibration: Any = None, seed: int = 0
) -> Evidence:
    units = cl.enumerate_units(model, GROUPS)
    return method.measure(model, units, calibration or tiny_text(), seed=seed, progress=False)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """The model of the fused family, its layers left in files."""
    folder = tmp_path_factory.mktemp("streamed")
    write_model(folder, dense("phi3", "mha"))
    return cl.load_model(folder, device="cpu", stream=True)[0]


every_method = pytest.mark.parametrize("name", NAMES)
every_reader = pytest.mark.parametrize("name", READERS)
every_model = pytest.mark.parametrize(("family", "heads"), MODELS)


# Plans --------------------------------------------------------------------------------------------


@every_method
@every_model
def test_budget_and_guards_bind_and_the_model_lacks_what_the_plan_says(
    name: str, family: str, heads: str
) -> None:
    model, method = dense(family, heads), cl.get_method(name)
    evidence = measured(name, family, heads)
    units, costs = evidence.units, evidence.units.costs
    assert method.select(evidence, units, 0.0).pruned == ()
    plan = method.select(evidence, units, RATIO)
    assert RATIO * costs.sum() <= plan.pruned_cost < RATIO * costs.sum() + costs.max()
    with unchanged(model):
        pruned = method.repair(model, plan, evidence)
    assert pruned.num_parameters() == model.num_parameters() - plan.pruned_cost
    if not method.repairs:
        cl.check_equivalence(model, pruned, plan, tiny_text(2, seed=5))
    guarded = method.select(evidence, units, 0.2, cl.Guards(layer_cap=0.6, protect_first=1))
    gone = np.bincount(units.layers, costs * guarded.indicator, minlength=3)
    kept = gone <= 0.6 * np.bincount(units.layers, costs)
    assert guarded.realized_ratio >= 0.2 * (1 - 1e-9)
    assert not method.honours_guards or (gone[0] == 0 and kept.all())


@every_method
@pytest.mark.parametrize("kind", ["attention", "ffn"])
def test_kinds_always_bind(name: str, kind: Any) -> None:
    evidence = measured(name, "llama", "gqa")
    try:
        plan = cl.get_method(name).select(evidence, evidence.units, 0.1, cl.Guards(kinds=(kind,)))
    except cl.InfeasibleError:  # a method of the other kind, or one that prunes both by design
        assert name in ("head-only", "ffn-only", "2ssp")
    else:
        assert set(evidence.units.kinds[list(plan.pruned)]) == {kind}


@every_method
def test_what_is_impossible_or_foreign_is_refused(name: str) -> None:
    model, method = dense("llama", "gqa"), cl.get_method(name)
    evidence, closed = measured(name, "llama", "gqa"), cl.Guards(protect_first=3)
    units = evidence.units
    if method.honours_guards:
        with pytest.raises(cl.InfeasibleError) as caught:
            method.select(evidence, units, RATIO, closed)
        assert (caught.value.requested_ratio, caught.value.reachable_ratio) == (RATIO, 0)
    else:
        assert method.select(evidence, units, RATIO, closed).pruned
    other = Evidence("another", units, evidence.arrays, evidence.provenance)
    finer, foreign = (cl.enumerate_units(dense("llama", h), n) for h, n in (("gqa", 5), ("mha", 4)))
    for call, error in (
        (lambda: method.select(other, units, RATIO), cl.MismatchError),
        (lambda: method.select(evidence, finer, RATIO), cl.MismatchError),
        (lambda: method.measure(model, foreign, tiny_text(), progress=False), cl.MismatchError),
        *((lambda r=r: method.select(evidence, units, r), cl.InputError) for r in (-0.1, 1.0)),
        *((lambda: measure(method, model, WIDE), cl.InputError) for _ in {name} - NO_TEXT),
    ):
        with pytest.raises(error):
            call()


@every_method
def test_evidence_survives_its_file_and_names_what_was_measured(name: str, tmp_path: Path) -> None:
    evidence, model = measured(name, "qwen2", "gqa"), dense("qwen2", "gqa")
    again = Evidence.load(evidence.save(tmp_path / "evidence.pkl"))
    require_same(again, evidence)
    assert again.provenance == evidence.provenance
    assert evidence.provenance["model_fingerprint"] == fingerprint_model(model)
    plans = [cl.get_method(name).select(found, found.units, RATIO) for found in (evidence, again)]
    assert plans[0].pruned == plans[1].pruned
    assert plans[0].origin["checkpoint"] == known_record(model)["checkpoint"]
    text = tiny_text()
    mark, windows = (None, "") if name in NO_TEXT else (text.fingerprint, text.text_windows)
    assert evidence.provenance.get("calibration_fingerprint") == mark
    assert plans[0].text_windows == windows


def require_same(one: Evidence, other: Evidence) -> None:
    assert set(one.arrays) == set(other.arrays)
    for key, array in other.arrays.items():
        np.testing.assert_array_equal(one.arrays[key], array)


@every_method
@pytest.mark.parametrize(("family", "heads"), [("mistral", "gqa"), ("phi3", "mha")])
def test_measuring_twice_gives_the_same_bits_and_leaves_the_model_as_it_was(
    name: str, family: str, heads: str
) -> None:
    """On a model of mixed modes and gradients that nothing has measured before."""
    model = unusual(family, heads)
    with unchanged(model):
        again = measure(cl.get_method(name), model)
    require_same(again, measured(name, family, heads))


# Evidence -----------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize(("family", "heads"), [("qwen2", "gqa"), ("phi3", "mha")])
def test_batch_size_and_row_order_do_not_matter(
    name: str, family: str, heads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, method = measured(name, family, heads), cl.get_method(name)
    monkeypatch.setattr(inputs, "TOKENS_PER_BATCH", 1)  # one row per forward
    text = tiny_text()
    order = torch.arange(len(text)) if name in FIRST_ROW else torch.tensor([2, 0, 3, 1])
    shuffled = cl.CalibrationSet(text.input_ids[order], text.scored[order])
    again = measure(method, dense(family, heads), shuffled)
    for key in {"scores", "matrix"} & first.arrays.keys():  # other arrays may be kept per row
        close = {"rtol": 1e-4, "atol": 1e-5 * np.abs(first.arrays[key]).max()}
        np.testing.assert_allclose(again.arrays[key], first.arrays[key], **close)
    plans = [method.select(found, first.units, RATIO) for found in (first, again)]
    assert set(plans[0].pruned) == set(plans[1].pruned)


@every_method
def test_a_pruned_model_can_be_measured_again(name: str) -> None:
    """Widths differ by layer, one layer has no attention left and one no FFN."""
    model = dense("llama", "gqa")
    units = cl.enumerate_units(model, GROUPS)
    gone = [i for i, u in enumerate(units) if (u.layer, u.kind) in ((1, "attention"), (2, "ffn"))]
    pruned = cl.prune(model, cl.Selection.from_pruned(units, [*gone, 0]))
    evidence = measure(cl.get_method(name), pruned)
    assert len(evidence.units) == len(units) - len(gone) - 1
    assert cl.get_method(name).select(evidence, evidence.units, 0.1).realized_ratio >= 0.1


# The model ----------------------------------------------------------------------------------------


@every_method
def test_a_streamed_model_is_scored_alike_or_refused(name: str, streamed: PreTrainedModel) -> None:
    method = cl.get_method(name)
    if method.needs_gradients:
        with pytest.raises(cl.InputError):
            measure(method, streamed)
        return
    found, expected = measure(method, streamed), measured(name, "phi3", "mha")
    require_same(found, expected)
    own = "model_fingerprint"
    assert found.provenance.get(own) == expected.provenance.get(own)


@every_reader
def test_the_model_is_left_as_it_was_after_an_error(name: str) -> None:
    model = unusual("llama", "gqa")

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    model.model.layers[-1].mlp.register_forward_hook(fail)
    with unchanged(model), pytest.raises(RuntimeError):
        measure(cl.get_method(name), model)


def unusual(family: str, heads: str) -> PreTrainedModel:
    """A model of mixed modes and gradients, with a gradient on one weight."""
    model = tiny_model(family, heads)
    model.train()
    model.model.layers[0].mlp.eval()
    norm = model.model.norm.weight.requires_grad_(True)
    norm.grad = torch.ones_like(norm)
    model.model.layers[1].mlp.down_proj.weight.requires_grad_(True)
    return model


@contextmanager
def unchanged(model: PreTrainedModel) -> Iterator[None]:
    """Assert that weights, hooks, modes, gradients and global state come out as they went in."""
    before = snapshot(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    norm = model.model.norm.weight
    grad = None if norm.grad is None else norm.grad.clone()
    yield
    assert snapshot(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert grad is None or torch.equal(norm.grad, grad)


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "modules": [
            (name, id(module), module.training, *(list(getattr(module, h)) for h in hooks))
            for name, module in model.named_modules()
        ],
        "parameters": [
            (name, id(p), p.requires_grad, p.grad is None, p.is_inference())
            for name, p in model.named_parameters()
        ],
        "global": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_num_threads(),
            torch.backends.cuda.matmul.fp32_precision,
            torch.get_rng_state().tolist(),
            str(np.random.get_state()),  # noqa: NPY002  (others may draw from it)
        ),
        "config": model.config.to_dict(),
    }


# Names --------------------------------------------------------------------------------------------


@every_method
def test_names_are_found_whatever_their_spelling(name: str) -> None:
    for spelled in (name.upper(), f" {name.replace('-', '_')} "):
        assert cl.get_method(spelled) == cl.get_method(name)  # frozen: compared by their options


# Bad input ----------------------------------------------------------------------------------------

BAD_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("random", {"allocation": "even"}),
    ("flap", {"metric": "wifx"}),
    ("cocurve", {"interaction_strength": -1.0}),
    ("cocurve", {"interaction_strength": "auto"}),
    ("cocurve", {"top_r": 0}),
    ("diagonal", {"interaction_strength": 1.0}),
    ("llm-pruner", {"taylor": "vectorize"}),
    ("llm-pruner", {"layers_per_pass": 0}),
    ("slimgpt", {"damping": -0.1}),
    ("slimgpt", {"damping": math.inf}),
    ("slimgpt", {"first": 0}),
    ("slimllm", {"alpha": -1}),
    ("2ssp", {"alpha": 0}),
    ("blockpruner", {"rows": 0}),
    ("cbo", {"passes": 0}),
    *((name, {"no_such_option": 1}) for name in NAMES),
    *((name, {}) for name in ("wandasp", "co-curve", "qqq")),
]


@pytest.mark.parametrize(("name", "options"), BAD_OPTIONS, ids=str)
def test_what_makes_no_method_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(cl.InputError):
        cl.get_method(name, **options)
