"""The authors' release: their matrices and masks as H and plans.

`reading.py` is imported when a release is opened.
"""

from __future__ import annotations

from ...curvature.release import RELEASE, Release


def _release() -> Release:
    from . import reading

    return reading


RELEASE.put(_release)
