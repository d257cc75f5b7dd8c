"""From H to a plan. Numpy, no model, no torch.

In reading order:

    targets.py      how much goes: a ratio, or parameters, bytes or KV cache left
    guards.py       where units may go, and how much can go at most
    portions.py     how many units a block may lose, for layers that are fast on their machine
    selection.py    a plan: which units go, in which order, at what predicted cost
    plan_json.py    the fields of a plan in JSON
    greedy.py       Algorithm 2
    solve.py        `solve_greedy`, and the longest plan that greedy reaches
    in_portions.py  Algorithm 2 with several units at a time, for the same
    additive.py     Algorithm 2 on the additive KL instead of H
    uniform.py      plans with the same counts in every layer
    interaction.py  how much weight the edges get: the gate, and every plan lambda makes
    refinement.py   better plans by local search
    bounds.py       a certified bound that no plan can beat
    variants.py     edges dropped or changed: what is solved on, never what is predicted
    gains.py        gains on kept FFN groups that stand in for what was pruned
    stability.py    whether other text would give another plan, and when a build may stop

Imports `curvature/`, and from `models/` the units and the view of a model, which only
`kv_cache_costs` may be given.
"""
