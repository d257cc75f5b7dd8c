"""CoCurve and the methods it is compared with, one file each, behind one interface.

In reading order:

    base.py          the interface, the base of methods that score units, and their evidence
    registry.py      `get_method`: every method by name
    filling.py       from an order of units to a plan at a ratio, the same way for all
    inputs.py        statistics of the output projections' inputs, in one pass over the rows
    cocurve.py       CoCurve, and its diagonal, head-only and FFN-only controls
    random_units.py  random units, the baseline of all
    magnitude.py     column norms
    wanda.py         Wanda-sp: column magnitude times input norm
    flap.py          FLAP: fluctuation of the inputs
    amp.py           AMP: size of a head's output, mean activation of a channel
    llm_pruner.py    LLM-Pruner: Taylor importance from gradients, a few layers at a time
    slimgpt.py       SlimGPT: greedy OBS by grouped Cholesky; optional refit of the columns left
    slimllm.py       SlimLLM: Pearson similarity of heads, PCA-weighted channels
    two_ssp.py       2SSP: FFN width evenly, whole attention blocks by perplexity
    short_gpt.py     ShortGPT: whole layers, by the cosine of what enters and leaves them
    block_pruner.py  BlockPruner: whole blocks, one after the other by perplexity
    finer_cut.py     FinerCut: the same by the KL from the dense model
    cbo.py           CBO: whole blocks, by a quadratic from gradients at the full model

Imports `pruner/`, `measuring/` and the rooms below them.
"""
