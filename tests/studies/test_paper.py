"""`cocurve paper`: one offline run, resumed, interrupted, and with a dataset missing."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.cli import DONE, FAILED, INTERRUPTED, main
from cocurve_lab.evaluation.suites import Source
from cocurve_lab.extensions.choosing.gains import choose_gains
from cocurve_lab.extensions.choosing.racing import ChoiceOptions
from cocurve_lab.extensions.choosing.settings import choose_guards, choose_interaction_strength
from cocurve_lab.solver.targets import flop_costs
from cocurve_studies.bake_off.contenders import BASELINES
from cocurve_studies.paper import command as paper_command
from cocurve_studies.paper import published, reproduction
from cocurve_studies.paper.protocol import Protocol
from cocurve_studies.tables import pick
from helpers.hub_copies import write_copies
from helpers.release import Shape, write_json, write_release
from helpers.tiny_models import (
    GROUPS,
    HIDDEN,
    naive_risk,
    tiny_model,
    tiny_text,
    units_by_hand,
    word_tokenizer,
    write_model,
)
from helpers.verbs import write_text

TITLES = [cl.get_method(name).title for name in BASELINES]
NAME = "Mistral-7B"  # of the paper, so that its numbers stand beside
# its guards leave 20 % within reach, and its vocabulary is that of its tokenizer
SIXTEEN = {"layers": 16, "intermediate_size": 64, "vocab_size": 92}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, a text, and copies of the datasets."""
    folder = tmp_path_factory.mktemp("place")
    write_model(folder / "tiny", tiny_model(**SIXTEEN))
    write_text(folder / "text.jsonl")
    write_copies(folder / "hub")
    return folder


def command(place: Path, out: Path, *more: str) -> list[str]:
    text = ["--text", str(place / "text.jsonl"), "--sequences", "2", "--length", "20"]
    text += ["--positions", "all", "--held-out", "2"]
    plans = ["--ratios", "0.2", "--lambdas", "1", "--guards", "paper"]
    plans += ["--ffn-groups", "8", "--top-r", "32", "--repeats", "1"]
    suite = ["--data", str(place / "hub"), "--limit", "2"]
    model = ["paper", str(place / "tiny"), "--as", NAME, "--device", "cpu", "--out", str(out)]
    return [*model, *text, *plans, *suite, *more]


