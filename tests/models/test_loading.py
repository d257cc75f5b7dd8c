"""Getting a model: by name, by folder, and with a clear word where that fails."""

from __future__ import annotations

import copy
import errno
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config

import cocurve_lab as cl
from cocurve_lab.base import progress
from cocurve_lab.models import loading, runtime
from cocurve_lab.models.identity import fingerprint_model
from cocurve_lab.models.load_errors import explain
from cocurve_lab.models.loading import report_device
from helpers.bpe import SIZE, byte_level
from helpers.problems import random_curvature
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "tiny")
    word_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_folders_load_ready_to_measure(folder: Path) -> None:
    model, tokenizer = cl.load_model(folder, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # on a CPU
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert tokenizer.eos_token_id == 0
    half, _ = cl.load_model(folder, device="cpu", dtype="bfloat16", attn_implementation="eager")
    assert half.dtype == torch.bfloat16
    assert half.config._attn_implementation == "eager"


def test_bars_of_loading_are_ours_and_nothing_stays_changed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging

    made: list[str] = []

    class Noted(progress.Bar):
        def __init__(self, *args: Any, **settings: Any) -> None:
            made.append(settings["desc"])
            super().__init__(*args, **settings)

    monkeypatch.setattr(runtime, "Bar", Noted)
    # an earlier test may have run the command line, which turns bars off in a log
    mine, shown = logging.set_tqdm_hook(None), logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        cl.load_model(folder, device="cpu")
        assert made == ["Loading weights"]
        assert "Loading weights: 100%" in capsys.readouterr().err
        assert logging.set_tqdm_hook(None) is None
        cl.load_model("demo", device="cpu")  # too small to need one
        logging.disable_progress_bar()
        cl.load_model(folder, device="cpu")
        assert capsys.readouterr().err == ""
    finally:
        if shown:
            logging.enable_progress_bar()
        logging.set_tqdm_hook(mine)


def test_a_folder_may_lie_in_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("USERPROFILE", str(folder.parent))  # what Windows reads
    model, tokenizer = cl.load_model("~/tiny", device="cpu")
    assert fingerprint_model(model) == fingerprint_model(cl.load_model(folder, device="cpu")[0])
    assert tokenizer.eos_token_id == 0


def test_what_cannot_be_loaded_is_explained(folder: Path, tmp_path: Path) -> None:
    for dtype in ("float31", "nn", "auto"):
        with pytest.raises(cl.InputError, match=f"dtype is '{dtype}'"):
            cl.load_model(folder, dtype=dtype)
    T5Config().save_pretrained(tmp_path / "other")  # no weights: refused before they are wanted
    with pytest.raises(cl.ArchitectureError):
        cl.load_model(tmp_path / "other", device="cpu")
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(cl.InputError):
        cl.load_model(folder, device="cpu")


def test_weights_that_are_in_no_file_are_not_made_up(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    kept = {name: weight for name, weight in weights.items() if ".layers.1." not in name}
    more = len(weights) - len(kept) - 3
    save_file(kept, file, {"format": "pt"})
    named = r"hold no (model\.layers\.1\.[\w.]+, ){2}model\.layers\.1\.[\w.]+"
    with pytest.raises(cl.InputError, match=rf"{named} and {more} more, for which .* random"):
        cl.load_model(folder, device="cpu")


def test_capped_attention_scores_stay_capped(tmp_path: Path) -> None:
    model = tiny_model("gemma2")  # transformers 5.17 would load it with sdpa, without the cap
    model.save_pretrained(tmp_path / "capped")
    word_tokenizer().save_pretrained(tmp_path / "capped")
    loaded, _ = cl.load_model(tmp_path / "capped", device="cpu")
    ids = tiny_text(2, 14).input_ids
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    plan = cl.solve_greedy(random_curvature(cl.enumerate_units(model, GROUPS)), 0.2)
    cl.save_pruned(cl.prune(model, plan), tmp_path / "cut")
    cut = cl.load_pruned(tmp_path / "cut", device="cpu")
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
    with pytest.warns(UserWarning, match=r"tiny is a Qwen2Tokenizer, which.*its tokenizer\.json"):
        _, tokenizer = cl.load_model(place, device="cpu")
    assert tokenizer(text)["input_ids"] != expected
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the advice; no warning may be left
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    assert loading.load_tokenizer(place)(text)["input_ids"] == expected


def test_a_wrong_path_is_told_from_a_hub_id(folder: Path, tmp_path: Path) -> None:
    for wrong, said in {
        tmp_path / "tinny": r"no folder '.*tinny'\. Did you mean '.*/tiny'\? Check",
        str(tmp_path / "tinny"): r"Did you mean '.*/tiny'\?",
        tmp_path / "no" / "such" / "place": r"is there, but holds no 'no'",
        tmp_path: r"has no config\.json; it holds tiny\.",
        folder / "config.json": r"is a file\. Give the folder",
        "./nowhere": "there is no folder './nowhere'",
        "hub/with/three": "there is no folder 'hub/with/three'",
    }.items():
        with pytest.raises(cl.InputError, match=said):
            cl.load_model(wrong)


def test_every_way_a_hub_can_fail_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    """A hub of our own serves one model and refuses others; see fake_hub.py."""
    script = Path(__file__).parents[1] / "helpers" / "fake_hub.py"
    command = [sys.executable, str(script), str(folder), str(tmp_path / "cache")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    for name, said in {
        "gated": "'org/gated' is gated.*`hf auth login`.*or give a folder",
        "missing": "no model 'org/missing' on the hub.*Check the spelling",
        "misspelt": "no model 'org/go od!' on the hub",
        "revision": "not in the requested revision",
        "full": "the disk filled up while 'org/good' .*set HF_HOME",
        "full elsewhere": "the disk filled up while .*/elsewhere; .*give a cache_dir= on a larger",
        "offline": "'org/other' is not in .*the hub cannot be reached",
    }.items():
        assert re.match(f"InputError: .*{said}", found[name]["outcome"]), found[name]
    assert found["full"]["weights"] == 0  # the stand-in for the full disk took their place
    assert "config.json" in found["left"]  # of both caches, and nothing half there in either
    assert not [name for name in found["left"] if "incomplete" in name]
    assert found["good"] == {"outcome": "LlamaForCausalLM", "weights": 1}
    assert found["cached"] == {"outcome": "LlamaForCausalLM", "weights": 0}
    for name, said in {
        "org/gated": "InputError: 'org/gated' is gated",
        "org/missing": "InputError: there is no model 'org/missing' on the hub",
        "org/go od!": "InputError: there is no model 'org/go od!' on the hub",
        "./good": "InputError: there is no folder './good'",
        "org/other": "InputError: 'org/other' is not in .* and the hub cannot be reached",
        "org/good": "TokenizersBackend$",
    }.items():
        assert re.match(said, found["tokenizers"][name]), found["tokenizers"]


@pytest.mark.parametrize("number", [errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)])
def test_a_full_disk_frees_what_is_half_there_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "own"))
    parts = {}
    for cache in ("own", "given"):
        blobs = tmp_path / cache / "models--org--good" / "blobs"
        blobs.mkdir(parents=True)
        parts[cache] = blobs / "1f.incomplete"
        for file in (parts[cache], blobs / "2f"):
            file.write_bytes(b"x")
    error = OSError("no weights")
    error.__cause__ = OSError(number, "full")
    assert f"downloaded to {tmp_path}/given;" in str(
        explain("org/good", error, cache=blobs.parents[1])
    )
    assert (parts["own"].exists(), parts["given"].exists()) == (True, False)
    assert f"downloaded to {tmp_path}/own;" in str(explain("org/good", error))
    assert not parts["own"].exists()
    assert len(list(tmp_path.rglob("2f"))) == 2  # what is whole stays


