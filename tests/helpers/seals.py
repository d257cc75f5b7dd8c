"""Files as earlier releases wrote them, without a checksum, to reach the checks behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cocurve_lab.base.storage import SUM
from cocurve_lab.models.identity import MANIFEST


def fields_of(text: str) -> dict[str, Any]:
    """The fields of a JSON text, without its checksum."""
    content: dict[str, Any] = json.loads(text)
    content.pop(SUM, None)
    return content


def unseal(folder: Path) -> Path:
    """Take the checksum out of the manifest of a pruned model's folder."""
    file = folder / MANIFEST
    file.write_text(json.dumps(fields_of(file.read_text())))
    return folder
