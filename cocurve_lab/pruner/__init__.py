"""From a plan to a smaller model, in memory and on disk.

In reading order:

    slicing.py      which rows and columns stay, and the modules made of them
    cutting.py      `prune`: the smaller model and its manifest
    equivalence.py  the check that pruned and masked model compute the same
    manifest.py     the record of widths and plan beside the weights
    saving.py       `save_pruned` and `load_pruned`
    folder.py       a saved folder: its configuration, card, and what extensions write into it
"""
