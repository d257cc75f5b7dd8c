"""Notebook 07: bridges and structure.

    bridges.py       bridge units by threshold, and their strongest edges
    matching.py      bridges against matched controls: arms that differ in connectivity only
    arms.py          the arms of the causal test, or why there are none
    causal.py        the causal test, measured
    ablations.py     plans of the paper's ablations: variants of H, kinds, the greedy rule
    edges.py         what the edges buy: every variant measured against the method
    geometry.py      blocks, budgets and spectrum of H
    propositions.py  the paper's propositions, measured on one H
    findings.py      claims and verdicts

All but causal.py and edges.py need H alone, and no torch.
"""
