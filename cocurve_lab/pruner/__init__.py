"""From a plan to a smaller model, in memory and on disk.

In reading order:

    blocks.py            blocks that lost everything, and head counts
    slicing.py           which rows and columns stay, and the modules made of them
    cutting.py           `prune`: the smaller model and its manifest
    best_plan.py         `best_plan`: the whole flow, in a given time
    equivalence.py       the check that pruned and masked model compute the same
    repair.py            `repair`: prune, and refit what stays on text
    refitting.py         least squares, layer by layer
    recovery.py          `recover`: low-rank updates, trained on the dense model's answers
    manifest.py          the record of widths and plan beside the weights
    saving.py            `save_pruned` and `load_pruned`
    on_disk.py           `prune(..., out=)`: read, cut and written one weight at a time
    eight_bits.py        `quantize_folder`: a saved folder in 8 bits, by torchao
    folder.py            the configuration that lets transformers load the folder alone
    card.py              the model card
    modeling_cocurve.py  copied beside the weights; builds layers of different widths

This room imports calibration, models, estimator (the replay of a layer), solver (the plan) and
measuring (the gate of gains, held-out KL, the model card). The names of `cutting.py` can be
imported from the room itself.
"""
