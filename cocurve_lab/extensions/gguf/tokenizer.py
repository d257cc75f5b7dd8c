"""A Hugging Face tokenizer in llama.cpp's terms, or the reason why it has none.

llama.cpp splits text by rules compiled into it, one set for each name in `tokenizer.ggml.pre`. A
tokenizer gets the name whose rules are its own. If there is none, it gets the name that lacks only
rules which llama.cpp does not know, with a note on the difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...base.errors import InputError
from ...base.schema import parse_json

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedTokenizerBase

NONE = "none"  # the model of a file that takes token ids only
NO_TOKENIZER = "tokenizer=None (--no-tokenizer) to write a file for token ids only"
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
_SPACE = "▁"  # U+2581, SentencePiece's space
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# (rules in order, whether a word that is a token skips the merges) -> tokenizer.ggml.pre
_PRETOKENIZERS = {
    (("bytes, gpt-2 rule",), False): "gpt-2",
    (("digits", "bytes, gpt-2 rule"), False): "smollm",
    ((_CL100K, "bytes"), True): "llama-bpe",  # Llama 3
    ((_CL100K, "bytes"), False): "dbrx",  # the same rules
    ((_CL100K.replace(r"\p{N}{1,3}", r"\p{N}"), "bytes"), False): "qwen2",
}


# Vocabulary ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """The values of the keys `tokenizer.*`.

    Attributes:
        model: "gpt2" (byte-level BPE), "llama" (SentencePiece) or "none" (token ids only).
        pretokenizer: `tokenizer.ggml.pre`.
        tokens, types, scores: one per row of the embedding; scores for SentencePiece only.
        merges: pairs "left right", best first; for byte-level BPE only.
        space_prefix: whether a space is put before a text; for SentencePiece only.
        special: token ids by role: bos, eos, unk, pad, eot.
        adds: whether (bos, eos) are added to a text.
        chat_template: Jinja, or None.
        like_phi3: whether spaces after special tokens are dropped as Phi-3's tokenizer does.
        notes: sentences on differences from the tokenizer.
        exact: False if ordinary text may become other tokens than the tokenizer's.
    """

    model: str
    pretokenizer: str = "default"
    tokens: Sequence[str] = ()
    types: Sequence[int] = ()
    scores: Sequence[float] = ()
    merges: Sequence[str] = ()
    space_prefix: bool | None = None
    special: Mapping[str, int] | None = None
    adds: tuple[bool, bool] = (False, False)
    chat_template: str | None = None
    like_phi3: bool = False
    notes: tuple[str, ...] = ()
    exact: bool = True

    def write(self, writer: GGUFWriter) -> None:
        """Add the keys `tokenizer.*` to a file that is not open yet."""
        writer.add_tokenizer_model(self.model)
        if self.model == NONE:
            return
        writer.add_tokenizer_pre(self.pretokenizer)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        writer.add_token_merges(self.merges)
        for role, index in (self.special or {}).items():
            getattr(writer, f"add_{role}_token_id")(index)
        writer.add_add_bos_token(self.adds[0])
        writer.add_add_eos_token(self.adds[1])
        if self.space_prefix is not None:
            writer.add_add_space_prefix(self.space_prefix)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def read_vocabulary(
    tokenizer: PreTrainedTokenizerBase | None,
    size: int,
    stops: Sequence[int] = (),
) -> Vocabulary:
    """Translate a tokenizer into llama.cpp's terms; InputError if llama.cpp has no such tokenizer.

    Args:
        tokenizer: the model's; None for a file that takes token ids only.
        size: V, rows of the embedding; those without a token become unused tokens.
        stops: ids with which the model ends a text, in addition to the tokenizer's.
    """
    if tokenizer is None:
        return Vocabulary(NONE, notes=("No tokenizer: the file takes token ids only.",))
    spec = _specification(tokenizer, size)
    tokens, types = _tokens(tokenizer, spec, size)
    special = _special(tokenizer, stops, size)
    adds, around = _added_around(tokenizer, special)
    own = _sentencepiece(spec, tokens) if spec["model"]["byte_fallback"] else _byte_level(spec)
    template = getattr(tokenizer, "chat_template", None)
    return replace(
        own,
        tokens=tokens,
        types=types,
        special=special,
        adds=adds,
        chat_template=template if isinstance(template, str) else None,
        like_phi3=_like_phi3(spec),
        notes=around + own.notes,
    )


def _specification(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[str, Any]:
    """Read the contents of tokenizer.json, and check that they are a BPE for this embedding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, so its rules cannot be read. "
            f"Load it with AutoTokenizer, or give {NO_TOKENIZER}."
        )
    spec: dict[str, Any] = parse_json(backend.to_str())
    if spec["model"]["type"] != "BPE":
        raise InputError(
            f"the tokenizer is a {spec['model']['type']} model; only BPE (byte-level or with byte "
            f"fallback) can be written. Give {NO_TOKENIZER}."
        )
    highest = max(tokenizer.get_vocab().values())
    if highest >= size or highest < size // 2:  # embeddings are padded, but not to twice the size
        raise InputError(
            f"the tokenizer's last token is {highest}, but the model embeds {size}; it may belong "
            "to another model. Give the dense model's tokenizer."
        )
    return spec


