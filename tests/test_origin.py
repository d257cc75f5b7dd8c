"""Things of one model on another: refused; told in another dtype, or where the origin is unknown.

The functions and verbs that combine two of model, plan, H and pruned model are collected from their
signatures; a missing row fails.
"""

from __future__ import annotations

import ast
import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab import cli
from cocurve_lab.base.origin import ALLOWED, EXACT, record_in
from cocurve_lab.extensions.choosing.gains import choose_gains
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.extensions.repairing.recovery import RecoverOptions
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.models.identity import known_record
from cocurve_lab.pruner.manifest import require_dense
from cocurve_studies.paper.reproduction import tokenizer_mark
from helpers.seals import sealed
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TEXT, HELD_OUT, MORE = (tiny_text(rows, 16, 4, seed=seed) for seed, rows in enumerate((3, 4, 4)))
HELD_OUT = HELD_OUT.assume_unseen()  # a plan by hand does not say what it has seen
CASES = ("same", "foreign", "allowed", "dtype", "unknown")
PLANS, MATRICES = ("selection", "selections"), ("curvature", "surrogate")  # what arguments are
KINDS = {"model": "model", "pruned": "pruned"} | dict.fromkeys(PLANS, "plan")
KINDS |= dict.fromkeys(MATRICES, "H")


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
DURABLE = {"search_plan", "choose_gains", "prune", "repair", "recover", "check_equivalence"}
DURABLE |= {"choose_interaction_strength", "a method's plan"}


def test_every_function_that_combines_two_has_a_row() -> None:
    found = set()
    for name in cl.__all__:
        function = getattr(cl, name)
        if inspect.isfunction(function):
            given = inspect.signature(function).parameters
            kinds = {KINDS[each] for each in given if each in KINDS}
            kinds |= {"plan"} if "Plan |" in str(given.get("units", "")) else set()
            if len(kinds) > 1:
                found.add(name)
    assert found == {*TABLE, *ON_H} - {"choose_gains", "predicted_by", "a method's plan"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TABLE)
def test_what_is_used_on_a_model(
    name: str, case: str, model: Any, cases: dict[str, Things], caplog: pytest.LogCaptureFixture
) -> None:
    fresh = tiny_model()  # what is told, is told once of a model
    if case == "foreign" or (case, name) == ("allowed", "recover"):  # plans and H are allowed
        with pytest.raises(cl.MismatchError, match="other weights"):
            TABLE[name](fresh, cases[case])
        return
    if name == "recover":
        pytest.importorskip("peft")
    TABLE[name](fresh, cases[case])
    told = {record.getMessage() for record in caplog.records}
    expected = {"allowed": "were allowed", "dtype": "two dtypes", "unknown": "cannot be told"}
    if case == "same" or (case == "unknown" and name not in DURABLE):
        assert not told
    else:
        assert all(expected[case] in note for note in told)
        assert told


@pytest.mark.parametrize("name", ON_H)
def test_what_is_used_on_an_h(name: str, cases: dict[str, Things]) -> None:
    h = cases["same"].curvature
    for case in ("same", "dtype", "unknown"):
        ON_H[name](h, cases[case])
    with pytest.raises(cl.MismatchError, match="other weights"):
        ON_H[name](h, cases["foreign"])
    ON_H[name](h, cases["allowed"])


def test_what_is_allowed_is_so_in_memory_alone(
    model: Any, cases: dict[str, Things], tmp_path: Path
) -> None:
    of, third = cases["allowed"], tiny_model(seed=2)
    found = cl.search_plan(
        model, of.plan, MORE, held_out=HELD_OUT, evaluations=8, progress=False
    ).selection
    solved = cl.solve_greedy(of.curvature, 0.2)
    for plan in (found, solved, of.plan.with_gains({})):  # what is made of it is allowed, too
        assert cl.pruning_risk(model, plan, TEXT) >= 0
        with pytest.raises(cl.MismatchError, match="other weights"):
            cl.pruning_risk(third, plan, TEXT)
        text = plan.to_json()
        assert ALLOWED not in text
        with pytest.raises(cl.MismatchError, match="other weights"):
            cl.pruning_risk(model, cl.Selection.from_json(text), TEXT)
    both = cl.allow_other_weights(of.plan, third)
    assert cl.pruning_risk(third, both, TEXT) + cl.pruning_risk(model, both, TEXT) >= 0
    for suffix in ("npz", "pkl"):
        again = cl.Curvature.load(of.curvature.save(tmp_path / f"H.{suffix}"))
        assert again.fingerprint == of.curvature.fingerprint
        with pytest.raises(cl.MismatchError, match="other weights"):
            TABLE["choose_interaction_strength"](model, of._replace(curvature=again))
    folder = cl.prune(model, of.plan, out=tmp_path / "out")
    manifest = cl.load_pruned(folder, device="cpu").cocurve_manifest
    assert "other weights were allowed" in manifest["origin"]["told"].lower()
    with pytest.raises(cl.InputError, match="Give a Selection or a Curvature"):
        cl.allow_other_weights(of.plan.pruned, model)


