"""Optional features. Each hooks into a seam of the core; the core imports none of them.

surrogates/   other matrices beside H: pair KL, additive KL, staged and refit-aware H
big_models/   weights that stay on disk, pruning to a folder, Ray, forecasts of a build
choosing/     lambda, guards and gains chosen by measured KL; search; `best_plan`
repairing/    least-squares refit of what remains, and training after it
analysis/     stability of plans, bounds, local refinement, infinitesimal and preview H
gguf/         one file for llama.cpp
"""

from ..base.seams import offer

_STREAMING = f"{__name__}.big_models.streaming"
offer("layer weights", f"{_STREAMING}:stream_of")
offer("streamed load", f"{_STREAMING}:streamed_load")
offer("layers in files", f"{_STREAMING}:leave_in_files")
offer("layerwise passes", f"{__name__}.big_models.layerwise:LayerwisePasses")
offer("prune to folder", f"{__name__}.big_models.on_disk:prune_to_folder")
