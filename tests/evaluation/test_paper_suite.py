"""The paper's suite, read by the real loader from copies laid out as on the hub."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.evaluation import suites, tasks
from cocurve_lab.evaluation.code_execution import why_not_confined
from cocurve_lab.evaluation.suites import Source
from cocurve_lab.evaluation.task_files import make_task, write_task_files
from cocurve_lab.evaluation.tasks import BOS_WINDOWS, TaskOptions, evaluate_tasks
from cocurve_lab.extensions.judging.perplexity import PerplexityOptions
from cocurve_studies.paper.published import published
from cocurve_studies.paper.reproduction import Reproduction, ReproductionOptions
from helpers.hub_copies import write_copies
from helpers.tiny_models import CHAT, opening_tokenizer, tiny_model, word_tokenizer

NO_CODE = tuple(name for name in suites.PAPER_NAMES if name not in suites.PAPER_CODE)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_copies(tmp_path_factory.mktemp("hub"))


def evaluate(data: Path, *names: str, **options: Any) -> Any:
    settings = TaskOptions(tasks=names, data=data, progress=False, **options)
    return evaluate_tasks(tiny_model(), word_tokenizer(), "paper", options=settings)


def test_the_whole_suite_runs_on_local_copies(copies: Path) -> None:
    report = evaluate(copies, *NO_CODE)
    assert report.failed == {}
    assert tuple(report.values) == NO_CODE
    assert len(report.averaged) == 7
    assert report.average == np.mean([report[name][how] for name, how in report.averaged.items()])
    shots = report.settings["num_fewshot"]
    assert {name for name, count in shots.items() if count} == {"gsm8k_5shot"}
    assert shots["gsm8k_5shot"] == 5
    assert report.samples["mmlu"] == report.samples["mmlu_letters"] == 4


def test_texts_are_what_the_release_reads(copies: Path) -> None:
    read = {name: text.texts(copies) for name, text in suites.PAPER_TEXTS.items()}
    assert read["wikitext2"] == [" = w1 = \n", "w2 w3 w4\n", "w5 w6\n"]  # no empty lines
    assert read["ptb"] == ["w1 w2 w3", "w4 w5"]
    assert len(read["c4"]) == 500
    assert read["c4"][-1] == "w49 w1"


def test_the_release_s_windows_stand_beside_begun_ones(copies: Path, tmp_path: Path) -> None:
    model, tokenizer, said = tiny_model(), opening_tokenizer("<unk>"), list[str]()
    tokenizer.chat_template = CHAT  # which the suite leaves alone
    settings = TaskOptions(tasks=("ptb",), data=copies, progress=False)
    options = ReproductionOptions(tmp_path, tasks=settings)
    study = Reproduction(model, tokenizer, [], published(""), options, say=said.append)
    found = {row["task"]: row["value"] for row in study.run() if row["shown"]}
    text, first = "w1 w2 w3\n\nw4 w5", PerplexityOptions(progress=False, starts="first window")
    assert found == {
        "ptb": pytest.approx(cl.perplexity(model, tokenizer, text, options=first).value),
        f"ptb, {BOS_WINDOWS}": pytest.approx(cl.perplexity(model, tokenizer, text).value),
    }


def test_one_text_that_fails_does_not_end_the_others(copies: Path, tmp_path: Path) -> None:
    data = shutil.copytree(copies, tmp_path / "hub")
    ptb = data / "ptb-text-only" / "ptb_text_only"
    (ptb / "ptb_text_only.py").write_text("# the loading script of the main branch\n")
    shutil.rmtree(data / "allenai" / "ai2_arc")
    damaged = data / "baber" / "piqa" / "data" / "validation-00000-of-00001.parquet"
    damaged.write_bytes(damaged.read_bytes()[:50])
    report = evaluate(data, "wikitext2", "ptb", "c4", "arc_easy", "piqa")
    assert set(report.values) == {"wikitext2", "c4"}
    assert set(report.failed) == {"ptb", "arc_easy", "piqa"}
    assert report.average is None  # one of the averaged tasks is missing
    assert cl.EvaluationReport.from_json(report.to_json()) == report
    with pytest.raises(cl.InputError, match="ptb"):
        evaluate(data, "ptb")


@pytest.mark.skipif(why_not_confined() is not None, reason="programs cannot be confined here")
def test_the_proxy_is_a_whole_text_and_some_problems(
    copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "PROXY_PROBLEMS", 1)
    settings = TaskOptions(data=copies, progress=False)
    model, tokenizer = tiny_model(), word_tokenizer()
    report = evaluate_tasks(model, tokenizer, "proxy", None, True, settings)
    assert report.failed == {}
    whole = evaluate(copies, "wikitext2")
    assert report["wikitext2"] == whole["wikitext2"]
    assert report.samples == whole.samples | {"humaneval": 1, "mbpp": 1}


# Questions --------------------------------------------------------------------------------------


def asked_of(kind: str, rows: list[dict[str, Any]], folder: Path) -> tuple[Any, Any]:
    """The harness's own task of a kind, and its first record."""
    from lm_eval.tasks import TaskManager

    write_task_files([make_task(kind, rows)], folder)
    task = TaskManager(None, str(folder), False).load(kind)["tasks"][kind]
    return task, next(iter(task.test_docs()))


