"""Where each study of a finding stands: a notebook and a heading in it, and links there."""

from __future__ import annotations

from urllib.parse import quote

TRUST = "06_when_to_trust_the_edges"
STRUCTURE = "07_bridges_and_structure"
CERTAINTY = "08_how_sure_is_H"
BAKE_OFF = "09_bake_off"

# study of a `Finding` -> its notebook and heading
SECTIONS: dict[str, tuple[str, str]] = {
    "single units": (TRUST, "1 · Does the prediction hold?"),
    "fidelity": (TRUST, "1 · Does the prediction hold?"),
    "pairs": (TRUST, "Pairs"),
    "lambda": (TRUST, "2 · Which λ?"),
    "gate": (TRUST, "2 · Which λ?"),
    "abilities": (TRUST, "What the plans can still do"),
    "guards": (TRUST, "3 · Guards"),
    "refinement": (TRUST, "4 · Better plans"),
    "gains": (TRUST, "4 · Better plans"),
    "finite or not": (TRUST, "5 · Whole removals or derivatives?"),
    "redundancy": (TRUST, "6 · Redundancy, model by model"),
    "steps": (TRUST, "7 · H, half-way"),
    "bridges": (STRUCTURE, "1 · Bridge units"),
    "causal": (STRUCTURE, "2 · Do bridges carry the damage?"),
    "edges": (STRUCTURE, "3 · Which edges does a plan need?"),
    "variants": (STRUCTURE, "What each variant can still do"),
    "blocks": (STRUCTURE, "4 · What H looks like"),
    "budgets": (STRUCTURE, "Where the budget goes"),
    "propositions": (STRUCTURE, "The propositions, measured"),
    "error bars": (CERTAINTY, "1 · Error bars on H"),
    "coverage": (CERTAINTY, "2 · Do the intervals hold?"),
    "stability": (CERTAINTY, "3 · Would other text give another plan?"),
    "convergence": (CERTAINTY, "4 · Is H converged?"),
    "sensitivity": (CERTAINTY, "5 · One knob at a time"),
    "preview": (CERTAINTY, "6 · A preview in seconds"),
    "capabilities": (BAKE_OFF, "4 · Which abilities are left"),
    "bake-off": (BAKE_OFF, "5 · Is the order more than chance?"),
    "speed": (BAKE_OFF, "6 · Quality and speed"),
    "why": (BAKE_OFF, "8 · Why"),
    "recovery": (BAKE_OFF, "9 · Recovery"),
}


def link_to(study: str) -> str | None:
    """The section of a study as a relative link from beside the notebooks; None for no section.

    JupyterLab opens the notebook at the heading.
    """
    if study not in SECTIONS:
        return None
    notebook, heading = SECTIONS[study]
    return f"{notebook}.ipynb#{quote(heading.replace(' ', '-'))}"
