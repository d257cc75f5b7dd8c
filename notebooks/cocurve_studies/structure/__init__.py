"""Notebook 07: bridges and structure.

bridges.py       the number of bridges by threshold, and their strongest edges
causal.py        bridges and matched controls, forced out
ablations.py     the variants of H that plans are made of
edges.py         those plans, measured
geometry.py      blocks, where the budget goes, and the propositions
propositions.py  the paper's propositions on one H
findings.py      claims and verdicts
"""
