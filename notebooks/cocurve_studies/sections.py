"""Map each study of a finding to its notebook section, and link to it."""

from __future__ import annotations

TRUST = "06_when_to_trust_the_edges"
EDGES = "12_appendix_edges"
PLANS = "13_appendix_plans"
STRUCTURE = "07_bridges_and_structure"
CERTAINTY = "08_how_sure_is_H"
BAKE_OFF = "09_bake_off"

# study of a `Finding` -> its notebook, heading, and the id of the cell that the heading is in
SECTIONS: dict[str, tuple[str, str, str]] = {
    "single units": (TRUST, "1 · Does the prediction hold?", "10"),
    "fidelity": (TRUST, "1 · Does the prediction hold?", "10"),
    "reach": (TRUST, "How far an edge is true", "20"),
    "lambda": (TRUST, "2 · Which λ?", "24"),
    "gate": (TRUST, "2 · Which λ?", "24"),
    "abilities": (PLANS, "2 · What the plans can still do", "abilities-text"),
    "guards": (TRUST, "3 · Guards", "36"),
    "edges or diagonal": (TRUST, "Edges against the diagonal", "diagonal-text"),
    "refinement": (EDGES, "2 · Better plans", "40"),
    "gains": (PLANS, "3 · Gains", "45"),
    "redundancy": (EDGES, "3 · Redundancy, model by model", "58"),
    "bridges": (STRUCTURE, "1 · Bridge units", "5"),
    "causal": (STRUCTURE, "2 · Do bridges carry the damage?", "14"),
    "edges": (STRUCTURE, "3 · Which edges does a plan need?", "29"),
    "variants": (STRUCTURE, "What each variant can still do", "abilities-text"),
    "activations": (STRUCTURE, "Edges by activation correlation", "activations-text"),
    "blocks": (STRUCTURE, "4 · What H looks like", "38"),
    "budgets": (STRUCTURE, "Where the budget goes", "41"),
    "propositions": (STRUCTURE, "The propositions, measured", "45"),
    "error bars": (CERTAINTY, "1 · Error bars on H", "5"),
    "coverage": (CERTAINTY, "2 · Do the intervals hold?", "11"),
    "stability": (CERTAINTY, "3 · Would other text give another plan?", "18"),
    "convergence": (CERTAINTY, "4 · Is H converged?", "25"),
    "sensitivity": (CERTAINTY, "5 · One knob at a time", "31"),
    "purpose": (CERTAINTY, "What is this plan for?", "purpose-text"),
    "capabilities": (BAKE_OFF, "4 · Which abilities are left", "17"),
    "bake-off": (BAKE_OFF, "5 · Is the order more than chance?", "21"),
    "speed": (BAKE_OFF, "6 · Quality and speed", "24"),
    "why": (PLANS, "4 · Why a method is ahead", "why-bake-off"),
    "recovery": (BAKE_OFF, "8 · Recovery", "41"),
}


def link_to(study: str) -> str | None:
    """Return a relative link to the section of a study; None without a section.

    JupyterLab finds a cell by its id, but a heading only if that is ASCII.
    """
    if study not in SECTIONS:
        return None
    notebook, _, cell = SECTIONS[study]
    return f"{notebook}.ipynb#cell-id={cell}"