@pytest.fixture(scope="module")
def done(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("out")
    assert main(command(place, out)) == DONE
    return out


def results(folder: Path) -> list[dict[str, Any]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_papers_numbers_stand_beside_the_measured_ones(done: Path, place: Path) -> None:
    page = (done / "results.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    heads, values = (next(line for line in lines if name in line) for name in ("task", "wikitext2"))
    beside = dict(zip(heads, values, strict=True))
    assert beside["paper: dense"] == "4.78"
    assert beside["paper: CoCurve, lambda 1"] == "8.1"
    assert beside["paper: CoCurve, lambda 0"] == "13.26"
    assert beside["paper: best baseline"] == "8.11"
    assert float(beside["dense"]) > 90  # random weights
    rows = results(done)
    (stated,) = pick(rows, source="paper", plan="CoCurve, lambda 1", task="mmlu")
    assert (stated["value"], stated["table"]) == ("0.374", "tab:cross-model")
    (hours,) = pick(rows, source="paper", task="prune hours")
    assert hours["value"] == "12.6"
    assert pick(rows, source="measured", task="prune hours")


def test_without_further_options_the_papers_rules_choose(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards, lambda and gains are those that the library's own choosers take on the rows."""
    order = ["paper", str(place / "tiny"), "--device", "cpu", "--out", str(tmp_path / "out")]
    order += ["--text", str(place / "text.jsonl"), "--sequences", "4", "--length", "20"]
    order += ["--positions", "12", "--held-out", "4", "--ffn-groups", "8", "--top-r", "32"]
    order += ["--data", str(place / "hub"), "--as", "none", "--methods", "all"]
    scores = {"wikitext2": 3.0, "piqa": 0.5}
    asked = []

    def evaluate(model: Any, *_: Any, options: Any, **__: Any) -> cl.EvaluationReport:
        (task,) = options.tasks
        asked.append(model.num_parameters())
        metric = "perplexity" if task == "wikitext2" else "acc_norm"
        value = {metric: 1e6 / model.num_parameters()}
        return cl.EvaluationReport("paper", {task: value}, {task: {}}, {}, {}, {"notes": []}, {})

    monkeypatch.setattr(reproduction, "evaluate_tasks", evaluate)
    monkeypatch.setattr(reproduction, "measure_efficiency", None)
    monkeypatch.setattr(reproduction, "suite_tasks", lambda *_: dict.fromkeys(scores))
    assert main([*order, "--ratios", "0.2", "0.4"]) == FAILED  # nothing is timed
    model, tokenizer = cl.load_model(place / "tiny", device="cpu")
    cut = {"seq_len": 20, "positions_per_sequence": 12, "text_file": place / "text.jsonl"}
    rows, held_out = cl.default_calibration("tiny", tokenizer, 4, 4, **cut)
    units = cl.enumerate_units(model, 8)
    curvature = cl.estimate_curvature(model, units, rows, 32, progress=False)
    for ratio in (0.2, 0.4):
        judged = ChoiceOptions(judge="nll", progress=False)
        guards = choose_guards(model, curvature, ratio, held_out, options=judged).guards
        inputs = (model, curvature, ratio, held_out, guards)
        chosen = choose_interaction_strength(*inputs, candidates=[0, 0.5, 1]).best
        gains = choose_gains(model, curvature, chosen, held_out).best
        for name, plan in {"CoCurve": chosen, "CoCurve+": gains}.items():
            file = tmp_path / "out" / "plans" / f"{name}_{100 * ratio:g}.json"
            found = cl.Selection.from_json(file.read_text())
            assert found.fingerprint == plan.fingerprint
            assert found.guards == plan.guards
        rows_here = pick(results(tmp_path / "out"), requested_ratio=str(ratio), source="measured")
        of_others = [r for r in rows_here if r["plan"] in TITLES and r["task"] == "wikitext2"]
        assert len(of_others) == 9
        at_ratio = [r for r in of_others if abs(float(r["realized_ratio"]) - ratio) <= 0.012]
        (best,) = pick(rows_here, plan="best baseline", task="wikitext2")
        assert float(best["value"]) == min(float(row["value"]) for row in at_ratio)
        (best,) = pick(rows_here, plan="best baseline", task="piqa")
        assert float(best["value"]) == max(float(row["value"]) for row in at_ratio)


def test_ratios_may_count_operations(place: Path, tmp_path: Path) -> None:
    """The protocol with costs: each plan, and the lambda of lowest KL on the held-out rows."""
    model, held_out = tiny_model(), tiny_text(4, 20, seed=1)
    units = cl.enumerate_units(model, GROUPS)
    rows = tiny_text(4, 20)
    curvature = cl.estimate_curvature(model, units, rows, 16, progress=False)
    costs = flop_costs(units, 2000)  # attention takes far more than its share of parameters
    settings = (tmp_path, model, curvature, rows, held_out, published.published(""), "none")
    by_cost, plain = (Protocol(*settings, progress=False, costs=c) for c in (costs, None))
    target = cl.Target(ratio=0.4, costs=costs)
    plans = {s: cl.solve_greedy(curvature, target, s) for s in (0.0, 0.5, 1.0)}
    for strength, plan in plans.items():
        assert by_cost.solved(0.4, strength).fingerprint == plan.fingerprint
        assert costs[list(plan.pruned)].sum() >= 0.4 * costs.sum()
    hand = units_by_hand(model)
    kl = [naive_risk(model, [hand[u] for u in p.pruned], held_out) for p in plans.values()]
    gaps = [row - min(kl, key=np.mean) for row in kl]
    # the smallest lambda within one paired standard error of the best, over 4 rows
    tied = [gap.mean() <= gap.std(ddof=1) / 2 + 1e-7 for gap in gaps]
    assert by_cost.chosen(0.4).fingerprint == list(plans.values())[tied.index(True)].fingerprint
    assert plain.solved(0.4, 1.0).fingerprint == cl.solve_greedy(curvature, 0.4).fingerprint
    assert plain.chosen(0.4).fingerprint != by_cost.chosen(0.4).fingerprint
    assert main([*command(place, tmp_path), "--cost", "flops", "--methods", "flap"]) == FAILED


def test_measured_numbers_are_those_of_the_pruned_model(done: Path, place: Path) -> None:
    plan = cl.Selection.from_json((done / "plans" / "lambda_1_20.json").read_text())
    assert plan.guards == cl.Guards(layer_cap=0.25, protect_first=1, protect_last=1)
    model, tokenizer = cl.load_model(place / "tiny", device="cpu")
    with cl.ablate(model, plan):
        masked = cl.perplexity(model, tokenizer, "w1 w2 w3\n\nw4 w5")
    (row,) = pick(results(done), source="measured", plan="lambda 1", task="ptb")
    assert float(row["value"]) == pytest.approx(masked.value, rel=1e-4)
    assert float(row["realized_ratio"]) == pytest.approx(plan.realized_ratio)
    (size,) = pick(results(done), source="measured", task="parameters")
    smaller = cl.prune(model, plan).num_parameters() / model.num_parameters()
    assert float(size["value"]) == pytest.approx(smaller)


def test_rows_are_the_release_s_where_the_text_has_enough(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, long = word_tokenizer(), tmp_path / "long.jsonl"
    words = np.random.default_rng(0).integers(90, size=(40, 35))
    texts = [" ".join(f"w{n}" for n in row) for row in words]
    long.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    seen: list[Any] = []
    monkeypatch.setattr(paper_command, "run", lambda options: seen.append(options) or DONE)
    for file, *recipe in ((long,), (long, "--recipe", "plain"), (place / "text.jsonl",)):
        main([*command(place, tmp_path), "--text", str(file), *recipe])
    release, plain, short = (paper_command._rows(options, tokenizer)[0] for options in seen)
    assert "the release's recipe" in release.source
    assert release.seed == 42
    for rows in (plain, short):
        assert "recipe" not in rows.source
    # WikiText-2 beside C4: shuffled by the seed, and the rows to choose on are others
    documents = [{"text": text} for text in texts]
    monkeypatch.setattr(Source, "rows", lambda source, data: documents * (source.split == "train"))
    order = command(place, tmp_path)
    at = order.index("--text")
    for seed in ("1", "7"):
        main([*order[:at], *order[at + 2 :], "--wikitext", "--seed", seed])
    (one, held_out), (seven, _) = (paper_command._rows(o, tokenizer) for o in seen[-2:])
    held_out.require_disjoint(one)
    assert one.fingerprint != seven.fingerprint


FEW = ("ptb", "piqa", "boolq", "gsm8k")  # a text, choices, an answer, and replies


def test_a_streamed_run_has_the_same_scores_and_leaves_no_model(
    done: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduction, "suite_tasks", lambda *_: dict.fromkeys(FEW))
    assert main(command(place, tmp_path, "--stream", "--methods", "llm-pruner")) == FAILED
    assert main(command(place, tmp_path, "--stream")) == DONE
    scores = [
        {
            (row["plan"], row["task"], row["metric"]): row["value"]
            for row in pick(results(folder), source="measured")
            if row["task"] in FEW
        }
        for folder in (done, tmp_path)
    ]
    assert scores[0] == scores[1]
    assert len(scores[0]) >= 2 * len(FEW)
    assert not any((tmp_path / "pruned").iterdir())


def test_ctrl_c_keeps_finished_tasks_and_a_whole_run_all(
    done: Path,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, asked = reproduction.evaluate_tasks, []

    def stopped(*arguments: Any, options: Any, **more: Any) -> Any:
        asked.extend(options.tasks)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(*arguments, options=options, **more)

    out = shutil.copytree(done, tmp_path / "out")
    for file in (out / "measured").glob("study_suite_*"):
        if any(f'"{name}"' in file.read_text() for name in FEW[:3]):
            file.unlink()
    monkeypatch.setattr(reproduction, "evaluate_tasks", stopped)
    assert main(command(place, out)) == INTERRUPTED
    assert main(command(place, out)) == DONE
    assert asked[:3] == list(FEW[:3])
    # the two finished ones are not asked again; two plans follow the dense model
    assert asked[3:] == ["boolq", *2 * FEW[:3]]
    assert results(out) == results(done)
    for name in ("evaluate_tasks", "measure_efficiency", "cut"):
        monkeypatch.setattr(reproduction, name, None)
    assert main(command(place, out)) == DONE
    assert results(out) == results(done)
    assert main([*command(place, out), "--limit", "1"]) == FAILED  # another limit is not measured


def test_a_missing_dataset_costs_its_task_alone(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduction, "suite_tasks", lambda *_: dict.fromkeys(FEW))
    data = shutil.copytree(place / "hub", tmp_path / "hub")
    shutil.rmtree(data / "baber")
    more = ["--data", str(data), "--release", str(tmp_path / "release")]
    (tmp_path / "release" / "r20").mkdir(parents=True)
    metrics = tmp_path / "release" / "r20" / "reference_metrics.json"
    metrics.write_text(json.dumps({"mmlu": {"accuracy_norm": 0.123}}))
    assert main([*command(place, tmp_path / "out"), *more]) == FAILED
    rows = results(tmp_path / "out")
    assert pick(rows, source="measured", plan="lambda 1", task="boolq")
    assert not pick(rows, source="measured", task="average")
    (row,) = pick(rows, source="release")
    assert (row["task"], row["value"]) == ("mmlu", "0.123")


def test_the_releases_plan_and_numbers_are_added(done: Path, place: Path, tmp_path: Path) -> None:
    shape = Shape("mistral-7b", 16, HIDDEN, HIDDEN // 4, 4, 2, 64, 8)
    write_release(tmp_path / "release", shape, (20,))
    write_json(tmp_path / "release" / "r20" / "reference_metrics.json", {"mmlu": 0.123, "ptb": 9})
    out = shutil.copytree(done, tmp_path / "out")
    tasks = ["--release", str(tmp_path / "release")]
    assert main([*command(place, out), *tasks]) == DONE
    rows = results(out)
    (mine,) = pick(rows, source="measured", plan=reproduction.RELEASED, task="ptb")
    (theirs,) = pick(rows, source="release", task="ptb")
    assert theirs["value"] == "9.0"
    plan = cl.Selection.from_release(tmp_path / "release", 0.2)
    assert float(mine["realized_ratio"]) == pytest.approx(plan.realized_ratio)
    (own,) = pick(rows, source="measured", plan="lambda 1", task="ptb")
    assert mine["value"] != own["value"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--ratios", "1.5"], "1.5"),
        (["--methods", "wandasp"], "'wandasp'"),
        (["--suite", "local"], "--tasks"),
        (["--data", "absent"], "'absent'"),
        (["--release", "absent"], "absent/r20/reference_metrics.json"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    more: list[str],
    named: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command(place, tmp_path / "out"), *more]) == FAILED
    assert named in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
