"""A Hugging Face model as the lab sees it: what can be removed, and how to switch it off.

In reading order:

    families.py       where each model family keeps its projections: one entry per family
    architectures.py  a model seen through its family; the weights of every projection
    units.py          units: what is removable, what each costs, in which order
    masking.py        `ablate`: switch units off for a while, and always restore them
    identity.py       a model's name, device, dtype and fingerprint
    loading.py        `load_model`: the demo model, a folder, or a hub id
    hub.py            why a model did not come from the hub, and what to do
    runtime.py        the state a model is measured in; memory that runs out; Ctrl-C

Imports errors and storage only. README.md tells how to add a family.
"""
