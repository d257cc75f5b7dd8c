"""The model card of a pruned model: what was removed and measured, and how to load and repeat it.

A card states what the manifest records and what `CardFacts` gives. It says of everything else that
it was not measured.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.errors import InputError, MismatchError
from ..base.tables import as_markdown
from ..models.loading import DEMO
from .manifest import KNOWN

if TYPE_CHECKING:
    from ..measuring.perplexity import Perplexity


@dataclass(frozen=True)
class CardFacts:
    """Facts about a pruned model beyond its plan; None where one is not known.

    Attributes:
        base_model: the dense model's hub id; None takes the name the model was loaded under.
        license: the hub's license id of the dense model, which usually binds the pruned one too.
        kl: measured KL(dense || pruned) in nats per token, on text that H was not built on
            (`pruning_risk`, or `measure_plans(...).mean`).
        kl_error: the standard error of `kl`, in nats per token.
        kl_text: a description of that text: source, sequences, length, scored positions.
        dense_perplexity, pruned_perplexity: results of `perplexity` on one text with one protocol.
    """

    base_model: str | None = None
    license: str | None = None
    kl: float | None = None
    kl_error: float | None = None
    kl_text: str | None = None
    dense_perplexity: Perplexity | None = None
    pruned_perplexity: Perplexity | None = None

    def __post_init__(self) -> None:
        if self.kl is None and (self.kl_error is not None or self.kl_text is not None):
            raise InputError("kl_error or kl_text is given without kl. Give the measured kl too.")
        for name, value in (("kl", self.kl), ("kl_error", self.kl_error)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} is {value}. Give nats per token, zero or more.")
        dense, pruned = self.dense_perplexity, self.pruned_perplexity
        if dense is not None and pruned is not None and dense.protocol != pruned.protocol:
            raise MismatchError(
                f"the perplexities have different protocols. Dense: {dense.protocol} Pruned: "
                f"{pruned.protocol} Measure both models on one text with one protocol."
            )


_CARD = """\
---
{front}
---

# {title}, pruned

{summary}

Pruning changes more than perplexity and KL show. **Safety behavior (refusals, bias, toxicity) \
must be evaluated again on this model**: nothing measured on the base model can be assumed to hold.

## Loading

{loading}

With cocurve_lab, which runs no code from the folder:

```python
import cocurve_lab as cl

model = cl.load_pruned(folder)
```

{tokenizer}

## What was measured

{measured}

## What was removed

{layers}

## How to repeat {what}

