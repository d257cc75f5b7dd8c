"""How llama.cpp splits text, and which of its ways is a tokenizer's own.

It splits by rules compiled into it, one set per name in `tokenizer.ggml.pre`, and merges pieces of
SentencePiece by their scores. Everything here reads tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ..errors import InputError

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# rules in order, and whether a word that is a token skips the merges -> tokenizer.ggml.pre
_PRETOKENIZERS = {
    (("bytes, gpt-2 rule",), False): "gpt-2",
    (("digits", "bytes, gpt-2 rule"), False): "smollm",
    ((_CL100K, "bytes"), True): "llama-bpe",  # Llama 3
    ((_CL100K, "bytes"), False): "dbrx",  # the same rules
    ((_CL100K.replace(r"\p{N}{1,3}", r"\p{N}"), "bytes"), False): "qwen2",
}
_SPACE = "▁"  # U+2581


def pretokenizer_for(spec: dict[str, Any], chosen: str | None) -> tuple[str, str | None]:
    """(name, what differs): the name with the tokenizer's rules, or the nearest."""
    rules, whole_words = tuple(_rules(spec["pre_tokenizer"])), bool(spec["model"]["ignore_merges"])
    exact = _PRETOKENIZERS.get((rules, whole_words))
    if chosen is not None and chosen != exact:
        return chosen, (
            f"Text is split by llama.cpp's {chosen!r}, as asked, not by {list(rules)}. A llama.cpp "
            "that does not know that name refuses the file."
        )
    if exact is not None:
        return exact, None
    known = {rule for listed, _ in _PRETOKENIZERS for rule in listed}
    shared = tuple(rule for rule in rules if rule in known)
    nearest = _PRETOKENIZERS.get((shared, whole_words))
    if nearest is None:
        raise InputError(
            f"llama.cpp splits text by rules of its own, and none are this tokenizer's: "
            f"{list(rules)}. Give pretokenizer= one of llama.cpp's names to take its rules, or "
            "tokenizer=None to write token ids only."
        )
    missing = [rule for rule in rules if rule not in known]
    return nearest, (
        f"Text is split by llama.cpp's {nearest!r}, which lacks {missing}: where that applies, "
        "tokens differ from the original's."
    )


def _rules(pre_tokenizer: dict[str, Any] | None) -> Iterator[str]:
    """The steps that split text, each in words or as its regular expression."""
    if pre_tokenizer is None:
        return
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        for part in pre_tokenizer["pretokenizers"]:
            yield from _rules(part)
    elif kind == "ByteLevel" and not pre_tokenizer["add_prefix_space"]:
        yield "bytes, gpt-2 rule" if pre_tokenizer["use_regex"] else "bytes"
    elif kind == "Digits" and pre_tokenizer["individual_digits"]:
        yield "digits"
    elif kind == "Split" and "Regex" in pre_tokenizer["pattern"]:
        plain = pre_tokenizer["behavior"] == "Isolated" and not pre_tokenizer["invert"]
        yield ("" if plain else f"{pre_tokenizer['behavior']} ") + pre_tokenizer["pattern"]["Regex"]
    else:
        yield json.dumps(pre_tokenizer, sort_keys=True, ensure_ascii=False)


def space_prefix(spec: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Whether a SentencePiece tokenizer puts a space before the text, and what differs.

    Older ones say it as normalizers, newer ones as a Metaspace pre-tokenizer.

    Raises:
        InputError: it does more to the text.
    """
    normalizer, pre_tokenizer = spec["normalizer"], spec["pre_tokenizer"] or {}
    parts = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    prepend = {"type": "Prepend", "prepend": _SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if not pre_tokenizer and parts in ([prepend, replace], [replace]):
        return prepend in parts, ()
    scheme = pre_tokenizer.get("prepend_scheme")
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "split": False}
    if not parts and pre_tokenizer == metaspace | {"prepend_scheme": scheme}:
        note = "llama.cpp puts a space before every text, this tokenizer only where there is none."
        return (False, ()) if scheme == "never" else (True, (note,))
    raise InputError(
        f"the tokenizer prepares text with {json.dumps(normalizer, ensure_ascii=False)} and "
        f"{json.dumps(spec['pre_tokenizer'], ensure_ascii=False)}; llama.cpp only replaces spaces "
        f"by {_SPACE!r}. Give tokenizer=None to write token ids only."
    )


def merge_pairs(spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The merges, best first."""
    for merge in spec["model"]["merges"]:  # older files write "left right"
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


def scores_of(spec: dict[str, Any], tokens: Sequence[str]) -> tuple[list[float], bool]:
    """Scores [V] by which llama.cpp merges SentencePiece tokens, and whether as the list says.

    llama.cpp merges any two pieces that make a token, the best token first. That is the list's
    order if the list holds every split of a token into two others, those of one token together.
    """
    pairs = list(merge_pairs(spec))
    made = [left + right for left, right in pairs]
    ranks: dict[str, int] = {}
    for rank, token in enumerate(made):
        ranks.setdefault(token, rank)
    pieces, listed = spec["model"]["vocab"], set(pairs)
    exact = len([*groupby(made)]) == len(ranks) and all(
        (token[:cut], token[cut:]) in listed
        for token in ranks
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    )
    last = float(len(made) + 1)  # what no merge makes is made last, if at all
    return [-float(ranks.get(token, last)) for token in tokens], exact
