"""Exported files run in stock llama.cpp: the same probabilities, the same text, the same tokens."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import cocurve_lab as cl
from helpers.bpe import (
    BYTE_LEVEL,
    HARD,
    SENTENCEPIECE,
    SIZE,
    byte_level,
    like_phi3,
    sentencepiece,
)
from helpers.llama_cpp import Job, largest_difference, mean_kl, run_llama_cpp
from helpers.tiny_models import LLAMA_3, tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
THIRD_PARTY = ROOT.parent / "shared" / "assets" / "tinystories_260k"
STORIES = THIRD_PARTY.parent / "text" / "tinystories.txt"
GREEDY = 32
BIASES = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_word_embeddings": True}
BASE = {"rope_type": "default", "rope_theta": 1e6}
Blocks = list[tuple[int, str]]
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
# family, heads, (layer, kind) that lose every unit, and the settings
CASES: dict[str, tuple[str, str, Blocks, dict[str, Any]]] = {
    "llama, GQA": ("llama", "gqa", [], {}),
    "llama, tied": ("llama", "gqa", [], TIED),
    "llama, all biases": ("llama", "mha", [], BIASES),
    "llama, Llama-3 rope": ("llama", "gqa", [], {"rope_parameters": LLAMA_3 | {"factor": 4.0}}),
    "llama, linear rope": ("llama", "gqa", [], {"rope_parameters": LINEAR}),
    "mistral, own head_dim": ("mistral", "gqa", [], {}),
    "mistral, window as long as context": ("mistral", "mqa", [], {"sliding_window": 64}),
    "qwen2": ("qwen2", "gqa", [], {}),
    "phi3": ("phi3", "gqa", [], {}),
    "seed_oss, biases": ("seed_oss", "gqa", [], {}),
    "ernie4_5, rotates neighbors": ("ernie4_5", "gqa", [], {}),
    "qwen3, own head_dim": ("qwen3", "gqa", [], TIED),
    "qwen3, no groups": ("qwen3", "mha", [], TIED | {"rope_parameters": BASE}),
    "qwen3, one group": ("qwen3", "mqa", [], TIED),
    "FFN inside": ("llama", "gqa", [(1, "ffn")], {}),
    "FFN of the last layer": ("llama", "gqa", [(2, "ffn")], {}),
    "FFN with biases": ("llama", "gqa", [(0, "ffn")], BIASES),
    "attention inside": ("llama", "gqa", [(1, "attention")], {}),
    "attention of the first layer": ("llama", "gqa", [(0, "attention")], {}),
    "attention with biases": ("llama", "gqa", [(1, "attention")], BIASES),
    "the whole last layer": ("llama", "gqa", [(2, "attention"), (2, "ffn")], {}),
    "the whole first layer": ("llama", "gqa", [(0, "attention"), (0, "ffn")], {}),
    "qwen3, the whole last layer": ("qwen3", "gqa", [(2, "attention"), (2, "ffn")], TIED),
    "qwen3, the whole first layer": ("qwen3", "gqa", [(0, "attention"), (0, "ffn")], TIED),
}


def pruned_unevenly(model: PreTrainedModel, empty: list[tuple[int, str]]) -> PreTrainedModel:
    """Other widths in every layer, and nothing left of the blocks in `empty`."""
    units = cl.enumerate_units(model, ffn_groups=4)
    always = {(0, "ffn", 1), (1, "attention", 0), (2, "ffn", 0), (2, "ffn", 3)}
    gone = [
        index
        for index, unit in enumerate(units)
        if (unit.layer, unit.kind, unit.index) in always or (unit.layer, unit.kind) in empty
    ]
    return cl.prune(model, cl.Selection.from_pruned(units, gone))


def random_quarter(model: PreTrainedModel, ffn_groups: int) -> PreTrainedModel:
    units = cl.enumerate_units(model, ffn_groups=ffn_groups)
    order = np.random.default_rng(0).permutation(len(units))
    count = int(np.searchsorted(np.cumsum(units.costs[order]), 0.25 * units.total_cost)) + 1
    return cl.prune(model, cl.Selection.from_pruned(units, order[:count].tolist()))


def random_prompts(size: int, lengths: tuple[int, ...] = (1, 7, 30)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(size, (n,), generator=generator).tolist() for n in lengths]


def log_probabilities(model: PreTrainedModel, prompts: list[list[int]]) -> list[np.ndarray]:
    """[T, V] of every prompt, without a KV cache."""
    logits = [model(torch.tensor([ids]), use_cache=False).logits[0].double() for ids in prompts]
    return [torch.log_softmax(z, -1).numpy() for z in logits]


@torch.no_grad()
def assert_same(model: PreTrainedModel, path: Path, prompts: list[list[int]], context: int) -> None:
    """The same log-probabilities, and GREEDY further ids."""
    answer = run_llama_cpp(path, Job(prompts, greedy=GREEDY, context=context))
    difference = largest_difference(answer, log_probabilities(model, prompts))
    print(f"largest difference of a log-probability: {difference:.1e}")
    assert difference < 1e-3
    for prompt, found in zip(prompts, answer.greedy, strict=True):
        ids = list(prompt)
        for _ in range(GREEDY):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert found == ids[len(prompt) :]


@pytest.mark.parametrize("name", CASES)
def test_what_is_pruned_computes_the_same(name: str, tmp_path: Path) -> None:
    family, heads, empty, changes = CASES[name]
    pruned = pruned_unevenly(tiny_model(family, heads, **changes), empty)
    cl.export_gguf(pruned, None, tmp_path / "tiny.gguf", dtype="f32")
    assert_same(pruned, tmp_path / "tiny.gguf", random_prompts(97), 64)


@torch.no_grad()
def test_a_window_is_exact_up_to_the_context_written(tmp_path: Path) -> None:
    model, prompts = tiny_model("mistral", sliding_window=40), random_prompts(97, (40,))
    written = cl.export_gguf(model, None, tmp_path / "window.gguf", dtype="f32")
    answer = run_llama_cpp(written.path, Job(prompts, context=64))
    assert largest_difference(answer, log_probabilities(model, prompts)) < 1e-3


@pytest.fixture(scope="module", params=["demo", "stories"])
def trained(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]]:
    """A trained model, a quarter of it removed at random, and texts of its own kind."""
    if request.param == "demo":
        model, tokenizer = cl.load_model("demo", device="cpu")
        lines = (ROOT / "data" / "texts" / "held_out.jsonl").read_text(encoding="utf-8")
        yield (
            random_quarter(model, 16),
            tokenizer,
            [json.loads(x)["text"] for x in lines.split("\n") if x],
        )
        return
    if not THIRD_PARTY.is_dir() or not STORIES.is_file():
        pytest.skip(f"the third-party checkpoint is not at {THIRD_PARTY}")
    model, tokenizer = cl.load_model(THIRD_PARTY, device="cpu")
    lines = STORIES.read_text(encoding="utf-8").splitlines()
    yield random_quarter(model, 8), tokenizer, [line for line in lines if line.strip()][:500]


Trained = tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]


def exported(trained: Trained, folder: Path, dtype: Any) -> Path:
    model, tokenizer, _ = trained
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Text is split by llama.cpp's 'smollm'", UserWarning)
        return cl.export_gguf(model, tokenizer, folder / "model.gguf", dtype=dtype).path


def test_a_quarter_removed_gives_the_same_text(trained: Trained, tmp_path: Path) -> None:
    model, tokenizer, texts = trained
    path = exported(trained, tmp_path, "f32")
    prompts = [tokenizer(text)["input_ids"][:60] for text in texts[:4]]
    assert_same(model, path, prompts, 256)


def test_its_texts_become_the_same_tokens(trained: Trained, tmp_path: Path) -> None:
    _, tokenizer, texts = trained
    path = exported(trained, tmp_path, "f16")
    answer = run_llama_cpp(path, Job(texts=texts, context=256))
    assert answer.tokens == [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.parametrize(
    ("dtype", "cache", "bound"),
    [("f32", "f16", 1e-4), ("f16", "f16", 1e-4), ("q8_0", "f32", 1e-2)],
    ids=["f32 with f16 cache", "f16", "q8_0"],
)
@torch.no_grad()
def test_rounding_stays_small(
    dtype: str, cache: str, bound: float, trained: Trained, tmp_path: Path
) -> None:
    model, tokenizer, texts = trained
    prompts = [tokenizer(text)["input_ids"][:100] for text in texts[:6]]
    expected, path = log_probabilities(model, prompts), exported(trained, tmp_path, dtype)
    answer = run_llama_cpp(path, Job(prompts, context=256, cache=cache))
    kl, difference = mean_kl(answer, expected), largest_difference(answer, expected)
    print(f"{dtype}, {cache} cache: mean KL {kl:.1e} nats, largest difference {difference:.1e}")
    assert kl < bound


@pytest.mark.parametrize("name", [*BYTE_LEVEL, *SENTENCEPIECE])
def test_tokenizers_split_text_alike(name: str, tmp_path: Path) -> None:
    make = byte_level if name in BYTE_LEVEL else sentencepiece
    tokenizer = make(name, bos=True) if name == "llama-bpe" else make(name)
    model = tiny_model("llama", vocab_size=SIZE + 13)  # rows beyond the tokenizer
    written = cl.export_gguf(model, tokenizer, tmp_path / "tiny.gguf", dtype="f32")
    lines = (ROOT / "data" / "texts" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [*HARD, *(json.loads(line)["text"] for line in lines[:100])]
    answer = run_llama_cpp(written.path, Job(texts=texts))
    for text, found in zip(texts, answer.tokens, strict=True):
        expected = tokenizer(text)["input_ids"]
        if name == "metaspace" and text.startswith(" "):  # said in a note
            expected = tokenizer(f" {text}")["input_ids"]
        assert found == expected, text


@pytest.mark.parametrize(
    ("kind", "name"),
    [("gpt-2", "Phi-3-mini"), ("prefix", "my-phi3"), ("phi-3", "Phi-3-mini"), ("phi-3", "other")],
)
def test_the_name_of_a_model_does_not_change_its_tokens(
    kind: str, name: str, tmp_path: Path
) -> None:
    """llama.cpp gives a model named "phi-3" other rules, and may reject its file."""
    makers = {"gpt-2": byte_level, "prefix": sentencepiece, "phi-3": lambda _: like_phi3()}
    tokenizer, model = makers[kind](kind), tiny_model("phi3", vocab_size=SIZE + 13)
    model.config._name_or_path = f"somewhere/{name}"
    written = cl.export_gguf(model, tokenizer, tmp_path / "tiny.gguf", dtype="f32")
    stop = tokenizer.eos_token
    texts = ["a phrase", f"one {stop} two{stop}  three", "<|user|>  who is it? <|end|>\n I am"]
    answer = run_llama_cpp(written.path, Job(texts=texts, special=True))
    assert answer.tokens == [tokenizer(text)["input_ids"] for text in texts]
