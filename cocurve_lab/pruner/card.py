"""The model card of a pruned model: what was removed and measured, and how to load and repeat it.

A card states what the manifest records and what `CardFacts` gives. Of everything else it says that
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

    Raises:
        InputError: a KL is negative or not finite, or an error or text is given without a KL.
        MismatchError: the perplexities have different protocols.
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


def model_card(manifest: Mapping[str, Any], facts: CardFacts, *, has_tokenizer: bool) -> str:
    """Write the card as Markdown, with the front matter that the hub reads.

    Args:
        manifest: the pruned model's, as written beside the weights.
        facts: the measurements.
        has_tokenizer: whether the folder holds a tokenizer.
    """
    # a name may contain line ends, which would break the heading
    base = " ".join((facts.base_model or manifest.get("base_model") or "").split()) or None
    sections = [
        _front_matter(manifest, facts, base),
        f"# {base or 'A language model'}, pruned",
        _summary(manifest, base),
        "Pruning changes more than perplexity and KL show. **Safety behavior (refusals, bias, "
        "toxicity) must be evaluated again on this model**: nothing measured on the base model "
        "can be assumed to hold.",
        "## Loading\n\n" + _loading(manifest, has_tokenizer),
        "## What was measured\n\n" + _measured(manifest, facts),
        "## What was removed\n\n" + _layers(manifest),
        f"## How to repeat {'it' if _is_known(manifest) else 'the pruning'}\n\n"
        + _reproduction(manifest, base),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(manifest: Mapping[str, Any], facts: CardFacts, base: str | None) -> str:
    """The YAML block by which the hub files the model."""
    own = manifest["loads_with"] == "cocurve_lab"
    fields: dict[str, Any] = {
        "library_name": "cocurve-lab" if own else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pruned", "structured-pruning", "cocurve"],
    }
    if base is not None and _is_hub_id(base):  # the hub rejects a card with any other name here
        fields["base_model"] = base
    if facts.license is not None:
        fields["license"] = facts.license
    # every JSON value is a YAML value, so no name can break out of its field
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(["---", *lines, "---"])


def _is_hub_id(name: str) -> bool:
    """Whether a name has the form owner/name."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


# Sections -----------------------------------------------------------------------------------------


def _state(manifest: Mapping[str, Any]) -> str:
    """The state of the weights since pruning; the first version of the manifest has none."""
    return str(manifest.get("weights_since_pruning", "unknown"))


def _is_known(manifest: Mapping[str, Any]) -> bool:
    """Whether all that happened to the weights is recorded."""
    return _state(manifest) in (*KNOWN, "converted")


def _as_pruned(manifest: Mapping[str, Any]) -> bool:
    """Whether the weights are, as far as recorded, those that pruning left."""
    return _is_known(manifest) and _last_change(manifest) == "pruning"


def _last_change(manifest: Mapping[str, Any]) -> str:
    """The last change of the weights that the manifest describes."""
    if manifest.get("recovery") is not None:
        return "training"
    return "pruning" if manifest.get("repair") is None else "refitting"


def _since(manifest: Mapping[str, Any]) -> str:
    """A clause on the weights since pruning."""
    done = "" if manifest.get("repair") is None else (
        "the output projections were refitted by least squares; "
    )  # fmt: skip
    if manifest.get("recovery") is not None:
        done += "low-rank updates were trained on the dense model's answers, and added; "
    earlier = _last_change(manifest)
    since = {
        "unchanged": "nothing was trained after pruning.",
        "refitted": "nothing else was trained.",
        "trained": "nothing else was trained.",
        "converted": f"the weights were converted to {manifest['dtype']} after {earlier}. Other "
        f"changes between {earlier} and that conversion would not be recorded here.",
        "changed": f"**the weights were changed after {earlier}** (by training, refitting or "
        "merging); the kind of change is not recorded here.",
        "unknown": f"whether the weights were changed after {earlier} is not recorded.",
    }[_state(manifest)]
    return done + since


def _earlier(manifest: Mapping[str, Any]) -> str:
    """Sentences on the rounds of pruning before the last."""
    rounds = manifest.get("earlier_rounds") or ()
    if not rounds:
        return ""
    kept = all(own.get("weights_since_pruning") in KNOWN for own in rounds)
    between = "" if kept else " Between rounds the weights were changed, or may have been."
    return (
        f" The model had been pruned before (rounds: {len(rounds)}). The rest of this card is "
        "about the last round, and its ratios are shares of the parameters that could be removed "
        f"then.{between}"
    )


