"""Optional features. Each hooks into a seam of the core; the core imports none of them.

surrogates/   other matrices beside H: pair KL, additive KL, staged and refit-aware H
big_models/   weights that stay on disk, pruning to a folder, Ray, forecasts, bfloat16 products
choosing/     lambda, guards and gains chosen by measured KL; search; `best_plan`
repairing/    least-squares refit of what remains, and training after it
interactions/ edges measured between blocks, layers or given parts, and plans of whole parts
machine/      plans whose widths suit the machine: tensor parallelism, alignment, whole blocks
analysis/     stability of plans, bounds, local refinement, infinitesimal and preview H
experts/      the experts of a mixture as units
opening/      checks of models that anybody made, and words for what fails
publishing/   the model card of a pruned model
gguf/         one file for llama.cpp, and one as input
pretrained/   a real language model under a short name, fetched by one command
"""

from ..base.seams import offer
from ..models.sources import FILES, SOURCES
from . import big_models as _big_models  # noqa: F401, these plug themselves in
from . import experts as _experts  # noqa: F401, registers its kind and its families
from . import opening as _opening  # noqa: F401
from . import publishing as _publishing  # noqa: F401
from .gguf.source import Gguf
from .pretrained.source import Smollm2

SOURCES["smollm2"] = Smollm2()
FILES[".gguf"] = Gguf()

_PRODUCTS = f"{__name__}.big_models.products"
offer("bfloat16 products", f"{_PRODUCTS}:ShiftProducts")
offer("bytes of bfloat16 products", f"{_PRODUCTS}:products_bytes")
offer("require products", f"{_PRODUCTS}:require_products")

_SURROGATES, _ANALYSIS = f"{__name__}.surrogates", f"{__name__}.analysis"
offer("sketch beside", f"{_SURROGATES}.sketched:beside")
offer("sketch saved", f"{_SURROGATES}.sketched:keep")
offer("sketches joined", f"{_SURROGATES}.sketched:joined")
offer("prices of plans", f"{_SURROGATES}.sketched:Prices")
offer("note of a curvature", f"{_SURROGATES}.notes:note_of")
offer("sketches of a build", f"{_SURROGATES}.sketch:Sketches")
offer("sketch of a sequence", f"{_SURROGATES}.sketch:SequenceSketch")
offer("refit-aware ablations", f"{_SURROGATES}.refit_aware:leftovers")
offer("refit-aware preparation", f"{_SURROGATES}.refit_aware:preparation")
offer("probe options", f"{_ANALYSIS}.preview:ProbeOptions")
offer("exact options", f"{_ANALYSIS}.exact:ExactOptions")
