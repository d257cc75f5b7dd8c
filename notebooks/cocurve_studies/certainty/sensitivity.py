"""The sensitivity of plans to the budget of H: one knob of the build at a time, on held-out text.

The knobs of appendix "Sensitivity to the Surrogate Budget" (calibration size, top-r, source, draw)
and two more: scored positions per row, and the number of FFN groups, which changes the units.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np

from cocurve_lab.base.errors import InputError
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.texts.documents import read_documents, stream_hub
from cocurve_lab.extensions.texts.records import read_objects
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.identity import demo_folder, is_demo
from cocurve_lab.models.units import enumerate_units
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.solve import solve_greedy

from ..chart import add, chart, empty
from ..shared import Recipe, compared, marks
from ..study import Study
from ..tables import Columns, DataFrame, Folder, Row, Rows, Table, column, pick, table_of
from .resampling import of_groups

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Count = int | Literal["all"]

NARROW = ("stories", "code")  # families of the embedded model's text

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
        rows, positions, top_r, ffn_groups: of the base build: sequences, scored positions per
            sequence (or "all"), support size r, FFN groups per layer.
        seq_len: T, tokens per row; None = min(2048, the tokenizer's context).
        seed: of document order and positions.
        row_counts, position_counts, top_rs, group_counts: other values of a knob; () leaves it at
            its base. Values above the maximum are taken at the maximum.
        draws: disjoint sets of `rows` rows, the knob "seed".
        ratio, interaction_strengths, guards: of the plans.
    """

    rows: int = 12
    positions: Count = 64
    top_r: int = 256
    ffn_groups: int = 16
    seq_len: int | None = None
    seed: int = 0
    row_counts: tuple[int, ...] = (3, 6, 24)
    position_counts: tuple[Count, ...] = (16, "all")
    top_rs: tuple[int, ...] = (64, 128, 512)
    group_counts: tuple[int, ...] = (8, 32)
    draws: int = 4
    ratio: float = 0.2
    interaction_strengths: tuple[float, ...] = (0.0, 1.0)
    guards: Guards = field(default_factory=Guards)

    def __post_init__(self) -> None:
        lowest = min(self.rows, self.draws, *self.row_counts)
        if lowest < 1:
            raise InputError(f"rows, row_counts and draws go down to {lowest}. Give 1 or more.")
        if not self.interaction_strengths:
            raise InputError("interaction_strengths is empty. Give at least one lambda.")


@dataclass(frozen=True)
class _Build:
    """One build, and the value of the knob it stands for."""

    knob: str
    value: float | str
    calibration: CalibrationSet
    top_r: int
    ffn_groups: int


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
        |H - H_base| / |H_base| in Frobenius norm and `overlap`, the Jaccard overlap with the base
        plan (both None where the units differ); `kl` and the `difference` to the base plan;
        `perplexity` and `dense_perplexity`.
    """
    builds = _builds(model, tokenizer, texts, options)
    for build in builds:
        held_out.require_disjoint(build.calibration)
    asked = [[b.knob, b.value, b.calibration.fingerprint, b.top_r, b.ffn_groups] for b in builds]
    settings = marks(model, held_out=held_out.fingerprint, options=asdict(options), builds=asked)

    def compute(study: Study) -> Rows:
        found = []
        for build in builds:
            text = build.calibration
            recipe = Recipe(text, build.top_r, len(text), cache, progress)
            found.append(recipe.build(model, enumerate_units(model, build.ffn_groups)))
        variants = list(_variants(builds, found, options))
        strengths = options.interaction_strengths
        plans = [
            solve_greedy(curvature, options.ratio, strength, options.guards)
            for _, _, curvature in variants
            for strength in strengths
        ]
        table = study.measure(plans)
        # the first variant is the base, and the first plans are its own, one per lambda
        return [
            _described(knob, value, curvature, variants[0][2])
            | {"interaction_strength": strength}
            | compared(table, number * len(strengths) + step, step)
            for number, (knob, value, curvature) in enumerate(variants)
            for step, strength in enumerate(strengths)
        ]

    study = Study(model, held_out, cache=cache, progress=progress)
    return study.table("sensitivity", settings, compute)


def _builds(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, Sequence[str]],
    options: SensitivityOptions,
) -> list[_Build]:
    """All builds of the study; the first holds every row that a row count or seed asks for."""
    if not texts:
        raise InputError("texts is empty. Give at least one source: {'mixed': documents}.")
    architecture = describe(model)
    channels = max(architecture.width(i, "ffn") for i in range(len(architecture.layers)))
    vocabulary = architecture.vocabulary
    base, *others = texts
    top_r, groups = min(options.top_r, vocabulary), min(options.ffn_groups, channels)

    def read(source: str, rows: int, positions: Count) -> CalibrationSet:
        return CalibrationSet.from_texts(
            list(texts[source]),
            tokenizer,
            rows,
            options.seq_len,
            positions,
            options.seed,
            source,
        )

    pool = read(base, max(options.rows * options.draws, *options.row_counts, 1), options.positions)
    few, scored = pool.rows(0, options.rows), pool.positions_per_sequence
    builds = [_Build("base", base, pool, top_r, groups)]
    r_values = [min(r, vocabulary) for r in options.top_rs]
    builds += [_Build("top_r", r, few, r, groups) for r in _others(r_values, top_r)]
    most = pool.seq_len - 1
    counts = [most if count == "all" else min(count, most) for count in options.position_counts]
    for count in _others(counts, scored):
        builds.append(_Build("positions", count, read(base, options.rows, count), top_r, groups))
    counts = [min(count, channels) for count in options.group_counts]
    builds += [_Build("ffn_groups", n, few, top_r, n) for n in _others(counts, groups)]
    for source in others:
        text = read(source, options.rows, options.positions)
        builds.append(_Build("source", source, text, top_r, groups))
    return builds


def _others(values: Iterable[int], base: int) -> list[int]:
    """Return the values once each, without the base."""
    return [value for value in dict.fromkeys(values) if value != base]


def _variants(
    builds: list[_Build], found: list[Curvature], options: SensitivityOptions
) -> Iterator[tuple[str, float | str, Curvature]]:
    """(knob, value, H) of every row of the table, each knob's base first."""
    pool, first = found[0], builds[0]
    base = of_groups(pool, range(options.rows))
    bases: dict[str, float | str] = {
        "top_r": first.top_r,
        "positions": first.calibration.positions_per_sequence,
        "ffn_groups": first.ffn_groups,
        "source": first.value,
    }
    for knob, value in bases.items():
        yield knob, value, base
        for build, curvature in zip(builds, found, strict=True):
            if build.knob == knob:
                yield knob, build.value, curvature
    yield "rows", options.rows, base
    for rows in _others(options.row_counts, options.rows):
        yield "rows", rows, of_groups(pool, range(rows))
    yield "seed", 0, base
    for draw in range(1, options.draws):
        mine = range(draw * options.rows, (draw + 1) * options.rows)
        yield "seed", draw, of_groups(pool, mine)


