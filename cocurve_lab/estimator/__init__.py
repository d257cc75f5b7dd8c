"""From a model to H.

In reading order:

    algorithm1.py  Algorithm 1 on one sequence: ablate, whiten, take the Gram
    teacher.py     the teacher pass, and where ablations start
    fisher.py      centring and the KL divergence
    replay.py      an ablation runs only what follows the unit
    batches.py     how many ablations run together
    risks.py       the KL of each unit alone, and the dense model's loss
    build.py       the loop over sequences, with checkpoints
    estimate.py    `estimate_curvature`, and H kept in a folder
"""
