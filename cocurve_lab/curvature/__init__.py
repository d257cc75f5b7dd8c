"""H alone: the matrix, its error bars and its graph. Numpy, no model, no torch.

In reading order:

    matrix.py       `Curvature`: H, its units and where it came from; files
    groups.py       the sums over groups of sequences that H comes from
    uncertainty.py  jackknife error bars of H, and how often they cover
    graph.py        H as a graph; bridge units
    settings.py     the options of a build, what decides H, and what a file may hold
    merging.py      builds put together, shards to the bits of one build
    release.py      the plug for the authors' published matrices and masks
"""
