"""From a plan to a smaller model, in memory and on disk.

In reading order:

    slicing.py      which rows and columns stay, and the modules made of them
    cutting.py      `prune`: the smaller model and its manifest
    equivalence.py  the check that pruned and masked model compute the same
    manifest.py     the record of widths and plan beside the weights
    saving.py       `save_pruned` and `load_pruned`
    folder.py       the configuration of a saved folder, as `load_pruned` reads it
    card.py         the facts on a model card that no manifest records
    plugs.py        the plugs for pruning weight by weight, and for what others load and read
"""
