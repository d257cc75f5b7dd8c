"""The model card of a pruned model: what was removed, what was measured, how to load and repeat it.

A card states what the manifest records and what `CardFacts` gives, and says of everything else that
it was not measured.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MismatchError
from ..models.loading import DEMO

if TYPE_CHECKING:
    from ..measuring.perplexity import Perplexity


@dataclass(frozen=True)
class CardFacts:
    """What is known of a pruned model beyond its plan; None where it is not.

    Attributes:
        base_model: the dense model's hub id; None takes what the model was loaded from.
        license: the hub's licence id of the dense model, which usually binds the pruned one too.
        kl: measured KL(dense || pruned), nats per token, on text that H was not built on
            (`pruning_risk`, or `measure_plans(...).mean`).
        kl_error: its standard error, nats per token.
        kl_text: that text in words: source, sequences, length, scored positions.
        dense_perplexity, pruned_perplexity: of one text with one protocol (`perplexity`).

    Raises:
        InputError: a KL that is negative or not finite, or an error or a text without a KL.
        MismatchError: perplexities that cannot be compared.
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
                raise InputError(f"{name} is {value}; give nats per token, zero or more.")
        dense, pruned = self.dense_perplexity, self.pruned_perplexity
        if dense is not None and pruned is not None and dense.protocol != pruned.protocol:
            raise MismatchError(
                f"{dense.protocol} Against: {pruned.protocol} Measure both models on one text "
                "with one protocol."
            )