def test_a_pruned_folder_is_not_taken_for_a_dense_one(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = cl.load_model(folder, device="cpu")
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), [0])
    small = cl.save_pruned(cl.prune(model, plan), tmp_path / "small")
    tokenizer.save_pretrained(small)
    with pytest.raises(cl.InputError):
        cl.load_model(small)


def test_other_models_load_where_the_embedded_one_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Path:
        raise cl.InputError("the embedded model is not there")

    monkeypatch.setattr(loading, "demo_folder", missing)
    assert not loading.is_demo(folder)
    assert loading.is_demo("demo")
    assert cl.load_model(folder, device="cpu")[0].config.vocab_size == 97
    with pytest.raises(cl.InputError):
        cl.load_model("demo")


def test_fingerprints_see_every_bit_and_nothing_else() -> None:
    model = tiny_model()
    mark = fingerprint_model(model)
    assert fingerprint_model(copy.deepcopy(model).train()) == mark
    for change in ("value", "swap", "dtype"):
        other = copy.deepcopy(model)
        weight = other.model.layers[1].mlp.up_proj.weight
        if change == "value":
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
        elif change == "swap":
            weight[[0, 1]] = weight[[1, 0]]
        else:
            other = other.bfloat16()
        assert fingerprint_model(other) != mark, change


