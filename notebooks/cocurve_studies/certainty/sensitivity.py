"""The sensitivity of plans to the budget of H: one knob of the build at a time, on held-out text.

The knobs are those of appendix "Sensitivity to the Surrogate Budget": calibration size, top-r,
source and draw.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from cocurve_lab.base.errors import InputError
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.texts.documents import read_documents, stream_hub
from cocurve_lab.extensions.texts.records import read_objects
from cocurve_lab.models.identity import demo_folder, is_demo
from cocurve_lab.models.units import enumerate_units
from cocurve_lab.solver.solve import solve_greedy

from ..chart import add, chart, empty
from ..shared import Recipe, compared, marks
from ..study import Study
from ..tables import Columns, DataFrame, Folder, Row, Rows, Table, column, pick, table_of
from .resampling import of_groups

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# columns of `sensitivity_study` and of its summary for reading, with `shown`
COLUMNS: Columns = {
    "knob": "",
    "value": "",
    "matrix_distance": "distance of H",
    "overlap": "",
    "kl": "KL",
    "difference": "",
    "perplexity": "",
}
SUMMARY_COLUMNS: Columns = {
    "knob": "",
    "values": "",
    "band": "",
    "kl_std": "spread of KL over builds",
    "largest_difference": "largest difference",
    "lowest_overlap": "lowest overlap",
}

_MATCH = 16  # tokens at the start of a document by which it is found again


@dataclass(frozen=True)
class SensitivityOptions:
    """The base build, the values each knob takes beside it, and the plans that are compared.

    Attributes:
        rows, top_r: of the base build: sequences, every position scored, and support size r.
        seq_len: T, tokens per row; None = min(2048, the tokenizer's context).
        row_counts, top_rs: other values of a knob; () leaves it at its base.
        draws: disjoint sets of `rows` rows, the knob "seed".
        ratio, interaction_strengths: of the plans, without guards.
    """

    rows: int = 8
    top_r: int = 256
    seq_len: int | None = None
    row_counts: tuple[int, ...] = (4, 16)
    top_rs: tuple[int, ...] = (128, 512)
    draws: int = 4
    ratio: float = 0.2
    interaction_strengths: tuple[float, ...] = (0.0, 1.0)


def sensitivity_study(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, Sequence[str]],
    held_out: CalibrationSet,
    options: SensitivityOptions = SensitivityOptions(),
    *,
    cache: Folder = None,
    progress: bool = True,
) -> DataFrame:
    """Rebuild H with one knob changed at a time, and measure the plan of each build.

    One build keeps a Gram per row, and H of any of its rows is a sum of them. Row counts are its
    first rows, and values of the knob "seed" are disjoint sets of its rows, so both cost nothing.
    Row counts are nested and share text with the base; seeds do not.

    Args:
        texts: source name -> documents; the first source is the base, the others are values of the
            knob "source".
        held_out: rows on which every plan is measured.
        options: base build, values of the knobs, plans.

    Returns:
        A row per knob, value and lambda, the base first in each knob (`is_base`): `matrix_distance`
        |H - H_base| / |H_base| in Frobenius norm; `overlap`, the Jaccard overlap with the base
        plan; `kl` and the `difference` to the base plan; `perplexity` and `dense_perplexity`.
    """
    base, *others = texts
    most = max(options.rows * options.draws, *options.row_counts, 1)
    pool = pool_of(texts[base], tokenizer, options, most, base)
    sources = {
        name: pool_of(texts[name], tokenizer, options, options.rows, name) for name in others
    }
    for text in (pool, *sources.values()):
        held_out.require_disjoint(text)
    built = {name: text.fingerprint for name, text in {base: pool, **sources}.items()}
    settings = marks(model, held_out=held_out.fingerprint, options=asdict(options), builds=built)

    def compute(study: Study) -> Rows:
        units = enumerate_units(model)

        def build(text: CalibrationSet, top_r: int) -> Curvature:
            return Recipe(text, top_r, len(text), cache, progress).build(model, units)

        whole = build(pool, options.top_r)
        first = of_groups(whole, range(options.rows))
        variants: list[tuple[str, Any, Curvature]] = [("top_r", options.top_r, first)]
        for top_r in options.top_rs:
            variants.append(("top_r", top_r, build(pool.rows(0, options.rows), top_r)))
        variants.append(("source", base, first))
        for name, text in sources.items():
            variants.append(("source", name, build(text, options.top_r)))
        variants.append(("rows", options.rows, first))
        for count in options.row_counts:
            variants.append(("rows", count, of_groups(whole, range(count))))
        variants.append(("seed", 0, first))
        for draw in range(1, options.draws):
            mine = range(draw * options.rows, (draw + 1) * options.rows)
            variants.append(("seed", draw, of_groups(whole, mine)))
        return _measured(study, variants, options)

    study = Study(model, held_out, cache=cache, progress=progress)
    return study.table("sensitivity", settings, compute)


def pool_of(
    documents: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: SensitivityOptions,
    rows: int,
    source: str,
) -> CalibrationSet:
    """Return rows of one source, every position scored."""
    return CalibrationSet.from_texts(
        list(documents), tokenizer, rows, options.seq_len, "all", source=source
    )


def _measured(
    study: Study, variants: list[tuple[str, Any, Curvature]], options: SensitivityOptions
) -> Rows:
    """Solve and measure every variant at every lambda; the first variant is the base."""
    strengths, base = options.interaction_strengths, variants[0][2]
    plans = [
        solve_greedy(curvature, options.ratio, strength)
        for _, _, curvature in variants
        for strength in strengths
    ]
    table, size = study.measure(plans), np.linalg.norm(base.matrix)
    rows: Rows = []
    for number, (knob, value, curvature) in enumerate(variants):
        for step, strength in enumerate(strengths):
            rows.append(
                {
                    "knob": knob,
                    "value": value,
                    "is_base": curvature is base,
                    "matrix_distance": np.linalg.norm(curvature.matrix - base.matrix) / size,
                    "interaction_strength": strength,
                }
                | compared(table, number * len(strengths) + step, step)
            )
    return rows


def sensitivity_summary(table: Table) -> DataFrame:
    """Summarize each knob that has several values: a row per knob and lambda.

    `band` is the largest perplexity over the smallest, less 1; `perplexity_std` and `kl_std` are
    over values (ddof 1); `largest_difference` is the KL furthest from the base plan's, with the
    error of that one (the largest of several is large by chance too).
    """
    rows: Rows = []
    for knob in dict.fromkeys(row["knob"] for row in pick(table)):
        for strength in dict.fromkeys(row["interaction_strength"] for row in pick(table)):
            found = pick(table, knob=knob, interaction_strength=strength)
            if len(found) > 1:
                head = {"knob": knob, "interaction_strength": strength, "values": len(found)}
                rows.append(head | _summary(found))
    return table_of(rows)


def _summary(rows: Rows) -> Row:
    perplexities = column(rows, "perplexity")
    others = [row for row in rows if not row["is_base"]]
    furthest = max(others, key=lambda row: abs(row["difference"]))
    return {
        "band": float(perplexities.max() / perplexities.min() - 1),
        "perplexity_mean": float(perplexities.mean()),
        "perplexity_std": float(perplexities.std(ddof=1)),
        "kl_std": float(column(rows, "kl").std(ddof=1)),
        "largest_difference": furthest["difference"],
        "largest_difference_error": furthest["difference_error"],
        "lowest_overlap": min(row["overlap"] for row in others),
    }


def plot_sensitivity(table: Table) -> Figure:
    """Plot the KL of each build's plan less that of the base plan, paired over sequences."""
    figure, hover = empty(), "%{x}: %{y:.4f} nats<extra>%{fullData.name}</extra>"
    strengths = dict.fromkeys(row["interaction_strength"] for row in pick(table))
    for number, strength in enumerate(strengths):
        rows = pick(table, interaction_strength=strength)
        x = [[row["knob"].replace("_", " ") for row in rows], [str(row["value"]) for row in rows]]
        add(figure, rows, x, "difference", f"λ = {strength:g}", number, hover=hover)
    title = "KL of plans from changed builds, less that of the base plan"
    y = "KL less the base plan's (± paired s.e.)<br>nats per token"
    return chart(figure, title, "knob of the build, and its value", y, across=0)


# Sources of text ----------------------------------------------------------------------------------
def text_sources(
    model_id: str,
    tokenizer: PreTrainedTokenizerBase,
    held_out: CalibrationSet,
    text_file: str | os.PathLike[str] | None = None,
    documents: int = 1000,
) -> dict[str, list[str]]:
    """Return documents by name of their source; the first source is for general use.

    For the embedded model: its calibration text, whole ("mixed"), and its programs ("code").
    For any other: `text_file` (`.jsonl` or plain text), or at most `documents` of the validation
    split of C4, which `default_calibration` does not read. Documents of the held-out rows are
    omitted.
    """
    if text_file is None and is_demo(model_id):
        records = list(read_objects(demo_folder().parent / "texts" / "calibration.jsonl"))
        code = [record["text"] for record in records if record["family"] == "code"]
        return {"mixed": [record["text"] for record in records], "code": code}
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
    """Return the documents whose first 16 tokens are not in a row in the held-out text."""
    # rows are neighboring cuts of one stream of documents
    text = f" {' '.join(map(str, held_out.input_ids.flatten().tolist()))} "
    kept = []
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"][:_MATCH]
        if ids and f" {' '.join(map(str, ids))} " not in text:
            kept.append(document)
    return kept
