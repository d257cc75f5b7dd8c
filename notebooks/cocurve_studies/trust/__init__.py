"""Notebook 06: when to trust the edges.

fidelity.py    predicted and measured risk of single units and of plans
gap.py         where the two differ
reach.py       measured interactions beside those of H, from two units to two layers
choices.py     the best lambda; edges against the diagonal
redundancy.py  FFN redundancy and the benefit of the edges, over models
scales.py      plans by the scale of what is removed
experts.py     experts as units
findings.py    claims and verdicts
"""
