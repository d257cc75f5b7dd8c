"""Texts of the dense model and of plans, token by token, from one batch and one model in memory.

Each row runs under the masks of its plan. Nothing is held between two tokens: each step takes the
model's lock, sets its masks and restores the model. So a caller may stop anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...base.errors import InputError
from ...calibration import CalibrationSet
from ...estimator.fisher import kl_divergence
from ...estimator.support import widen
from ...models.architectures import Architecture, describe
from ...models.identity import embedding_weight, model_device
from ...models.logits import pieces, require_numbers
from ...models.masking import Scales, plan_scales, scaled, stack_rows
from ...models.runtime import context_of, in_double, measuring, require_measurable
from ...models.units import Unit
from ...solver.selection import Selection
from .generation import GrowingText, encode_prompt, last_logits, uses_chat

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Options and results ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: the most new tokens per row; the model's context may end a text earlier.
        temperature: 0 takes the likeliest token. Above 0, logits are divided by it and all rows
            choose with the same uniform draw.
        seed: seed of the draws.
        line: whether a text also ends with its first line that is not blank.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    line: bool = False

    def __post_init__(self) -> None:
        known = self.max_new_tokens >= 1 and 0 <= self.temperature < math.inf
        if not known or not 0 <= self.seed < 2**63:
            raise InputError(
                f"{self} cannot be sampled. Ask for at least 1 token, at a finite temperature of "
                "at least 0 (0 is greedy), with a seed from 0 to 2^63 - 1."
            )


GREEDY = Sampling()


@dataclass(frozen=True)
class TextPair:
    """One prompt continued by the dense model and under a plan.

    Attributes:
        prompt_ids, dense_ids, pruned_ids: token ids; a row that ended has its end token last.
        dense, pruned: the two texts, without prompt and special tokens.
        chat: whether the prompt was asked through the chat template.
    """

    prompt_ids: tuple[int, ...]
    dense_ids: tuple[int, ...]
    pruned_ids: tuple[int, ...]
    dense: str
    pruned: str
    chat: bool = False

    @property
    def divergence(self) -> int | None:
        """Index of the first generated token that differs; None if none does."""
        return first_divergence(self.dense_ids, self.pruned_ids)


def first_divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first index at which two rows of tokens differ or only one ends, or None."""
    pairs = enumerate(zip_longest(left, right))
    return next((index for index, (a, b) in pairs if a != b), None)


# Generated text -----------------------------------------------------------------------------------


def compare_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    selection: Selection | Iterable[Unit | str | int],
    sampling: Sampling = GREEDY,
    *,
    chat: bool | None = None,
) -> TextPair:
    """Continue a prompt with the dense model and under a plan, in lockstep.

    Arguments and errors are those of `generate_rows`.
    """
    prompt_ids = encode_prompt(model, tokenizer, prompt, chat)
    texts = (GrowingText(tokenizer, prompt_ids), GrowingText(tokenizer, prompt_ids))
    for pair in generate_rows(model, tokenizer, prompt, ([], selection), sampling, chat=chat):
        for text, token in zip(texts, pair, strict=True):
            if token is not None:
                text.add(token)
    dense, pruned = texts
    return TextPair(
        tuple(prompt_ids),
        tuple(dense.ids),
        tuple(pruned.ids),
        dense.text,
        pruned.text,
        uses_chat(tokenizer, chat),
    )


def generate_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    selections: Sequence[Selection | Iterable[Unit | str | int]],
    sampling: Sampling = GREEDY,
    *,
    chat: bool | None = None,
) -> Iterator[tuple[int | None, ...]]:
    """Yield the next token of the text under each plan, None for a text that has ended.

    Each row is what that model would generate alone (half precision may round a batch of two
    differently). When sampling, one uniform number per step picks a token from all distributions,
    so equal distributions give equal tokens.

    Args:
        model: the dense model; it may be used freely between two steps.
        tokenizer: its tokenizer; it encodes the prompt as in `continue_text`.
        prompt: the text to continue.
        selections: as for `pruning_risk`; the gains of a Selection apply. An empty plan
            is the dense model.
        sampling: length, temperature and seed.
        chat: as for `continue_text`.
    """
    architecture = describe(model)
    masks = [plan_scales(architecture, plan) for plan in selections]
    ids = encode_prompt(model, tokenizer, prompt, chat)
    texts = [GrowingText(tokenizer, ids) for _ in masks] if sampling.line else None
    return _steps(architecture, ids, masks, sampling, texts)


# A given text -----------------------------------------------------------------------------------


