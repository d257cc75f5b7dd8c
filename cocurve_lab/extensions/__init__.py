"""Optional features. Each hooks into a seam of the core; the core imports none of them.

surrogates/   other matrices beside H: pair KL, additive KL, staged and refit-aware H
big_models/   weights that stay on disk, pruning to a folder, Ray, forecasts of a build
choosing/     lambda, guards and gains chosen by measured KL; search; `best_plan`
repairing/    least-squares refit of what remains, and training after it
analysis/     stability of plans, bounds, local refinement, infinitesimal and preview H
gguf/         one file for llama.cpp
"""

from ..base.seams import offer

offer("layer weights", f"{__name__}.big_models.streaming:stream_of")
