"""H alone: the matrix, its error bars and its graph. Numpy, no model, no torch.

In reading order:

    matrix.py       `Curvature`: H, its units and where it came from; files
    stored.py       what a file of H may hold, and how its parts fit together
    shifts.py       the sketch of the shifts that a build keeps beside H
    pair_kl.py      the KL of every pair, from the shifts
    saturation.py   where the teacher is so sure that H sees little
    merging.py      builds put together, shards to the bits of one build
    release.py      the authors' published matrices and masks
    uncertainty.py  jackknife error bars of H, and how often they cover
    graph.py        H as a graph; bridge units

Imports the units of `models/`, storage and errors.
"""
