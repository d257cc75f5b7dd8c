"""What a plan really costs, measured on text.

In reading order:

    additive_solve.py the additive KL and its plans with torch, for a GPU
    risk.py           `pruning_risk` and `measure_plans`: the KL of many plans on held-out text
    riding.py         its plans together, where weights are read when a layer runs
    repaired.py       the same for plans that are repaired before they are measured
    plan_memory.py    measurements of plans, kept on disk
    gap.py            where predicted and measured part, by position, and why
    agreement.py      predicted against measured: plans of one budget, and how well they agree
    racing.py         plans raced on held-out text, compared in pairs
    choosing.py       which lambda and which guards, by that race
    choosing_gains.py which ridge of the gains, by the same rows
    swaps.py          plans near a plan, with its target and guards kept
    search.py         `search_plan`: swaps judged by measured KL, the result by held-out text
    staged.py         `staged_plan`: the surrogate measured anew on what is left
    perplexity.py     perplexity by a sliding window, with its protocol in words
    generation.py     text before and after
    lockstep.py       both texts from one batch; the KL at every token of a text
    answers.py        right answers of many plans, by capability

Imports `solver/`, `estimator/` (replay and the KL formula) and what lies below them.
"""
