"""Plans that suit the machine that the pruned model runs on: `solve_aligned`."""

from .portions import Machine as Machine
from .portions import solve_aligned as solve_aligned