def test_a_file_cannot_allow_other_weights(cases: dict[str, Things], model: Any) -> None:
    plan, mark = cases["foreign"].plan, known_record(model)["checkpoint"][EXACT]
    content = json.loads(plan.to_json())
    content["origin"][ALLOWED] = [mark]
    with pytest.raises(cl.FileFormatError, match=f"no field is called 'origin.{ALLOWED}'"):
        cl.Selection.from_json(sealed(content))
    h = cases["foreign"].curvature.with_provenance(allowed=[mark])
    with pytest.raises(cl.MismatchError, match="other weights"):
        cl.choose_interaction_strength(model, h, 0.3, HELD_OUT, **CHOICE)


def test_weights_in_another_dtype_in_memory_are_the_same_checkpoint(tmp_path: Path) -> None:
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    word_tokenizer().save_pretrained(tmp_path / "half")
    wide, _ = cl.load_model(tmp_path / "half", device="cpu", dtype="float32")
    narrow, _ = cl.load_model(tmp_path / "half", device="cpu", dtype="bfloat16")
    pytest.importorskip("accelerate")
    streamed, _ = cl.load_model(tmp_path / "half", device="cpu", stream=True)
    marks = {known_record(each)["checkpoint"][EXACT] for each in (wide, narrow, streamed)}
    assert len(marks) == 1
    of = things_of(wide)
    folder = cl.prune(narrow, of.plan, out=tmp_path / "pruned")
    pruned = cl.load_pruned(folder, device="cpu")
    assert require_dense(wide, pruned).kind == require_dense(streamed, pruned).kind == "same"
    once = cl.prune(pruned, cl.Selection.from_pruned(cl.enumerate_units(pruned, GROUPS), [0]))
    assert require_dense(wide, once).kind == "same"  # the round before
    with pytest.raises(cl.MismatchError):
        require_dense(tiny_model(seed=1), once)


def test_an_h_without_marks_of_the_numbers_is_known_by_its_loaded_bits(model: Any) -> None:
    of, foreign = things_of(model), tiny_model(seed=1)
    old = {k: v for k, v in of.curvature.provenance.items() if k != "checkpoint"}
    curvature = cl.Curvature(of.curvature.matrix, of.curvature.units, old)
    plan = cl.solve_greedy(curvature, 0.3)
    assert record_in(old)["checkpoint"] == {"loaded": old["model_fingerprint"]}
    assert "told" not in vars(cl.prune(model, plan))["cocurve_manifest"]["origin"]
    assert "cannot be told" in cl.prune(foreign, plan).cocurve_manifest["origin"]["told"]


def test_weights_that_change_in_memory_are_other_weights(cases: dict[str, Things]) -> None:
    model = tiny_model()
    cl.pruning_risk(model, cases["same"].plan, TEXT)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(cl.MismatchError):
        cl.pruning_risk(model, cases["same"].plan, TEXT)


def test_terms_of_a_plan_are_those_of_its_h(cases: dict[str, Things]) -> None:
    of = cases["same"]
    first, *rest = of.plan.pruned
    free = next(
        unit for unit in of.plan.kept if of.plan.units.costs[unit] == of.plan.units.costs[first]
    )
    changed = replace(of.plan, pruned=(free, *rest))
    with pytest.raises(cl.FileFormatError, match="terms of the plan"):
        cl.solve_gains(of.curvature, changed)


def test_no_code_of_the_library_allows_other_weights() -> None:
    folders = ("cocurve_lab", "notebooks/cocurve_studies", "widgets/cocurve_widgets", "data")
    found = {
        path.name
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and "allow_other_weights" in ast.unparse(node.func)
    }
    assert found == {"measuring.py", "pruning.py"}  # the option --other-weights


# Verbs ------------------------------------------------------------------------------------------


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("verbs")
    for seed, name in enumerate("AB"):
        tiny_model(seed=seed, tie_word_embeddings=False).save_pretrained(place / name)
        word_tokenizer().save_pretrained(place / name)
        loaded, tokenizer = cl.load_model(place / name, device="cpu")
        of = things_of(loaded)
        of.curvature.save(place / f"H_{name}.npz")
        (place / f"plan_{name}.json").write_text(of.plan.to_json())
        cl.save_pruned(of.pruned, place / f"pruned_{name}", tokenizer=tokenizer)
    hand = cl.Selection.from_pruned(of.plan.units, of.plan.pruned)
    (place / "plan_hand.json").write_text(hand.to_json())
    drawn = np.random.default_rng(0).integers(90, size=(60, 30))
    (place / "text.txt").write_text(
        "\n\n".join(" ".join(f"w{word}" for word in row) for row in drawn)
    )
    return place


ROWS_OF = ("--sequences", "8", "--length", "16", "--positions", "4")
VERBS: dict[str, tuple[str, ...]] = {
    "Prune": ("prune", "A", "plan_{}.json", "--out", "{out}"),
    "Search": (
        *("search", "A", "H_{}.npz", "--plan", "plan_{}.json", "--evaluations", "8", "--rows", "4"),
        *("--text", "text.txt", *ROWS_OF, "--held-out", "2", "--out", "{out}.json"),
    ),
    "Recover": (
        *("recover", "pruned_{}", "--against", "A", "--epochs", "1", "--held-out", "2"),
        *("--text", "text.txt", *ROWS_OF, "--out", "{out}"),
    ),
    "Evaluate": ("evaluate", "pruned_{}", "--against", "A", "--text", "text.txt", *ROWS_OF),
}
ALLOW = ("Prune", "Search")  # verbs that take a plan


