"""A Hugging Face model as the lab sees it.

In reading order:

    families.py       where each model family keeps its projections
    architectures.py  access to a model's layers, blocks and projections
    units.py          the removable units, their costs and their order
    masking.py        running a model with some units ablated
    streaming.py      layers whose weights come from disk or another memory when they run
    identity.py       name, device, dtype and fingerprint of a model
    runtime.py        the state a model is measured in: lock, precision, interrupts
    hub.py            why a model cannot be loaded, and the next step
    configuration.py  checks of a model's JSON files before they are followed
    files.py          the weight files of a model, and whether their headers fit it
    loading.py        loading a model and its tokenizer
    stored.py         a model whose weights stay on disk, to be read one by one

This room imports only `errors`, `numeric` and `storage`. README.md lists the families and how to
add one.
"""