def test_mmlu_scores_texts_that_the_prompt_does_not_show(copies: Path, tmp_path: Path) -> None:
    rows = Source("cais/mmlu", "all", "test").rows(copies)
    task, record = asked_of("mmlu", rows, tmp_path)
    asked = "Subject: high_school_physics\nQuestion:  w1 w2? \nAnswer:"
    assert task.doc_to_text(record) == asked
    assert task.doc_to_choice(record) == ["w3", "w4", "w5", "w6"]
    assert task.doc_to_target(record) == 1


def test_mmlu_letters_asks_as_the_harness(copies: Path, tmp_path: Path) -> None:
    import lm_eval.tasks
    import yaml
    from jinja2 import Template

    home = Path(lm_eval.tasks.__file__).parent / "mmlu" / "default"
    template = yaml.safe_load((home / "_default_template_yaml").read_text())
    own = yaml.safe_load((home / "mmlu_high_school_physics.yaml").read_text())
    rows = Source("cais/mmlu", "all", "test").rows(copies)[:1]
    task, record = asked_of("mmlu_letters", rows, tmp_path)
    asked = own["description"] + Template(template["doc_to_text"]).render(rows[0])
    assert task.doc_to_text(record) == asked
    assert task.doc_to_choice(record) == template["doc_to_choice"]
    assert task.doc_to_target(record) == rows[0][template["doc_to_target"]]


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("6 * 7 = 42, so it is 1,042 in all.", True),
        ("It is 1042.", True),
        ("1042 at first, and 7 in the end", False),
        ("no number", False),
        ("-1042", False),
    ],
)
def test_gsm8k_takes_the_last_number(reply: str, right: bool, tmp_path: Path) -> None:
    """By the harness's own filters and metric."""
    from lm_eval.api.instance import Instance

    rows = [{"question": "w1?", "answer": "w2 <<6*7=42>>\n#### 1,042"}]
    task, record = asked_of("gsm8k", rows, tmp_path)
    assert task.doc_to_text(record) == "Question: w1?\nLet's solve this step by step.\n"
    assert task.get_config("generation_kwargs")["max_gen_toks"] == 256
    request = Instance("generate_until", record, ("", {}), 0)
    request.resps = [reply]
    task._instances = [request]
    task.apply_filters()
    (found,) = request.filtered_resps.values()
    assert bool(task.process_results(record, [found])["exact_match"]) == right


def test_the_tables_name_the_harness_s_own_datasets() -> None:
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    home = Path(lm_eval.tasks.__file__).parent
    for made in suites.PAPER_HARNESS.values():
        own = load_yaml(home / made.config["include"], resolve_func=False)
        assert own["dataset_path"] == made.dataset
    assert set(suites.DIFFERENCES) <= set(suites.PAPER_NAMES)
