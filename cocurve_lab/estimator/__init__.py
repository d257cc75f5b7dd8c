"""From a model to H.

In reading order:

    features.py  Algorithm 1 on one sequence: ablate, whiten, take the Gram
    teacher.py   the teacher pass, and where ablations start
    fisher.py    centring, the whitened feature and the KL divergence
    replay.py    an ablation runs only what follows the unit
    refitted.py  ablations that the rest of their block makes up for, where they are asked for
    inputs.py    the inputs of output projections, in one pass over the rows
    least_squares.py  least squares with a ridge
    batches.py   how many ablations run together
    vocabulary.py  the KL of ablations over the full vocabulary, where it is asked for
    sketch.py    the shifts of a sequence that are kept for other surrogates
    sums.py      the sum over sequences, by group
    on_paper.py  what a build takes on a machine that is not here
    worker.py    measures sequences; the interface for running workers elsewhere
    build.py     the loop over sequences, with checkpoints
    estimate.py  `estimate_curvature`, and H kept in a folder
    files.py     names of the files of H, of its shards and of checkpoints
    cluster.py   the same build on Ray workers
    probing.py   a preview of H from random probes
    exact.py     the exact infinitesimal H*, by forward-mode differentiation

Imports `models/`, `curvature/`, the calibration text and what lies below them. Only cluster.py
imports Ray.
"""
