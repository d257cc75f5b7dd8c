"""Small tokenizers of the kinds real models have, trained on the texts in data/."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXTS = Path(__file__).resolve().parents[2] / "data" / "texts" / "calibration.jsonl"
SIZE = 400
# written out here on purpose: what Llama 3 and Qwen2 ship
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL: dict[str, tuple[list[Any], bool]] = {  # tokenizer.ggml.pre: splitting, ignore_merges
    "gpt-2": ([pre_tokenizers.ByteLevel(add_prefix_space=False)], False),
    "smollm": (
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        False,
    ),
    "llama-bpe": (
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
        True,
    ),
    "dbrx": (
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
        False,
    ),
    "qwen2": (
        [
            pre_tokenizers.Split(Regex(QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
        False,
    ),
}
SENTENCEPIECE = ("prefix", "no prefix", "metaspace")
HARD = (  # where rules differ: numbers, contractions, capitals, spaces, lines, other scripts
    "In 2026 there were 1234567 of them, 3.14 and 10,000!",
    "I'm sure they'll say we've won; it's DON'T and O'Brien's.",
    "  two  spaces,\ttabs\n\n\nand lines\r\n  x = y+1;  ",
    "naïve café – 北京 и Москва 🙂🙂, ½ x² ٣٤",
    "def f(x):\n    return x**2  # squared",
    "ABC XYZ HTTPServer iPhone",
    "a",
)


@functools.cache
def byte_level(name: str, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the splitting of BYTE_LEVEL[name]."""
    steps, ignore_merges = BYTE_LEVEL[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>"
    )


@functools.cache
def sentencepiece(style: str) -> PreTrainedTokenizerFast:
    """A BPE with byte fallback as converters make it: every split of every piece is a merge."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=SIZE - 259, show_progress=False)
    trained.train_from_iterator(_lines(), trainer)
    learned = json.loads(trained.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].get)
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [*(f"<0x{byte:02X}>" for byte in range(256)), *pieces]:
        vocab.setdefault(piece, len(vocab))
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    replace = normalizers.Replace(" ", "▁")
    if style == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif style == "prefix":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    else:
        tokenizer.normalizer = replace
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def like_phi3() -> PreTrainedTokenizerFast:
    """A SentencePiece tokenizer with special tokens that drop the spaces after them as Phi-3's."""
    spec = json.loads(sentencepiece("prefix").backend_tokenizer.to_str())
    for index, text in enumerate(("<|endoftext|>", "<|user|>", "<|end|>"), start=SIZE):
        spec["added_tokens"].append(spec["added_tokens"][0] | {"id": index, "content": text})
    for token in spec["added_tokens"]:
        token["rstrip"] = token["content"] in ("</s>", "<|user|>", "<|end|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def _lines() -> list[str]:
    lines = TEXTS.read_text(encoding="utf-8").splitlines()[:300]
    return [json.loads(line)["text"] for line in lines]
