"""What an exported file holds: widths per layer, weights, tokenizer; and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.big_models.on_disk import open_model
from cocurve_lab.extensions.gguf import tensors as gguf_tensors
from cocurve_lab.pruner.saving import open_pruned
from helpers.bpe import SIZE, byte_level, like_phi3, sentencepiece
from helpers.tiny_models import (
    FURTHER,
    LLAMA_3,
    MHA_ONLY,
    MORE_FAMILIES,
    tiny_model,
    word_tokenizer,
)

HEAD_DIM = {"mistral": 12}  # others 8
TIED = {"tie_word_embeddings": True}


def pruned_tiny(
    family: str = "llama", heads: str = "gqa", gone: Any = (), **changes: Any
) -> PreTrainedModel:
    model = tiny_model(family, heads, **changes)
    units = cl.enumerate_units(model, ffn_groups=4)
    gone = {(0, "ffn", 1), (1, "ffn", 0), (1, "ffn", 3), *gone}
    if heads != "mqa":
        gone |= {(2, "attention", 0)}
    indices = [i for i, u in enumerate(units) if (u.layer, u.kind, u.index) in gone]
    return cl.prune(model, cl.Selection.from_pruned(units, indices))


def written(model: PreTrainedModel, path: Path, **options: Any) -> tuple[Any, Any]:
    """(fields by key, tensors by name as arrays) of an export without a tokenizer."""
    cl.export_gguf(model, options.pop("tokenizer", None), path, **options)
    reader = GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def paired_by_hand(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row 2j of a head is its row j, row 2j + 1 its row j + head_dim / 2."""
    out, step = np.empty_like(rows), len(rows) // heads
    for head in range(heads):
        for j in range(step // 2):
            out[head * step + 2 * j] = rows[head * step + j]
            out[head * step + 2 * j + 1] = rows[head * step + j + step // 2]
    return out


@pytest.mark.parametrize(
    ("family", "heads"), [("llama", "mqa"), ("mistral", "gqa"), ("qwen2", "gqa"), ("phi3", "mha")]
)
def test_every_weight_is_there_in_its_order(family: str, heads: str, tmp_path: Path) -> None:
    model = pruned_tiny(family, heads)
    fields, tensors = written(model, tmp_path / "m.gguf", dtype="f32")
    head_dim = HEAD_DIM.get(family, 8)
    queries, groups, widths = [], [], []
    for layer, block in enumerate(model.model.layers):
        attention, mlp = block.self_attn, block.mlp
        widths.append(mlp.down_proj.weight.shape[1])
        queries.append(attention.o_proj.weight.shape[1] // head_dim)
        groups.append(queries[-1] * {"mha": 4, "gqa": 2, "mqa": 1}[heads] // 4)
        if family == "phi3":
            sizes = [queries[-1] * head_dim, groups[-1] * head_dim, groups[-1] * head_dim]
            q, k, v = attention.qkv_proj.weight.split(sizes)
            gate, up = mlp.gate_up_proj.weight.chunk(2)
        else:
            q, k, v = (getattr(attention, f"{n}_proj").weight for n in "qkv")
            gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
        expected = {
            "attn_q.weight": paired_by_hand(q.numpy(), queries[-1]),
            "attn_k.weight": paired_by_hand(k.numpy(), groups[-1]),
            "attn_v.weight": v,
            "attn_output.weight": attention.o_proj.weight,
            "ffn_gate.weight": gate,
            "ffn_up.weight": up,
            "ffn_down.weight": mlp.down_proj.weight,
            "attn_norm.weight": block.input_layernorm.weight,
            "ffn_norm.weight": block.post_attention_layernorm.weight,
        }
        if family == "qwen2":
            q, k, v = (getattr(attention, f"{n}_proj").bias.numpy() for n in "qkv")
            expected["attn_q.bias"] = paired_by_hand(q, queries[-1])
            expected["attn_k.bias"] = paired_by_hand(k, groups[-1])
            expected["attn_v.bias"] = v
        for name, rows in expected.items():
            np.testing.assert_array_equal(tensors.pop(f"blk.{layer}.{name}").data, rows)
    for name, module in (
        ("token_embd", model.model.embed_tokens),
        ("output_norm", model.model.norm),
        ("output", model.lm_head),
    ):
        np.testing.assert_array_equal(tensors.pop(f"{name}.weight").data, module.weight)
    assert not tensors  # llama.cpp refuses a file with a tensor it does not ask for
    assert fields["deci.attention.head_count"] == queries
    assert fields["deci.attention.head_count_kv"] == groups
    assert fields["deci.feed_forward_length"] == widths
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        assert fields[f"deci.{key}"] == head_dim


def test_what_is_said_of_the_model(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 12345.0}
    model = pruned_tiny(rope_parameters=rope, **TIED)
    fields, tensors = written(model, tmp_path / "m.gguf", dtype="f16")
    manifest: Any = model.cocurve_manifest
    expected = {
        "general.architecture": "deci",
        "general.file_type": 1,
        "deci.rope.freq_base": 12345.0,
        "deci.context_length": 64,
        "deci.vocab_size": 97,
        "deci.attention.layer_norm_rms_epsilon": np.float32(model.config.rms_norm_eps),
        "cocurve.realized_ratio": np.float32(manifest["realized_ratio"]),
        "cocurve.selection_fingerprint": manifest["selection_fingerprint"],
    }
    assert {key: fields[key] for key in expected} == expected
    assert not {"rope_freqs.weight", "output.weight"} & tensors.keys()  # tied: written once


def test_the_name_says_phi3_exactly_if_the_tokenizer_is_like_it(tmp_path: Path) -> None:
    model = tiny_model("phi3", vocab_size=SIZE + 3)
    for name, tokenizer, expected in (
        ("Phi-3-mini", byte_level("gpt-2"), "Phi 3-mini"),
        ("myPHI3", None, "myPHI 3"),
        ("Phi-3-mini", like_phi3(), "Phi-3-mini"),
        ("other", like_phi3(), "other (Phi-3 tokenizer)"),
    ):
        model.config._name_or_path = f"somewhere/{name}"
        options = {"tokenizer": tokenizer, "overwrite": True}
        fields, _ = written(model, tmp_path / "m.gguf", **options)
        assert fields["general.name"] == expected


def test_qwen3_becomes_openelm(tmp_path: Path) -> None:
    model = pruned_tiny("qwen3", gone={(1, "attention", i) for i in range(2)}, **TIED)
    fields, tensors = written(model, tmp_path / "m.gguf", dtype="f32")
    for layer, block in enumerate(model.model.layers):
        attention = block.self_attn
        expected = np.zeros((3 * 12, 32), np.float32)  # one head of zeros
        if layer != 1:
            expected = np.concatenate([getattr(attention, f"{n}_proj").weight for n in "qkv"])
        np.testing.assert_array_equal(tensors[f"blk.{layer}.attn_qkv.weight"].data, expected)
        for name in ("q_norm", "k_norm"):
            found = tensors[f"blk.{layer}.attn_{name}.weight"].data
            np.testing.assert_array_equal(found, getattr(attention, name).weight)
    assert fields["general.architecture"] == "openelm"
    assert fields["openelm.attention.head_count"] == [4, 1, 2]
    assert fields["openelm.attention.head_count_kv"] == [2, 1, 1]
    assert not any(".attn_q." in name for name in tensors)


def test_llama3_frequencies_are_divided(tmp_path: Path) -> None:
    model = pruned_tiny(rope_parameters=LLAMA_3).to(torch.bfloat16)  # which rounds its frequencies
    _, tensors = written(model, tmp_path / "m.gguf", dtype="f32")
    expected = []
    for pair in range(4):  # Llama 3.1's own rule
        wavelength = 2 * np.pi * 10000 ** (2 * pair / 8)
        smooth = np.clip((32 / wavelength - 1) / (4 - 1), 0, 1)
        expected.append(1 / ((1 - smooth) / 8 + smooth))
    assert len({round(x, 3) for x in expected}) > 1
    np.testing.assert_allclose(tensors["rope_freqs.weight"].data, expected, rtol=1e-4)


def test_layers_that_lost_a_block(tmp_path: Path) -> None:
    gone = {(0, "attention", i) for i in range(2)} | {(2, "attention", i) for i in range(2)}
    gone |= {(1, "ffn", i) for i in range(4)}
    fields, tensors = written(pruned_tiny(gone=gone), tmp_path / "n.gguf", dtype="f32")
    assert fields["deci.attention.head_count"] == [1, 4, 0]  # llama.cpp needs one in layer 0
    assert fields["deci.attention.head_count_kv"] == [1, 2, 0]
    assert fields["deci.feed_forward_length"][1] == 32
    assert len(fields["cocurve.notes"]) == 3  # of each, and that there is no tokenizer
    assert not any(name.startswith("blk.2.attn") for name in tensors)
    for name in ("blk.0.attn_q", "blk.0.attn_output", "blk.1.ffn_gate", "blk.1.ffn_down"):
        assert not tensors[f"{name}.weight"].data.any()


def test_types_of_storage(tmp_path: Path) -> None:
    model = pruned_tiny("qwen2")  # hidden 32: rows of one block; FFN widths of 31, 21 and 42
    stores = [written(model, tmp_path / dtype, dtype=dtype)[1] for dtype in ("f32", "f16", "q8_0")]
    for name, plain in stores[0].items():
        _, halves, blocks = (store[name] for store in stores)
        kinds = [store[name].tensor_type.name for store in stores]
        if plain.data.ndim == 1:
            assert kinds == ["F32"] * 3
            continue
        np.testing.assert_array_equal(halves.data, plain.data.astype(np.float16))
        assert kinds == ["F32", "F16", "F16" if plain.data.shape[1] % 32 else "Q8_0"]
        if kinds[2] == "Q8_0":
            rows = blocks.data.reshape(-1, 34)  # a float16 scale, then 32 signed bytes
            scales = rows[:, :2].copy().view(np.float16).astype(np.float64)
            found = scales * rows[:, 2:].copy().view(np.int8)
            wanted = plain.data.reshape(-1, 32)
            step = np.abs(wanted).max(axis=1, keepdims=True) / 127
            error = np.abs(found - wanted)
            assert (error <= 0.5 * step + 127 * step * 2**-11 + 1e-9).all()


EXPORTED = ("ministral", "seed_oss", "ernie4_5", "helium", "cwm", "internlm3", "iquestcoder")


@pytest.mark.parametrize("family", [*MORE_FAMILIES, *(f for f in FURTHER if f not in EXPORTED)])
def test_other_families_are_refused(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, "mha" if family in MHA_ONLY else "gqa", layers=1)
    with pytest.raises(cl.ArchitectureError):
        cl.export_gguf(model, None, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("family", [family for family in EXPORTED if family in FURTHER])
def test_rows_are_as_the_family_rotates_them(family: str, tmp_path: Path) -> None:
    """test_llama_cpp.py runs one family of each kind."""
    model = tiny_model(family, layers=2)
    _, tensors = written(model, tmp_path / "m.gguf", dtype="f32")
    rows = model.model.layers[0].self_attn.q_proj.weight.numpy()
    neighbors = family in ("ernie4_5", "helium")  # 2i with 2i + 1, in transformers too
    expected = rows if neighbors else paired_by_hand(rows, 4)
    np.testing.assert_array_equal(tensors["blk.0.attn_q.weight"].data, expected)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": YARN}),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
        ("phi3", {"rope_parameters": PARTIAL}),
        ("llama", {"hidden_act": "gelu"}),
        ("qwen3", TIED | {"attention_bias": True}),
        ("qwen3", TIED | {"rope_parameters": LLAMA_3}),
        ("qwen3", TIED | {"rope_parameters": YARN}),
    ],
    ids=["yarn", "longrope", "partial rotary", "gelu", "bias", "llama3", "yarn of qwen3"],
)
def test_what_the_block_cannot_do_is_refused(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(cl.ArchitectureError):
        cl.export_gguf(tiny_model(family, **changes), None, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_another_scale_of_attention_or_weights_elsewhere_are_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.model.layers[1].self_attn.scaling = 0.5
    with pytest.raises(cl.ArchitectureError):
        cl.export_gguf(model, None, tmp_path / "m.gguf")
    with pytest.raises(cl.ArchitectureError):
        cl.export_gguf(tiny_model().to("meta"), None, tmp_path / "m.gguf")


def test_a_short_window_becomes_the_context(tmp_path: Path) -> None:
    fields, _ = written(tiny_model("mistral", sliding_window=16), tmp_path / "m.gguf")
    assert fields["deci.context_length"] == 16


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "f32"), (np.inf, "q8_0"), (1e6, "f16")])
def test_numbers_that_cannot_be_stored(value: float, dtype: Any, tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    with pytest.raises(cl.NumericalError):
        cl.export_gguf(model, None, tmp_path / "m.gguf", dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path, model = tmp_path / "m.gguf", tiny_model()
    path.write_bytes(b"precious")
    for place, dtype in ((path, "f16"), (tmp_path, "f16"), (tmp_path / "n.gguf", "q4_0")):
        with pytest.raises(cl.InputError):
            cl.export_gguf(model, None, place, dtype=dtype)
    assert path.read_bytes() == b"precious"
    cl.export_gguf(model, None, path, overwrite=True)
    assert GGUFReader(path).fields


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_old_file(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "m.gguf", []
    path.write_bytes(b"precious")
    original = gguf_tensors.FileTensor.values

    def stops(self: Any, *how: Any) -> np.ndarray:
        seen.append(self.name)
        if len(seen) == 5:
            raise error("stop")
        return original(self, *how)

    monkeypatch.setattr(gguf_tensors.FileTensor, "values", stops)
    with pytest.raises(error, match="stop"):
        cl.export_gguf(tiny_model(), None, path, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("family", "heads", "dtype"),
    [
        ("llama", "mqa", "f32"),
        ("mistral", "gqa", "f16"),
        ("qwen2", "mha", "q8_0"),
        ("phi3", "gqa", "q8_0"),
        ("qwen3", "gqa", "f16"),
    ],
)
def test_a_folder_is_exported_without_loading_it(
    family: str, heads: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {(1, "attention", 0), (1, "attention", 1), *((2, "ffn", i) for i in range(4))}
    wide = {"hidden_size": 64, "intermediate_size": 128} | (TIED if family == "qwen3" else {})
    small = pruned_tiny(family, heads, gone, dtype=torch.bfloat16, **wide)
    folder = cl.save_pruned(small, tmp_path / "small")
    cl.export_gguf(cl.load_pruned(folder), None, tmp_path / "memory.gguf", dtype=dtype)
    monkeypatch.setattr(gguf_tensors, "_AT_ONCE", 300)  # a few rows at a time
    stored = open_pruned(folder)
    assert all(weight.is_meta for weight in stored.parameters())
    cl.export_gguf(stored, None, tmp_path / "disk.gguf", dtype=dtype)
    assert (tmp_path / "disk.gguf").read_bytes() == (tmp_path / "memory.gguf").read_bytes()


def test_a_dense_folder_and_a_streamed_model_are_exported(tmp_path: Path) -> None:
    model = tiny_model("phi3", "gqa", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    streamed, _ = cl.load_model(tmp_path / "model", stream=True, device="cpu")
    sources = {"memory": model, "streamed": streamed, "disk": open_model(tmp_path / "model")}
    for name, source in sources.items():
        source.config._name_or_path = "one"
        cl.export_gguf(source, None, tmp_path / name)
    expected = (tmp_path / "memory").read_bytes()
    assert (tmp_path / "streamed").read_bytes() == (tmp_path / "disk").read_bytes() == expected


def test_a_full_disk_is_told_before_and_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, *_: Any) -> np.ndarray:
        raise OSError("268435456 requested and 0 written")  # numpy's words, without a number

    monkeypatch.setattr(gguf_tensors.FileTensor, "values", full)
    for free, error in ((1000, cl.InputError), (2**20, cl.InputError), (2**40, OSError)):
        usage = SimpleNamespace(total=1 << 60, free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda _, usage=usage: usage)
        with pytest.raises(error):
            cl.export_gguf(tiny_model(), None, tmp_path / "m.gguf")
        assert list(tmp_path.iterdir()) == []


def test_a_byte_level_tokenizer_is_written(tmp_path: Path) -> None:
    tokenizer, model = byte_level("llama-bpe", bos=True), tiny_model(vocab_size=SIZE + 2)
    tokenizer.chat_template = "{{ messages }}"
    try:
        fields, _ = written(model, tmp_path / "m.gguf", tokenizer=tokenizer)
    finally:
        tokenizer.chat_template = None
    vocab = tokenizer.get_vocab()
    tokens = fields["tokenizer.ggml.tokens"]
    assert {token: index for index, token in enumerate(tokens[:SIZE])} == vocab
    assert fields["tokenizer.ggml.token_type"][:3] == [3, 3, 1]  # control, control, normal
    assert fields["tokenizer.ggml.token_type"][SIZE:] == [5, 5]  # unused
    assert len(fields["tokenizer.ggml.merges"]) == SIZE - 258
    expected = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.bos_token_id": vocab["<|begin|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|end|>"],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    assert {key: fields[key] for key in expected} == expected


def test_a_sentencepiece_tokenizer_is_written(tmp_path: Path) -> None:
    tokenizer, model = sentencepiece("no prefix"), tiny_model(vocab_size=SIZE)
    model.generation_config.eos_token_id = [2, 7]
    fields, _ = written(model, tmp_path / "m.gguf", tokenizer=tokenizer)
    expected = {"model": "llama", "add_space_prefix": False, "add_bos_token": True}
    expected["eot_token_id"] = 7
    assert {key: fields[f"tokenizer.ggml.{key}"] for key in expected} == expected
    scores, tokens = fields["tokenizer.ggml.scores"], fields["tokenizer.ggml.tokens"]
    assert fields["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]  # unknown, control, byte
    longer = [scores[i] for i in range(259, len(tokenizer)) if len(tokens[i]) > 1]
    assert len(longer) > 20
    assert longer == sorted(longer, reverse=True)


def with_rules(*rules: Any) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    copy = Tokenizer.from_str(byte_level("gpt-2").backend_tokenizer.to_str())
    copy.pre_tokenizer = pre_tokenizers.Sequence(list(rules))
    return PreTrainedTokenizerFast(tokenizer_object=copy, eos_token="<|end|>")


def test_unknown_rules_are_left_out_with_a_note_or_refused(tmp_path: Path) -> None:
    model = tiny_model(vocab_size=SIZE)
    vowels = pre_tokenizers.Split(Regex("[aeiou]"), "isolated")
    near = with_rules(vowels, pre_tokenizers.ByteLevel(add_prefix_space=False))
    with pytest.warns(UserWarning, match="lacks"):
        result = cl.export_gguf(model, near, tmp_path / "n.gguf")
    assert len(result.notes) == 1
    own = cl.export_gguf(model, byte_level("gpt-2"), tmp_path / "o.gguf")
    assert own.notes == ()


def test_tokenizers_llama_cpp_does_not_have(tmp_path: Path) -> None:
    nameless = with_rules(pre_tokenizers.ByteLevel(add_prefix_space=False))
    nameless.eos_token = None
    for size, tokenizer in (
        (97, word_tokenizer()),
        *((size, byte_level("gpt-2")) for size in (97, 2 * SIZE + 2)),  # too few rows, or too many
        (SIZE, with_rules(pre_tokenizers.ByteLevel(add_prefix_space=True))),
        (SIZE, with_rules(pre_tokenizers.Split(Regex("[aeiou]"), "isolated"))),
        (SIZE, nameless),
    ):
        with pytest.raises(cl.InputError):
            cl.export_gguf(tiny_model(vocab_size=size), tokenizer, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())
