"""Notebook 08: how sure H is.

    precision.py    intervals of every unit, a build that ends by itself
    coverage.py     whether error bars cover, and how fast plans settle
    sensitivity.py  one knob of the build at a time, judged on held-out text
    purposes.py     the same budget, calibrated on several texts and judged on all
    findings.py     claims and verdicts

A study returns a tidy table. Beside it stand the columns for reading it, and its picture.
"""
