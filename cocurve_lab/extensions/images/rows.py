"""Rows that carry images: what the model's processor makes of pairs of an image and a text.

Everything that measures a model takes such rows as it takes text. The model is shown the images
before it runs (`show`): from then on its decoder, when it is called with the tokens of such a row,
gets what belongs to them too. So the tokens of a row must belong to one image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...base.arguments import as_int
from ...base.errors import ArchitectureError, InputError, shown
from ...base.storage import fingerprint
from ...calibration import CalibrationSet
from ...models.architectures import describe
from ...models.families import TOWERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Given = dict[str, Tensor]  # what a processor makes of a row beside its tokens
_TEXT = ("input_ids", "attention_mask")


@dataclass(frozen=True, eq=False)
class ImageRows(CalibrationSet):
    """A `CalibrationSet` whose rows carry images.

    Attributes:
        images: of each row, the arguments of the model beside the tokens, such as pixel_values.
    """

    images: tuple[Given, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.images) != len(self):
            raise InputError(
                f"there are {len(self)} rows, but images of {len(self.images)}. Give those of each."
            )
        same: dict[str, str] = {}
        for tokens, given in zip(self.row_fingerprints, self.images, strict=True):
            if same.setdefault(tokens, _mark(given)) != _mark(given):
                raise InputError(
                    "two rows have the same tokens and different images, so the model could not "
                    "tell which is meant. Give them different texts, or longer rows."
                )

    def rows(self, start: int, stop: int) -> ImageRows:
        """Return the rows `start:stop` as a new set."""
        own = super().rows(start, stop)
        facts = own.source, own.seed, own.begun_both_ways, own.unseen
        return ImageRows(own.input_ids, own.positions, *facts, self.images[start:stop])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens, positions and images."""
        return fingerprint(super().fingerprint, [_mark(given) for given in self.images])

    @property
    def shown(self) -> dict[str, Given]:
        """The images by the fingerprint of their row's tokens."""
        return dict(zip(self.row_fingerprints, self.images, strict=True))


def image_rows(
    processor: Any,
    pairs: Iterable[tuple[Any, str]],
    *,
    seq_len: int | None = None,
    source: str = "images and their texts",
) -> ImageRows:
    """Make a row of each image and its text, as the model's processor does.

    Rows are full, so all are cut to one length; shorter ones are an error. Each position after the
    image is scored; rows that are cut score equally many, the last ones.

    Args:
        processor: the model's, from `AutoProcessor.from_pretrained`.
        pairs: an image (of PIL, or what the processor takes) and its text, which holds the
            processor's sign for the image, such as `<image>`.
        seq_len: T, tokens of a row; None means the length of the shortest.
        source: a name for the provenance.
    """
    if not hasattr(processor, "image_processor") or not hasattr(processor, "image_token_id"):
        raise InputError(
            f"the processor is {shown(type(processor).__name__)}, which reads no images. Give the "
            "model's own: transformers.AutoProcessor.from_pretrained(place)."
        )
    made: list[Given] = []
    for image, text in pairs:
        made.append(dict(processor(images=image, text=text, return_tensors="pt")))
    lengths = [given["input_ids"].shape[1] for given in made]
    length = min(lengths, default=0) if seq_len is None else as_int(seq_len, "seq_len", 2)
    if not made or length > min(lengths):
        raise InputError(
            f"the rows have {min(lengths, default=0)} tokens or more, but {length} are asked for. "
            "Give longer texts, or a smaller seq_len."
        )
    ids = torch.cat([given["input_ids"][:, :length] for given in made])
    token = int(processor.image_token_id)
    for whole, cut in zip(made, ids, strict=True):
        if int((whole["input_ids"] == token).sum()) != int((cut == token).sum()):
            raise InputError(
                f"rows of {length} tokens cut an image. Put images first, give longer texts or a "
                "larger seq_len."
            )
    starts = [int((row == token).nonzero().max()) if (row == token).any() else 0 for row in ids]
    scored = length - 1 - max(starts)
    if scored < 1:
        raise InputError("no text follows the image of a row. Give a text after each image.")
    positions = torch.arange(length - 1 - scored, length - 1).expand(len(ids), -1)
    images = tuple(_cut(given, length) for given in made)
    return ImageRows(ids, positions, source, None, (), False, images)


def _mark(given: Given) -> str:
    return fingerprint(*(part for name in sorted(given) for part in (name, given[name].numpy())))


def _cut(given: Given, length: int) -> Given:
    """What belongs to a row cut to `length`; what has a number for each token is cut too."""
    whole = given["input_ids"].shape
    beside = {name: value for name, value in given.items() if name not in _TEXT}
    return {n: v[:, :length] if v.shape == whole else v for n, v in beside.items()}


def show(model: PreTrainedModel, rows: Any) -> None:
    """Let a model see the images of rows wherever it is given their tokens, from here on."""
    images: Mapping[str, Given] = getattr(rows, "shown", {})
    tower = model.config.model_type in TOWERS
    if images and not tower:
        raise ArchitectureError(
            f"the rows from {rows.source} carry images, but {type(model).__name__} reads text "
            "alone. Give text, or load the whole model with its image tower."
        )
    token = getattr(model.config, "image_token_id", None)
    if not tower or token is None:
        return
    decoder = describe(model).decoder
    if not hasattr(decoder, "cocurve_sees"):
        decoder.cocurve_sees = _Beside({}, token)
        decoder.register_forward_pre_hook(decoder.cocurve_sees, with_kwargs=True)
    decoder.cocurve_sees.known.update(images)


class _Beside:
    """A hook that gives the decoder the images of the rows that it is called with."""

    def __init__(self, known: dict[str, Given], token: int) -> None:
        self.known, self.token = known, token

    def __deepcopy__(self, _: Any) -> _Beside:
        return self  # a pruned copy sees the same images, which are large

    def __call__(self, decoder: Any, args: Any, given: dict[str, Any]) -> Any:
        ids = given.get("input_ids")
        own = given.get("pixel_values") is not None or given.get("past_key_values") is not None
        if ids is None or own:
            return None
        marks = [fingerprint(row.numpy()) for row in ids.cpu()]
        found = [self.known.get(mark) for mark in marks]
        if not any(found):
            if bool((ids == self.token).any()):
                raise InputError(
                    "a row holds tokens of an image that the model was not shown. Measure on the "
                    "rows of image_rows, as they are."
                )
            return None
        rows = [row or {} for row in found]
        names = sorted({name for row in rows for name in row})
        beside = {
            name: torch.cat([row[name] for row in rows if name in row]).to(ids.device)
            for name in names
        }
        size = next(decoder.parameters()).dtype
        beside = {n: v.to(size) if v.is_floating_point() else v for n, v in beside.items()}
        return args, given | beside
