"""A saved pruned model: read without the library, its card, and folders one should not trust."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.base import atomic
from cocurve_lab.extensions.judging.perplexity import Perplexity
from cocurve_lab.extensions.publishing import modeling_cocurve
from cocurve_lab.extensions.publishing.card import model_card
from cocurve_lab.extensions.publishing.configuration import MODELING_FILE
from cocurve_lab.models.identity import MANIFEST, fingerprint_model
from cocurve_lab.pruner.folder import CardFacts
from helpers.bare_process import run_bare, save_expected
from helpers.seals import reseal
from helpers.tiny_models import (
    GROUPS,
    LLAMA_3,
    full_logits,
    masked_by_hand,
    tiny_model,
    tiny_text,
    word_tokenizer,
)

UNEVEN = ["L0.attention[0]", "L1.ffn[1]", "L2.ffn[0]", "L2.ffn[3]"]
EVEN = [f"L{layer}.{unit}" for layer in range(3) for unit in ("attention[0]", "ffn[0]")]


def whole(layer: int, kind: str, heads: int = 2) -> list[str]:
    return [f"L{layer}.{kind}[{i}]" for i in range(heads if kind == "attention" else GROUPS)]


# name: (family, heads, units, changes of the configuration, whose class reads it)
CASES: dict[str, tuple[str, str, list[str], dict[str, Any], str]] = {
    "one key head": ("llama", "mqa", [*UNEVEN[1:], *whole(1, "attention", 1)], {}, "CocurveLlama"),
    "no heads": ("llama", "gqa", whole(0, "attention") + UNEVEN[1:], {}, "CocurveLlama"),
    "no heads, bias": (
        *("llama", "gqa", whole(0, "attention") + whole(1, "ffn")),
        *({"attention_bias": True, "mlp_bias": True}, "CocurveLlama"),
    ),
    "no FFN": ("llama", "gqa", UNEVEN[:2] + whole(2, "ffn"), {}, "CocurveLlama"),
    "tied": ("llama", "gqa", UNEVEN, {"tie_word_embeddings": True}, "CocurveLlama"),
    "mistral": ("mistral", "gqa", UNEVEN + whole(1, "attention"), {}, "CocurveMistral"),
    "qwen2": ("qwen2", "gqa", UNEVEN + whole(1, "attention"), {}, "CocurveQwen2"),
    "qwen3": ("qwen3", "gqa", UNEVEN + whole(1, "attention"), {}, "CocurveQwen3"),
    "phi3": ("phi3", "gqa", UNEVEN + whole(0, "ffn"), {}, "CocurvePhi3"),
    "gemma": ("gemma", "gqa", UNEVEN + whole(1, "attention"), {}, "CocurveGemma"),
    "gemma2": ("gemma2", "gqa", UNEVEN + whole(1, "attention"), {}, "CocurveGemma2"),
    "gemma3": ("gemma3_text", "gqa", UNEVEN + whole(1, "attention"), {}, "CocurveGemma3"),
    "nothing": ("llama", "gqa", [], {}, "Llama"),
    "uniform llama": ("llama", "gqa", EVEN, {}, "Llama"),
    # 32 is no multiple of 3 heads: Llama refuses, Mistral computes the same but has no biases
    "uniform as mistral": ("llama", "mha", EVEN, {"rope_parameters": LLAMA_3}, "Mistral"),
    "uniform refused": ("llama", "mha", EVEN, {"attention_bias": True}, "CocurveLlama"),
    "uniform qwen2": ("qwen2", "mha", EVEN, {}, "Qwen2"),
}
GAINS = {"L0.ffn[2]": 1.25, "L1.ffn[0]": 0.8}  # kept in every case but where a block is gone


def plan_of(
    model: PreTrainedModel, names: list[str], gains: dict[str, float] | None = None
) -> cl.Selection:
    units = cl.enumerate_units(model, GROUPS)
    plan = cl.Selection.from_pruned(units, names)
    return plan.with_gains({units.index(name): gain for name, gain in (gains or {}).items()})


def saved_case(folder: Path, name: str) -> None:
    """A folder, and beside it what the dense model under hooks of our own computes."""
    family, heads, names, changes, _ = CASES[name]
    model = tiny_model(family, heads, **changes)
    gains = {unit: gain for unit, gain in GAINS.items() if unit not in names and names != []}
    plan = plan_of(model, names, gains)
    cl.save_pruned(cl.prune(model, plan), folder, tokenizer=word_tokenizer())
    ids = tiny_text(2, 14).input_ids
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padding on the left
    inputs = {"input_ids": ids, "attention_mask": mask}
    removed = [plan.units.units[i] for i in plan.pruned]
    scaled = {plan.units.units[i]: gain for i, gain in plan.gains.items()}
    with masked_by_hand(model, removed, scaled):
        save_expected(model, inputs, folder)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without the library saw of every case."""
    place = tmp_path_factory.mktemp("bare")
    for name in CASES:
        saved_case(place / name, name)
    found = run_bare("load", [place / name for name in CASES], place / "home")
    for name in CASES:
        found[name]["folder"] = place / name
    return found


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_it_without_us(seen: dict[str, Any], name: str) -> None:
    *_, changes, reader = CASES[name]
    saw = seen[name]
    assert saw["class"] == f"{reader}ForCausalLM"
    assert not saw["config"].startswith("Cocurve")
    assert not any(saw["info"].values()), "missing, unexpected or mismatched weights"
    manifest = json.loads((saw["folder"] / MANIFEST).read_text())
    assert saw["parameters"] == manifest["parameters"]
    tied = changes.get("tie_word_embeddings", reader in ("CocurveGemma2", "CocurveGemma3"))
    assert saw["tied"] is tied
    ways = ("difference", "eager", "switched to eager", "switched to sdpa", "base", "again", "card")
    for way in ways:
        assert saw[way] < 1e-5, way  # float32, logits of order 1
    assert saw["generated"] == {"cache": True, "none": True}
    assert saw["half"] == ["torch.bfloat16"]
    assert saw["half finite"]


