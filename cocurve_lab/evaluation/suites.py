"""The suites demo and paper: their tasks, and the metric of each that enters the average.

Averaged metrics are fixed here, before any run. For the paper's fourteen they follow its appendix
"Evaluation Protocol", paragraph "Per-task metric": acc_norm for HellaSwag, ARC-challenge,
OpenBookQA and PIQA, acc for WinoGrande and BoolQ. Its table of datasets lists PIQA under acc
instead; the paragraph wins. ARC-easy is in the table only, as acc (norm), so acc_norm. acc and
acc_norm are both in the report wherever the harness has both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ..calibration import read_documents, stream_hub
from ..errors import InputError
from ..models.loading import demo_folder
from .task_files import (
    TaskFile,
    generation,
    humaneval,
    mbpp,
    multiple_choice,
    read_records,
    rolling_text,
)

DEMO_ENDS = (".", "\n")  # a reply of the embedded model ends at its first full stop or line end
_DEMO_TOKENS = 16  # more than any of its answers needs


@dataclass(frozen=True)
class HubText:
    """A split of text for perplexity, read from the hub.

    Attributes:
        name: its name in the report.
        dataset, subset, split, field: its place on the hub.
        documents: only so many from the start; None takes all.
    """

    name: str
    dataset: str
    subset: str | None
    split: str
    field: str
    documents: int | None = None

    def read(self) -> list[str]:
        """Read the documents.

        Raises:
            InputError: the hub cannot be reached, or the dataset is not there.
        """
        stream: Iterator[str] = stream_hub(
            self.dataset, name=self.subset, split=self.split, field_name=self.field
        )
        return list(islice(stream, self.documents))


# C4's validation split has 364,868 documents; the first 1,100 are what SparseGPT and Wanda read.
PAPER_TEXTS = (
    HubText("wikitext2", "Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text"),
    HubText("ptb", "ptb-text-only/ptb_text_only", None, "test", "sentence"),
    HubText("c4", "allenai/c4", "en", "validation", "text", 1100),
)

# The harness's own tasks with its own prompts, splits and shots: all zero-shot except GSM8K, for
# which the paper gives no number of examples (the harness's 5).
PAPER_HARNESS = {
    "arc_easy": "acc_norm",
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "piqa": "acc_norm",
    "openbookqa": "acc_norm",
    "boolq": "acc",
    "mmlu": None,
    "gsm8k": None,
}
PAPER_CODE = ("humaneval", "mbpp")
PAPER_NAMES = (*(text.name for text in PAPER_TEXTS), *PAPER_HARNESS, *PAPER_CODE)


def demo_tasks() -> list[TaskFile]:
    """Make the tasks of the embedded model: five families of prompts, and its test texts.

    Each family is scored by exact match of the greedy reply up to its first "." or line end, as in
    the model's card. FAMILY_choice, for families with choices, is scored by likelihood, and "texts"
    by the likelihood of whole test documents. The average is over the five exact matches.

    Raises:
        InputError: the data folder is not there (a partial checkout).
    """
    data = demo_folder().parent
    tasks, choices = [], []
    for file in sorted((data / "prompts").glob("*.jsonl")):
        rows = read_records(file)
        asked = [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]
        tasks.append(generation(file.stem, asked, DEMO_ENDS, _DEMO_TOKENS))
        offered = [
            {
                "query": row["prompt"],
                "choices": row["choices"],
                "gold": row["choices"].index(row["answer"]),
            }
            for row in rows
            if row.get("choices")
        ]
        if offered:
            chosen = multiple_choice(f"{file.stem}_choice", offered)
            choices.append(replace(chosen, average=None))
    if not tasks:
        raise InputError(
            f"there are no prompts in {data / 'prompts'}. Clone the whole repository, or write "
            "them again with `python data/world.py`."
        )
    texts = [{"text": text} for text in read_documents(data / "texts" / "test.jsonl")]
    return [*tasks, *choices, rolling_text("texts", texts)]


def paper_tasks(names: tuple[str, ...]) -> list[TaskFile]:
    """Make the paper's tasks among `names`, except perplexity; code is read from the hub.

    Raises:
        InputError: `datasets` is not installed, or the hub cannot be reached.
    """
    tasks = [
        TaskFile(name, {}, average=metric)
        for name, metric in PAPER_HARNESS.items()
        if name in names
    ]
    # the paper's average is over the seven commonsense tasks, so code does not enter it
    if "humaneval" in names:
        rows = _hub_rows("openai/openai_humaneval", None, "test")
        tasks.append(replace(humaneval(rows), average=None))
    if "mbpp" in names:
        source = "google-research-datasets/mbpp"
        rows = [row for part in ("prompt", "test") for row in _hub_rows(source, "full", part)]
        tasks.append(replace(mbpp(rows), average=None))
    return tasks


def _hub_rows(dataset: str, subset: str | None, split: str) -> list[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError(
            f"{dataset} needs the `datasets` package. Run `pip install 'cocurve-lab[eval]'`."
        ) from None
    try:
        return [dict(row) for row in load_dataset(dataset, subset, split=split)]
    except Exception as error:  # each hub client release raises its own network errors
        raise unreachable(dataset, error) from None


def unreachable(what: str, error: Exception) -> InputError:
    """Make the error of a suite that needs the hub and cannot reach it."""
    return InputError(
        f"{what} cannot be read from the hub ({type(error).__name__}: {error!s:.200}). The paper "
        'suite needs it: go online once, or evaluate files you have with suite="local".'
    )
