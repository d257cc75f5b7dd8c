"""The tables of the paper, measured again: `cocurve paper`."""

from typing import Literal

GuardsRule = Literal["search", "paper", "none"]  # of `--guards`; see `Protocol.guards`
