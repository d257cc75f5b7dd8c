"""Checksums of files that a test changed: taken out, or made anew to reach what comes after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cocurve_lab.base.errors import FileFormatError
from cocurve_lab.base.schema import parse_json
from cocurve_lab.base.storage import SUM, seal_json
from cocurve_lab.models.identity import MANIFEST, file_sums


def fields_of(text: str) -> dict[str, Any]:
    """The fields of a JSON text, without its checksum."""
    content: dict[str, Any] = json.loads(text)
    content.pop(SUM, None)
    return content


def sealed(content: dict[str, Any]) -> str:
    """A JSON text of the fields with their checksum, as somebody who forges a file can make it."""
    return json.dumps(seal_json({k: v for k, v in content.items() if k != SUM}))


def reseal(folder: Path) -> Path:
    """Make the checksums of a pruned model's folder anew, if its manifest can be read."""
    file = folder / MANIFEST
    try:
        content = parse_json(file.read_bytes())
    except (FileFormatError, OSError):
        return folder
    if isinstance(content, dict):
        file.write_text(sealed(content | {"files": file_sums(folder)}))
    return folder