{reproduction}
"""
_STOCK = """

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(folder{trust})
```"""
_LOADING = {
    "stock": "All layers have the same widths, so a stock class of transformers loads the model, "
    "and no other code is run. (A Llama whose hidden size is not a multiple of its number of heads "
    "is saved as a Mistral, which computes the same.)" + _STOCK.format(trust=""),
    "own code": "Layers differ in width. transformers 5.17 or newer loads them with the short "
    "modeling file beside the weights, which does not need cocurve_lab. Read that file before you "
    "trust it:"
    + _STOCK.format(trust=", trust_remote_code=True")
    + "\n\ntransformers may log that a global value is read for a per-layer attribute, and, in "
    "`pipeline(..., trust_remote_code=True)`, that the class is not in its list. Both are "
    "harmless.",
    "cocurve_lab": "transformers alone cannot load a pruned model of this family: **this folder "
    "needs cocurve_lab**.",
}


def model_card(manifest: Mapping[str, Any], facts: CardFacts, *, has_tokenizer: bool) -> str:
    """Write the card as Markdown, with the front matter that the hub reads."""
    from huggingface_hub import ModelCardData

    # a name may contain line ends, which would break the heading
    base = " ".join((facts.base_model or manifest["base_model"] or "").split()) or None
    own = manifest["loads_with"] == "cocurve_lab"
    data = ModelCardData(
        library_name="cocurve-lab" if own else "transformers",
        pipeline_tag="text-generation",
        tags=["pruned", "structured-pruning", "cocurve"],
        base_model=base if _is_hub_id(base) else None,  # the hub rejects a card with another name
        license=facts.license,
    )
    return _CARD.format(
        front=data.to_yaml(),
        title=base or "A language model",
        summary=_summary(manifest, base),
        loading=_LOADING[manifest["loads_with"]],
        tokenizer="The tokenizer is in the folder: `AutoTokenizer.from_pretrained(folder)`."
        if has_tokenizer
        else "Use the tokenizer of the base model; none was saved here.",
        measured=_measured(manifest, facts),
        layers=_layers(manifest),
        what="it" if _is_known(manifest) else "the pruning",
        reproduction=_reproduction(manifest, base),
    )


def _is_hub_id(name: str | None) -> bool:
    """Whether a name has the form owner/name."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    return "/" in (name or "")


def _is_known(manifest: Mapping[str, Any]) -> bool:
    """Whether all that happened to the weights is recorded."""
    return manifest["weights_since_pruning"] in (*KNOWN, "converted")


def _last_change(manifest: Mapping[str, Any]) -> str:
    if manifest["recovery"] is not None:
        return "training"
    return "pruning" if manifest["repair"] is None else "refitting"


def _as_pruned(manifest: Mapping[str, Any]) -> bool:
    """Whether the weights are, as far as recorded, those that pruning left."""
    return _is_known(manifest) and _last_change(manifest) == "pruning"


def _since(manifest: Mapping[str, Any]) -> str:
    """A clause on the weights since pruning."""
    repair, recovery, earlier = manifest["repair"], manifest["recovery"], _last_change(manifest)
    done = "the output projections were refitted by least squares; " if repair is not None else ""
    if recovery is not None:
        done += "low-rank updates were trained on the dense model's answers, and added; "
    return (
        done
        + {
            "unchanged": "nothing was trained after pruning.",
            "refitted": "nothing else was trained.",
            "trained": "nothing else was trained.",
            "converted": f"the weights were converted to {manifest['dtype']} after {earlier}. "
            f"Other changes between {earlier} and that conversion would not be recorded here.",
            "changed": f"**the weights were changed after {earlier}** (by training, refitting or "
            "merging); the kind of change is not recorded here.",
        }[manifest["weights_since_pruning"]]
    )


def _summary(manifest: Mapping[str, Any], base: str | None) -> str:
    """One paragraph on the pruning, and its figures as a list."""
    text = (
        f"Whole attention heads and FFN channel groups of {base or 'a dense model'} were removed; "
        f"{_since(manifest)}"
    )
    rounds = manifest["earlier_rounds"]
    if rounds:
        text += (
            f" The model had been pruned before (rounds: {len(rounds)}). The rest of this card is "
            "about the last round, and its ratios are shares of the parameters that could be "
            "removed then."
        )
    if any(own["weights_since_pruning"] not in KNOWN for own in rounds):
        text += " Between rounds the weights were changed, or may have been."
    realized = f"realized: {manifest['realized_ratio']:.2%} of the removable parameters"
    asked = "units chosen by hand or by another method"
    if manifest["target"]:
        asked = f"requested: {manifest['target']}"
    elif manifest["interaction_strength"] is not None:
        asked = f"requested: {manifest['requested_ratio']:.2%} of the removable parameters"
    gains = len(manifest["gains"])
    folded = f"{gains} kept FFN groups have one, folded into W_down" if gains else "none"
    lines = [
        f"{asked}; {realized}",
        f"parameters removed: {manifest['removed_parameters']:,} "
        f"({manifest['params_removed_fraction']:.2%} of all, embeddings included); left: "
        f"{manifest['parameters']:,} in {manifest['dtype']}",
        f"units removed: {len(manifest['pruned_units'])}; gains: {folded}",
    ]
    repair, recovery = manifest["repair"], manifest["recovery"]
    if repair is not None:
        statistics = "of the model refitted so far" if repair["sequential"] else "of the dense one"
        lines.append(
            f"refitted: {' and '.join(repair['kinds'])} outputs, ridge {repair['ridge']:g}, on "
            f"{_source(repair)}, with statistics {statistics}"
        )
    if recovery is not None:
        lines.append(
            f"trained: updates of rank {recovery['rank']} for all linear layers, by KL from the "
            f"dense model, {recovery['epoch']} times on {_source(recovery)}"
        )
    return "\n".join([text, "", *(f"- {line}" for line in lines)])


def _source(record: Mapping[str, Any]) -> str:
    return f"{record['positions']:,} tokens ({' '.join(record['calibration'].split())})"


def _measured(manifest: Mapping[str, Any], facts: CardFacts) -> str:
    """A table of predicted and measured quality, with the protocols."""
    rows = []
    if _as_pruned(manifest):  # H predicts the plan's weights, not those of later training
        predicted = _nats(manifest["predicted_risk"], "not predicted")
        rows.append(("KL predicted from the curvature, 1/2 s^T H s", predicted))
    measured = _nats(facts.kl, "not measured", facts.kl_error)
    rows.append(("KL measured on held-out text", measured))
    for name, found in (("dense", facts.dense_perplexity), ("pruned", facts.pruned_perplexity)):
        value = "not measured" if found is None else f"{found.value:.4g} ({found.nll:.4f} nats)"
        rows.append((f"perplexity, {name}", value))
    notes = [] if facts.kl_text is None else [f"KL: {facts.kl_text}"]
    protocol = facts.pruned_perplexity or facts.dense_perplexity
    notes += [] if protocol is None else [f"Perplexity: {protocol.protocol}"]
    if facts.kl is None or facts.pruned_perplexity is None or facts.dense_perplexity is None:
        risk = "`cl.pruning_risk(dense, selection, held_out)` and " if _as_pruned(manifest) else ""
        notes.append(f"To measure the rest, use {risk}`cl.perplexity(model, tokenizer, text)`.")
    return "\n\n".join([as_markdown(("", "value"), rows), *notes])


def _nats(value: float | None, missing: str, error: float | None = None) -> str:
    spread = "" if error is None else f" ± {error:.2g}"
    return missing if value is None else f"{value:.4g}{spread} nats per token"


def _layers(manifest: Mapping[str, Any]) -> str:
    """A table of each layer's widths and removed units."""
    # "L12.ffn[3]" -> "L12.ffn"
    gone = Counter(name.partition("[")[0] for name in manifest["pruned_units"])
    head = (
        *("layer", "key/value heads left", "attention columns left", "FFN channels left"),
        *("attention units removed", "FFN units removed"),
    )
    names = ("key_value_heads", "attention_columns", "ffn_columns")
    rows = (
        (n, *(layer[name] for name in names), gone[f"L{n}.attention"], gone[f"L{n}.ffn"])
        for n, layer in enumerate(manifest["layers"])
    )
    return as_markdown(head, rows)


def _reproduction(manifest: Mapping[str, Any], base: str | None) -> str:
    """Code that repeats the pruning from the manifest, and where the plan came from."""
    # whatever a manifest holds goes into code as a literal, because it may be anybody's
    solved = "The plan was not solved from H: its units were given, or chosen by another method."
    if manifest["interaction_strength"] is not None:
        guards, target = manifest["guards"], manifest["target"]
        given = "" if not guards else f", cl.Guards({_arguments(guards)})"
        given += ", uniform=True" if manifest["uniform"] else ""
        asked = "target" if target else repr(manifest["requested_ratio"])
        strength = repr(manifest["interaction_strength"])
        solved = f"The plan came from `cl.solve_greedy(curvature, {asked}, {strength}{given})`"
        solved += f" with the target {target}" if target else ""
        solved += ". Units forced in or out, and refinement, are not recorded here."
    mark = manifest["curvature_fingerprint"]
    curvature = "No curvature is recorded." if mark is None else f"Curvature: `{mark}`."
    after = "" if _is_known(manifest) else " This does not repeat what came after the pruning."
    load = f"model, tokenizer = cl.load_model({json.dumps(base or 'the dense model')})"
    if base not in (None, DEMO) and not _is_hub_id(base):
        load += "  # or the path of its folder"
    if manifest["earlier_rounds"]:
        load = 'model = cl.load_pruned("the folder of the model before this round")'
        after += " Earlier rounds are listed in the manifest under `earlier_rounds`."
    return f"""The manifest lists the removed units, so H need not be built again.{after}

```python
import json
from pathlib import Path
import cocurve_lab as cl

