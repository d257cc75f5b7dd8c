"""What GenerationCompare asks for and gets: a request, its two texts, and words for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cocurve_lab import Selection
from cocurve_lab.measuring.generation import GrowingText, Question, demo_questions
from cocurve_lab.measuring.lockstep import Sampling, first_divergence
from cocurve_lab.models.loading import is_demo

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SIDES = ("dense", "pruned")


@dataclass(frozen=True)
class Request:
    """What one press of Generate asks for; `number` counts the presses."""

    number: int
    prompt: str
    prompt_ids: list[int]
    selection: Selection
    sampling: Sampling


@dataclass
class Written:
    """What came of a request: a growing text per side, and the seconds it took."""

    request: Request
    texts: dict[str, GrowingText]
    stopped: bool = False
    seconds: float = 0.0

    @property
    def divergence(self) -> int | None:
        """Index of the first token that differs."""
        return first_divergence(self.texts["dense"].ids, self.texts["pruned"].ids)

    @property
    def sampling(self) -> Sampling:
        """Sampling that writes these texts again; a stopped text was shorter than asked."""
        if not self.stopped:
            return self.request.sampling
        length = max(1, *(len(text.ids) for text in self.texts.values()))
        return replace(self.request.sampling, max_new_tokens=length)

    def sentence(self) -> str:
        """The status line."""
        sampling, place = self.request.sampling, self.divergence
        how = f"temperature {sampling.temperature:g}, seed {sampling.seed}"
        lengths = ", ".join(f"{side} {len(self.texts[side].ids)} tokens" for side in SIDES)
        so_far = " so far" if self.stopped else ""
        same = f"the texts are the same{so_far}"
        parting = same if place is None else f"they part at token {place + 1}"
        return (
            f"{'stopped: ' if self.stopped else ''}{lengths}; "
            f"{how if sampling.temperature else 'greedy'}; {parting}; "
            f"written together in {self.seconds:.1f} s"
        )


def plain_tokens(text: GrowingText, tokenizer: PreTrainedTokenizerBase) -> list[list[Any]]:
    """[id, text] of each token, and [id, "", name] of special ones, for the page."""
    special = set(tokenizer.all_special_ids)
    return [
        [token, piece, tokenizer.convert_ids_to_tokens(token)]
        if token in special
        else [token, piece]
        for token, piece in zip(text.ids, text.pieces, strict=True)
    ]


def menu_questions(
    model: PreTrainedModel, prompts: Sequence[str | Question] | None
) -> list[Question]:
    """The menu: what the user gave, else the embedded model's prompts where it is that model."""
    if prompts is not None:
        return [p if isinstance(p, Question) else Question("your prompts", p) for p in prompts]
    source = getattr(model.config, "_name_or_path", "")
    return demo_questions() if source and is_demo(source) else []


def same_plan(left: Selection, right: Selection) -> bool:
    """Whether two plans over the same units do the same to a model."""
    return left is right or (set(left.pruned), left.gains) == (set(right.pruned), right.gains)


def plan_words(plan: Selection) -> str:
    """A plan in a few words."""
    words = f"{len(plan)} of {len(plan.units)} units off, {plan.realized_ratio:.1%} of their cost"
    if plan.interaction_strength is not None:
        words += f", lambda {plan.interaction_strength:g}"
    return words + (f", {len(plan.gains)} gains" if plan.gains else "")
