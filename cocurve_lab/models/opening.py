"""What is checked of files that anybody made, and what is said where transformers fails.

The core checks nothing: transformers' own errors come through. An extension knows what has gone
wrong with such files, and is plugged in at `OPENING` (extensions/opening). torch is imported for
annotations only, so that it can plug itself in without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from ..base.plugs import Plug

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Place = str | os.PathLike[str]  # a folder or hub id


class Opening(Protocol):
    """The checks of one load, in their order; `options` say where the hub is asked."""

    def require_place(self, place: Place) -> None:
        """Raise InputError if a place is clearly a path, and no model is there."""

    def require_no_adapter(self, place: Place, **options: Any) -> None:
        """Raise InputError if an adapter, alone or beside its base, is in a folder or model."""

    def require_settings(self, content: Any, place: Place, *, attention: bool = True) -> None:
        """Check the content of a config.json before anything in it is followed.

        `attention` says whether its choice of an attention implementation will be followed.
        """

    def require_files(self, place: str, shapes: PreTrainedModel, **options: Any) -> None:
        """Check the weight files against the model on the meta device; no weight is read."""

    def require_loaded(
        self,
        model: PreTrainedModel,
        report: Mapping[str, Any],
        place: str,
        shapes: PreTrainedModel,
        **options: Any,
    ) -> None:
        """Check what was loaded; `report` is what `from_pretrained` says of missing weights."""

    def require_generation(self, config: Any, place: Place) -> None:
        """Raise FileFormatError unless a model's generation settings have types and ranges."""

    def require_tokenizer(
        self, tokenizer: PreTrainedTokenizerBase, name: Place, place: str, **options: Any
    ) -> None:
        """Warn of a tokenizer that splits text otherwise than its own file says."""

    def explaining(
        self, place: Place, *, cache: Place | None = None, part: str = ""
    ) -> AbstractContextManager[None]:
        """Turn errors of transformers inside the block into an InputError with the next step.

        `cache` is the cache_dir= of the load; `part` is what is read, such as "the tokenizer of ".
        """
        return nullcontext()


class Unchecked(Opening):
    """The core's own: everything passes."""


OPENING: Plug[Opening] = Plug(Unchecked)
