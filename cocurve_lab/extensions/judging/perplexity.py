"""Perplexity by a sliding window (appendix "Evaluation Protocol"), reported with its protocol."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...base.arguments import as_int, as_list, require_choice
from ...base.errors import InputError
from ...base.progress import Progress, open_bar
from ...calibration import bare_ids, require_tokenizable, text_start
from ...models.identity import embedding_weight, model_device, vocabulary_mark
from ...models.logits import (
    log_likelihood,
    require_numbers,
    too_large,
    unless_too_large,
)
from ...models.runtime import context_of, in_double, measuring, require_known_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Starts = Literal["every window", "first window"]
_LOGIT_BYTES = 256e6  # bytes of logits in a batch of windows; a single window may need more
_BATCH_TOKENS = 8192  # with more tokens a forward pass gets no faster, and on a CPU slower


@dataclass(frozen=True)
class PerplexityOptions:
    """Options of running the text.

    Attributes:
        starts: the windows that begin with `<bos>`, or what else begins a text: every one, or the
            first alone, as in the authors' release.
        progress: show a bar; "lines" writes lines for a log file instead.
        tokens: the most that are read, from the start of the text; None reads all.
    """

    progress: Progress = True
    starts: Starts = "every window"
    tokens: int | None = None

    def __post_init__(self) -> None:
        require_choice(self.starts, Starts, "starts")


@dataclass(frozen=True)
class Perplexity:
    """A perplexity with its protocol and its parts; made by `perplexity`.

    Attributes:
        value: exp(nll).
        nll: mean negative log-likelihood, nats per scored token.
        tokens: number of scored tokens; a first token with nothing before it has no prediction.
        protocol: the protocol in one sentence, to print with the number.
        context, stride: tokens per window and between the starts of windows, as used.
        window_nll, window_tokens: summed nats and number of scored tokens of each window [W].
    """

    value: float
    nll: float
    tokens: int
    protocol: str
    context: int
    stride: int
    window_nll: tuple[float, ...]
    window_tokens: tuple[int, ...]

    @property
    def standard_error(self) -> float | None:
        """Standard error of `nll`, nats per token, taking windows as independent.

        None with fewer than two windows.
        """
        return _ratio_error(np.array(self.window_nll), np.array(self.window_tokens))

    def __repr__(self) -> str:
        error = self.standard_error
        spread = "" if error is None else f" ± {error:.4f}"
        return (
            f"perplexity {self.value:.4g} ({self.nll:.4f}{spread} nats per token, {self.tokens:,} "
            f"tokens). {self.protocol}"
        )


class Window(NamedTuple):
    """Tokens [start, stop) of the text, of which the last `scored` are scored."""

    start: int
    stop: int
    scored: int


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Iterable[str],
    context: int = 2048,
    stride: int = 512,
    options: PerplexityOptions | None = None,
    *,
    bos: str | int | None = None,
) -> Perplexity:
    """Compute the perplexity of a text by a sliding window (appendix "Evaluation Protocol").

    Windows of `context` tokens start every `stride` tokens. Each window scores the tokens that no
    earlier one has scored, given all tokens before them in the window. So every token is scored
    once, including the tail. With stride = context the windows do not overlap. The first token of a
    window is scored only after a token that begins the window, such as `<bos>`.

    Args:
        model: a dense, ablated or pruned model.
        tokenizer: its tokenizer; the text is tokenized as a whole.
        text: a text, or documents, which are joined by blank lines (as SparseGPT, Wanda and the
            harness recipes join WikiText-2).
        context: tokens per window, `<bos>` included. A model with a shorter context uses its own,
            with the stride shortened in proportion; the protocol then states that.
        stride: tokens between the starts of windows, at most `context`; 512 in the paper's tables.
        options: windows that begin a text, progress.
        bos: the token that begins a window; None begins windows as the tokenizer begins a text
            (many add nothing), and "" with nothing.
    """
    options = options or PerplexityOptions()
    context, stride = as_int(context, "context"), as_int(stride, "stride")
    if not 1 <= stride <= context or context < 2:
        raise InputError(
            f"context is {context} and stride is {stride}. Give a context of 2 tokens or more, and "
            "a stride from 1 to the context."
        )
    used, step = _fitting(model, context, stride)
    ids, joined = _tokens(tokenizer, text)
    if options.tokens is not None and len(ids) > options.tokens:
        joined += f", the first {options.tokens:,} of {len(ids):,} tokens"
        ids = ids[: options.tokens]
    start = text_start(tokenizer, bos)
    if start:
        joined += f", {options.starts} after {tokenizer.decode(start)}"
    if options.starts == "first window":  # then it is a part of the text
        ids, start = start + ids, []
    if len(ids) + bool(start) < 2 or len(start) >= used:
        raise InputError(
            f"the text has {len(ids)} tokens, a window {used}, and {len(start)} begin it. A "
            "prediction needs a token and one before it. Give a longer text or context."
        )
    require_known_ids(model, max(*start, *ids), vocabulary_mark(tokenizer))
    protocol = _protocol((context, stride), (used, step), joined)
    step = min(step, used - len(start))
    windows = list(_windows(len(ids), used - len(start), step, bool(start)))
    sums = _measure(model, torch.tensor(start), torch.tensor(ids), windows, options)
    counts = tuple(window.scored for window in windows)
    nll = math.fsum(sums) / sum(counts)
    value = math.exp(nll) if nll < 700 else math.inf  # exp overflows above 709
    return Perplexity(value, nll, sum(counts), protocol, used, step, tuple(sums), counts)


def _fitting(model: PreTrainedModel, context: int, stride: int) -> tuple[int, int]:
    """Context and stride that the model can run, with the asked share of new tokens per window."""
    own = context_of(model)
    if own >= context:
        return context, stride
    return int(own), max(1, round(stride * own / context))


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str | Iterable[str]) -> tuple[list[int], str]:
    """Ids of the whole text, and the joining of documents in words."""
    documents = [text] if isinstance(text, str) else as_list(text, "text")
    for document in documents:
        require_tokenizable(document)
    ids = bare_ids(tokenizer, require_tokenizable("\n\n".join(documents)))
    if len(documents) == 1:
        return ids, "one text"
    return ids, f"{len(documents):,} documents joined by a blank line"


def _windows(tokens: int, room: int, stride: int, begun: bool) -> Iterator[Window]:
    """The windows over a text; those with no token left to score are omitted.

    Args:
        tokens: number of tokens of the text.
        room: the most of them in a window.
        stride: tokens between the starts of windows, at most `room`.
        begun: whether something stands before each window, so that its first token is scored.
    """
    done = 0
    for start in range(0, tokens, stride):
        stop = min(start + room, tokens)
        scored = stop - max(done, start + (not begun))  # a first token needs one before it
        if scored > 0:
            yield Window(start, stop, scored)
        if stop == tokens:
            return
        done = stop


def _measure(
    model: PreTrainedModel,
    start: Tensor,
    ids: Tensor,
    windows: list[Window],
    options: PerplexityOptions,
) -> list[float]:
    """Summed nats of each window, with `start` before it."""
    sums: list[float] = []
    start, ids = (tokens.long().to(model_device(model)) for tokens in (start, ids))
    bar = open_bar(options.progress, total=len(windows), desc="perplexity", unit="window")
    with measuring(model, torch.get_num_threads()), bar:
        # a batch has windows of one shape, which need no padding: all but the first and the last
        for (length, scored), same in groupby(windows, lambda w: (w.stop - w.start, w.scored)):
            group = list(same)
            fits = int(_LOGIT_BYTES // (4 * (scored + 1) * embedding_weight(model).shape[0]))
            batch = max(1, min(fits, _BATCH_TOKENS // (len(start) + length)))
            while group:
                found = unless_too_large(_batch, model, start, ids, group[:batch])
                if found is None and batch == 1:
                    raise too_large(f"one window of {length} tokens")
                if found is None:  # out of memory: the same windows again, by halves
                    batch //= 2
                    continue
                sums += found
                bar.update(len(found))
                group = group[len(found) :]
    finite = np.isfinite(sums)
    require_numbers(finite.all(), f"window {int(np.argmin(finite))}")
    return sums


def _batch(model: Any, start: Tensor, ids: Tensor, windows: list[Window]) -> list[float]:
    """Summed nats of windows of one shape."""
    rows = torch.stack([torch.cat([start, ids[w.start : w.stop]]) for w in windows])
    scored = windows[0].scored
    # logits for the scored tokens only: position t predicts token t + 1, so one more is needed
    # before them, and the last position predicts none
    output = model(input_ids=rows, use_cache=False, logits_to_keep=scored + 1)
    nats = -log_likelihood(output.logits[:, :-1].float(), rows[:, -scored:])
    return [float(total) for total in in_double(nats).sum(dim=-1)]


def _protocol(asked: tuple[int, int], used: tuple[int, int], joined: str) -> str:
    """The protocol in a sentence, from (context, stride) as asked and as used."""
    context, stride = used
    kind = "non-overlapping windows" if context == stride else f"sliding window, stride {stride}"
    own = ""
    if asked != used:
        own = f" (the model's own; {asked[0]} with stride {asked[1]} was asked for)"
    return (
        f"Context {context} tokens{own}, {kind}; {joined}, the model's own tokenizer; per token, "
        "not comparable with other tokenizers or word perplexity."
    )


def _ratio_error(sums: np.ndarray, counts: np.ndarray) -> float | None:
    """Standard error of sum(sums) / sum(counts) over windows; None with fewer than two."""
    windows = len(sums)
    if windows < 2:
        return None
    # both sums vary over windows: to first order the ratio varies with these residuals
    residuals = sums - counts * (sums.sum() / counts.sum())
    return float(np.sqrt(windows / (windows - 1) * (residuals**2).sum()) / counts.sum())
