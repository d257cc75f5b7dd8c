"""Put the notebooks and pages into the wheel, from where `cocurve lab` copies them.

What a reader's own runs leave in notebooks/ stays out, and so do the pages of results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIPPED = ("[0-9][0-9]_*.ipynb", "README.md", "explore_*.html")


class Notebooks(BuildHookInterface):
    """A build hook of hatchling, named in pyproject.toml."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to an ordinary wheel; an editable one reads them where they are."""
        if version == "standard":
            for pattern in SHIPPED:
                for file in Path(self.root, "notebooks").glob(pattern):
                    build_data["force_include"][str(file)] = f"cocurve_lab/notebooks/{file.name}"