def forced_kl(
    model: PreTrainedModel,
    selection: Selection | Iterable[Unit | str | int],
    input_ids: Sequence[int] | Tensor,
) -> np.ndarray:
    """Measure KL(dense || pruned) at every position of a given text (teacher-forced).

    Both models read the same tokens, so values stay comparable where their own texts would differ.
    The mean over positions is `pruning_risk` on this row.

    Args:
        model: the dense model.
        selection: as for `pruning_risk`; the gains of a Selection apply.
        input_ids: the text [T], at least two tokens.

    Returns:
        [T - 1] float64, nats per token over the full vocabulary; entry t scores the prediction of
        token t + 1.
    """
    architecture = describe(model)
    row = torch.as_tensor(input_ids)
    if row.dim() != 1 or len(row) < 2:
        raise InputError(
            f"the text has shape {tuple(row.shape)}. Give one row of at least two tokens."
        )
    require_measurable(model, CalibrationSet(row[None]))
    scales = plan_scales(architecture, selection)
    ids = row.to(model_device(model)).expand(2, -1)
    with measuring(model, torch.get_num_threads()):
        with scaled(architecture, stack_rows(architecture, [{}, scales])):
            hidden = architecture.last_hidden(ids)[:, :-1]
        parts = []
        for part in pieces(hidden.shape[1], 16 * architecture.vocabulary):
            logits, masked = widen(architecture.logits(hidden[:, part]))
            kl = kl_divergence(torch.softmax(logits, dim=-1), masked - logits)
            parts.append(in_double(kl).cpu())
    values: np.ndarray = torch.cat(parts).numpy()
    require_numbers(np.isfinite(values).all(), "the text")
    return values


def next_token_probabilities(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    selections: Sequence[Selection],
    prompt: str,
    *,
    chat: bool | None = None,
) -> np.ndarray:
    """Measure how likely each token is after a prompt under each plan, in one batch.

    Args:
        model: the dense model.
        tokenizer: its tokenizer.
        selections: plans over the model's units; an empty plan is the dense model.
        prompt: the text to continue.
        chat: as for `continue_text`.

    Returns:
        [plans, V] float64; each row sums to 1.
    """
    if not selections:
        raise InputError("next_token_probabilities got no plan. Give at least one Selection.")
    architecture = describe(model)
    ids = torch.tensor([encode_prompt(model, tokenizer, prompt, chat)], device=model_device(model))
    masks = [plan_scales(architecture, plan) for plan in selections]
    with measuring(model, torch.get_num_threads()):
        with scaled(architecture, stack_rows(architecture, masks)):
            rows = ids.expand(len(masks), -1)
            hidden = architecture.last_hidden(rows)
        logits = widen(architecture.logits(hidden[:, -1]))
        found: np.ndarray = torch.softmax(in_double(logits), dim=-1).cpu().numpy()
    require_numbers(np.isfinite(found).all(), "the prompt")
    return found


def _steps(
    architecture: Architecture,
    prompt_ids: list[int],
    scales: list[Scales],
    sampling: Sampling,
    texts: list[GrowingText] | None,
) -> Iterator[tuple[int | None, ...]]:
    """The loop of `generate_rows`, a generator: it runs only when a token is asked for."""
    model: Any = architecture.model
    weight = embedding_weight(model)
    # equal masks share a row, which makes their texts equal to the last bit
    firsts = [next(i for i, other in enumerate(scales) if _same(own, other)) for own in scales]
    rows = sorted(set(firsts))
    masks = {  # moved once, not at every step
        key: mask.to(weight.device, weight.dtype)
        for key, mask in stack_rows(architecture, [scales[i] for i in rows]).items()
    }
    draws = torch.Generator().manual_seed(sampling.seed)
    # all rows have the same prompt and grow by one token per step, so no padding is needed and no
    # attention mask; a row that has ended runs on until all have, and its tokens are dropped
    inputs = torch.tensor([prompt_ids] * len(rows), device=weight.device)
    cache: dict[str, Any] = {}
    running, ends = [True] * len(scales), end_tokens(model)
    for _ in range(int(min(sampling.max_new_tokens, context_of(model) - len(prompt_ids)))):
        with measuring(model, torch.get_num_threads()), scaled(architecture, masks):
            logits, cache = last_logits(model, inputs, cache)
            uniform = float(torch.rand((), generator=draws, dtype=torch.float64))
            chosen = _choose(logits, sampling.temperature, uniform)
        tokens = [chosen[rows.index(first)] for first in firsts]
        yield tuple(t if on else None for t, on in zip(tokens, running, strict=True))
        for i, token in enumerate(tokens):
            if running[i] and texts is not None:
                texts[i].add(token)
                running[i] = "\n" not in texts[i].text.lstrip()
            running[i] = running[i] and token not in ends
        if not any(running):
            return
        inputs = torch.tensor(chosen, device=weight.device)[:, None]


def _same(one: Scales, other: Scales) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _choose(logits: Tensor, temperature: float, uniform: float) -> list[int]:
    """One token per row of logits [B, V]: the likeliest, or the one at `uniform` in the CDF."""
    require_numbers(not bool(logits.isnan().any()), "the text so far")
    if temperature == 0:
        return logits.argmax(dim=-1).tolist()
    wide = in_double(logits)
    below = wide - wide.amax(dim=-1, keepdim=True)  # <= 0: no overflow at any T
    shares = torch.softmax(below / temperature, dim=-1)
    # in order of falling probability, so that similar distributions mostly give the same token
    ordered, ids = shares.sort(dim=-1, descending=True, stable=True)
    reached = ordered.cumsum(dim=-1)
    # scaled by the last entry, which rounding leaves beside 1
    place = torch.searchsorted(reached, uniform * reached[:, -1:], right=True)
    return ids.gather(-1, place.clamp(max=logits.shape[-1] - 1)).squeeze(-1).tolist()


def end_tokens(model: PreTrainedModel) -> set[int]:
    """Return the token ids that end a text: those at which `model.generate` stops."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        return set()
    return set(ends) if isinstance(ends, (list, tuple)) else {int(ends)}
