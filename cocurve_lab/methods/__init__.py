"""CoCurve and the methods it is compared with, one file each, behind one interface.

In reading order:

    base.py          the interface: measure once, select at any ratio, optionally repair
    registry.py      `get_method`: every method by name
    filling.py       from scores to a plan of one cost, the same way for all
    inputs.py        sums over the inputs of the output projections, in one pass
    cocurve.py       CoCurve, and its diagonal, head-only and FFN-only controls
    random_units.py  random units, the floor
    magnitude.py     column norms
    wanda.py         Wanda-sp
    flap.py          FLAP
    amp.py           AMP
    llm_pruner.py    LLM-Pruner: Taylor importance from gradients, a few layers at a time
    slimgpt.py       SlimGPT: greedy OBS by grouped Cholesky; optional refit of what stays
    slimllm.py       SlimLLM: Pearson similarity of heads, PCA-weighted channels
    two_ssp.py       2SSP: FFN width evenly, whole attention blocks by perplexity

Imports `pruner/`, `measuring/` and what lies below them.
"""
