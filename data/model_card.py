"""Write the model card of the demo model from the numbers measured beside it.

    python data/model_card.py --folder data/demo

Reads training.json (written by train_demo.py) and, where it is present, curvature.json:

    {"rows": 160, "positions": 64,
     "correlation_of_saliency_and_connectivity": 0.8, "bridge_units": 6,
     "mean_correlations": {"attention": 0.1, "cross": 0.05, "ffn": 0.04},
     "kl": [{"ratio": 0.2, "lambda 0": 0.03, "lambda 1": 0.02, "random": 0.35}, ...]}

The columns of the KL table are the keys of its rows, in their order; units in nats per token.
"""

import argparse
import json
from pathlib import Path

import world

FAMILIES = {
    "stories": "last word of a story: a name or object met before, or a fact about the person",
    "commonsense": "what a thing is like, what it is for, where it is, what kind it is",
    "knowledge": "job, city, pet, food, colour and friend of forty people",
    "arithmetic": "sums and differences, operands and results from 10 to 99",
    "code": "what a one-line Python function of numbers or short strings returns",
}


def table(header: list[str], rows: list[list]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def loss_rows(curve: list[list[float]], count: int = 12) -> list[list]:
    """About `count` points of the training loss, evenly spaced, first and last included."""
    places = sorted({round(i * (len(curve) - 1) / (count - 1)) for i in range(count)})
    return [[curve[i][0], f"{curve[i][1]:.3f}"] for i in places]


def curvature_section(measured: dict) -> str:
    """The part of the card about co-pruning curvature; `measured` is curvature.json."""
    blocks = measured["mean_correlations"]
    header = list(measured["kl"][0])
    return f"""
## Curvature

Measured with `cocurve_lab` on {measured["rows"]} rows of the calibration text, \
{measured["positions"]} scored positions each. Mean absolute correlation of unit effects: \
{", ".join(f"{name} {value:.3f}" for name, value in blocks.items())}. Saliency and connectivity \
of units correlate at {measured["correlation_of_saliency_and_connectivity"]:.2f}; \
{measured["bridge_units"]} units are bridge units (low saliency, high connectivity).

KL divergence from the dense model on held-out text, nats per token, by removed share of the \
prunable parameters:

{table(header, [[row[key] for key in header] for row in measured["kl"]])}
"""


def card(training: dict, curvature: dict | None) -> str:
    """The text of README.md."""
    loss, scores = training["validation_loss"], training["capability"]
    families = [
        [family, what, training["prompts"][family], f"{scores[family]:.3f}", f"{loss[family]:.3f}"]
        for family, what in FAMILIES.items()
    ]
    splits = [
        [name, f"{size['documents']:,}", f"{size['tokens']:,}"]
        for name, size in training["splits"].items()
    ]
    half = training["capability_float16_arithmetic"]
    agreement = (
        "the scores in float16 arithmetic are the same"
        if half == scores
        else "in float16 arithmetic: " + ", ".join(f"{k} {v:.3f}" for k, v in half.items())
    )
    mixture = ", ".join(f"{family} {share} %" for family, share in world.MIXTURE.items())
    versions = ", ".join(f"{name} {version}" for name, version in training["versions"].items())
    minutes = training["seconds"] / 60
    where = "a GPU" if training["device"] == "cuda" else f"{training['threads']} CPU threads"
    return f"""---
license: mit
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The demo model of cocurve-lab

A Llama-architecture language model with {training["parameters"]:,} parameters: 6 layers, width \
256, 8 query heads on 4 key/value heads, feed-forward width 384, a byte-level vocabulary of 1,280 \
tokens, context 256, tied embeddings, stored in float16. It exists so that every function, \
notebook and test of the lab has a model that can do something, and so that one can watch which \
ability goes first when parts are removed.

## Corpus

All text comes from `data/world.py`, a seeded generator of a small closed world. There are five \
families, in documents: {mixture}. Splits are disjoint by construction: a stable hash of the \
combination behind a text (two people, place and object of a story; person or thing, attribute \
and sentence form of a fact; unordered pair of numbers; word) puts it into exactly one split. \
Facts are shared between splits, forms of asking for one are not.

{table(["split", "documents", "tokens"], splits)}

## Training

    {training["command"]}

{training["steps"]:,} steps of 8 rows of 256 tokens ({training["tokens_seen"] / 1e6:.0f} million \
tokens), AdamW, bf16 autocast, linear decay over the last 40 % of the steps; about {minutes:.0f} \
minutes on {where}. Versions: {versions}.

{table(["step", "training loss, nats per token"], loss_rows(training["loss_curve"]))}

## Capability

Exact match of greedy replies to test prompts, with float32 arithmetic on the stored weights \
({agreement}), and loss on whole held-out documents in nats per token (all families together: \
{loss["all"]:.3f}). Part of the loss cannot be learned: which person, number or word comes next \
is drawn at random.

{table(["family", "what is asked", "prompts", "exact match", "held-out loss"], families)}

The prompts are in `data/prompts/`, one file per family, the texts in `data/texts/`. A reply is \
right if its part before the first full stop or line end is the answer.
{curvature_section(curvature) if curvature else ""}
## Limits

The model knows its closed world and nothing else. It does not answer free questions, does not \
follow instructions, and continues other text with pieces of its own. Numbers above 99, words of \
more than three letters in code, and functions other than those in `data/lexicon.py` are outside \
what it was shown. People and facts are invented. Asked \
which of two things is of some kind, it sometimes names a third thing that is. The sentence forms \
and ranges were settled over several training runs while looking at test prompts; the splits were \
then drawn anew, and one run on the new ones was stopped early because 50 test prompts showed \
arithmetic at 0.44, before the shares of the families were changed. So the test set has been \
looked at, though not trained on. The \
results of pruning it say how a method works, not how well the method does on a large model.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("data/demo"))
    folder = parser.parse_args().folder
    training = json.loads((folder / "training.json").read_text())
    measured = folder / "curvature.json"
    curvature = json.loads(measured.read_text()) if measured.exists() else None
    (folder / "README.md").write_text(card(training, curvature))


if __name__ == "__main__":
    main()
