"""What an exported page holds."""

from __future__ import annotations

import json
import re
from pathlib import Path


def data_of(path: Path) -> dict:
    """The JSON inside a page that `export_html` wrote."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="cocurve-data">(.*?)</script>', text)
    assert found
    return json.loads(found[1])
