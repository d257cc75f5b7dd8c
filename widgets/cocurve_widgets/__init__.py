"""Instruments for notebooks. This release holds none: they arrive with the next one.

Everything they will show can be computed today with `cocurve_lab`.
"""

__all__: list[str] = []
