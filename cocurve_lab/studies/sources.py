"""Documents to build H on, by source, none of which is in the held-out text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from ..calibration import CalibrationSet
from ..documents import read_documents, stream_hub
from ..errors import InputError
from ..loading import demo_folder, is_demo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NARROW = ("stories", "code")  # families of the embedded model's text
_MATCH = 16  # tokens at the start of a document by which it is found again


def text_sources(
    model_id: str,
    tokenizer: PreTrainedTokenizerBase,
    held_out: CalibrationSet,
    text_file: str | os.PathLike[str] | None = None,
    documents: int = 1000,
) -> dict[str, list[str]]:
    """Source name -> documents, the first one for general use; add files of your own to it.

    The embedded model's calibration text comes whole ("mixed") and by family ("stories", "code").
    Any other model gets `text_file`, or the validation split of C4, which `default_calibration`
    does not read.

    Args:
        model_id: as for `load_model`.
        tokenizer: of the model.
        held_out: rows whose documents are left out.
        text_file: `.jsonl` or plain text, as for `default_calibration`.
        documents: at most this many from C4.

    Raises:
        InputError: offline and no text file, or all documents are in the held-out text.
    """
    if text_file is None and is_demo(model_id):
        path = demo_folder().parent / "texts" / "calibration.jsonl"
        return {"mixed": read_documents(path)} | _families(path)
    if text_file is not None:
        found = read_documents(text_file)
    else:
        stream = stream_hub("allenai/c4", name="en", split="validation", field_name="text")
        found = list(islice(stream, documents))
    kept = outside(found, tokenizer, held_out)
    if not kept:
        raise InputError(
            f"all {len(found)} documents are in the held-out text. Give a longer text file."
        )
    return {"text": kept}


def outside(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, held_out: CalibrationSet
) -> list[str]:
    """The documents whose first 16 tokens do not stand one after the other in the held-out rows."""
    # rows are neighbouring cuts of one stream of documents
    text = f" {' '.join(map(str, held_out.input_ids.flatten().tolist()))} "
    kept = []
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"][:_MATCH]
        if ids and f" {' '.join(map(str, ids))} " not in text:
            kept.append(document)
    return kept


def _families(path: os.PathLike[str]) -> dict[str, list[str]]:
    with open(path, encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.strip()]
    return {name: [r["text"] for r in records if r["family"] == name] for name in NARROW}
