"""Measure on text what a plan costs.

In reading order:

    risk.py         `pruning_risk` and `measure_plans`: the KL of many plans on held-out text
    plan_memory.py  measurements of plans, kept on disk
    logits.py       logits of the whole vocabulary, in pieces and checked
    gap.py          why predicted and measured risk diverge, position by position
    agreement.py    predicted against measured: plans of one budget, and how well they agree
    perplexity.py   perplexity by a sliding window, with its protocol in words
    generation.py   text before and after
    lockstep.py     both texts from one batch; the KL at every token of a text
    answers.py      right answers of many plans, by capability
"""
