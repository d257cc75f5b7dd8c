"""Notebook 09: CoCurve against other methods at equal budgets.

compare.py     `compare`: every method at one budget, measured
comparison.py  its table, also in the paper's form
frontier.py    the plans behind its cells, paired differences, texts side by side
pictures.py    ratio, families, guards, layers, speed
speeds.py      whether plans of one budget differ in speed
findings.py    the paper's main table beside ours, with verdicts
"""