def _tokens(
    tokenizer: PreTrainedTokenizerBase, spec: dict[str, Any], size: int
) -> tuple[list[str], list[int]]:
    """Text and type of each of the V rows of the embedding."""
    from gguf import TokenType

    vocab = tokenizer.get_vocab()
    added = {token["id"]: token for token in spec["added_tokens"]}
    texts = {index: text for text, index in vocab.items()}
    tokens: list[str] = []
    types: list[int] = []
    for index in range(size):
        text = texts.get(index)
        kind = TokenType.NORMAL
        if text is None:
            # llama.cpp wants a token for every row: one without gets a name that is never used
            kind = TokenType.UNUSED
            text = f"[PAD{index}]"
            while text in vocab:  # llama.cpp ends the process if two tokens are equal
                text = f"[{text}]"
        elif text == spec["model"]["unk_token"]:
            kind = TokenType.UNKNOWN
        elif index in added:
            # control tokens are read from text on request only and not printed; others always
            kind = TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED
        elif spec["model"]["byte_fallback"] and re.fullmatch("<0x.{2}>", text, re.DOTALL):
            kind = TokenType.BYTE
        tokens.append(text)
        types.append(int(kind))
    return tokens, types


def _like_phi3(spec: dict[str, Any]) -> bool:
    """Whether the special tokens are those that llama.cpp expects of Phi-3, and strip alike."""
    strips = {token["content"]: token["rstrip"] for token in spec["added_tokens"]}
    expected = {text: text not in _PHI3_KEEPS_SPACES for text in (*strips, *_PHI3_KEEPS_SPACES)}
    return strips == expected and "</s>" in strips


def _special(tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], size: int) -> dict[str, int]:
    """Token ids by role."""
    roles = {role: getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "unk", "pad")}
    special = {role: int(index) for role, index in roles.items() if index is not None}
    stops = [stop for stop in stops if 0 <= stop < size]
    if "eos" not in special and not stops:
        raise InputError(
            "neither tokenizer nor model names an end-of-text token, so llama.cpp would end texts "
            f"at a token of its own choice. Set tokenizer.eos_token, or give {NO_TOKENIZER}."
        )
    special.setdefault("eos", next(iter(stops), 0))
    special.setdefault("bos", special["eos"])  # llama.cpp would take a fixed id
    # a second stop, such as the end of a chat turn; llama.cpp has a role for one
    further = [stop for stop in stops if stop != special["eos"]]
    return special | ({"eot": further[0]} if further else {})


def _added_around(
    tokenizer: PreTrainedTokenizerBase, special: Mapping[str, int]
) -> tuple[tuple[bool, bool], tuple[str, ...]]:
    """Whether (bos, eos) are put around a text, and a note if other tokens are."""
    # tried out on a text: tokenizers say it in several ways
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for bos in (False, True):
        for eos in (False, True):
            before = [special["bos"]] if bos else []
            after = [special["eos"]] if eos else []
            if whole == before + bare + after:
                return (bos, eos), ()
    return (False, False), (
        f"The tokenizer turns 'a' into {whole}. llama.cpp cannot add the tokens around it: add "
        "them to the prompt.",
    )


# Byte-level BPE: how text is split ----------------------------------------------------------------


