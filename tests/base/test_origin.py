"""Things of one model on another: refused, or told where dtype or origin are not the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.base.origin import ALLOWED, EXACT, record_in
from cocurve_lab.extensions.choosing.gains import choose_gains
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.extensions.repairing.recovery import RecoverOptions
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.models.identity import known_record
from cocurve_lab.pruner.manifest import require_dense
from helpers.seals import fields_of, sealed
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer

TEXT, HELD_OUT, MORE = (tiny_text(rows, 16, 4, seed=seed) for seed, rows in enumerate((3, 4, 4)))
HELD_OUT = HELD_OUT.assume_unseen()  # a plan by hand does not say what it has seen
CASES = ("same", "foreign", "allowed", "dtype", "unknown")


class Things(NamedTuple):
    """What is combined with a model."""

    plan: cl.Selection
    curvature: cl.Curvature
    pruned: Any
    ranked: cl.Selection  # by another method


def things_of(model: Any, *, known: bool = True) -> Things:
    units = cl.enumerate_units(model, GROUPS)
    h = cl.estimate_curvature(model, units, TEXT, progress=False)
    if not known:
        h = cl.Curvature(h.matrix, h.units)
    plan, method = cl.solve_greedy(h, 0.3), cl.get_method("magnitude")
    evidence = method.measure(model, units, TEXT, progress=False)
    if not known:
        plan = cl.Selection.from_pruned(units, plan.pruned)
        evidence = replace(evidence, provenance={})
    return Things(plan, h, cl.prune(model, plan), method.select(evidence, units, 0.3))


def allowed(of: Things, model: Any) -> Things:
    plan, curvature, ranked = (
        cl.allow_other_weights(each, model) for each in (of.plan, of.curvature, of.ranked)
    )
    return Things(plan, curvature, of.pruned, ranked)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def cases(model: Any) -> dict[str, Things]:
    foreign, unknown = things_of(tiny_model(seed=1)), things_of(model, known=False)
    vars(unknown.pruned)["cocurve_manifest"] |= {"origin": {}, "dense_fingerprint": None}
    half = things_of(tiny_model().to(torch.bfloat16))
    found = (things_of(model), foreign, allowed(foreign, model), half, unknown)
    return dict(zip(CASES, found, strict=True))


def ablated(model: Any, of: Things) -> None:
    with cl.ablate(model, of.plan):
        pass


QUIET: dict[str, Any] = {"progress": False}
SEARCH = QUIET | {"held_out": HELD_OUT, "evaluations": 8}
CHOICE = {"options": cl.ChoiceOptions(progress=False)}
REPAIR = {"options": RepairOptions(progress=False)}
RECOVER = {"options": RecoverOptions(rank=1, epochs=1, progress=False)}
ASKED, WORDS = [Question("w1 w2 w3", "w4", "some")], word_tokenizer()
TABLE: dict[str, Callable[..., Any]] = {
    "ablate": ablated,
    "pruning_risk": lambda m, of: cl.pruning_risk(m, of.plan, TEXT),
    "measure_plans": lambda m, of: cl.measure_plans(m, [of.plan], TEXT, **QUIET),
    "choose_interaction_strength": lambda m, of: cl.choose_interaction_strength(
        m, of.curvature, 0.3, HELD_OUT, candidates=[0.0, 1.0], **CHOICE
    ),
    "choose_gains": lambda m, of: choose_gains(
        m, of.curvature, of.plan, HELD_OUT, (0.2,), (1.0,), **CHOICE
    ),
    "search_plan": lambda m, of: cl.search_plan(m, of.plan, MORE, surrogate=of.curvature, **SEARCH),
    "compare_text": lambda m, of: cl.compare_text(m, WORDS, "w1 w2", of.plan),
    "answer_accuracy": lambda m, of: cl.answer_accuracy(m, WORDS, [of.plan], ASKED, **QUIET),
    "split_risk": lambda m, of: cl.split_risk(m, of.plan, TEXT, **QUIET),
    "prune": lambda m, of: cl.prune(m, of.plan),
    "a method's plan": lambda m, of: cl.prune(m, of.ranked),
    "repair": lambda m, of: cl.repair(m, of.plan, MORE, **REPAIR),
    "recover": lambda m, of: cl.recover(m, of.pruned.float(), MORE, **RECOVER),
    "check_equivalence": lambda m, of: cl.check_equivalence(m, cl.prune(m, of.plan), of.plan, TEXT),
}
# plan and H: a model's dtype plays no part
ON_H: dict[str, Callable[..., Any]] = {
    "solve_gains": lambda h, of: cl.solve_gains(h, of.plan),
    "refine": lambda h, of: cl.refine(of.plan.with_made(interaction_strength=1.0), h),
    "predicted_by": lambda h, of: of.plan.predicted_by(h),
}
# an unknown origin is told by what makes something that lasts
DURABLE = ("search_plan", "prune", "repair", "recover", "a method's plan")
PAIRS = [(name, case) for name in TABLE for case in ("same", "foreign")]
PAIRS += [(name, case) for name in ("ablate", *DURABLE) for case in CASES[2:]]


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_what_is_used_on_a_model(
    name: str, case: str, model: Any, cases: dict[str, Things], caplog: pytest.LogCaptureFixture
) -> None:
    fresh = tiny_model()  # what is told, is told once of a model
    if case == "foreign" or (case, name) == ("allowed", "recover"):  # plans and H are allowed
        with pytest.raises(cl.MismatchError):
            TABLE[name](fresh, cases[case])
        return
    if name == "recover":
        pytest.importorskip("peft")
    TABLE[name](fresh, cases[case])
    silent = case == "same" or (case == "unknown" and name not in DURABLE)
    assert bool(caplog.records) is not silent


@pytest.mark.parametrize("name", ON_H)
def test_what_is_used_on_an_h(name: str, cases: dict[str, Things]) -> None:
    h = cases["same"].curvature
    for case in ("same", "dtype", "unknown"):
        ON_H[name](h, cases[case])
    with pytest.raises(cl.MismatchError):
        ON_H[name](h, cases["foreign"])
    ON_H[name](h, cases["allowed"])


def test_what_is_allowed_is_so_in_memory_alone(
    model: Any, cases: dict[str, Things], tmp_path: Path
) -> None:
    of, third = cases["allowed"], tiny_model(seed=2)
    found = cl.search_plan(model, of.plan, MORE, **SEARCH).selection
    solved = cl.solve_greedy(of.curvature, 0.2)
    for plan in (found, solved, of.plan.with_gains({})):  # what is made of it is allowed, too
        assert cl.pruning_risk(model, plan, TEXT) >= 0
        for on, other in ((third, plan), (model, cl.Selection.from_json(plan.to_json()))):
            with pytest.raises(cl.MismatchError):
                cl.pruning_risk(on, other, TEXT)
    again = cl.Curvature.load(of.curvature.save(tmp_path / "H.npz"))
    with pytest.raises(cl.MismatchError):
        TABLE["choose_interaction_strength"](model, of._replace(curvature=again))
    both = cl.allow_other_weights(of.plan, third)
    assert cl.pruning_risk(third, both, TEXT) + cl.pruning_risk(model, both, TEXT) >= 0
    folder = cl.prune(model, of.plan, out=tmp_path / "out")
    assert cl.load_pruned(folder, device="cpu").cocurve_manifest["origin"]["told"]


def test_a_file_cannot_allow_other_weights(cases: dict[str, Things], model: Any) -> None:
    plan, mark = cases["foreign"].plan, known_record(model)["checkpoint"][EXACT]
    content = json.loads(plan.to_json())
    content["origin"][ALLOWED] = [mark]
    with pytest.raises(cl.FileFormatError):
        cl.Selection.from_json(sealed(content))
    h = cases["foreign"].curvature.with_provenance(allowed=[mark])
    with pytest.raises(cl.MismatchError):
        cl.choose_interaction_strength(model, h, 0.3, HELD_OUT, **CHOICE)


def test_weights_in_another_dtype_in_memory_are_the_same_checkpoint(tmp_path: Path) -> None:
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    word_tokenizer().save_pretrained(tmp_path / "half")
    options: list[dict[str, Any]] = [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"stream": True}]
    wide, narrow, streamed = (
        cl.load_model(tmp_path / "half", device="cpu", **each)[0] for each in options
    )
    marks = {known_record(each)["checkpoint"][EXACT] for each in (wide, narrow, streamed)}
    assert len(marks) == 1
    folder = cl.prune(narrow, things_of(wide).plan, out=tmp_path / "pruned")
    pruned = cl.load_pruned(folder, device="cpu")
    once = cl.prune(pruned, cl.Selection.from_pruned(cl.enumerate_units(pruned, GROUPS), [0]))
    for dense, small in ((wide, pruned), (streamed, pruned), (wide, once)):
        assert require_dense(dense, small).kind == "same"
    with pytest.raises(cl.MismatchError):
        require_dense(tiny_model(seed=1), once)


def test_weights_that_change_in_memory_are_other_weights(cases: dict[str, Things]) -> None:
    model = tiny_model()
    cl.pruning_risk(model, cases["same"].plan, TEXT)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(cl.MismatchError):
        cl.pruning_risk(model, cases["same"].plan, TEXT)


def test_an_h_without_marks_of_the_numbers_is_known_by_its_loaded_bits(model: Any) -> None:
    of, foreign = things_of(model), tiny_model(seed=1)
    old = {k: v for k, v in of.curvature.provenance.items() if k != "checkpoint"}
    curvature = cl.Curvature(of.curvature.matrix, of.curvature.units, old)
    plan = cl.solve_greedy(curvature, 0.3)
    assert record_in(old)["checkpoint"] == {"loaded": old["model_fingerprint"]}
    assert "told" not in vars(cl.prune(model, plan))["cocurve_manifest"]["origin"]
    assert "told" in cl.prune(foreign, plan).cocurve_manifest["origin"]


def test_a_plan_changed_by_hand_loses_its_origin_and_its_predicted_risk(
    cases: dict[str, Things],
) -> None:
    plan = cases["same"].plan
    content = json.loads(plan.to_json())
    content["pruned"][0] = next(
        u for u in plan.kept if plan.units.costs[u] >= plan.units.costs[plan.pruned[0]]
    )
    with pytest.raises(cl.FileFormatError):
        cl.Selection.from_json(json.dumps(content))
    by_hand = cl.Selection.from_json(json.dumps(fields_of(json.dumps(content))))
    assert by_hand.origin is by_hand.predicted_risk is by_hand.curvature_fingerprint is None


# Files that change --------------------------------------------------------------------------------


def test_a_streamed_file_that_changes_stops_a_build(tmp_path: Path) -> None:
    for name, seed in (("A", 0), ("B", 1)):
        tiny_model(seed=seed).save_pretrained(tmp_path / name)
        word_tokenizer().save_pretrained(tmp_path / name)
    own, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "AB")
    folder, file, kept = tmp_path / "A", tmp_path / "A" / "model.safetensors", tmp_path / "H.ckpt"
    late, _ = cl.load_model(folder, device="cpu", stream=True)
    streamed, _ = cl.load_model(folder, device="cpu", stream=True)
    before = streamed(TEXT.input_ids).logits
    file.write_bytes(own)  # the same again
    assert torch.equal(streamed(TEXT.input_ids).logits, before)

    def after_row(build: Any) -> None:
        if build.done == 1:
            file.write_bytes(other)

    units = cl.enumerate_units(streamed, GROUPS)
    options = cl.BuildOptions(on_sequence=after_row)
    build: Any = {"checkpoint": kept, "progress": False}
    with pytest.raises(cl.InputError):
        cl.estimate_curvature(streamed, units, TEXT, **build, options=options)
    assert kept.exists()
    with pytest.raises(cl.InputError):  # it changed before it was read at all
        late(TEXT.input_ids)
    file.write_bytes(own)
    again, _ = cl.load_model(folder, device="cpu", stream=True)
    whole = cl.estimate_curvature(again, units, TEXT, **build)
    expected = cl.estimate_curvature(again, units, TEXT, progress=False)
    assert whole.fingerprint == expected.fingerprint
