"""Text before and after pruning."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from .calibration import CalibrationSet
from .loading import demo_folder, is_demo

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def continue_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, max_new_tokens: int = 32
) -> str:
    """Greedy continuation of a prompt, up to the end token; without the prompt itself.

    Args:
        model: dense, ablated or pruned.
        tokenizer: its tokenizer.
        text: the prompt.
        max_new_tokens: at most this many tokens.
    """
    encoded = tokenizer(text, return_tensors="pt").to(model.device)
    generate: Any = model.generate  # a mixin the type checker cannot see through
    output = generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    new = output[0, encoded["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def example_prompts(
    model_id: str | os.PathLike[str], text: CalibrationSet, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Prompts to continue: one per capability of the embedded model, else held-out beginnings."""
    if not is_demo(model_id):
        return [str(tokenizer.decode(row[:24])) for row in text.input_ids[:3]]
    files = sorted((demo_folder().parent / "prompts").glob("*.jsonl"))
    return [json.loads(file.read_text().splitlines()[0])["prompt"] for file in files]