def _summary(manifest: Mapping[str, Any], base: str | None) -> str:
    """One paragraph on the pruning, and its figures as a list."""
    realized = f"{manifest['realized_ratio']:.2%}"
    lines = [
        f"Whole attention heads and FFN channel groups of {base or 'a dense model'} were removed; "
        f"{_since(manifest)}{_earlier(manifest)}\n",
    ]
    if manifest.get("target"):
        lines.append(
            f"- requested: {manifest['target']}; realized: {realized} of the removable parameters"
        )
    elif manifest.get("interaction_strength") is not None:
        asked = f"{manifest['requested_ratio']:.2%}"
        lines.append(f"- requested: {asked} of the removable parameters; realized: {realized}")
    else:
        lines.append(
            "- units chosen by hand or by another method; realized: "
            f"{realized} of the removable parameters"
        )
    fraction, cost = manifest.get("params_removed_fraction"), manifest.get("removed_parameters")
    share = "" if fraction is None else f" ({fraction:.2%} of all, embeddings included)"
    lines.append(
        f"- parameters removed: {'not recorded' if cost is None else f'{cost:,}'}{share}; "
        f"left: {manifest['parameters']:,} in {manifest['dtype']}"
    )
    gains = len(manifest["gains"])
    folded = f"{gains} kept FFN groups have one, folded into W_down" if gains else "none"
    lines.append(f"- units removed: {len(manifest['pruned_units'])}; gains: {folded}")
    repair = manifest.get("repair")
    if repair is not None:
        source = " ".join(repair["calibration"].split())
        statistics = "of the model refitted so far" if repair["sequential"] else "of the dense one"
        lines.append(
            f"- refitted: {' and '.join(repair['kinds'])} outputs, ridge {repair['ridge']:g}, on "
            f"{repair['positions']:,} tokens ({source}), with statistics {statistics}"
        )
    recovery = manifest.get("recovery")
    if recovery is not None:
        source = " ".join(recovery["calibration"].split())
        lines.append(
            f"- trained: updates of rank {recovery['rank']} for all linear layers, by KL from the "
            f"dense model, {recovery['epoch']} times on {recovery['positions']:,} tokens ({source})"
        )
    return "\n".join(lines)


_STOCK = """```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(folder{trust})
```"""
_OURS = """```python
import cocurve_lab as cl

model = cl.load_pruned(folder)
```"""


def _loading(manifest: Mapping[str, Any], has_tokenizer: bool) -> str:
    """How to load the folder, without this library where that is possible, and with it."""
    words = {
        "stock": "All layers have the same widths, so a stock class of transformers loads the "
        "model, and no other code is run. (A Llama whose hidden size is not a multiple of its "
        "number of heads is saved as a Mistral, which computes the same.)\n\n"
        + _STOCK.format(trust=""),
        "own code": "Layers differ in width. transformers 5.17 or newer loads them with the short "
        "modeling file beside the weights, which does not need cocurve_lab. Read that file before "
        "you trust it:\n\n" + _STOCK.format(trust=", trust_remote_code=True") + "\n\n"
        "transformers may log that a global value is read for a per-layer attribute. The value is "
        "the dense model's count, and the message is harmless.\n\n"
        '`pipeline("text-generation", model=folder, trust_remote_code=True)` works too if the '
        "folder holds a tokenizer. transformers then logs that the class is not in its list, which "
        "is harmless.",
        "cocurve_lab": "transformers alone cannot load a pruned model of this family: **this "
        "folder needs cocurve_lab**.",
    }[manifest["loads_with"]]
    own = "With cocurve_lab, which runs no code from the folder:\n\n" + _OURS
    tokenizer = (
        "The tokenizer is in the folder: `AutoTokenizer.from_pretrained(folder)`."
        if has_tokenizer
        else "Use the tokenizer of the base model; none was saved here."
    )
    return "\n\n".join([words, own, tokenizer])


def _measured(manifest: Mapping[str, Any], facts: CardFacts) -> str:
    """A table of predicted and measured quality, with the protocols."""
    lines = ["| | value |", "|---|---|"]
    if _as_pruned(manifest):  # H predicts the plan's weights, not those of later training
        predicted = _nats(manifest.get("predicted_risk"), "not predicted")
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
        notes.append(f"To measure the rest, use {risk}`cl.perplexity(model, tokenizer, text)`.")
    return "\n\n".join(["\n".join(lines), *notes])


