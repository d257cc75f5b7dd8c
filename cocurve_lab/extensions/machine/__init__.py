"""Plans that suit the machine that the pruned model runs on: `solve_aligned`.

portions.py     how many units each block may lose
aligned.py      Algorithm 2 in these portions
"""

from .aligned import solve_aligned as solve_aligned
from .portions import Machine as Machine