@pytest.mark.parametrize("name", CASES)
def test_its_configuration_says_what_is_in_each_layer(seen: dict[str, Any], name: str) -> None:
    folder, reader = seen[name]["folder"], CASES[name][4]
    config = json.loads((folder / "config.json").read_text())
    manifest = json.loads((folder / MANIFEST).read_text())
    own = reader.startswith("Cocurve")
    assert manifest["loads_with"] == ("own code" if own else "stock")
    assert (folder / MODELING_FILE).exists() is own
    assert (MODELING_FILE in seen[name]["again files"]) is own
    if not own:
        assert not {"auto_map", "per_layer_config"} & set(config)
        return
    per_layer = {int(layer): own for layer, own in config["per_layer_config"].items()}
    kept = {w["key_value_heads"] for w in manifest["layers"]} - {0}
    for layer, widths in enumerate(manifest["layers"]):
        counts = config | per_layer.get(layer, {})
        gone = counts.get("skip", [])
        assert ("attention" in gone) is (widths["attention_columns"] == 0)
        assert ("mlp" in gone) is (widths["ffn_columns"] == 0)
        if "attention" not in gone:
            heads = counts["num_attention_heads"]
            assert heads * config["head_dim"] == widths["attention_columns"]
            assert counts["num_key_value_heads"] == widths["key_value_heads"]
        else:  # vLLM keeps a cache of so many heads for it
            assert counts["num_key_value_heads"] == min(kept)
        if "mlp" not in gone:
            assert counts["intermediate_size"] == widths["ffn_columns"]


@pytest.mark.parametrize("name", ["no heads", "phi3", "uniform qwen2"])
def test_our_loader_reads_the_same_folder(seen: dict[str, Any], name: str) -> None:
    from safetensors.torch import load_file

    folder = seen[name]["folder"]
    expected = load_file(f"{folder}.expected.safetensors")
    loaded = cl.load_pruned(folder)
    assert not loaded.config.is_heterogeneous
    assert not hasattr(loaded.config, "auto_map")
    logits = loaded(expected["input_ids"], attention_mask=expected["attention_mask"]).logits
    scored = expected["attention_mask"] > 0
    assert (logits - expected["logits"])[scored].abs().max() < 1e-5
    again = cl.load_pruned(cl.save_pruned(loaded, folder.parent / f"{name} ours again"))
    assert torch.equal(full_logits(again, expected["input_ids"]),
                       full_logits(loaded, expected["input_ids"]))  # fmt: skip


