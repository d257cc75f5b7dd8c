"""A suite of tasks on a model object, dense, ablated or pruned, by the lm-evaluation-harness."""

from __future__ import annotations

import copy
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..base.arguments import as_int
from ..base.atomic import scratch
from ..base.errors import InputError
from ..calibration import bare_ids, text_start
from ..extensions.judging.generation import uses_chat
from ..extensions.judging.perplexity import PerplexityOptions, Starts, perplexity
from ..extensions.texts.documents import fixed_template
from ..models.runtime import context_of, measuring
from .code_execution import (
    WORTH,
    Limits,
    require_confinement,
    require_permission,
    run_programs,
)
from .report import EvaluationReport
from .suites import (
    DIFFERENCES,
    PAPER_CODE,
    PAPER_NAMES,
    PAPER_TEXTS,
    PROXY_NAMES,
    PROXY_PROBLEMS,
    demo_tasks,
    local_copy,
    paper_task,
    unreadable,
)
from .task_files import TaskFile, local_tasks, write_task_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SUITES = ("demo", "paper", "proxy", "local")
_OF_PAPER = {"paper": PAPER_NAMES, "proxy": PROXY_NAMES}
_LONGEST = 2048  # tokens of a prompt with its reply, as the paper's context
_SEED = 1234  # of few-shot examples, the harness's own default
BOS_WINDOWS = (
    "BOS in every window"  # a second perplexity beside the release's windows in suite "paper"
)
APART = "stride 2048"  # perplexity in windows that do not overlap
_REPLY = 256  # tokens of a reply where a task does not say, the harness's own default


@dataclass(frozen=True)
class TaskOptions:
    """Options of `evaluate_tasks`.

    Attributes:
        tasks: names of the suite's tasks to run; None runs all.
        files: for suite "local": JSONL files, or folders of them.
        data: for suites "paper" and "proxy": a folder with copies of the datasets,
            DATA/ORGANIZATION/NAME with the files as on the hub; None reads the hub.
        batch_size: prompts per forward.
        limits: time, memory, files and processes of each executed program.
        progress: show the harness's bars.
    """

    tasks: Sequence[str] | None = None
    files: Sequence[str | os.PathLike[str]] = ()
    data: str | os.PathLike[str] | None = None
    batch_size: int = 16
    limits: Limits = field(default_factory=Limits)
    progress: bool = True


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    suite: str = "demo",
    limit: int | None = None,
    allow_code_execution: bool = False,
    options: TaskOptions | None = None,
    *,
    chat: bool | None = None,
) -> EvaluationReport:
    """Score a model on a suite of tasks, by the real harness (lm_eval).

    Args:
        model: the object itself; a pruned model too.
        tokenizer: its tokenizer (a copy is used: the harness changes padding).
        suite: "demo", the five families of the embedded model; "paper", the paper's fourteen
            benchmarks and two more of the harness, from the hub or from copies in `options.data`;
            "proxy", the three of them that rank candidate plans (appendix "Evaluation Protocol"):
            WikiText-2, HumanEval and MBPP; "local", the files in `options.files`.
        limit: only so many samples of each task (documents of each text), from its start; None
            takes all, in suite "proxy" 200 problems and the whole text.
        allow_code_execution: True lets generated programs run for pass@1, confined by bubblewrap.
            Where that does not start, no program runs, and the report names the tasks as failed. A
            program that is written to deceive its tests can pass without solving its task.
        options: a choice of tasks, files, batch size, limits, progress.
        chat: True asks each prompt as the user's turn in the tokenizer's chat template, False as it
            is. None asks through the template where there is one, except in suites "paper"
            and "proxy".

    Returns:
        Every metric the harness gives, which of them are averaged, the settings of the run, and
        the tasks that failed, with the reason. They do not end the others.

    Raises:
        InputError: an unknown suite or task; code tasks without
            `allow_code_execution`; a file that cannot be used; no task could be run, for example
            because the hub cannot be reached.
    """
    options = options or TaskOptions()
    limit = None if limit is None else as_int(limit, "limit", 1)
    work = suite_tasks(suite, options)
    documents = limit
    if suite == "proxy" and limit is None:
        limit = PROXY_PROBLEMS
    code = [n for n, made in work.items() if n in PAPER_CODE or (made and made.program)]
    if code:
        require_permission(allow_code_execution)  # before anything is read from the hub
    chat = uses_chat(tokenizer, False if chat is None and suite in _OF_PAPER else chat)
    asked = f"prompts were asked {'through' if chat else 'without'} the tokenizer's chat template"
    settings: dict[str, Any] = {
        "num_fewshot": {},
        "truncated": {},
        "limit": limit,
        "batch_size": options.batch_size,
        "max_length": int(min(context_of(model), _LONGEST)),
        "chat": chat,
        "notes": [asked] if uses_chat(tokenizer) else [],  # said where there is a choice
    }
    versions = {name: version(name) for name in ("lm_eval", "torch", "transformers", "datasets")}
    report = EvaluationReport(suite, {}, settings=settings, versions=versions)
    bench = _Bench(model, tokenizer, options, report, documents)
    first: Exception | None = None
    for name, made in work.items():
        try:
            if name in code:
                require_confinement()
            bench.run(name, made)
        except Exception as error:  # hours of other tasks must not be lost
            log.warning("%s failed: %s", name, error)
            first = first or error
            report.failed[name] = f"{type(error).__name__}: {error}"
            report.values.pop(name, None)  # replies whose programs could not be run are no score
    if first and not report.values:
        raise first
    return report