def test_every_verb_that_combines_two_has_a_row() -> None:
    found = set()
    for name in cli.VERBS:
        taken = signature(cli.verb_named(name)).parameters
        if len(taken.keys() & {"model", "against", "plan", "curvature", "folder"}) > 1:
            found.add(name.capitalize())
    assert found == set(VERBS)


@pytest.mark.parametrize(
    ("verb", "case"),
    [*((verb, case) for verb in VERBS for case in "AB"), *((verb, "B allowed") for verb in ALLOW)],
)
def test_verbs(
    verb: str,
    case: str,
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if verb == "Recover":
        pytest.importorskip("peft")
    monkeypatch.chdir(folders)
    line = [part.format(case[0], out=tmp_path / "out") for part in VERBS[verb]]
    line += ["--other-weights"] * ("allowed" in case)
    status = cli.main(line)
    said = "".join(capsys.readouterr())
    assert status == (case == "B"), said
    assert ("other weights" in said) == (case == "B"), said
    if case == "B":
        assert not (tmp_path / "out").exists()
    if verb == "Prune" and "allowed" in case:
        manifest = json.loads((tmp_path / "out" / "cocurve_manifest.json").read_text())
        assert "other weights were allowed" in manifest["origin"]["told"].lower()


def test_a_plan_by_hand_is_told(folders: Path, tmp_path: Path, caplog: Any) -> None:
    line = ["prune", str(folders / "A"), str(folders / "plan_hand.json"), "--out"]
    assert cli.main([*line, str(tmp_path / "out")]) == 0
    assert "cannot be told" in caplog.text


# Files that change --------------------------------------------------------------------------------


def test_a_streamed_file_that_changes_stops_a_build(folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    other = (folders / "B" / "model.safetensors").read_bytes()
    folder = copied(folders / "A", tmp_path / "A")
    streamed, _ = cl.load_model(folder, device="cpu", stream=True)
    ids, file = TEXT.input_ids, folder / "model.safetensors"
    before = streamed(ids).logits
    file.write_bytes(file.read_bytes())  # the same again
    assert torch.equal(streamed(ids).logits, before)

    def after_row(build: Any) -> None:
        if build.done == 1:
            file.write_bytes(other)

    kept = tmp_path / "H.ckpt"
    units = cl.enumerate_units(streamed, GROUPS)
    options = cl.BuildOptions(on_sequence=after_row)
    build: Any = {"checkpoint": kept, "progress": False}
    with pytest.raises(cl.InputError, match="changed after the model was loaded"):
        cl.estimate_curvature(streamed, units, TEXT, **build, options=options)
    assert kept.exists()
    (folder / "model.safetensors").write_bytes((folders / "A" / file.name).read_bytes())
    again, _ = cl.load_model(folder, device="cpu", stream=True)
    whole = cl.estimate_curvature(again, units, TEXT, **build)
    expected = cl.estimate_curvature(again, units, TEXT, progress=False)
    assert whole.fingerprint == expected.fingerprint


def test_a_file_that_changed_before_it_was_read_is_refused(folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    folder = copied(folders / "A", tmp_path / "A")
    streamed, _ = cl.load_model(folder, device="cpu", stream=True)
    file = folder / "model.safetensors"
    file.write_bytes((folders / "B" / file.name).read_bytes())
    with pytest.raises(cl.InputError, match="changed after the model was loaded"):
        streamed(TEXT.input_ids)


def test_a_pruned_folder_of_paper_is_of_this_model(folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from cocurve_studies.paper.published import Published
    from cocurve_studies.paper.reproduction import Reproduction, ReproductionOptions

    tokenizer = word_tokenizer()
    a, b = (cl.load_model(folders / n, device="cpu", stream=True)[0] for n in "AB")
    plan = cl.Selection.from_pruned(cl.enumerate_units(a, GROUPS), [1, 5])
    options = ReproductionOptions(folder=tmp_path, suite="demo", limit=2)

    def run_of(model: Any) -> Any:
        return Reproduction(model, tokenizer, [], Published("", None, []), options)

    run_of(a)._pruned(plan).__enter__()  # killed before it is left
    with run_of(b)._pruned(plan) as pruned:
        found = pruned(TEXT.input_ids).logits
    whole, _ = cl.load_model(folders / "B", device="cpu")
    assert torch.allclose(found, cl.prune(whole, plan)(TEXT.input_ids).logits, atol=1e-5)


def test_the_mark_of_a_tokenizer_is_that_of_its_rules() -> None:
    first, second = word_tokenizer(), word_tokenizer()
    first("w1 w2", truncation=True, max_length=8)
    assert tokenizer_mark(first) == tokenizer_mark(second)
    second.chat_template = "{{ messages }}"
    assert tokenizer_mark(first) != tokenizer_mark(second)
