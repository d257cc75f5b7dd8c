"""All checks of a load: `Opening`, as this extension carries it out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import FileFormatError, InputError
from ...models.opening import Opening, Place
from . import errors, files, names, places, settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Checks(Opening):
    """The checks of one load, in their order."""

    def require_place(self, place: Place) -> None:
        places.require_place(place)

    def require_no_adapter(self, place: Place, **options: Any) -> None:
        places.require_no_adapter(place, **options)

    def require_settings(self, content: Any, place: Place, *, attention: bool = True) -> None:
        places.require_usable(content, place, attention=attention)

    def require_files(self, place: str, shapes: PreTrainedModel, **options: Any) -> None:
        places.require_own_files(place, **options)
        try:
            files.require_used_scales(place, shapes, **options)
            # packed ones differ in shape
            if Path(place).is_dir() and files.quantization(shapes) is None:
                wanted = {name: weight.shape for name, weight in shapes.state_dict().items()}
                files.require_sound_files(place, wanted)
        except FileFormatError as error:
            raise InputError(str(error)) from error

    def require_loaded(
        self,
        model: PreTrainedModel,
        report: Mapping[str, Any],
        place: str,
        shapes: PreTrainedModel,
        **options: Any,
    ) -> None:
        missing, ignored = sorted(report["missing_keys"]), names.may_ignore(model)
        unexpected = sorted(name for name in report["unexpected_keys"] if not ignored(name))
        for name in filter(files.is_wrapped, unexpected):
            raise InputError(str(files.foreign_weight(place, name)))
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise InputError(
                f"the files of {place!r} hold no {', '.join(missing[:3])}{more}, for which "
                "transformers would draw random numbers. Get the whole model, and load it again."
            )
        files.require_used_scales(place, shapes, unexpected)
        if unexpected:  # as when they are read from the disk
            raise files.foreign_weight(place, unexpected[0])
        names.tell_ignored(model, names.ignored_in(place, shapes, **options))

    def require_generation(self, config: Any, place: Place) -> None:
        settings.require_generation(config, place)

    def require_tokenizer(
        self, tokenizer: PreTrainedTokenizerBase, name: Place, place: str, **options: Any
    ) -> None:
        difference = settings.difference_from_file(tokenizer, place, options)
        if difference is not None:
            warnings.warn(f"the tokenizer of {name} {difference}", UserWarning, stacklevel=3)

    def explaining(
        self, place: Place, *, cache: Place | None = None, part: str = ""
    ) -> AbstractContextManager[None]:
        return errors.explaining(place, cache=cache, part=part)
