"""From H to a plan. Numpy, no model, no torch.

In reading order:

    targets.py      how much goes: a ratio, or parameters, bytes or KV cache left
    guards.py       where units may go, and how much can go at most
    protection.py   default guards, and which to relax where a target cannot be reached
    selection.py    a plan: which units go, in which order, at what predicted cost (plan_json.py)
    greedy.py       Algorithm 2, and `fill`, the loop behind every plan
    uniform.py      Algorithm 2 with the same counts in every layer
    solve.py        `solve_greedy`, and the longest plan that greedy reaches
    path.py         every plan that lambda makes
"""