def _nats(value: float | None, missing: str, error: float | None = None) -> str:
    """A value in nats per token with its standard error, or the words for a missing one."""
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
    rows = (
        (
            index,
            widths["key_value_heads"],
            widths["attention_columns"],
            widths["ffn_columns"],
            gone[f"L{index}.attention"],
            gone[f"L{index}.ffn"],
        )
        for index, widths in enumerate(manifest["layers"])
    )
    return as_markdown(head, rows)


def _reproduction(manifest: Mapping[str, Any], base: str | None) -> str:
    """Code that repeats the pruning from the manifest, and where the plan came from."""
    # whatever a manifest holds goes into code as a literal, because it may be anybody's
    strength, groups = manifest.get("interaction_strength"), manifest.get("ffn_groups") or 16
    solved = "The plan was not solved from H: its units were given, or chosen by another method."
    if strength is not None:
        guards, target = manifest.get("guards"), manifest.get("target")
        given = "" if not guards else f", cl.Guards({_arguments(guards)})"
        given += ", uniform=True" if manifest.get("uniform") else ""
        asked = "target" if target else repr(manifest["requested_ratio"])
        solved = f"The plan came from `cl.solve_greedy(curvature, {asked}, {strength!r}{given})`"
        solved += f" with the target {target}" if target else ""
        solved += ". Units forced in or out, and refinement, are not recorded here."
    mark = manifest.get("curvature_fingerprint")
    curvature = "No curvature is recorded." if mark is None else f"Curvature: `{mark}`."
    after = "" if _is_known(manifest) else " This does not repeat what came after the pruning."
    load = f"model, tokenizer = cl.load_model({json.dumps(base or 'the dense model')})"
    if base not in (None, DEMO) and not _is_hub_id(base):
        load += "  # or the path of its folder"
    if manifest.get("earlier_rounds"):
        load = 'model = cl.load_pruned("the folder of the model before this round")'
        after += " Earlier rounds are listed in the manifest under `earlier_rounds`."
    return f"""The manifest lists the removed units, so H need not be built again.{after}

```python
import json
from pathlib import Path
import cocurve_lab as cl

plan = json.loads(Path("cocurve_manifest.json").read_text())
{load}
units = cl.enumerate_units(model, ffn_groups={groups!r})
selection = cl.Selection.from_pruned(units, plan["pruned_units"])
selection = selection.with_gains({{units.index(u): g for u, g in plan["gains"].items()}})
assert selection.fingerprint == {manifest["selection_fingerprint"]!r}
{_last_step(manifest)}
```

{solved} {curvature}"""


def _last_step(manifest: Mapping[str, Any]) -> str:
    """The lines that prune, refit if the model was refitted, and train if it was trained."""
    repair, recovery = manifest.get("repair"), manifest.get("recovery")
    lines = "pruned = cl.prune(model, selection)"
    if repair is not None:
        own = {name: repair[name] for name in ("ridge", "kinds")}
        own |= {"target": repair["target"]} if repair["sequential"] else {}
        given = f"calibration, sequential={repair['sequential']}, options=options"
        lines = f"""{_text_of(repair)}
options = cl.RepairOptions({_arguments(own)})
pruned = cl.repair(model, selection, {given})"""
    if recovery is not None:
        names = ("rank", "learning_rate", "epochs", "rows_per_step", "seed")
        own = {name: recovery[name] for name in names}
        lines += f"""
{_text_of(recovery)}
options = cl.RecoverOptions({_arguments(own)})
# with the same held-out rows, if there were any: the weights are those of epoch {recovery["epoch"]}
pruned = cl.recover(model, pruned, calibration, options=options)"""
    return lines


def _text_of(record: Mapping[str, Any]) -> str:
    """The lines that name the calibration of a refit or a training."""
    return f"""# the text named above: {record["sequences"]} rows
calibration = cl.CalibrationSet(...)
assert calibration.fingerprint == {record["calibration_fingerprint"]!r}"""


def _arguments(values: Mapping[str, Any]) -> str:
    """Values as the keyword arguments of a call; a key that is no name is omitted."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items() if name.isidentifier())
