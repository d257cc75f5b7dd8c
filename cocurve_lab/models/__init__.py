"""A Hugging Face model as the lab sees it.

In reading order:

    unit.py           one removable unit, and what stays of a projection without it
    families.py       where each model family keeps its projections
    architectures.py  access to a model's layers, blocks and projections; the plug for unit kinds
    kinds.py          attention and FFN: their units, costs, masks and cuts
    units.py          the set of a model's units, and their order
    masking.py        running a model with some units ablated
    layers.py         where the weights are: in memory, or at a source; the plug for other sources
    layer_calls.py    how the decoder calls its layers
    identity.py       name, device, dtype and fingerprint of a model
    runtime.py        the state a model is measured in: lock, precision, interrupts
    logits.py         logits of the whole vocabulary, in pieces and checked
    weights.py        the weights of a model by name, wherever they are
    sources.py        the plugs for where models and texts come from, and what is checked of them
    loading.py        loading a model and its tokenizer

This room imports only `base`. README.md lists the families and how to add one.
"""

from . import kinds as kinds  # registers the paper's kinds of units
