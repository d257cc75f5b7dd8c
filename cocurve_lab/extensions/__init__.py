"""Optional features. Each hooks into a seam of the core; the core imports none of them.

big_models/   weights that stay on disk, pruning to a folder, Ray
choosing/     lambda, guards and gains chosen by measured KL; search; `best_plan`
repairing/    least-squares refit of what remains, and training after it
interactions/ edges measured between blocks, layers or given parts, and plans of whole parts
analysis/     stability of plans, bounds, local refinement
images/       rows that carry images, for a vision-language model; units of its image tower
gguf/         one file for llama.cpp, and one as input
pretrained/   a real language model under a short name, fetched by one command
"""

from ..base.seams import offer

_STREAMING = f"{__name__}.big_models.streaming"
offer("layer weights", f"{_STREAMING}:stream_of")
offer("streamed load", f"{_STREAMING}:streamed_load")
offer("layers in files", f"{_STREAMING}:leave_in_files")
offer("layerwise passes", f"{__name__}.big_models.layerwise:LayerwisePasses")
offer("prune to folder", f"{__name__}.big_models.on_disk:prune_to_folder")

for _part in ("model", "config", "tokenizer"):
    offer(f"gguf {_part}", f"{__name__}.gguf.reading:gguf_{_part}")
offer("images of rows", f"{__name__}.images.rows:show")
offer("two towers", f"{__name__}.images.towers:two_towers")
_PRETRAINED = f"{__name__}.pretrained"
offer("model smollm2", f"{_PRETRAINED}.smollm2:require_smollm2")
offer("own text", f"{_PRETRAINED}.texts:own_text")
offer("own questions", f"{_PRETRAINED}.texts:own_questions")
offer("row options", f"{_PRETRAINED}.texts:row_options")