def test_the_modeling_file_imports_only_what_every_user_has() -> None:
    code = Path(modeling_cocurve.__file__).read_text(encoding="utf-8")
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", code, re.MULTILINE))
    assert imported == {"__future__", "torch", "transformers", "typing", "warnings"}


def test_without_trust_nothing_is_loaded_wrongly(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model()
    folder = cl.save_pruned(cl.prune(model, plan_of(model, UNEVEN)), tmp_path / "small")
    with pytest.raises(RuntimeError, match="mismatched"):
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox"])
def test_other_families_say_that_they_need_us(tmp_path: Path, family: str) -> None:
    model = tiny_model(family, "mha")
    plan = plan_of(model, ["L0.ffn[0]", "L1.ffn[2]"])
    folder = cl.save_pruned(cl.prune(model, plan), tmp_path / "small")
    assert json.loads((folder / MANIFEST).read_text())["loads_with"] == "cocurve_lab"
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    card = (folder / "README.md").read_text()
    assert "this folder needs cocurve_lab" in card
    assert "trust_remote_code" not in card
    ids = tiny_text(1).input_ids
    with masked_by_hand(model, [plan.units.units[i] for i in plan.pruned]):
        masked = full_logits(model, ids)
    assert (full_logits(cl.load_pruned(folder), ids) - masked).abs().max() < 1e-5


@pytest.mark.slow
def test_the_harness_scores_it_by_path(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    saved_case(tmp_path / "no heads", "no heads")
    found = run_bare("harness", [tmp_path / "no heads"], tmp_path / "home")["no heads"]
    assert found["score"] == pytest.approx(found["by hand"], abs=1e-4)


@pytest.mark.slow
def test_adapters_train_on_it(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    names = ("no heads", "no FFN")
    for name in names:
        saved_case(tmp_path / name, name)
    seen = run_bare("adapter", [tmp_path / name for name in names], tmp_path / "home")
    for name in names:
        found = seen[name]
        assert found["trained"] > 0, name
        assert found["after"] < found["before"], name
        assert found["read back"] == pytest.approx(found["after"], abs=1e-5), name


# The card -----------------------------------------------------------------------------------------


def card_of(
    folder: Path, facts: CardFacts | None = None, **changes: Any
) -> tuple[dict[str, Any], str]:
    model = tiny_model(**changes)
    plan = plan_of(model, UNEVEN, GAINS)
    cl.save_pruned(cl.prune(model, plan), folder, evaluation=facts, overwrite=True)
    card = (folder / "README.md").read_text(encoding="utf-8")
    _, front, text = card.split("---\n", 2)
    return yaml.safe_load(front), text


def measured(value: float, protocol: str = "One text.") -> Perplexity:
    return Perplexity(value, 1.5, 10, protocol, 8, 4, (15.0,), (10,))


def test_the_card_states_what_was_given_and_no_more(tmp_path: Path) -> None:
    front, text = card_of(tmp_path / "small")
    assert front["library_name"] == "transformers"
    assert front["pipeline_tag"] == "text-generation"
    assert not {"base_model", "license"} & set(front)
    assert text.count("not measured") >= 3
    facts = CardFacts(
        *("someone/a-model", "mit", 0.125, 0.03, "8 rows of a test text."),
        dense_perplexity=measured(4.5),
        pruned_perplexity=measured(9.25),
    )
    front, text = card_of(tmp_path / "small", facts)
    assert (front["base_model"], front["license"]) == ("someone/a-model", "mit")
    said = ("0.125 ± 0.03 nats", "8 rows of a test text.", "| 9.25 (", "| 4.5 (", "One text.")
    assert all(words in text for words in said)
    assert "not measured" not in text


def test_the_card_counts_what_was_removed(tmp_path: Path) -> None:
    _, text = card_of(tmp_path / "small")
    model = tiny_model()
    plan = plan_of(model, UNEVEN, GAINS)
    pruned = cl.prune(model, plan)
    assert f"realized: {plan.realized_ratio:.2%}" in text
    assert f"parameters removed: {plan.pruned_cost:,} " in text
    assert model.num_parameters() - pruned.num_parameters() == plan.pruned_cost
    assert f"left: {pruned.num_parameters():,} in float32" in text
    assert "units removed: 4; gains: 2 kept FFN groups have one" in text
    rows = re.findall(r"^\| (\d+(?: \| \d+){5}) \|$", text, re.MULTILINE)
    assert [list(map(int, row.split(" | "))) for row in rows] == [
        [0, 1, 16, 42, 1, 0],
        [1, 2, 32, 31, 0, 1],
        [2, 2, 32, 21, 0, 2],
    ]


@pytest.mark.parametrize("base", ['a/"b\nlicense: evil', "../elsewhere", "demo"])
def test_odd_names_do_not_break_the_front_matter(tmp_path: Path, base: str) -> None:
    front, text = card_of(tmp_path / "small", CardFacts(base_model=base, license="a: [b"))
    assert "base_model" not in front
    assert front["license"] == "a: [b"
    assert f"# {' '.join(base.split())}, pruned\n" in text
    assert "requested" not in text  # a ratio that nobody asked for


def test_what_a_manifest_holds_stays_a_literal_in_the_code(tmp_path: Path) -> None:
    card_of(tmp_path / "small")
    manifest = json.loads((tmp_path / "small" / MANIFEST).read_text())
    evil = '"; __import__("os").abort(); "\n```\n'
    changed: dict[str, Any] = {"selection_fingerprint": evil, "ffn_groups": evil}
    changed["guards"] = {evil: evil}
    card = model_card(manifest | changed | {"target": None}, CardFacts(), has_tokenizer=False)
    code = re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)[-1]
    calls = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    assert "__import__" not in calls


def test_facts_that_cannot_be_true_are_refused() -> None:
    with pytest.raises(cl.MismatchError):
        CardFacts(dense_perplexity=measured(4.0), pruned_perplexity=measured(5.0, "Another."))


def test_the_card_repeats_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = cl.load_model("demo", device="cpu")
    units = cl.enumerate_units(model)
    plan = cl.Selection.from_pruned(units, range(0, len(units), 3)).with_gains({5: 1.5})
    pruned = cl.prune(model, plan)
    folder = cl.save_pruned(pruned, tmp_path / "small", tokenizer=tokenizer)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert 'load_model("demo")' in card
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[-1]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names: dict[str, Any] = {}
    exec(code, names)
    again = names["pruned"].to("cpu").state_dict()
    assert all(torch.equal(again[key], value) for key, value in pruned.state_dict().items())


# What became of the weights since they were pruned -------------------------------------------


def saved_as(pruned: Any, folder: Path) -> tuple[dict[str, Any], str]:
    cl.save_pruned(pruned, folder)
    return json.loads((folder / MANIFEST).read_text()), (folder / "README.md").read_text()


@pytest.mark.parametrize("inplace", [True, False])
def test_the_manifest_names_the_weights_before_and_after(tmp_path: Path, inplace: bool) -> None:
    model = tiny_model()
    before = fingerprint_model(model)
    pruned: Any = cl.prune(model, plan_of(model, EVEN), inplace=inplace)
    manifest, card = saved_as(pruned, tmp_path / "small")
    assert manifest["dense_fingerprint"] == before != fingerprint_model(pruned)
    assert manifest["weights_fingerprint"] == pruned.cocurve_manifest["weights_fingerprint"]
    assert manifest["weights_since_pruning"] == "unchanged"
    assert "nothing was trained after pruning" in card
    assert "## How to repeat it\n" in card
    # read back, its configuration is another, its weights are not
    loaded = cl.load_pruned(tmp_path / "small")
    assert saved_as(loaded, tmp_path / "again")[0]["weights_since_pruning"] == "unchanged"


@pytest.mark.parametrize("read_back", [True, False])
def test_changed_weights_are_not_passed_off_as_those_of_the_plan(
    tmp_path: Path, read_back: bool
) -> None:
    model = tiny_model()
    pruned: Any = cl.prune(model, plan_of(model, UNEVEN))
    if read_back:
        pruned = cl.load_pruned(cl.save_pruned(pruned, tmp_path / "first"))
    with torch.no_grad():
        pruned.model.layers[1].mlp.down_proj.weight[0, 0] += 1e-3
    manifest, card = saved_as(pruned, tmp_path / "trained")
    assert manifest["weights_since_pruning"] == "changed"
    assert "the weights were changed after pruning" in card
    assert "nothing was trained" not in card
    assert "KL predicted" not in card
    assert "pruning_risk" not in card
    assert "## How to repeat the pruning\n" in card
    assert "does not repeat what came after" in card
    again = cl.load_pruned(tmp_path / "trained")
    assert saved_as(again, tmp_path / "later")[0]["weights_since_pruning"] == "changed"
    half = again.to(torch.bfloat16)
    assert saved_as(half, tmp_path / "half")[0]["weights_since_pruning"] == "changed"


def test_a_conversion_says_what_it_hides(tmp_path: Path) -> None:
    model = tiny_model()
    pruned = cl.prune(model, plan_of(model, UNEVEN)).to(torch.bfloat16)
    manifest, card = saved_as(pruned, tmp_path / "half")
    assert manifest["weights_since_pruning"] == "converted"
    assert "converted to bfloat16" in card
    assert "nothing was trained" not in card
    loaded: Any = cl.load_pruned(tmp_path / "half")
    assert saved_as(loaded, tmp_path / "same")[0]["weights_since_pruning"] == "converted"
    with torch.no_grad():
        loaded.lm_head.weight[0, 0] += 1
    assert saved_as(loaded, tmp_path / "other")[0]["weights_since_pruning"] == "changed"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_is_saved_as_its_checkpoint_stores_it(
    tmp_path: Path, dtype: str, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = tiny_model(tie_word_embeddings=tied).to(getattr(torch, dtype))
    dense.save_pretrained(tmp_path / "dense")
    word_tokenizer().save_pretrained(tmp_path / "dense")
    model, _ = cl.load_model(tmp_path / "dense", device="cpu")
    pruned: Any = cl.prune(model, plan_of(model, UNEVEN))
    assert pruned.dtype == torch.float32
    manifest, card = saved_as(pruned, tmp_path / "small")
    assert pruned.dtype == torch.float32
    assert (manifest["dtype"], manifest["weights_since_pruning"]) == (dtype, "unchanged")
    assert "nothing was trained" in card
    loaded: Any = cl.load_pruned(tmp_path / "small")
    weights = loaded.state_dict()
    for name, weight in pruned.state_dict().items():
        assert weights[name].dtype == getattr(torch, dtype)
        assert torch.equal(weights[name].float(), weight), name
    again = cl.prune(dense, plan_of(dense, UNEVEN), out=tmp_path / "on disk")
    assert (again / WEIGHTS).read_bytes() == (tmp_path / "small" / WEIGHTS).read_bytes()
    assert saved_as(loaded, tmp_path / "again")[0]["weights_since_pruning"] == "unchanged"
    wide: Any = cl.load_pruned(tmp_path / "small", dtype="float32")
    assert saved_as(wide, tmp_path / "wide")[0]["dtype"] == dtype
    # gains, and whatever else a narrow dtype cannot hold
    scaled = cl.prune(model, plan_of(model, UNEVEN, GAINS))
    capsys.readouterr()
    assert saved_as(scaled, tmp_path / "scaled")[0]["dtype"] == "float32"
    assert f"Saved in float32: {dtype}" in capsys.readouterr().out


@pytest.mark.parametrize("trained", [True, False])
def test_a_second_round_is_told(tmp_path: Path, trained: bool) -> None:
    model = tiny_model()
    once: Any = cl.load_pruned(
        cl.save_pruned(cl.prune(model, plan_of(model, UNEVEN)), tmp_path / "once")
    )
    if trained:
        with torch.no_grad():
            once.lm_head.weight[0, 0] += 1
    twice = cl.prune(once, plan_of(once, ["L0.ffn[1]"]))
    manifest, card = saved_as(twice, tmp_path / "twice")
    assert manifest["dense_fingerprint"] == fingerprint_model(once)
    (first,) = manifest["earlier_rounds"]
    assert first["pruned_units"] == UNEVEN
    assert first["dense_fingerprint"] == fingerprint_model(model)
    assert first["weights_since_pruning"] == ("changed" if trained else "unchanged")
    assert manifest["base_model"] == once.cocurve_manifest["base_model"]
    assert "had been pruned before (rounds: 1)" in card
    assert ("Between rounds the weights were changed" in card) is trained
    assert "cl.load_pruned(" in card.partition("## How to repeat")[2]
    assert "load_model(" not in card.partition("## How to repeat")[2]


# Folders one should not trust, or that are not whole --------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_model()
    return cl.save_pruned(cl.prune(model, plan_of(model, UNEVEN)), tmp_path / "small")


def test_our_loader_runs_nothing_of_the_folder(folder: Path) -> None:
    (folder / MODELING_FILE).write_text("raise SystemExit('the folder was run')")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoConfig"] = "modeling_cocurve.Config"
    (folder / "config.json").write_text(json.dumps(config))
    reseal(folder)
    assert cl.load_pruned(folder).num_parameters() > 0


def edited(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return spoil


def rewritten(name: str, change: Callable[[str], str]) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(change((folder / name).read_text()))


def layer(number: int, **widths: Any) -> Callable[[Path], None]:
    return edited(MANIFEST, lambda m: m["layers"][number].update(widths))


def reweighed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    from safetensors.torch import load_file, save_file

    def spoil(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return spoil


WEIGHTS, CONFIG = "model.safetensors", "config.json"
# what is done to a folder, and what the message must name
HOSTILE: list[tuple[Callable[[Path], Any], str]] = [
    (
        lambda f: ((f / MANIFEST).unlink(), edited(CONFIG, lambda c: c.pop("per_layer_config"))(f)),
        MANIFEST,
    ),
    *((rewritten(MANIFEST, lambda _, c=c: c), "small") for c in ("{", "[]", "[" * 100_000)),
    (rewritten(MANIFEST, lambda text: text[:-40]), "small"),
    (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe\x00"), "small"),
    (edited(MANIFEST, lambda m: m.update(version=9)), "version 9"),
    (edited(MANIFEST, lambda m: m.update(format="gguf")), "'gguf'"),
    (edited(MANIFEST, lambda m: m.pop("layers")), "layers"),
    (edited(MANIFEST, lambda m: m["layers"][1].pop("ffn_columns")), "ffn_columns"),
    (edited(MANIFEST, lambda m: m["layers"].pop()), "2 layers.* 3"),
    *((edited(MANIFEST, lambda m, d=d: m.update(dtype=d)), "dtype") for d in ("load", "nn")),
    (edited(MANIFEST, lambda m: m.update(dtype=["float32"])), "small"),
    (layer(0, ffn_columns=999), "layer 0 999 ffn columns"),
    (layer(0, ffn_columns="42"), "ffn_columns is '42'"),
    (
        rewritten(MANIFEST, lambda t: t.replace('"ffn_columns": 42', '"ffn_columns": 1e400')),
        "1e400",
    ),
    (layer(0, attention_columns=9), "layer 0 9 attention columns"),
    (layer(2, ffn_columns=40), r"model\.layers\.2\.mlp\."),
    (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-1000]), WEIGHTS),
    (lambda f: (f / WEIGHTS).unlink(), "small"),
    (reweighed(lambda w: w.update(stray=torch.zeros(2))), "stray"),
    (reweighed(lambda w: w.pop("lm_head.weight")), "lm_head"),
    (lambda f: (f / CONFIG).unlink(), CONFIG),
    (edited(CONFIG, lambda c: c.update(model_type="../evil")), CONFIG),
    (edited(CONFIG, lambda c: c.update(hidden_size="many")), CONFIG),
    (edited(CONFIG, lambda c: c.update(hidden_act="nope")), CONFIG),
    (edited(CONFIG, lambda c: c.update(num_hidden_layers=10**7)), "1,000"),
    (edited(CONFIG, lambda c: c.update(_attn_implementation="org/kernel")), "'org/kernel'"),
    (lambda f: (f / "generation_config.json").write_text("[1]"), "generation_config.json"),
]


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_hostile_folders_are_refused(folder: Path, case: int) -> None:
    spoil, named = HOSTILE[case]
    spoil(folder)
    reseal(folder)
    with pytest.raises(cl.FileFormatError, match=named):
        cl.load_pruned(folder)


@pytest.mark.parametrize("dtype", ["float31", "nn", "int8", torch.int64, "float8_e4m3fn"])
def test_other_dtypes_are_refused(folder: Path, dtype: Any) -> None:
    with pytest.raises(cl.InputError):
        cl.load_pruned(folder, dtype=dtype)


@pytest.mark.parametrize("stage", ["card", "tokenizer", "configuration"])
def test_an_interrupted_save_leaves_what_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    model, tokenizer = tiny_model(), word_tokenizer()
    other = cl.prune(model, plan_of(model, EVEN))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    if stage == "tokenizer":
        monkeypatch.setattr(type(tokenizer), "save_pretrained", interrupt)
    else:
        place = {
            "card": "extensions.publishing.card.model_card",
            "configuration": "extensions.publishing.configuration.write_configuration",
        }[stage]
        monkeypatch.setattr(f"cocurve_lab.{place}", interrupt)
    for target in (folder, folder.parent / "new"):
        with pytest.raises(KeyboardInterrupt):
            cl.save_pruned(other, target, tokenizer=tokenizer, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_failed_rename_brings_the_old_model_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that cannot exchange two folders, where there are two renames."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.parent.name == "new":
            raise OSError("no")
        return rename(self, target)

    model = tiny_model()
    other = cl.prune(model, plan_of(model, EVEN))
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no"):
        cl.save_pruned(other, folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_overwriting_deletes_nothing_a_save_did_not_write(folder: Path) -> None:
    model = tiny_model()
    other = cl.prune(model, plan_of(model, EVEN))
    cl.save_pruned(other, folder, tokenizer=word_tokenizer(), overwrite=True)
    cl.save_pruned(other, folder, overwrite=True)  # a tokenizer's files are a save's own
    (folder / "my_adapter").mkdir()
    (folder / "notes.txt").write_text("keep")
    with pytest.raises(cl.InputError):
        cl.save_pruned(other, folder, overwrite=True)
    assert (folder / "notes.txt").read_text() == "keep"
    assert (folder / "my_adapter").is_dir()


def test_the_working_directory_is_not_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    other = cl.prune(model, plan_of(model, EVEN))
    monkeypatch.chdir(folder)
    for place in (".", folder):
        with pytest.raises(cl.InputError):
            cl.save_pruned(other, place, overwrite=True)
    assert cl.load_pruned(folder).num_parameters() > 0
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert (
        cl.load_pruned(cl.save_pruned(other, "inside")).num_parameters() == other.num_parameters()
    )


def test_a_link_stays_and_its_folder_is_replaced(folder: Path) -> None:
    model = tiny_model()
    other = cl.prune(model, plan_of(model, EVEN))
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert cl.save_pruned(other, link, overwrite=True) == link
    assert link.is_symlink()
    assert cl.load_pruned(folder).num_parameters() == other.num_parameters()


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_files_have_the_permissions_of_the_umask(tmp_path: Path, mask: int) -> None:
    model = tiny_model()
    pruned = cl.prune(model, plan_of(model, UNEVEN))
    earlier = os.umask(mask)
    try:
        folder = cl.save_pruned(pruned, tmp_path / "small", tokenizer=word_tokenizer())
    finally:
        os.umask(earlier)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~mask}