def _described(knob: str, value: float | str, curvature: Curvature, base: Curvature) -> Row:
    same, size = curvature.units == base.units, np.linalg.norm(base.matrix)
    return {
        "knob": knob,
        "value": value,
        "is_base": curvature is base,
        "units": len(curvature.units),
        "sequences": curvature.provenance["sequences_done"],
        "matrix_distance": np.linalg.norm(curvature.matrix - base.matrix) / size if same else None,
    }


def sensitivity_summary(table: Table) -> DataFrame:
    """Summarize each knob that has several values: a row per knob and lambda.

    `band` is the largest perplexity over the smallest, less 1; `perplexity_std` and `kl_std` are
    over values (ddof 1); `largest_difference` is the KL furthest from the base plan's, with the
    error of that one (the largest of several is large by chance too); `lowest_overlap` is None
    where all units differ.
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
    perplexities, kls = column(rows, "perplexity"), column(rows, "kl")
    others = [row for row in rows if not row["is_base"]]
    furthest = max(others, key=lambda row: abs(row["difference"]))
    overlaps = [row["overlap"] for row in others if row["overlap"] is not None]
    return {
        "lowest_perplexity": float(perplexities.min()),
        "highest_perplexity": float(perplexities.max()),
        "band": float(perplexities.max() / perplexities.min() - 1),
        "perplexity_mean": float(perplexities.mean()),
        "perplexity_std": float(perplexities.std(ddof=1)),
        "kl_mean": float(kls.mean()),
        "kl_std": float(kls.std(ddof=1)),
        "largest_difference": furthest["difference"],
        "largest_difference_error": furthest["difference_error"],
        "lowest_overlap": min(overlaps, default=None),
    }


def plot_sensitivity(table: Table) -> Figure:
    """Plot the KL of each build's plan less that of the base plan, paired over sequences."""
    figure, hover = empty(), "%{x}: %{y:.4f} nats<br>%{text}<extra>%{fullData.name}</extra>"
    for number, strength in enumerate(
        dict.fromkeys(r["interaction_strength"] for r in pick(table))
    ):
        rows, name = pick(table, interaction_strength=strength), f"λ = {strength:g}"
        x = [[row["knob"].replace("_", " ") for row in rows], [str(row["value"]) for row in rows]]
        words = [f"perplexity {row['perplexity']:.3f}" for row in rows]
        add(figure, rows, x, "difference", name, number, text=words, hover=hover)
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

    For the embedded model: its calibration text, whole ("mixed") and by family ("stories", "code").
    For any other: `text_file` (`.jsonl` or plain text), or at most `documents` of the validation
    split of C4, which `default_calibration` does not read. Documents of the held-out rows are
    omitted.
    """
    if text_file is None and is_demo(model_id):
        path = demo_folder().parent / "texts" / "calibration.jsonl"
        return read_families(path, ("mixed", *NARROW))
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


def read_families(path: os.PathLike[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Read the documents of families of the embedded model's text; "mixed" is all of them."""
    records = list(read_objects(path))
    return {
        name: [each["text"] for each in records if name in ("mixed", each["family"])]
        for name in names
    }
