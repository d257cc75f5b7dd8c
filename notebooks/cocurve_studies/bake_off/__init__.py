"""Notebook 09: CoCurve against other methods at equal budgets.

In reading order:

    contenders.py  the rows and who judges them: methods, a search, a repair
    compare.py     `compare`: every row at one budget
    bench.py       its cells: evidence, plans, their choice, repairs, and what they cost
    comparison.py  its table
    frontier.py    the plans behind its cells, paired differences, and pictures
    speeds.py      size and speed of the plans' pruned models
    findings.py    the paper's claims beside the cells

The methods themselves are in `methods/`.
"""
