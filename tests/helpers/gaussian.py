"""H of Gaussian features whose second moments are known."""

from __future__ import annotations

import numpy as np

import cocurve_lab as cl
from cocurve_lab.curvature.groups import Groups

from .problems import make_units

UNITS = make_units(2, 1, 2)  # six units: attention 0 and 3, FFN the rest


def covariance(shared: float = 0.6, seed: int = 3) -> np.ndarray:
    """Features' second moments [6, 6]: a common part of both signs, scales apart."""
    rng = np.random.default_rng(seed)
    load = shared * rng.normal(size=(len(UNITS), 1))
    scale = np.exp(0.5 * rng.normal(size=len(UNITS)))
    return (np.eye(len(UNITS)) + load @ load.T) * np.outer(scale, scale)


def draw(truth: np.ndarray, sizes: list[int], rng: np.random.Generator) -> cl.Curvature:
    """H of Gaussian features with these second moments, in groups of the given sizes."""
    parts = [np.linalg.cholesky(truth) @ rng.normal(size=(len(truth), size)) for size in sizes]
    grams = np.stack([part @ part.T for part in parts])
    matrix = grams.sum(axis=0) / sum(sizes)
    return cl.Curvature(matrix, UNITS, {}, Groups(grams, np.array(sizes)))