def _byte_level(spec: dict[str, Any]) -> Vocabulary:
    """The vocabulary of a byte-level BPE, without tokens and types."""
    normalizer = (spec["normalizer"] or {"type": None})["type"]
    if normalizer not in (None, "NFC"):
        raise InputError(
            f"the tokenizer applies a {normalizer} normalizer to text; llama.cpp does not. Give "
            f"{NO_TOKENIZER}."
        )
    rules = list(_rules(spec["pre_tokenizer"]))
    known = {rule for listed, _ in _PRETOKENIZERS for rule in listed}
    shared = tuple(rule for rule in rules if rule in known)
    name = _PRETOKENIZERS.get((shared, bool(spec["model"]["ignore_merges"])))
    if name is None:
        raise InputError(
            f"llama.cpp cannot split text by this tokenizer's rules: {rules}. Give {NO_TOKENIZER}."
        )
    missing = [rule for rule in rules if rule not in known]
    notes = []
    if missing:
        notes.append(
            f"Text is split by llama.cpp's {name!r}, which lacks {missing}. Where these rules "
            "apply, tokens differ from the tokenizer's."
        )
    if normalizer == "NFC":
        notes.append("llama.cpp does not apply NFC. Give it text that is already in NFC.")
    return Vocabulary(
        "gpt2",
        pretokenizer=name,
        merges=[" ".join(pair) for pair in merge_pairs(spec)],
        notes=tuple(notes),
        exact=not missing,
    )


def _rules(pre_tokenizer: dict[str, Any] | None) -> Iterator[str]:
    """The steps that split text, each by a name, its regular expression, or as JSON."""
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
        # llama.cpp's rules isolate what they match; any other behavior makes it another rule
        plain = pre_tokenizer["behavior"] == "Isolated" and not pre_tokenizer["invert"]
        yield ("" if plain else f"{pre_tokenizer['behavior']} ") + pre_tokenizer["pattern"]["Regex"]
    else:
        yield json.dumps(pre_tokenizer, sort_keys=True, ensure_ascii=False)


# SentencePiece: spaces and merges -----------------------------------------------------------------


def _sentencepiece(spec: dict[str, Any], tokens: Sequence[str]) -> Vocabulary:
    """The vocabulary of a BPE with byte fallback, without tokens and types."""
    absent = next((f"<0x{b:02X}>" for b in range(256) if f"<0x{b:02X}>" not in tokens), None)
    if absent is not None:
        raise InputError(
            f"the tokenizer falls back to bytes, but has no token {absent}. Give {NO_TOKENIZER}."
        )
    scores, exact = scores_of(spec, tokens)
    prefix, notes = space_prefix(spec)
    note = (
        "llama.cpp merges any two pieces that make a token; this tokenizer merges only the pairs "
        "in its list. Text may become other tokens: compare on your own texts."
    )
    return Vocabulary(
        "llama",
        scores=scores,
        space_prefix=prefix,
        notes=notes if exact else (*notes, note),
        exact=exact,
    )


def space_prefix(spec: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Whether a SentencePiece tokenizer puts a space before a text, and notes on differences.

    Older tokenizers express it as normalizers, newer ones as a Metaspace pre-tokenizer.
    """
    normalizer = spec["normalizer"]
    pre_tokenizer = spec["pre_tokenizer"] or {}
    parts = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    prepend = {"type": "Prepend", "prepend": _SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if not pre_tokenizer and parts in ([prepend, replace], [replace]):
        return prepend in parts, ()
    scheme = pre_tokenizer.get("prepend_scheme")
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "split": False}
    if not parts and pre_tokenizer == metaspace | {"prepend_scheme": scheme}:
        note = (
            "llama.cpp puts a space before every text; this tokenizer does so only if the text "
            "starts without one."
        )
        return (False, ()) if scheme == "never" else (True, (note,))
    raise InputError(
        f"the tokenizer prepares text with {json.dumps(normalizer, ensure_ascii=False)} and "
        f"{json.dumps(spec['pre_tokenizer'], ensure_ascii=False)}; llama.cpp only replaces spaces "
        f"by {_SPACE!r}. Give {NO_TOKENIZER}."
    )


def scores_of(spec: dict[str, Any], tokens: Sequence[str]) -> tuple[list[float], bool]:
    """Scores [V] by which llama.cpp merges SentencePiece tokens, and whether they are exact.

    llama.cpp merges any two pieces that make a token, the token with the best score first. This is
    the order of the tokenizer's list if the list has every split of a token into two others, with
    the splits of one token next to each other.
    """
    pairs = list(merge_pairs(spec))
    made = [left + right for left, right in pairs]
    ranks: dict[str, int] = {}
    for rank, token in enumerate(made):
        ranks.setdefault(token, rank)
    pieces = spec["model"]["vocab"]
    listed = set(pairs)
    # as many runs of one token as tokens: the splits of each stand together
    exact = len([*groupby(made)]) == len(ranks) and all(
        (token[:cut], token[cut:]) in listed
        for token in ranks
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    )
    last = float(len(made) + 1)  # a token that no merge makes comes last, if at all
    return [-float(ranks.get(token, last)) for token in tokens], exact


def merge_pairs(spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The merges as (left, right), best first."""
    for merge in spec["model"]["merges"]:  # older files write "left right"
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right
