"""Notebook 08: how sure H is.

precision.py    the interval of every unit's saliency
resampling.py   H on part of its text; whether the jackknife's intervals hold
sensitivity.py  one knob of the build at a time, judged on held-out text
purposes.py     the same budget, calibrated on several texts and judged on all
findings.py     claims and verdicts
"""
