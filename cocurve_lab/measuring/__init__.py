"""Measure on text what a plan costs.

In reading order:

    risk.py         `pruning_risk` and `measure_plans`: the KL of many plans on held-out text
    plan_memory.py  measurements of plans, kept on disk
    results.py      standard errors over rows, and tables

Perplexity, continuations and answers are in extensions/judging.
"""
