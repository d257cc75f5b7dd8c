"""Notebooks 06, 12 and 13: when the edges help and when they hurt.

    fidelity.py    predicted against measured: single units, and plans of one budget
    gap.py         where predicted and measured part, in pictures
    reach.py       edges against measured interactions, from two units to two layers
    choices.py     which lambda and which guards, by ratio
    diagonal.py    edges against the diagonal, with guards and without
    improving.py   local search, the certified bound, and gains on top of a plan
    redundancy.py  edge benefit against FFN redundancy, over models
    findings.py    claims and verdicts

A study returns a tidy table. Beside it stand the columns for reading it, and its picture.
"""
