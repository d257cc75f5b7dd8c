"""The suites demo, paper and proxy: their tasks, and the metric of each that enters the average.

Averaged metrics are fixed here, before any run. For the paper's seven commonsense tasks they follow
its appendix "Evaluation Protocol", paragraph "Per-task metric": acc_norm for HellaSwag,
ARC-challenge, OpenBookQA and PIQA, acc for WinoGrande and BoolQ. Its table of datasets lists PIQA
under acc instead; the paragraph wins. ARC-easy is in the table only, as acc (norm), so acc_norm.
acc and acc_norm are both in the report wherever the harness has both.

Where the paper leaves the protocol open, the authors' release decides: MMLU scores the texts of the
options, which the prompt does not show, and GSM8K has no examples. The harness asks both otherwise;
its versions are mmlu_letters and gsm8k_5shot. `DIFFERENCES` says what still differs from the
release.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ..base.errors import InputError
from ..extensions.texts.documents import read_documents
from ..extensions.texts.records import read_objects
from ..models.identity import demo_folder
from .task_files import TaskFile, make_task, replies

DEMO_ENDS = (".", "\n")  # a reply of the embedded model ends at its first full stop or line end
_DEMO_TOKENS = 16  # more than any of its answers needs


# Where texts and questions are --------------------------------------------------------------------
# The pinned `datasets` runs no loading scripts. A dataset that still has one is read from the hub's
# branch of converted parquet files.


@dataclass(frozen=True)
class Source:
    """A split of a dataset on the hub.

    Attributes:
        dataset: its hub id, ORGANIZATION/NAME.
        subset: its configuration; None where it has one only.
        split: the split.
        revision: the branch; None for the main one.
        files: pattern of the split's files, for a branch without configurations.
        text: the field that holds a document, of a text for perplexity.
        documents: of a text, only so many from the start; None takes all.
    """

    dataset: str
    subset: str | None
    split: str
    revision: str | None = None
    files: str | None = None
    text: str = ""
    documents: int | None = None

    def texts(
        self, data: str | os.PathLike[str] | None = None, limit: int | None = None
    ) -> list[str]:
        """Read the documents that are not blank, at most `limit`; `data` as for `rows`."""
        rows = self.rows(data, self.documents)
        return [row[self.text] for row in rows if row[self.text].strip()][:limit]

    def rows(
        self, data: str | os.PathLike[str] | None = None, first: int | None = None
    ) -> list[dict[str, Any]]:
        """Read the rows, or only the `first`, one dict each.

        `data` is a folder with a copy of the dataset as DATA/ORGANIZATION/NAME, the files as on the
        hub; None reads the hub.
        """
        place = self.dataset if data is None else str(local_copy(data, self.dataset))
        from datasets import load_dataset

        try:
            rows = load_dataset(
                place,
                self.subset,
                split=self.split,
                revision=None if data is not None else self.revision,
                data_files=None if self.files is None else {self.split: self.files},
                # a stream leaves no copy in the cache: a local one is there already, and of C4 only
                # the start is wanted
                streaming=data is not None or first is not None,
            )
            return [dict(row) for row in islice(rows, first)]
        except Exception as error:  # each hub client release raises its own network errors
            raise unreadable(self.dataset, data, error) from None


def local_copy(data: str | os.PathLike[str], dataset: str) -> Path:
    """Return the folder of a dataset's local copy."""
    place = Path(data).resolve() / dataset
    if not place.is_dir():
        raise InputError(
            f"there is no {place}. Copy the dataset {dataset} there, with its files as on the hub."
        )
    return place


def unreadable(what: str, data: str | os.PathLike[str] | None, error: Exception) -> InputError:
    """Make the error of a suite that cannot read a dataset."""
    place = "the hub" if data is None else f"its copy in {data}"
    return InputError(
        f"{what} cannot be read from {place} ({type(error).__name__}: {error!s:.200}). Go online, "
        "name a folder of copies with the files as on the hub (data=FOLDER, or --data FOLDER), or "
        'evaluate files you have with suite="local".'
    )