def test_device_report_warns_of_an_unusable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/nvidia-smi")
    with pytest.warns(RuntimeWarning, match="CANNOT USE A GPU"):
        assert "CPU" in report_device()


def test_device_report_names_the_dtype_asked_for() -> None:
    assert "; float32; " in report_device("cpu")
    assert "; bfloat16; " in report_device("cpu", "bfloat16")


# Files of others ----------------------------------------------------------------------------------


def edit(path: Path, **changes: Any) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers = 10000000; at most 1,000 are built"),
        ({"n_layer": 10**7, "model_type": "gpt2"}, "n_layer = 10000000"),
        ({"num_hidden_layers": 0}, "has no layers"),
        ({"hidden_size": "64"}, r"the configuration of '.*tiny' cannot be loaded .*expected int"),
        ({"hidden_act": "nope"}, "cannot be loaded .KeyError: 'nope'"),
        ({"hidden_size": 10**18}, "cannot be loaded .*overflowed"),
        ({"model_type": ["llama"]}, "cannot be loaded .TypeError"),
        ({"attn_implementation": "org/kernel"}, "attn_implementation = 'org/kernel'.*from the hub"),
        ({"text_config": {"_attn_implementation": {"": "a/b@c"}}}, "'a/b@c'.*from the hub"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "tiny' needs .* missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_hostile_configuration_is_refused_in_a_sentence(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises((cl.InputError, cl.ArchitectureError), match=said) as caught:
        cl.load_model(folder, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[1]", "[" * 100_000, "{", ""])
def test_a_configuration_that_is_no_object_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(cl.InputError):
        cl.load_model(folder, device="cpu")


def test_the_caller_may_choose_what_a_configuration_may_not(folder: Path) -> None:
    edit(folder / "config.json", attn_implementation="org/kernel")
    model, _ = cl.load_model(folder, device="cpu", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


class Opens:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("opened"),)


def test_a_pickle_runs_nothing_and_is_not_advised_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"a": Opens()}, folder / "pytorch_model.bin")
    with pytest.raises(cl.InputError) as caught:
        cl.load_model(folder, device="cpu")
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("place", ["../tiny.safetensors", "{}/tiny.safetensors", "C:\\a", None, 3])
def test_an_index_stays_in_its_folder(folder: Path, tmp_path: Path, place: Any) -> None:
    """With the weights where the index says, so that only the check stands in the way."""
    weights = (folder / "model.safetensors").rename(tmp_path / "tiny.safetensors")
    place = place.format(tmp_path) if isinstance(place, str) else place
    mapped: Any = dict.fromkeys(load_file(weights), place)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapped}))
    said = "outside its folder" if isinstance(place, str) else "does not map weights to files"
    with pytest.raises(cl.InputError, match=said):
        cl.load_model(folder, device="cpu")


def test_an_index_of_its_own_folder_is_followed(folder: Path) -> None:
    tiny_model().save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert (folder / "model.safetensors.index.json").exists()
    model, _ = cl.load_model(folder, device="cpu")
    assert fingerprint_model(model) == fingerprint_model(tiny_model())
