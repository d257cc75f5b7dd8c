"""The most expensive set of units that fits under a cap: subset sum, exact for all real models."""

from __future__ import annotations

import numpy as np


def largest_sum(costs: np.ndarray, room: float) -> tuple[float, bool]:
    """Return the largest subset sum of `costs` that is at most `room`, and whether it is exact.

    Where it is not exact it is the room, an upper bound; see `guards.reachable_ratio`.
    """
    if costs.sum() <= room:
        return costs.sum().item(), True
    # every sum of whole costs is a multiple of their common divisor, so sums are counted in steps
    # of it. Costs of a model are multiples of a width: a layer of Llama-3.1-8B has 416 steps
    whole = costs.dtype == np.int64
    step = int(np.gcd.reduce(costs)) if whole else 0
    if not whole or room // step > 1 << 24:  # above this the bits below would take over 2 MB
        few = len(costs) <= 40  # each half then has at most 2^20 sums, 8 MB
        return (_largest_of_halves(costs, room) if few else room), few
    room = int(room)
    # one big integer holds every reachable sum: bit k is set if some subset sums to k steps
    sums, within = 1, (1 << (room // step + 1)) - 1
    for cost in costs.tolist():
        # shifting adds this cost to every sum so far; the mask drops sums beyond the room
        sums |= (sums << (cost // step)) & within
    return (sums.bit_length() - 1) * step, True  # the highest set bit is the largest sum


def _largest_of_halves(costs: np.ndarray, room: float) -> float:
    """Largest subset sum within `room`, by meeting in the middle (Horowitz and Sahni 1974)."""
    # listing the sums of all subsets takes 2^n; of two halves, 2 x 2^(n/2)
    halves = []
    for half in (costs[::2], costs[1::2]):
        sums = np.zeros(1, dtype=costs.dtype)
        for cost in half:
            sums = np.concatenate([sums, sums + cost])
        halves.append(np.sort(sums[sums <= room]))
    one, other = halves
    # each sum of one half is paired with the largest sum of the other that still fits; the empty
    # sum 0 is in both halves, so there always is one
    return (one + other[np.searchsorted(other, room - one, "right") - 1]).max().item()