def suite_tasks(suite: str, options: TaskOptions) -> dict[str, TaskFile | None]:
    """Find the tasks of a suite that are to run: name -> task.

    A task of the paper is None: it is made only when its turn comes.
    """
    if suite not in SUITES:
        raise InputError(f"the suite is {suite!r}. Choose one of {', '.join(SUITES)}.")
    if options.data is not None and (suite not in _OF_PAPER or not Path(options.data).is_dir()):
        raise InputError(
            f"data is {str(options.data)!r}, for suite {suite!r}. Give an existing folder, and "
            'suite="paper" or "proxy".'
        )
    if suite in _OF_PAPER:
        work: dict[str, TaskFile | None] = dict.fromkeys(_OF_PAPER[suite])
    else:
        tasks = demo_tasks() if suite == "demo" else local_tasks(options.files)
        work = {task.name: task for task in tasks}
    wanted = work if options.tasks is None else options.tasks
    for name in wanted:
        if name not in work:
            raise InputError(f"there is no task {name!r}. Choose one of {', '.join(work)}.")
    return {name: made for name, made in work.items() if name in wanted}


@dataclass
class _Bench:
    """A model under test, and what was found so far."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    options: TaskOptions
    found: EvaluationReport
    documents: int | None

    def run(self, name: str, made: TaskFile | None) -> None:
        """Run one task; one of the paper's is made first (`made` is None)."""
        notes = self.found.settings["notes"]
        if made is None and name in PAPER_TEXTS:
            self._text(name, notes)
        else:
            task = paper_task(name, self.options.data) if made is None else made
            if task.average is not None:
                self.found.averaged[name] = task.average
            results = self._measure(task, notes)
            self._collect(task.name, results)
            if task.program is not None:
                execute_code(results, task, self.options, self.found)
                notes.append(f"{name}: {WORTH}")
        if made is None and name in DIFFERENCES:
            notes.append(f"{name}, where the authors' release differs: {DIFFERENCES[name]}")

    def _text(self, name: str, notes: list[str]) -> None:
        """Measure one of the paper's three perplexities: context 2048, stride 512.

        The release's windows, where the tokenizer begins a text ours beside them, and of WikiText-2
        windows that do not overlap, as in the paper's tab:stride-equiv.
        """
        text = PAPER_TEXTS[name].texts(self.options.data, self.documents)
        asked: dict[str, tuple[int, Starts]] = {"perplexity": (512, "first window")}
        if text_start(self.tokenizer):
            asked[BOS_WINDOWS] = (512, "every window")
        if name == "wikitext2":
            asked[APART] = (2048, "first window")
        results = {}
        for metric, (stride, start) in asked.items():
            settings = PerplexityOptions(progress=self.options.progress, starts=start)
            result = perplexity(self.model, self.tokenizer, text, stride=stride, options=settings)
            notes.append(f"{name}, {metric}: {len(text)} documents, none blank. {result.protocol}")
            results[metric] = result
        self.found.samples[name] = results["perplexity"].tokens
        self.found.values[name] = {metric: result.value for metric, result in results.items()}
        # perplexity is exp(nll), so its error is perplexity x that of the nll, to first order
        self.found.errors[name] = {
            metric: None if result.standard_error is None else result.standard_error * result.value
            for metric, result in results.items()
        }

    def _measure(self, task: TaskFile, notes: list[str]) -> Any:
        """Run a task by lm_eval, greedily and in eval mode; the model comes out as it went in.

        Returns the harness's own results, samples included.
        """
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        # the harness warns about model objects, and one is given on purpose
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        settings = self.found.settings
        length, chat = settings["max_length"], settings["chat"]
        with (
            scratch() as folder,
            nullcontext() if self.options.progress else redirect_stderr(io.StringIO()),
            measuring(self.model, torch.get_num_threads()),
            _plain_generation(self.model),
        ):
            loaded = _loaded(task, str(folder), self.options.data)
            (known,) = loaded["tasks"].values()
            known.set_fewshot_seed(seed=_SEED)
            replies = known.get_config("generation_kwargs") or {}
            usual, most = int(replies.get("max_gen_toks", _REPLY)), length // 2
            if known.OUTPUT_TYPE == "generate_until" and usual > most:  # room for prompts
                known.set_config(key="generation_kwargs", value=replies | {"max_gen_toks": most})
                notes.append(
                    f"{task.name}: replies have at most {most} tokens, half the context, where "
                    f"{usual} are usual"
                )
            # a template writes its own first token
            start = [] if chat else text_start(self.tokenizer)
            wrapped = HFLM(
                pretrained=self.model,
                tokenizer=_opening(self.tokenizer),
                backend="causal",
                batch_size=self.options.batch_size,
                max_length=length,
                add_bos_token=bool(start),
                prefix_token_id=start[-1] if start else None,  # before a whole text
            )
            cut: set[int] = set()
            for kind in ("loglikelihood", "generate_until"):
                setattr(wrapped, kind, partial(_checked, wrapped, getattr(wrapped, kind), cut))
            # simple_evaluate would seed the caller's generators and ask git and pip
            results = evaluate(
                wrapped,
                loaded,
                limit=settings["limit"],
                log_samples=True,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
        settings["truncated"][task.name] = len(cut)
        if cut:
            notes.append(
                f"prompts longer than the context of {length} tokens lost their start: "
                f"{len(cut)} of {task.name}"
            )
        return results

    def _collect(self, name: str, results: Mapping[str, Any]) -> None:
        """Read a task's metrics, errors and counts."""
        found = self.found
        scores = results["results"][name]
        values = found.values[name] = {}
        errors = found.errors[name] = {}
        for key, value in scores.items():
            metric, _, how = key.partition(",")
            if how and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                label = metric if how == "none" else f"{metric} ({how})"
                error = scores.get(f"{metric}_stderr,{how}")
                values[label] = float(value)
                errors[label] = float(error) if isinstance(error, (int, float)) else None
        found.samples[name] = results["n-samples"][name]["effective"]
        found.versions[f"task {name}"] = str(results["versions"].get(name, "unstated"))
        found.settings["num_fewshot"][name] = results["n-shot"].get(name)


def execute_code(
    results: Mapping[str, Any], task: TaskFile, options: TaskOptions, found: EvaluationReport
) -> None:
    """Replace the harness's metric of a code task in `found` by pass@1, with its error.

    Replies are read from the harness's results. The caller has checked that code may be executed.
    """
    assert task.program is not None
    rows = sorted(results["samples"][task.name], key=lambda row: row["doc_id"])
    programs = [task.program(task.records[row["doc_id"]], row["resps"][0][0]) for row in rows]
    outcomes = run_programs(
        programs, allow_code_execution=True, limits=options.limits, progress=options.progress
    )
    passed = np.array([outcome.status == "passed" for outcome in outcomes], dtype=float)
    error = float(passed.std(ddof=1) / np.sqrt(len(passed))) if len(passed) > 1 else None
    found.values[task.name] = {"pass@1": float(passed.mean())}
    found.errors[task.name] = {"pass@1": error}


# The harness ------------------------------------------------------------------------------------
def _loaded(task: TaskFile, folder: str, data: str | os.PathLike[str] | None) -> Any:
    """The task as the harness's manager loads it from a folder of YAML files."""
    import datasets.config
    import lm_eval.tasks

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it would tell a host of every load
    if not task.dataset:
        write_task_files([task], folder)
        return lm_eval.tasks.TaskManager(None, folder, False).load(task.name)
    # one of the harness's own: all of them would take half a minute to read
    config = task.config | {
        "include": str(Path(lm_eval.tasks.__file__).parent / task.config["include"])
    }
    if data is not None:
        config["dataset_path"] = str(local_copy(data, task.dataset))
        # the cache lies in the temporary folder: another would only copy what is there already
        config["dataset_kwargs"] = {"cache_dir": f"{folder}/cache"}
    write_task_files([replace(task, config=config)], folder)
    try:
        return lm_eval.tasks.TaskManager(None, folder, False).load(task.name)
    except Exception as error:  # each hub client release raises its own network errors
        raise unreadable(task.dataset, data, error) from None


def _checked(model: Any, answer: Callable[[Any], Any], cut: set[int], requests: Any) -> Any:
    """Answer the harness's requests, after a look at them.

    Args:
        model: the harness's model.
        answer: its own method.
        cut: gets the samples that are longer than the context, so that a prompt loses its start.
        requests: of all samples of a task.

    Raises:
        InputError: a prompt without a token, or a choice longer than the context.
    """
    for request in requests:
        prompt, rest = request.args
        record = f"{request.task_name}, record {request.doc_id + 1}"
        before = len(model.tok_encode(prompt))
        if before == 0:
            raise InputError(
                f"{record}: the prompt is empty, and the tokenizer puts no token before a text. "
                "Give a prompt with text."
            )
        if isinstance(rest, str):
            after = len(model._encode_pair(prompt or " ", rest)[1])
            if after > model.max_length:
                raise InputError(
                    f"{record}: the choice {rest!r:.40} has {after:,} tokens, more than the "
                    f"context of {model.max_length:,}. Shorten it."
                )
        else:
            after = rest.get("max_gen_toks", _REPLY)
        if before + after > model.max_length:
            cut.add(request.doc_id)
    return answer(requests)


@contextmanager
def _plain_generation(model: Any) -> Iterator[None]:
    """Decode greedily, without a checkpoint's own lengths and repetition penalties."""
    from transformers import GenerationConfig

    before = model.generation_config
    ends = {
        name: getattr(before, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    model.generation_config = GenerationConfig(**ends)
    try:
        yield
    finally:
        model.generation_config = before


def _opening(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Copy a tokenizer; the copy adds nothing after a text, and dates chats as those of rows."""
    from tokenizers.processors import TemplateProcessing

    found: Any = copy.deepcopy(tokenizer)
    start = text_start(found)
    if list(found("a")["input_ids"]) != [*start, *bare_ids(found, "a")]:
        known = list(zip(found.convert_ids_to_tokens(start), start, strict=True))
        template = [*(token for token, _ in known), "$A"]
        found.backend_tokenizer.post_processor = TemplateProcessing(template, None, known)
    if found.chat_template:
        found.chat_template = fixed_template(found)
    return found
