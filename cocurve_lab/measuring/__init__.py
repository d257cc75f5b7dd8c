"""Measure on text what a plan costs.

In reading order:

    risk.py         `pruning_risk` and `measure_plans`: the KL of many plans on held-out text
    plan_memory.py  measurements of plans, kept on disk
    logits.py       logits of the whole vocabulary, in pieces and checked
    perplexity.py   perplexity by a sliding window, with its protocol in words
    generation.py   text before and after
"""
