"""Rows that carry images: H and KL against whole passes with the same images, and bad input."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.extensions.images.rows import ImageRows, image_rows
from helpers import tiny_models
from helpers.contract import by_hand, plans
from helpers.tiny_models import (
    GROUPS,
    IMAGE,
    full_logits,
    naive_build,
    relative_error,
    tiny_model,
    tiny_text,
)

LENGTH = 16
FAMILIES = ("gemma3", "qwen3_vl", "llava")


def rows_of(family: str, count: int = 2) -> ImageRows:
    """Random rows with an image of 8 x 8 in each, as the family's processor makes them."""
    random = torch.Generator().manual_seed(3)
    ids, images = torch.randint(80, (count, LENGTH), generator=random), []
    next_ones = family == "llava_next"  # two patches, and a sign after each line
    end = 12 if next_ones else 6
    for row in ids:
        row[2:end] = IMAGE
        types = (row[None] == IMAGE).int()
        if family.startswith("qwen"):
            row[1], row[6] = IMAGE + 2, IMAGE + 3
            pixels = torch.randn(16, 48, generator=random)
            grid = torch.tensor([[1, 4, 4]])
            images.append(
                {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}
            )
            continue
        shape = (1, 2, 3, 8, 8) if next_ones else (1, 3, 8, 8)
        images.append({"pixel_values": torch.randn(shape, generator=random)})
        if family == "gemma3":
            images[-1]["token_type_ids"] = types
        if family in ("llava_next", "mistral3"):
            images[-1]["image_sizes"] = torch.tensor([[8, 8]])
    scored = torch.arange(end, LENGTH - 1).expand(count, -1)
    return ImageRows(ids, scored, images=tuple(images))


def seen_by_hand(rows: ImageRows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let naive passes give the model the images themselves."""
    images = dict(zip(map(tuple, rows.input_ids.tolist()), rows.images, strict=True))

    @torch.no_grad()
    def look(model: Any, ids: torch.Tensor) -> torch.Tensor:
        given = images[tuple(ids[0].tolist())]
        return model(input_ids=ids, use_cache=False, **given).logits.double()

    monkeypatch.setattr(tiny_models, "full_logits", look)


@pytest.mark.parametrize("family", FAMILIES)
def test_h_with_images_is_naive(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = tiny_model(family), rows_of(family)
    units = cl.enumerate_units(model, GROUPS)
    found = cl.estimate_curvature(model, units, rows, 32, progress=False)
    plan = plans(units)["scattered"]
    kl = cl.measure_plans(model, [plan], rows, progress=False).kl[0]
    cl.check_equivalence(model, cl.prune(model, plan), plan, rows)
    seen_by_hand(rows, monkeypatch)
    expected, risks = naive_build(tiny_model(family), rows, 32)
    assert relative_error(found.matrix, expected) < 1e-5
    np.testing.assert_allclose(found.single_unit_risk, risks, rtol=1e-3, atol=1e-7)
    naive = tiny_models.naive_risk(tiny_model(family), by_hand(plan)[0], rows, double=False)
    np.testing.assert_allclose(kl, naive, rtol=1e-4)
    # and the images matter
    other = [given | {"pixel_values": -given["pixel_values"]} for given in rows.images]
    swapped = ImageRows(rows.input_ids, rows.positions, images=tuple(other))
    assert swapped.fingerprint != rows.fingerprint
    again = cl.estimate_curvature(tiny_model(family), units, swapped, 32, progress=False)
    assert relative_error(again.matrix, expected) > 1e-3


def test_text_after_images_is_text() -> None:
    model, text = tiny_model("qwen3_vl"), tiny_text(1, LENGTH)
    units = cl.enumerate_units(model, GROUPS)
    before = full_logits(model, text.input_ids)
    cl.estimate_curvature(model, units, rows_of("qwen3_vl"), 32, progress=False)
    assert torch.equal(full_logits(model, text.input_ids), before)


def test_parts_and_files(tmp_path: Path) -> None:
    rows = rows_of("llava", 4)
    first, second = rows.split(held_out=1)
    assert isinstance(second, ImageRows)
    assert second.images == rows.images[3:]
    assert len(first.images) == 3
    model = tiny_model("llava", layers=2)
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), [0])
    pruned = cl.prune(model, plan, verify=rows)
    loaded = cl.load_pruned(cl.save_pruned(pruned, tmp_path / "small"), device="cpu")
    cl.check_equivalence(model, loaded, plan, rows)


class Processor:
    """What a processor looks like; one image takes four tokens, each word one."""

    image_processor, image_token_id = SimpleNamespace(), IMAGE

    def __call__(self, images: torch.Tensor, text: str, return_tensors: str) -> dict[str, Any]:
        ids: list[int] = []
        for word in text.split():
            ids += [IMAGE] * 4 if word == "<image>" else [int(word)]
        tokens = torch.tensor([ids])
        made = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        return made | {"pixel_values": images[None], "token_type_ids": (tokens == IMAGE).int()}


def test_rows_of_a_processor() -> None:
    pictures = torch.randn(2, 3, 8, 8)
    texts = ["1 <image> 2 3 4 5", "1 1 <image> 7 8"]
    rows = image_rows(Processor(), zip(pictures, texts, strict=True))
    assert rows.input_ids.tolist() == [
        [1, *[IMAGE] * 4, 2, 3, 4],
        [1, 1, *[IMAGE] * 4, 7, 8],
    ]
    # the last position of an image predicts the first word after it
    assert rows.positions.tolist() == [[5, 6], [5, 6]]
    assert torch.equal(rows.images[1]["pixel_values"], pictures[1:])
    assert rows.images[0]["token_type_ids"].tolist() == [[0, 1, 1, 1, 1, 0, 0, 0]]
    assert "attention_mask" not in rows.images[0]
    for wrong, pairs, length in (
        (object(), zip(pictures, texts, strict=True), None),  # a tokenizer reads no images
        (Processor(), zip(pictures, texts, strict=True), 9),  # longer than the shorter row
        (Processor(), zip(pictures, texts, strict=True), 4),  # through an image
        (Processor(), [(pictures[0], "1 <image>")], None),  # nothing to predict
        (Processor(), [], None),
        (Processor(), [(picture, texts[0]) for picture in pictures], None),  # one text, two images
    ):
        with pytest.raises(cl.InputError):
            image_rows(wrong, pairs, seq_len=length)


def test_images_that_cannot_be_seen_are_refused() -> None:
    model, rows = tiny_model("gemma3", layers=2), rows_of("gemma3")
    blind = cl.CalibrationSet(rows.input_ids, rows.positions)
    with pytest.raises(cl.InputError, match="not shown"):
        cl.estimate_curvature(model, None, blind, 32, progress=False)
    with pytest.raises(cl.ArchitectureError, match="text"):
        cl.estimate_curvature(tiny_model(vocab_size=120), None, rows, 32, progress=False)
    plan = cl.Selection.from_pruned(cl.enumerate_units(model), [0])
    with pytest.raises(cl.InputError, match="images"):
        cl.repair(model, plan, rows)
    with pytest.raises(cl.InputError, match="workers"):
        cl.estimate_curvature(model, None, rows, 32, progress=False, workers=object())
