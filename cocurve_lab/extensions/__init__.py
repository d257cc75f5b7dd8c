"""Optional features. Each registers itself at a typed plug; the core imports none of them.

big_models/   weights that stay on disk, pruning to a folder, Ray
choosing/     lambda, guards and gains chosen by measured KL; search; `best_plan`
repairing/    least-squares refit of what remains, and training after it
interactions/ edges measured between blocks, layers or given parts, and plans of whole parts
machine/      plans whose widths suit the machine: tensor parallelism, alignment, whole blocks
analysis/     what else H says: gate, gains, variants of the edges, stability, bounds, refinement
judging/      text, answers, agreement of H with measured KL, the three causes of a gap
figures.py    plotly figures of an H
device.py     where a model would run, in one line
experts/      the experts of a mixture as units
opening/      checks of models that anybody made, and words for what fails
publishing/   the model card of a pruned model
release/      the authors' published matrices, masks and rows of text
texts/        text from files, mixes and the hub; the rows of a model by default
gguf/         one file for llama.cpp, and one as input
pretrained/   a real language model under a short name, fetched by one command
"""

from ..curvature.release import FORMS, SHIPPED
from ..models.sources import FILES, SOURCES
from . import big_models as _big_models  # noqa: F401, these plug themselves in
from . import experts as _experts  # noqa: F401, registers its kind and its families
from . import opening as _opening  # noqa: F401
from . import publishing as _publishing  # noqa: F401
from . import release as _release  # noqa: F401
from . import texts as _texts  # noqa: F401
from .gguf.reading import Gguf
from .pretrained.source import Smollm2

SOURCES["smollm2"] = Smollm2()
SHIPPED["smollm2"] = Smollm2.curvature_file
FORMS["cocurve-kept-curvature"] = Smollm2.curvature
FILES[".gguf"] = Gguf()