# PTB has a loading script; its parquet files are on a branch. The release takes 500 C4 documents.
PAPER_TEXTS = {
    "wikitext2": Source("Salesforce/wikitext", "wikitext-2-raw-v1", "test", text="text"),
    "ptb": Source(
        "ptb-text-only/ptb_text_only",
        None,
        "test",
        revision="refs/convert/parquet",
        files="penn_treebank/test/*.parquet",
        text="sentence",
    ),
    "c4": Source("allenai/c4", "en", "validation", text="text", documents=500),
}
# The harness's own prompts, splits and examples: all zero-shot except gsm8k_5shot.
PAPER_HARNESS = {
    name: TaskFile(
        name,
        {"include": file, "num_fewshot": 5 if name == "gsm8k_5shot" else 0},
        average=average,
        dataset=dataset,
    )
    for name, file, dataset, average in (
        ("arc_easy", "arc/arc_easy.yaml", "allenai/ai2_arc", "acc_norm"),
        ("arc_challenge", "arc/arc_challenge.yaml", "allenai/ai2_arc", "acc_norm"),
        ("hellaswag", "hellaswag/hellaswag.yaml", "Rowan/hellaswag", "acc_norm"),
        ("winogrande", "winogrande/default.yaml", "allenai/winogrande", "acc"),
        ("piqa", "piqa/piqa.yaml", "baber/piqa", "acc_norm"),
        ("openbookqa", "openbookqa/openbookqa.yaml", "allenai/openbookqa", "acc_norm"),
        ("boolq", "super_glue/boolq/default.yaml", "aps/super_glue", "acc"),
        ("gsm8k_5shot", "gsm8k/gsm8k.yaml", "openai/gsm8k", None),
    )
}
_MMLU = Source("cais/mmlu", "all", "test")
# Tasks that are made here of questions on the hub. None is averaged: the paper's average is over
# the seven commonsense tasks.
PAPER_OWN = {
    "mmlu": _MMLU,
    "mmlu_letters": _MMLU,
    "gsm8k": Source("openai/gsm8k", "main", "test"),
    "humaneval": Source("openai/openai_humaneval", None, "test"),
    "mbpp": Source("google-research-datasets/mbpp", "full", "test"),
}
PAPER_CODE = ("humaneval", "mbpp")
# The metric of each task that the paper's tables show. Its MMLU is acc_norm: "multiple-choice tasks
# use length-normalized log-likelihood".
PAPER_METRICS = {
    **dict.fromkeys(PAPER_TEXTS, "perplexity"),
    **{name: task.average for name, task in PAPER_HARNESS.items() if task.average is not None},
    "mmlu": "acc_norm",
    "gsm8k": "exact_match",
    **dict.fromkeys(PAPER_CODE, "pass@1"),
}
PAPER_NAMES = (*PAPER_TEXTS, *PAPER_HARNESS, *PAPER_OWN)
# what the paper ranks candidate plans by: its appendix "Evaluation Protocol", "Generation proxy"
PROXY_NAMES, PROXY_PROBLEMS = ("wikitext2", *PAPER_CODE), 200

_PER_BYTE = "acc_norm divides by the bytes of a choice, the release by its tokens"
# task -> how it still differs from the authors' release
DIFFERENCES = {
    "arc_easy": _PER_BYTE,
    "arc_challenge": _PER_BYTE,
    "hellaswag": f"the prompt names the activity and is cleaned of markup; {_PER_BYTE}",
    "winogrande": "the end of the sentence is scored after each option; the release scores the "
    "option with the end",
    "piqa": _PER_BYTE,
    "openbookqa": f'the prompt is the question alone, without "Question:" and "Answer:"; '
    f"{_PER_BYTE}",
    "boolq": "all 3,270 questions; the release prepares 2,000 unless told otherwise",
    "mmlu": _PER_BYTE,
    "mmlu_letters": "the harness's prompt; the release has none like it",
    "gsm8k_5shot": "the harness's own task, with five examples; the release has none like it",
    "humaneval": "replies have up to 1,024 tokens and end at the harness's stops; the release "
    "writes 256",
    "mbpp": "each example shows three assertions; the release shows one",
}


def demo_tasks() -> list[TaskFile]:
    """Make the tasks of the embedded model: five families of prompts, and its test texts.

    Each family is scored by exact match of the greedy reply up to its first "." or line end, as in
    the model's card. FAMILY_choice, for families with choices, is scored by likelihood, and "texts"
    by the likelihood of whole test documents. The average is over the five exact matches.
    """
    data = demo_folder().parent
    tasks: list[TaskFile] = []
    choices: list[TaskFile] = []
    ends = replies(DEMO_ENDS, _DEMO_TOKENS)
    for file in sorted((data / "prompts").glob("*.jsonl")):
        rows = read_objects(file)
        tasks.append(make_task("generation", rows, file.stem, generation_kwargs=ends))
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
            chosen = make_task("multiple_choice", offered, f"{file.stem}_choice")
            choices.append(replace(chosen, average=None))
    texts = [{"text": text} for text in read_documents(data / "texts" / "test.jsonl")]
    return [*tasks, *choices, make_task("rolling_text", texts, "texts")]


def paper_task(name: str, data: str | os.PathLike[str] | None = None) -> TaskFile:
    """Make one of the paper's tasks other than perplexity.

    Args:
        name: a name in `PAPER_HARNESS` or `PAPER_OWN`.
        data: folder of local copies, as for `Source.rows`; None reads the hub.
    """
    if name in PAPER_HARNESS:
        return PAPER_HARNESS[name]
    return replace(make_task(name, PAPER_OWN[name].rows(data)), average=None)