plan = json.loads(Path("cocurve_manifest.json").read_text())
{load}
units = cl.enumerate_units(model, ffn_groups={manifest["ffn_groups"]!r})
selection = cl.Selection.from_pruned(units, plan["pruned_units"])
selection = selection.with_gains({{units.index(u): g for u, g in plan["gains"].items()}})
assert selection.fingerprint == {manifest["selection_fingerprint"]!r}
{_last_step(manifest)}
```

{solved} {curvature}"""


def _last_step(manifest: Mapping[str, Any]) -> str:
    """The lines that prune, refit if the model was refitted, and train if it was trained."""
    repair, recovery = manifest["repair"], manifest["recovery"]
    lines = "pruned = cl.prune(model, selection)"
    if repair is not None:
        own, sequential = ["ridge", "kinds"], repair["sequential"]
        lines = f"""{_options("Repair", repair, [*own, "target"] if sequential else own)}
pruned = cl.repair(model, selection, calibration, {sequential=}, options=options)"""
    if recovery is not None:
        names = ["rank", "learning_rate", "epochs", "rows_per_step", "seed"]
        lines += f"""
{_options("Recover", recovery, names)}
# with the same held-out rows, if there were any: the weights are those of epoch {recovery["epoch"]}
pruned = cl.recover(model, pruned, calibration, options=options)"""
    return lines


def _options(kind: str, record: Mapping[str, Any], names: list[str]) -> str:
    """The lines that name the text and the options of a refit or a training."""
    return f"""# the text named above: {record["sequences"]} rows
calibration = cl.CalibrationSet(...)
assert calibration.fingerprint == {record["calibration_fingerprint"]!r}
options = cl.{kind}Options({_arguments({name: record[name] for name in names})})"""


def _arguments(values: Mapping[str, Any]) -> str:
    """Values as the keyword arguments of a call; a key that is no name is omitted."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if name.isidentifier())
