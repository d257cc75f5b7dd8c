"""Notebook 09: CoCurve against other methods at equal budgets.

In reading order:

    contenders.py  the rows: methods, alone or several to choose from, a search, a repair
    settings.py    who judges, and the options
    compare.py     `compare`: every row at one budget
    bench.py       its cells: evidence, plans, their choice, repairs; measured and kept one by one
    costs.py       what a row's work costs
    comparison.py  its table
    frontier.py    the plans behind its cells, and paired differences
    speeds.py      size and speed of the plans' pruned models
    pictures.py    perplexity by ratio, and layers
    findings.py    the paper's claims beside the cells

The methods themselves are in `methods/`.
"""
