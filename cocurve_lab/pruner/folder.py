"""A saved folder: its configuration, the facts of its card, and what extensions write into it.

torch is imported for annotations only, so that an extension can plug itself in without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..base.errors import FileFormatError, InputError, MismatchError, one_line
from ..base.plugs import Plug, absent
from ..base.schema import read_json
from ..models.sources import OPENING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from ..models.architectures import Architecture
    from ..solver.selection import Selection

_OWN_KEYS = ("per_layer_config", "allow_global_per_layer_attribute_access", "auto_map")


# Its configuration --------------------------------------------------------------------------------


def dense_configuration(folder: Path) -> PreTrainedConfig:
    """Read the configuration of a saved folder without its layers' widths; run no code of it."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    path = folder / "config.json"
    with rejecting(f"{path} cannot be read"):
        content = read_json(path)
        OPENING().require_settings(content, folder)
        # otherwise the model's own, as in Gemma 4
        if "auto_map" in content or "Cocurve" in str(content.get("architectures")):
            content = stock_keys(content)
        content = PreTrainedConfig._decode_special_floats(content)  # infinity, in Granite 4
        config = CONFIG_MAPPING[content["model_type"]].from_dict(content)
    config._name_or_path = str(folder)
    return config


@contextmanager
def rejecting(fact: str) -> Iterator[None]:
    """Turn what transformers makes of a damaged file, nearly any error, into a FileFormatError."""
    try:
        yield
    except InputError as error:
        raise FileFormatError(str(error)) from None
    except Exception as error:
        raise FileFormatError(
            f"{fact} ({type(error).__name__}: {one_line(error)}). Save the model again."
        ) from None


def stock_keys(content: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's values without the keys that only the modeling file understands."""
    kept = {name: value for name, value in content.items() if name not in _OWN_KEYS}
    if isinstance(text := kept.get("text_config"), dict):
        kept["text_config"] = stock_keys(text)
    return kept


# The facts of its card ----------------------------------------------------------------------------


@dataclass(frozen=True)
class CardFacts:
    """Facts about a pruned model beyond its plan; None where one is not known.

    Attributes:
        base_model: the dense model's hub id; None takes the name the model was loaded under.
        license: the hub's license id of the dense model, which usually binds the pruned one too.
        kl: measured KL(dense || pruned) in nats per token, on text that H was not built on
            (`pruning_risk`, or `measure_plans(...).mean`).
        kl_error: the standard error of `kl`, in nats per token.
        kl_text: a description of that text: source, sequences, length, scored positions.
        dense_perplexity, pruned_perplexity: a `Perplexity` each, on one text with one protocol.
    """

    base_model: str | None = None
    license: str | None = None
    kl: float | None = None
    kl_error: float | None = None
    kl_text: str | None = None
    dense_perplexity: Any = None
    pruned_perplexity: Any = None

    def __post_init__(self) -> None:
        dense, pruned = self.dense_perplexity, self.pruned_perplexity
        if dense is not None and pruned is not None and dense.protocol != pruned.protocol:
            raise MismatchError(
                f"the perplexities have different protocols. Dense: {dense.protocol} Pruned: "
                f"{pruned.protocol} Measure both models on one text with one protocol."
            )


# What extensions write ----------------------------------------------------------------------------


class PruneToFolder(Protocol):
    """Writes the pruned model into a folder as `save_pruned` would, weight by weight."""

    def __call__(
        self,
        model: PreTrainedModel,
        selection: Selection,
        folder: str | os.PathLike[str],
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        check: Callable[[Path], object],
    ) -> Path:
        """Write the folder, and return it.

        `check` is called with what was written before it becomes the folder, and may raise.
        """


# "stock": AutoModelForCausalLM.from_pretrained(folder); "own code": the same with
# trust_remote_code=True; "cocurve_lab": load_pruned only
Loader = Literal["stock", "own code", "cocurve_lab"]


class Publishing(Protocol):
    """Writes what others need of a folder beside the weights; by itself, nothing."""

    def write_configuration(
        self, pruned: Architecture, layers: Sequence[Mapping[str, int]], folder: Path
    ) -> Loader:
        """Write what transformers needs to load the folder, and return what loads it.

        `layers` are the widths of the manifest. A config.json of the dense model is there already.
        """
        return "cocurve_lab"

    def write_card(
        self, folder: Path, manifest: Mapping[str, Any], facts: CardFacts, *, has_tokenizer: bool
    ) -> None:
        """Write the model card, README.md."""


class Unpublished(Publishing):
    """The core's own: a folder that only this library loads."""


FOLDERS: Plug[PruneToFolder] = Plug(absent("prune(out=)"))
PUBLISHING: Plug[Publishing] = Plug(Unpublished)
