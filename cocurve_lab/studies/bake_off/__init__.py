"""Notebook 09: CoCurve against other methods at equal budgets.

In reading order:

    compare.py     `compare`: every method at one budget, measured and kept cell by cell
    comparison.py  its table, also in the paper's form
    frontier.py    the plans behind its cells, paired differences, texts side by side
    speeds.py      size and speed of the plans' pruned models
    pictures.py    perplexity, abilities, guards, layers and speed as pictures
    findings.py    the paper's claims beside the cells, with verdicts

The methods themselves are in `methods/`.
"""
