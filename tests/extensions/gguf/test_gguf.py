"""What an exported file holds: widths per layer, weights, tokenizer; and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.cli import DONE, main
from cocurve_lab.extensions.big_models.on_disk import open_model
from cocurve_lab.extensions.gguf import tensors as gguf_tensors
from cocurve_lab.models.identity import weight_marks
from cocurve_lab.pruner.saving import open_pruned
from helpers.bpe import SIZE, byte_level
from helpers.gguf_files import write_gguf, write_source
from helpers.tiny_models import (
    FURTHER,
    LLAMA_3,
    MHA_ONLY,
    MORE_FAMILIES,
    full_logits,
    tiny_model,
    word_tokenizer,
    write_model,
)

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
            found = dequantize(blocks.data, blocks.tensor_type).reshape(-1, 32)
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


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", *(family for family in EXPORTED if family in FURTHER)]
)
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
    scaled = tiny_model()
    scaled.model.layers[1].self_attn.scaling = 0.5
    for model in (tiny_model(family, **changes), scaled, tiny_model().to("meta")):
        with pytest.raises(cl.ArchitectureError):
            cl.export_gguf(model, None, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


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
    write_model(tmp_path / "model", model)
    streamed, _ = cl.load_model(tmp_path / "model", stream=True, device="cpu")
    sources = {"memory": model, "streamed": streamed, "disk": open_model(tmp_path / "model")}
    for name, source in sources.items():
        source.config._name_or_path = "one"
        cl.export_gguf(source, None, tmp_path / name)
    expected = (tmp_path / "memory").read_bytes()
    assert (tmp_path / "streamed").read_bytes() == (tmp_path / "disk").read_bytes() == expected


def test_a_full_disk_and_ctrl_c_leave_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the old file stays."""
    path, ends = tmp_path / "m.gguf", [OSError("0 written"), KeyboardInterrupt()]
    path.write_bytes(b"precious")
    original = gguf_tensors.FileTensor.values

    def full(self: Any, *how: Any) -> np.ndarray:
        if self.name.startswith("blk.1"):
            raise ends.pop(0)
        return original(self, *how)

    monkeypatch.setattr(gguf_tensors.FileTensor, "values", full)
    some, much = (1000, cl.InputError), 2**40
    for free, error in (some, (much, OSError), (much, KeyboardInterrupt)):
        usage = SimpleNamespace(total=1 << 60, free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda _, usage=usage: usage)
        with pytest.raises(error):
            cl.export_gguf(tiny_model(), None, path, overwrite=True)
        assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]
        assert path.read_bytes() == b"precious"
    assert not ends


def test_a_byte_level_tokenizer_is_written(tmp_path: Path) -> None:
    tokenizer, model = byte_level("llama-bpe", bos=True), tiny_model(vocab_size=SIZE + 2)
    tokenizer.chat_template = "{{ messages }}"
    model.generation_config.eos_token_id = [1, 7]
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
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    assert {key: fields[key] for key in expected} == expected


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


# GGUF files as input: equal to what transformers reads, on every road, or refused ---

TEXT = "Two words:\n\n12 numbers,  3 of them"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    write_gguf(folder / "a.gguf")
    return folder / "a.gguf"


@pytest.mark.parametrize("place", ["the file", "its folder"])
def test_it_loads_as_transformers_reads_it(file: Path, place: str) -> None:
    model, tokenizer = cl.load_model(file if place == "the file" else file.parent, device="cpu")
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    assert weight_marks(model) == weight_marks(read)
    assert tokenizer(TEXT)["input_ids"] == byte_level("smollm")(TEXT)["input_ids"]
    assert not any(weight.requires_grad for weight in model.parameters())


def test_its_model_is_pruned_on_every_road(file: Path, tmp_path: Path) -> None:
    model, _ = cl.load_model(file, device="cpu")
    units = cl.enumerate_units(model)
    plan = cl.Selection.from_pruned(units, [0, len(units) - 1])
    (tmp_path / "plan.json").write_text(plan.to_json())
    memory = cl.prune(model, plan)
    for place in (file, file.parent):
        out = tmp_path / f"of {place.name}"
        assert main(["prune", str(place), str(tmp_path / "plan.json"), "--out", str(out)]) == DONE
        assert weight_marks(cl.load_pruned(out)) == weight_marks(memory)


KEY, LONG = struct.pack("<Q", 1) + b"a", struct.pack("<IIQ", 9, 0, 2**60)
TOO_LONG = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + KEY + LONG  # an array longer than its file


@pytest.mark.parametrize("damage", [b"GGUF", 1000, -1000, b"x" * 100, b"", TOO_LONG])
def test_damaged_files_are_refused(file: Path, damage: Any) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:damage] if isinstance(damage, int) else damage)
    with pytest.raises(cl.InputError):
        cl.load_model(file)


def test_what_it_is_not_for_is_refused(file: Path) -> None:
    for name in ("b.gguf", "part-00001-of-00002.gguf"):
        (file.parent / name).write_bytes(file.read_bytes())
    for place, options in (
        (file, {"stream": True}),
        (file, {"revision": "x"}),
        (file.parent, {}),  # which of its files?
        (file.parent / "part-00001-of-00002.gguf", {}),
    ):
        with pytest.raises(cl.InputError):
            cl.load_model(place, device="cpu", **options)


ROPE = {"rope_type": "default", "rope_theta": 5000.0}
READ: dict[str, dict[str, Any]] = {  # with settings that are not the defaults of their class
    "llama": {"rms_norm_eps": 1e-3},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    "qwen3": {"head_dim": 128, "rms_norm_eps": 1e-3},  # which all of its models have
}


@pytest.mark.parametrize("family", READ)
def test_each_family_computes_what_the_source_does(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, "gqa", vocab_size=SIZE, rope_parameters=ROPE, **READ[family])
    write_source(tmp_path / "a.gguf", model)
    found, _ = cl.load_model(tmp_path / "a.gguf", device="cpu")
    ids = torch.arange(2, 26)[None]
    assert (full_logits(found, ids) - full_logits(model, ids)).abs().max() < 1e-5
    assert len(cl.enumerate_units(found)) == len(cl.enumerate_units(model))


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "falcon", "deci", "openelm"])
def test_other_files_are_refused_before_their_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers ignores caps and windows of two, one is no family, two are our own exports."""
    file, exported = tmp_path / "a.gguf", {"deci": "llama", "openelm": "qwen3"}
    if kind in exported:
        cl.export_gguf(tiny_model(exported[kind], tie_word_embeddings=True), None, file)
    else:
        write_gguf(file, name=kind)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", pytest.fail)
    with pytest.raises((cl.InputError, cl.ArchitectureError)):
        cl.load_model(file, device="cpu")


@pytest.mark.parametrize(
    "change",
    [
        lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32)),
        lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32)),
        lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"),
    ],
    ids=["a bias", "factors", "scaled positions"],
)
def test_what_transformers_would_leave_out_is_refused(change: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", change)
    with pytest.raises(cl.InputError):
        cl.load_model(tmp_path / "a.gguf")
