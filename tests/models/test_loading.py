"""Getting a model: by name, by folder, and with a clear word where that fails."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, T5Config

import cocurve_lab as cl
from cocurve_lab.models import loading
from cocurve_lab.models.identity import fingerprint_model, model_name
from helpers.bpe import SIZE, byte_level
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer, write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "tiny")
    word_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_folders_load_ready_to_measure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = cl.load_model(folder, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # on a CPU
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert tokenizer.eos_token_id == 0
    for name in ("HOME", "USERPROFILE"):  # which Windows reads
        monkeypatch.setenv(name, str(folder.parent))
    # the caller may choose what a configuration may not
    edit(folder / CONFIG, attn_implementation="org/kernel")
    half, _ = cl.load_model("~/tiny", device="cpu", dtype="bfloat16", attn_implementation="eager")
    assert half.dtype == torch.bfloat16
    assert half.config._attn_implementation == "eager"
    for dtype in ("float31", "nn"):
        with pytest.raises(cl.InputError):
            cl.load_model(folder, dtype=dtype)


def test_capped_attention_scores_stay_capped(tmp_path: Path) -> None:
    model = tiny_model("gemma2")  # transformers 5.17 would load it with sdpa, without the cap
    write_model(tmp_path / "capped", model)
    loaded, _ = cl.load_model(tmp_path / "capped", device="cpu")
    ids = tiny_text(2, 14).input_ids
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), [0])
    cut = cl.load_pruned(cl.save_pruned(cl.prune(model, plan), tmp_path / "cut"), device="cpu")
    assert cut.config._attn_implementation == "eager"


def test_a_tokenizer_loads_alone_or_says_why_not(folder: Path) -> None:
    for other in ("model.safetensors", "config.json"):
        (folder / other).unlink()
    assert loading.load_tokenizer(folder).eos_token_id == 0
    assert type(loading.load_tokenizer()) is type(cl.load_model("demo", device="cpu")[1])
    for content in ("{broken", "{}", "[]"):  # three kinds of exception
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(cl.InputError):
            loading.load_tokenizer(folder)


def test_a_tokenizer_that_disagrees_with_its_file_is_named(tmp_path: Path) -> None:
    place = tmp_path / "tiny"
    tiny_model(vocab_size=SIZE).save_pretrained(place)
    byte_level("gpt-2").save_pretrained(place)
    text = "In 2026 there were 1234567"
    expected = byte_level("gpt-2")(text)["input_ids"]
    settings = json.loads((place / "tokenizer_config.json").read_text())
    # transformers gives this class rules of its own
    settings["tokenizer_class"] = "Qwen2Tokenizer"
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.warns(UserWarning, match="Qwen2Tokenizer"):
        _, tokenizer = cl.load_model(place, device="cpu")
    assert tokenizer(text)["input_ids"] != expected
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the advice; no warning may be left
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    assert loading.load_tokenizer(place)(text)["input_ids"] == expected


def test_every_way_a_hub_can_fail_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    """A hub of our own serves one model and refuses others; see fake_hub.py."""
    script = Path(__file__).parents[1] / "helpers" / "fake_hub.py"
    command = [sys.executable, str(script), str(folder), str(tmp_path / "cache")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    refused = found.keys() - {"left", "tokenizers", "good", "cached"}
    assert all(found[name]["outcome"].startswith("InputError: ") for name in refused), found
    assert found["full"]["weights"] == 0  # the stand-in for the full disk took their place
    assert not any(found[name]["weights"] for name in ("modelopt", "unknown", "tuned"))
    assert "config.json" in found["left"]
    assert found["good"] == {"outcome": "LlamaForCausalLM", "weights": 1}
    assert found["cached"] == {"outcome": "LlamaForCausalLM", "weights": 0}
    assert found["tokenizers"].pop("org/good") == "TokenizersBackend"
    assert len(found["tokenizers"]) == 5
    assert all(said.startswith("InputError: ") for said in found["tokenizers"].values())


def test_fingerprints_see_every_bit_and_nothing_else() -> None:
    model = tiny_model()
    mark = fingerprint_model(model)
    assert fingerprint_model(copy.deepcopy(model).train()) == mark
    value, swap, dtype = (copy.deepcopy(model) for _ in range(3))
    weight = value.model.layers[1].mlp.up_proj.weight
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    weight = swap.model.layers[1].mlp.up_proj.weight
    weight[[0, 1]] = weight[[1, 0]]
    assert len({mark, *map(fingerprint_model, (value, swap, dtype.bfloat16()))}) == 4


# What is refused ----------------------------------------------------------------------------------

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def config(**changes: Any) -> Any:
    return lambda folder: edit(folder / CONFIG, **changes)


def file(name: str, content: str) -> Any:
    return lambda folder: (folder / name).write_text(content)


def edit(path: Path, **changes: Any) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pruned(folder: Path) -> None:
    plan = cl.Selection.from_pruned(cl.enumerate_units(tiny_model(), GROUPS), [0])
    shutil.rmtree(folder)
    cl.save_pruned(cl.prune(tiny_model(), plan), folder)


def index(place: Any) -> Any:
    """Move the weights, and let an index point there: only the check stands in the way."""

    def change(folder: Path) -> None:
        weights = (folder / WEIGHTS).rename(folder.parent / "tiny.safetensors")
        where = place.format(folder.parent) if isinstance(place, str) else place
        mapped: Any = dict.fromkeys(load_file(weights), where)
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": mapped}))

    return change


def without_metadata(folder: Path) -> None:
    names = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    mapped = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(mapped))


def weights(change: Any) -> Any:
    """Change the weights in the file, by name."""

    def changed(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})

    return changed


def packed(dtype: torch.dtype, scale: str = "") -> Any:
    """A checkpoint whose quantization transformers does not know, and so does not undo."""
    more = {DOWN.replace("weight", scale): torch.ones(())} if scale else {}
    return weights(lambda found: found | {DOWN: found[DOWN].to(dtype)} | more)


def renamed(change: Any) -> Any:
    """Weights under other names, as a trainer's or an adapter's wrapper gives them."""
    return weights(lambda found: {change(name): weight for name, weight in found.items()})


PACKED = 4  # so many of DAMAGED have packed weights
DOWN = "model.layers.0.mlp.down_proj.weight"
WRAPPED = {
    "module": lambda name: f"module.{name}",
    "_orig_mod": lambda name: f"_orig_mod.{name}",
    "base_model.model": lambda name: f"base_model.model.{name}",
    "base_layer": lambda name: name.replace("down_proj.", "down_proj.base_layer."),
}
LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 9\n"
DAMAGED: list[tuple[Any, str]] = [
    (packed(torch.float32, "weight_scale"), "weight_scale"),
    (packed(torch.float8_e4m3fn, "input_scale"), "input_scale"),
    (packed(torch.float8_e4m3fn), f"{DOWN} as F8_E4M3"),
    (packed(torch.int8), f"{DOWN} as I8"),
    (file("adapter_config.json", "{}"), "merge_and_unload"),
    (
        lambda folder: (file("adapter_config.json", "{}")(folder), (folder / CONFIG).unlink()),
        "merge_and_unload",
    ),
    (config(num_hidden_layers=10**7), "num_hidden_layers = 10000000"),
    (config(n_layer=10**7, model_type="gpt2"), "n_layer = 10000000"),
    (config(num_hidden_layers=0), "no layers"),
    (config(architectures=["LlamaForSequenceClassification"]), "labels"),
    (config(quantization_config={"load_in_4bit": True}), "missing"),
    (config(hidden_size="64"), "tiny"),
    (config(hidden_act="nope"), "'nope'"),
    (config(hidden_size=10**18), "tiny"),
    (config(model_type=["llama"]), "tiny"),
    (config(attn_implementation="org/kernel"), "'org/kernel'"),
    (config(text_config={"_attn_implementation": {"": "a/b@c"}}), "'a/b@c'"),
    (config(quantization_config={"quant_method": "gptq", "bits": 4}), "missing"),
    *((file(CONFIG, content), "tiny") for content in ("[1]", "[" * 100_000, "{", "")),
    *((renamed(change), rf"{name}.*wrapper") for name, change in WRAPPED.items()),
    (file(WEIGHTS, "not weights"), WEIGHTS),
    *((file(name, LFS), f"{name}.*git lfs pull") for name in (WEIGHTS, "tokenizer.json")),
    (without_metadata, '"metadata"'),
    (
        weights(lambda found: {n: w for n, w in found.items() if ".layers.1." not in n}),
        r"model\.layers\.1\..* more",
    ),
    (pruned, "pruned"),
    (lambda folder: T5Config().save_pretrained(folder), "t5"),  # refused before its weights
    *(
        (index(place), "outside")
        for place in ("../tiny.safetensors", "{}/tiny.safetensors", "C:\\a")
    ),
    *((index(place), "index.json") for place in (None, 3)),
]


@pytest.mark.parametrize("case", range(len(DAMAGED)))
def test_a_folder_that_cannot_be_loaded_is_refused_in_a_sentence(
    folder: Path, case: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, named = DAMAGED[case]
    change(folder)
    if case < PACKED:  # refused before they are loaded
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", pytest.fail)
    with pytest.raises((cl.InputError, cl.ArchitectureError), match=named) as caught:
        cl.load_model(folder, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "place",
    [
        *("{}/tinny", "{}/no/such/place", "{}", "{}/tiny/config.json", "./nowhere"),
        *("hub/with/three", "pruned"),  # a name without an owner is not asked of the hub
    ],
)
def test_a_wrong_path_is_told_from_a_hub_id(folder: Path, place: str) -> None:
    where = place.format(folder.parent)
    for each in (where, Path(where)) if "{}" in place else (where,):
        with pytest.raises(cl.InputError):
            cl.load_model(each)


class Opens:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("opened"),)


def test_a_pickle_runs_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"a": Opens()}, folder / "pytorch_model.bin")
    with pytest.raises(cl.InputError):
        cl.load_model(folder, device="cpu")
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
@pytest.mark.parametrize("settings", [None, {"eos_token": "</s>", "pad_token": "</s>"}])
def test_a_tokenizer_without_its_vocabulary_is_refused(
    tmp_path: Path, family: str, settings: Any
) -> None:
    """transformers makes an empty one where the files are missing, and says nothing."""
    tiny_model(family).save_pretrained(tmp_path)
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for load in (cl.load_model, loading.load_tokenizer):
        with pytest.raises(cl.InputError):
            load(tmp_path)


def test_a_tokenizer_of_a_smaller_vocabulary_is_refused(tmp_path: Path) -> None:
    tiny_model(vocab_size=2000).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(cl.InputError):
        cl.load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("name", ["demo", "mixture"])
def test_a_folder_with_the_name_of_a_model_that_ships(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder.rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cl.InputError):
        cl.load_model(name)
    assert (
        cl.load_model(f"./{name}")[0].config.vocab_size
        != cl.load_model(str(loading.demo_folder().with_name(name)))[0].config.vocab_size
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_the_older_name_of_dtype_is_not_dropped(folder: Path, tmp_path: Path, dtype: Any) -> None:
    model, tokenizer = cl.load_model(folder, device="cpu", torch_dtype=dtype)
    assert model.dtype == torch.bfloat16
    model, _ = cl.load_model(folder, device="cpu", torch_dtype="auto")
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), ["L0.ffn[0]"])
    small = cl.save_pruned(cl.prune(model, plan), tmp_path / "small", tokenizer=tokenizer)
    assert cl.load_pruned(small, torch_dtype=dtype).dtype == torch.bfloat16
    assert cl.load_pruned(small, torch_dtype="auto").dtype == model.dtype


def test_a_snapshot_of_the_hub_has_the_name_of_its_model(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "models--owner--tiny-1.1" / "snapshots" / ("c" * 40)
    place.parent.mkdir(parents=True)
    folder.rename(place)
    model, tokenizer = cl.load_model(place, device="cpu")
    assert model_name(model) == "tiny-1.1"
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), ["L0.ffn[0]"])
    small = cl.save_pruned(cl.prune(model, plan), tmp_path / "small", tokenizer=tokenizer)
    assert (
        json.loads((small / "cocurve_manifest.json").read_text())["base_model"] == "owner/tiny-1.1"
    )