def model_card(manifest: Mapping[str, Any], facts: CardFacts, *, has_tokenizer: bool) -> str:
    """The card as Markdown with the front matter the hub reads.

    Args:
        manifest: of the pruned model, as written beside it.
        facts: what was measured.
        has_tokenizer: whether the folder holds one.
    """
    base = " ".join((facts.base_model or manifest.get("base_model") or "").split()) or None
    sections = [
        _front_matter(manifest, facts, base),
        f"# {base or 'A language model'}, pruned",
        _summary(manifest, base),
        "Pruning changes more than perplexity and KL show. **Safety behaviour (refusals, bias, "
        "toxicity) must be evaluated again on this model**: nothing measured on the base model "
        "can be assumed to hold.",
        "## Loading\n\n" + _loading(manifest, has_tokenizer),
        "## What was measured\n\n" + _measured(manifest, facts),
        "## What was removed\n\n" + _layers(manifest),
        f"## How to repeat {'it' if _as_pruned(manifest) else 'the pruning'}\n\n"
        + _reproduction(manifest, base),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(manifest: Mapping[str, Any], facts: CardFacts, base: str | None) -> str:
    own = manifest["loads_with"] == "cocurve_lab"
    fields: dict[str, Any] = {
        "library_name": "cocurve-lab" if own else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pruned", "structured-pruning", "cocurve"],
    }
    if base is not None and _is_hub_id(base):  # the hub takes nothing else
        fields["base_model"] = base
    if facts.license is not None:
        fields["license"] = facts.license
    # JSON values are YAML values, whatever a name contains
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(["---", *lines, "---"])


def _is_hub_id(name: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _state(manifest: Mapping[str, Any]) -> str:
    return str(manifest.get("weights_since_pruning", "unknown"))


def _as_pruned(manifest: Mapping[str, Any]) -> bool:
    """Whether nothing says that the weights are other than those the plan left."""
    return _state(manifest) in ("unchanged", "converted")


def _since(manifest: Mapping[str, Any]) -> str:
    return {
        "unchanged": "nothing was trained after pruning.",
        "converted": f"the weights were converted to {manifest['dtype']} after pruning. Other "
        "changes between pruning and that conversion would not be recorded here.",
        "changed": "**the weights were changed after pruning** (training, refitting, merging); "
        "how is not recorded here.",
        "unknown": "whether the weights were changed after pruning is not recorded.",
    }[_state(manifest)]


def _earlier(manifest: Mapping[str, Any]) -> str:
    """A sentence on the rounds of pruning before the last."""
    rounds = manifest.get("earlier_rounds") or ()
    if not rounds:
        return ""
    kept = all(own.get("weights_since_pruning") == "unchanged" for own in rounds)
    between = "" if kept else " Between rounds the weights were changed, or may have been."
    return (
        f" That model had been pruned before (rounds: {len(rounds)}): what follows is of the last "
        f"round, and its ratios are shares of what that round found.{between}"
    )


def _summary(manifest: Mapping[str, Any], base: str | None) -> str:
    realised = f"{manifest['realized_ratio']:.2%}"
    lines = [
        f"Whole attention heads and FFN channel groups of {base or 'a dense model'} were removed; "
        f"{_since(manifest)}{_earlier(manifest)}\n",
    ]
    if manifest.get("target"):
        lines.append(f"- asked: {manifest['target']}; of removable parameters went {realised}")
    elif manifest.get("interaction_strength") is not None:
        asked = f"{manifest['requested_ratio']:.2%}"
        lines.append(f"- ratio asked: {asked} of removable parameters; realised: {realised}")
    else:
        lines.append(
            "- units chosen by hand or by another method; of removable parameters, realised: "
            + realised
        )
    fraction, cost = manifest.get("params_removed_fraction"), manifest.get("removed_parameters")
    share = "" if fraction is None else f" ({fraction:.2%} of all, embeddings included)"
    lines.append(
        f"- parameters removed: {'not recorded' if cost is None else f'{cost:,}'}{share}; "
        f"left: {manifest['parameters']:,} in {manifest['dtype']}"
    )
    gains = len(manifest["gains"])
    folded = f"{gains} kept FFN groups carry one, folded into W_down" if gains else "none"
    return "\n".join([*lines, f"- units removed: {len(manifest['pruned_units'])}; gains: {folded}"])


_STOCK = """```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(folder{trust})
```"""
_OURS = """```python
import cocurve_lab as cl

model = cl.load_pruned(folder)
```"""


def _loading(manifest: Mapping[str, Any], has_tokenizer: bool) -> str:
    words = {
        "stock": "Every layer has the same widths, so a stock class reads it; no code of ours is "
        "run. (A Llama whose hidden size is no multiple of its heads is written as a Mistral, "
        "which computes the same.)\n\n" + _STOCK.format(trust=""),
        "own code": "Layers differ in width. transformers 5.17 or newer reads that with the short "
        "modelling file beside the weights (read it before you trust it), which needs nothing of "
        "cocurve_lab:\n\n" + _STOCK.format(trust=", trust_remote_code=True") + "\n\n"
        "transformers may log that a global value is read for a per-layer attribute; here that is "
        "the dense count, and harmless.\n\n"
        '`pipeline("text-generation", model=folder, trust_remote_code=True)` works too, with a '
        "tokenizer in the folder; transformers logs that the class is not in its list, harmless.",
        "cocurve_lab": "transformers alone cannot read this family with widths of its own per "
        "layer: **this folder needs cocurve_lab**.",
    }[manifest["loads_with"]]
    own = "With cocurve_lab, which runs no code of the folder:\n\n" + _OURS
    tokenizer = (
        "The tokenizer is in the folder: `AutoTokenizer.from_pretrained(folder)`."
        if has_tokenizer
        else "The tokenizer is that of the base model; none was saved here."
    )
    return "\n\n".join([words, own, tokenizer])


def _measured(manifest: Mapping[str, Any], facts: CardFacts) -> str:
    lines = ["| | value |", "|---|---|"]
    if _as_pruned(manifest):  # of other weights it predicts nothing
        predicted = _nats(manifest.get("predicted_risk"), "no curvature")
        lines.append(f"| KL predicted from the curvature, 1/2 s^T H s | {predicted} |")
    measured = _nats(facts.kl, "not measured", facts.kl_error)
    lines.append(f"| KL measured on held-out text | {measured} |")
    for name, found in (("dense", facts.dense_perplexity), ("pruned", facts.pruned_perplexity)):
        value = "not measured" if found is None else f"{found.value:.4g} ({found.nll:.4f} nats)"
        lines.append(f"| perplexity, {name} | {value} |")
    notes = [] if facts.kl_text is None else [f"KL: {facts.kl_text}"]
    protocol = facts.pruned_perplexity or facts.dense_perplexity
    notes += [] if protocol is None else [f"Perplexity: {protocol.protocol}"]
    if facts.kl is None or facts.pruned_perplexity is None or facts.dense_perplexity is None:
        risk = "`cl.pruning_risk(dense, selection, held_out)` and " if _as_pruned(manifest) else ""
        notes.append(
            f"What was not measured can be: {risk}`cl.perplexity(model, tokenizer, text)`."
        )
    return "\n\n".join(["\n".join(lines), *notes])


def _nats(value: float | None, missing: str, error: float | None = None) -> str:
    spread = "" if error is None else f" ± {error:.2g}"
    return missing if value is None else f"{value:.4g}{spread} nats per token"


def _layers(manifest: Mapping[str, Any]) -> str:
    gone = Counter(name.partition("[")[0] for name in manifest["pruned_units"])
    lines = [
        "| layer | key/value heads left | attention columns left | FFN channels left "
        "| attention units removed | FFN units removed |",
        "|---|---|---|---|---|---|",
    ]
    for index, widths in enumerate(manifest["layers"]):
        cells = [
            index,
            widths["key_value_heads"],
            widths["attention_columns"],
            widths["ffn_columns"],
            gone[f"L{index}.attention"],
            gone[f"L{index}.ffn"],
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _reproduction(manifest: Mapping[str, Any], base: str | None) -> str:
    strength, groups = manifest.get("interaction_strength"), manifest.get("ffn_groups") or 16
    solved = "The plan was not solved with an interaction strength: it was given or came elsewhere."
    if strength is not None:
        guards, target = manifest.get("guards"), manifest.get("target")
        given = "" if not guards else f", cl.Guards({_arguments(guards)})"
        given += ", uniform=True" if manifest.get("uniform") else ""
        asked = "target" if target else manifest["requested_ratio"]
        solved = f"The plan came from `cl.solve_greedy(curvature, {asked}, {strength}{given})`"
        solved += f" with the target {target}" if target else ""
        solved += "; units forced in or out, and refinement, are not recorded here."
    mark = manifest.get("curvature_fingerprint")
    curvature = "No curvature is recorded." if mark is None else f"Curvature: `{mark}`."
    after = "" if _as_pruned(manifest) else " This does not repeat what came after the pruning."
    load = f"model, tokenizer = cl.load_model({json.dumps(base or 'the dense model')})"
    if base not in (None, DEMO) and not _is_hub_id(base):
        load += "  # or the path of its folder"
    if manifest.get("earlier_rounds"):
        load = 'model = cl.load_pruned("the folder of the model before this round")'
        after += " The rounds before are listed in the manifest, under `earlier_rounds`."
    return f"""From the removed units listed in the manifest, without building H again.{after}

```python
import json
from pathlib import Path
import cocurve_lab as cl

plan = json.loads(Path("cocurve_manifest.json").read_text())
{load}
units = cl.enumerate_units(model, ffn_groups={groups})
selection = cl.Selection.from_pruned(units, plan["pruned_units"])
selection = selection.with_gains({{units.index(u): g for u, g in plan["gains"].items()}})
assert selection.fingerprint == "{manifest["selection_fingerprint"]}"
pruned = cl.prune(model, selection)
```

{solved} {curvature}"""


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
