"""The authors' release: their matrices, masks and rows of text.

`reading.py` is imported when a release is opened, `rows.py` when text is cut as theirs is.
"""

from __future__ import annotations

from ...curvature.release import RELEASE, ROWS, Release, ReleaseRows


def _release() -> Release:
    from . import reading

    return reading


def _rows() -> ReleaseRows:
    from . import rows

    return rows


RELEASE.put(_release)
ROWS.put(_rows)
