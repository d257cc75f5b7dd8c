"""Notebook 09: CoCurve against other methods at equal budgets.

In reading order:

    contenders.py  the rows: methods, alone or several to choose from, a search, a repair
    settings.py    who judges, and the options
    compare.py     `compare`: every row at one budget
    bench.py       its cells: evidence, plans, their choice, repairs; measured and kept one by one
    costs.py       what a row's work costs
    comparison.py  its table, also in the paper's form
    frontier.py    the plans behind its cells, paired differences, texts side by side
    speeds.py      size and speed of the plans' pruned models
    pictures.py    perplexity, abilities, guards, layers and speed as pictures
    findings.py    the paper's claims beside the cells, with verdicts

The methods themselves are in `methods/`.
"""
