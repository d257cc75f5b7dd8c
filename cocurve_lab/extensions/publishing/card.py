"""The model card of a pruned model: what was removed and measured, and how to load and repeat it.

A card states what the manifest records and what `CardFacts` gives; everything else is called not
measured. Its text is in card.md.jinja.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...models.architectures import UNIT_KINDS
from ...models.identity import DEMO
from ...pruner.folder import CardFacts
from ...pruner.manifest import KNOWN

TEMPLATE = Path(__file__).with_name("card.md.jinja")


def write_card(
    folder: Path, manifest: Mapping[str, Any], facts: CardFacts, *, has_tokenizer: bool
) -> None:
    """Write the model card into a folder."""
    card = model_card(manifest, facts, has_tokenizer=has_tokenizer)
    (folder / "README.md").write_text(card, encoding="utf-8")


def model_card(manifest: Mapping[str, Any], facts: CardFacts, *, has_tokenizer: bool) -> str:
    """Write the card as Markdown, with the front matter that the hub reads."""
    from huggingface_hub import ModelCard, ModelCardData

    # a name may contain line ends, which would break the heading
    base = " ".join((facts.base_model or manifest["base_model"] or "").split()) or None
    own, is_hub_id = manifest["loads_with"] == "cocurve_lab", _is_hub_id(base or "")
    data = ModelCardData(
        library_name="cocurve-lab" if own else "transformers",
        pipeline_tag="text-generation",
        tags=["pruned", "structured-pruning", "cocurve"],
        base_model=base if is_hub_id else None,  # the hub rejects a card with another name
        license=facts.license,
    )
    # whether all that happened to the weights is recorded, and, with it, was pruning alone
    known = manifest["weights_since_pruning"] in (*KNOWN, "converted")
    as_pruned = known and manifest["repair"] is None and manifest["recovery"] is None
    earlier = [own["weights_since_pruning"] for own in manifest["earlier_rounds"]]
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        manifest=manifest,
        facts=facts,
        base=base,
        from_folder=base not in (None, DEMO) and not is_hub_id,
        has_tokenizer=has_tokenizer,
        known=known,
        as_pruned=as_pruned,
        changed_between=any(state not in KNOWN for state in earlier),
        measured=_measured(manifest, facts, as_pruned),
        layers=_layers(manifest),
        # whatever a manifest holds goes into code as a literal, because it may be anybody's
        repr=repr,
        text=as_markdown_text,
        json=json.dumps,
        arguments=_arguments,
    )
    return str(card)


def _is_hub_id(name: str) -> bool:
    """Whether a name has the form owner/name."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _measured(manifest: Mapping[str, Any], facts: CardFacts, as_pruned: bool) -> str:
    """A table of predicted and measured quality."""
    rows = []
    if as_pruned:  # H predicts the plan's weights, not those of later training
        predicted = _nats(manifest["predicted_risk"], "not predicted")
        rows.append(("KL predicted from the curvature, 1/2 s^T H s", predicted))
    measured = _nats(facts.kl, "not measured", facts.kl_error)
    rows.append(("KL measured on held-out text", measured))
    for name, found in (("dense", facts.dense_perplexity), ("pruned", facts.pruned_perplexity)):
        value = "not measured" if found is None else f"{found.value:.4g} ({found.nll:.4f} nats)"
        rows.append((f"perplexity, {name}", value))
    return as_markdown(("", "value"), rows)


def _nats(value: float | None, missing: str, error: float | None = None) -> str:
    if value is None:
        return missing
    known = "" if error is None else f" ± {error:.2g}"
    return f"{value:.4g}{known} nats per token"


def _layers(manifest: Mapping[str, Any]) -> str:
    """A table of each layer's widths and removed units."""
    # "L12.ffn[3]" -> "L12.ffn"
    gone = Counter(name.partition("[")[0] for name in manifest["pruned_units"])
    layers = manifest["layers"]
    left = {
        "key_value_heads": "key/value heads left",
        "attention_columns": "attention columns left",
        "ffn_columns": "FFN channels left",
    }
    left |= {
        f"{name}_columns": f"{kind.plural} left"
        for name, kind in UNIT_KINDS.items()
        if not kind.columns
    }
    kinds = [kind for kind in UNIT_KINDS if any(f"{kind}_columns" in layer for layer in layers)]
    names = [name for name in left if any(name in layer for layer in layers)]
    removed = (f"{UNIT_KINDS[kind].label} units removed" for kind in kinds)
    rows = (
        (n, *(layer.get(name, "-") for name in names), *(gone[f"L{n}.{kind}"] for kind in kinds))
        for n, layer in enumerate(layers)
    )
    table = as_markdown(("layer", *map(left.__getitem__, names), *removed), rows)
    return table


def _arguments(values: Mapping[str, Any], names: Iterable[str] | None = None) -> str:
    """Values as the keyword arguments of a call; a key that is no name is omitted."""
    wanted = (name for name in (values if names is None else names) if name.isidentifier())
    # a backtick would end the code; repr puts it into a string, where it may be escaped
    return ", ".join(f"{name}={values[name]!r}" for name in wanted).replace("`", r"\x60")


def as_markdown(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Lay out rows of cells under a head as a Markdown table, a line each."""
    table = ([" ".join(str(c).splitlines()).replace("|", "\\|") for c in r] for r in (head, *rows))
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def as_markdown_text(value: object) -> str:
    """Write a text as one line of Markdown that shows it as it is: no tag, link or emphasis."""
    shown = "".join(c if c.isprintable() else " " for c in str(value))
    return re.sub(r"([\\`*_\[\]<>&|~$#]|:(?=//))", r"\\\1", " ".join(shown.split()))
