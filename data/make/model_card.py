"""Write the model card of the demo model from the numbers measured beside it.

    python -m data.make.model_card --folder data/demo

Reads training.json (written by train_demo.py) and, where it is present, curvature.json (written by
measure_curvature.py). The columns of the KL table are the keys of its rows, in their order; units
in nats per token.
"""

import argparse
import json
from pathlib import Path

from . import world

FAMILIES = {
    "stories": "last word of a story: a name or object met before, or a fact about a person",
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
    draws, bridges = measured["draws"], measured["bridge_units"]
    return f"""
## Curvature

H has {measured["units"]} units. It was built {draws} times with `cocurve_lab`, on {draws} \
disjoint draws of {measured["rows"]} rows of calibration text with {measured["positions"]} scored \
positions each, as many as the notebooks use. ± is the standard error over the draws. Mean \
absolute correlation of unit effects: \
{", ".join(f"{name} {value}" for name, value in blocks.items())}. Saliency and connectivity of \
units correlate at {measured["correlation_of_saliency_and_connectivity"]}; {min(bridges)} to \
{max(bridges)} units are bridge units (low saliency, high connectivity). At \
{measured["sure_positions"]} of the calibration positions the model gives its first choice more \
than 99 %; they carry {measured["sure_risk"]} of the KL of single units.

Each H was solved for plans without guards, and the plans were measured on \
{measured["held_out_rows"]} rows of held-out text: KL divergence from the dense model in nats per \
token, by removed share of the prunable parameters. "error over rows" is the standard error of one \
lambda 1 plan over held-out rows; "measured / predicted" is of the lambda 1 plan.

{table(header, [[row[key] for key in header] for row in measured["kl"]])}
"""


def card(folder: Path, training: dict, curvature: dict | None) -> str:
    """The text of README.md."""
    text, scores = training["held_out"], training["capability"]
    families = [
        [family, what, training["prompts"][family], f"{scores[family]:.3f}"]
        for family, what in FAMILIES.items()
    ]
    losses = [
        [family]
        + [f"{found[name]:.3f}" for name in ("loss", "drawn", "entropy")]
        + [f"{found['sure']:.1%}"]
        for family, found in text.items()
    ]
    shape = json.loads((folder / "config.json").read_text())
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
    device, threads = training["device"], training["threads"]
    where = f"{threads} CPU threads" if device == "cpu" else f"one {device} and {threads} CPU cores"
    return f"""---
license: mit
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The demo model of cocurve-lab

A Llama-architecture language model with {training["parameters"]:,} parameters: \
{shape["num_hidden_layers"]} layers, width {shape["hidden_size"]}, {shape["num_attention_heads"]} \
query heads on {shape["num_key_value_heads"]} key/value heads, feed-forward width \
{shape["intermediate_size"]}, a byte-level vocabulary of {shape["vocab_size"]:,} tokens, context \
{shape["max_position_embeddings"]}, tied embeddings, stored in float16. It exists so that every \
function, notebook and test of the lab has a model that can do something, and so that one can \
watch which ability goes first when parts are removed.

## Corpus

All text comes from `data/make/world.py`, a seeded generator. There are five families, in \
documents: {mixture}. Stories are most of the text. Each has one of 26 topics; a small English \
grammar (`data/make/prose.py`) draws its sentences from the words of that topic, so that the next \
word is mostly a real choice. The other families are about a closed world, in which most of a \
sentence is settled. Splits are disjoint by construction: a stable hash of the combination behind \
a text (two people, topic and object of a story; person or thing, attribute and sentence form of \
a fact; unordered pair of numbers; word) puts it into exactly one split. Facts are shared between \
splits, forms of asking for one are not.

{table(["split", "documents", "tokens"], splits)}

## Training

    {training["command"]}

{training["steps"]:,} steps of 32 rows of 256 tokens ({training["tokens_seen"] / 1e6:.0f} million \
tokens), AdamW, bf16 autocast, linear decay over the last 40 % of the steps; about {minutes:.0f} \
minutes on {where}. Versions: {versions}.

{table(["step", "training loss, nats per token"], loss_rows(training["loss_curve"]))}

## Capability

Exact match of greedy replies to test prompts, with float32 arithmetic on the stored weights \
({agreement}):

{table(["family", "what is asked", "prompts", "exact match"], families)}

The prompts are in `data/prompts/`, one file per family, the texts in `data/texts/`. A reply is \
right if its part before the first full stop or line end is the answer.

## How sure it is

On whole held-out documents, in nats per token. "drawn" is -log of the probability of the \
generator's own choices. It bounds the entropy of the text from above, because some texts can be \
drawn in several ways; so a loss below it is possible. "entropy" is the mean entropy of the \
model's next token, "sure" the share of positions at which its first choice has more than 99 %.

{table(["family", "loss", "drawn", "entropy", "sure"], losses)}
{curvature_section(curvature) if curvature else ""}
## Limits

The model knows its own world and nothing else. It does not answer free questions, does not \
follow instructions, and continues other text with pieces of its own. Its stories are grammatical \
English without a plot. Numbers above 99, words of more than three letters in code, and functions \
other than those in `data/make/lexicon.py` are outside what it was shown. People and facts are \
invented. The shares of the families and the wording of the stories were settled over three \
training runs, by entropy, loss, the share of sure positions, and exact match on 50 test prompts \
of each family. So the test set has been looked at, though not trained on. No plan was measured \
before the last run. The results of pruning it say how a method works, not how well the method \
does on a large model.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("data/demo"))
    folder = parser.parse_args().folder
    training = json.loads((folder / "training.json").read_text())
    measured = folder / "curvature.json"
    curvature = json.loads(measured.read_text()) if measured.exists() else None
    (folder / "README.md").write_text(card(folder, training, curvature))


if __name__ == "__main__":
    main()
