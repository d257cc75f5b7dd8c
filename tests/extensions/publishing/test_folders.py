"""A saved pruned model, read without the library."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import cocurve_lab as cl
from cocurve_lab.extensions.judging.perplexity import Perplexity
from cocurve_lab.extensions.publishing import modeling_cocurve
from cocurve_lab.extensions.publishing.card import as_markdown, as_markdown_text, model_card
from cocurve_lab.extensions.publishing.configuration import MODELING_FILE
from cocurve_lab.models.identity import MANIFEST, weight_marks
from cocurve_lab.pruner.folder import CardFacts
from cocurve_lab.pruner.manifest import manifest_on
from helpers.bare_process import run_bare, save_expected
from helpers.builds import plan_of
from helpers.tiny_models import (
    GROUPS,
    LLAMA_3,
    full_logits,
    masked_by_hand,
    tiny_model,
    tiny_text,
    word_tokenizer,
    write_model,
)

UNEVEN = ["L0.attention[0]", "L1.ffn[1]", "L2.ffn[0]", "L2.ffn[3]"]
EVEN = [f"L{layer}.{unit}" for layer in range(3) for unit in ("attention[0]", "ffn[0]")]


def whole(layer: int, kind: str, heads: int = 2) -> list[str]:
    return [f"L{layer}.{kind}[{i}]" for i in range(heads if kind == "attention" else GROUPS)]


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
        found[name]["manifest"] = json.loads((place / name / MANIFEST).read_text())
    return found


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_it_without_us(seen: dict[str, Any], name: str) -> None:
    *_, changes, reader = CASES[name]
    saw = seen[name]
    assert saw["class"] == f"{reader}ForCausalLM"
    assert not saw["config"].startswith("Cocurve")
    assert not any(saw["info"].values()), "missing, unexpected or mismatched weights"
    assert saw["parameters"] == saw["manifest"]["parameters"]
    tied = changes.get("tie_word_embeddings", reader in ("CocurveGemma2", "CocurveGemma3"))
    assert saw["tied"] is tied
    ways = ("difference", "eager", "switched to eager", "switched to sdpa", "base", "again", "card")
    for way in ways:
        assert saw[way] < 1e-5, way  # float32, logits of order 1
    assert saw["generated"] == {"cache": True, "none": True}
    assert (saw["half"], saw["half finite"]) == (["torch.bfloat16"], True)


@pytest.mark.parametrize("name", CASES)
def test_its_configuration_says_who_reads_it_and_what_a_cache_needs(
    seen: dict[str, Any], name: str
) -> None:
    folder, manifest = seen[name]["folder"], seen[name]["manifest"]
    config = json.loads((folder / "config.json").read_text())
    own = CASES[name][4].startswith("Cocurve")
    assert manifest["loads_with"] == ("own code" if own else "stock")
    assert (folder / MODELING_FILE).exists() is own
    assert (MODELING_FILE in seen[name]["again files"]) is own
    if not own:
        assert not {"auto_map", "per_layer_config"} & set(config)
        return
    heads = [widths["key_value_heads"] for widths in manifest["layers"]]
    for layer, number in enumerate(heads):
        counts = config | config["per_layer_config"].get(str(layer), {})
        # vLLM keeps a cache of so many heads for a layer without any
        assert counts["num_key_value_heads"] == (number or min({*heads} - {0}))


def test_without_trust_nothing_is_loaded_wrongly(seen: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError):
        AutoModelForCausalLM.from_pretrained(seen["no FFN"]["folder"], trust_remote_code=False)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox"])
def test_other_families_say_that_they_need_us(tmp_path: Path, family: str) -> None:
    model, text = tiny_model(family, "mha"), tiny_text(1)
    plan = plan_of(model, ["L0.ffn[0]", "L1.ffn[2]"])
    folder = cl.save_pruned(cl.prune(model, plan), tmp_path / "small")
    assert json.loads((folder / MANIFEST).read_text())["loads_with"] == "cocurve_lab"
    assert "auto_map" not in (folder / "config.json").read_text()
    assert "trust_remote_code" not in (folder / "README.md").read_text()
    cl.check_equivalence(model, cl.load_pruned(folder), plan, text)


@pytest.mark.slow
def test_the_harness_scores_it_by_path(tmp_path: Path) -> None:
    saved_case(tmp_path / "no heads", "no heads")
    found = run_bare("harness", [tmp_path / "no heads"], tmp_path / "home")["no heads"]
    assert found["score"] == pytest.approx(found["by hand"], abs=1e-4)


@pytest.mark.slow
def test_adapters_train_on_it(tmp_path: Path) -> None:
    names = ("no heads", "no FFN")
    for name in names:
        saved_case(tmp_path / name, name)
    seen = run_bare("adapter", [tmp_path / name for name in names], tmp_path / "home")
    for name in names:
        found = seen[name]
        assert found["trained"] > 0, name
        assert found["after"] < found["before"], name
        assert found["read back"] == pytest.approx(found["after"], abs=1e-5), name


# Trained or used by other tools: no manifest, only their own files ------------------------------

LOST = ["L0.attention[0]", "L0.attention[1]", "L1.ffn[1]", "L2.ffn[0]", "L2.ffn[3]"]
GONE = [f"L1.ffn[{group}]" for group in range(GROUPS)]
FAMILIES = {
    "llama": ("llama", LOST, {"attention_bias": True}),
    "phi3": ("phi3", [*LOST[:2], *GONE], {}),
    "tied gemma": ("gemma3_text", LOST[1:], {}),
}


def pruned(family: str = "llama", names: list[str] = LOST, **changes: Any) -> Any:
    model = tiny_model(family, "gqa", **changes)
    return cl.prune(model, cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), names))


def trained(folder: Path) -> Any:
    """What a trainer holds: the saved class, with other weights."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(modeling_cocurve, name).from_pretrained(folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01 * torch.randn_like(weight)
    return model


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """A folder that a trainer saved, with a tokenizer."""
    write_model(tmp_path / "tuned", trained(cl.save_pruned(pruned(), tmp_path / "small")))
    return tmp_path / "tuned"


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_trainer_saved_is_read_and_pruned_again(tmp_path: Path, name: str) -> None:
    """And the object itself, saved by us."""
    family, names, changes = FAMILIES[name]
    small = pruned(family, names, **changes)
    model = trained(cl.save_pruned(small, tmp_path / "small"))
    model.save_pretrained(tmp_path / "tuned")
    loaded: Any = cl.load_pruned(tmp_path / "tuned")
    ids = tiny_text(2).input_ids
    assert (full_logits(loaded, ids) - full_logits(model, ids)).abs().max() < 1e-5
    assert loaded.cocurve_manifest["layers"] == small.cocurve_manifest["layers"]
    for number, each in enumerate((loaded, model)):
        again = cl.save_pruned(each, tmp_path / f"again {number}")
        manifest = json.loads((again / MANIFEST).read_text())
        assert manifest["weights_since_pruning"] == "trained elsewhere"
        assert weight_marks(cl.load_pruned(again)) == weight_marks(loaded)
    plan = cl.Selection.from_pruned(cl.enumerate_units(loaded, GROUPS), ["L2.ffn[1]"])
    manifest = cl.prune(cl.load_pruned(again), plan, verify=tiny_text(1)).cocurve_manifest
    (first,) = manifest["earlier_rounds"]
    assert (first["weights_since_pruning"], first["pruned_units"]) == ("trained elsewhere", [])
    assert manifest["base_model"] is None


def test_a_separate_head_survives_a_configuration_that_ties_it(tuned: Path) -> None:
    before = cl.load_pruned(tuned)
    edit(tuned, tie_word_embeddings=True)
    assert weight_marks(cl.load_pruned(tuned)) == weight_marks(before)


def edit(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "own",
    [
        {"1": {"intermediate_size": 10**6}},
        {"1": {"intermediate_size": "7"}},
        [1],
        {"1": 3},
    ],
    ids=str,
)
def test_widths_that_cannot_be_and_adapters_are_refused(tuned: Path, own: Any) -> None:
    (tuned / "adapter_config.json").write_text("{}")
    with pytest.raises(cl.InputError):
        cl.load_pruned(tuned)
    (tuned / "adapter_config.json").unlink()
    edit(tuned, per_layer_config=own)
    with pytest.raises(cl.FileFormatError):
        cl.load_pruned(tuned)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_classifier_is_made_of_it(tmp_path: Path, family: str) -> None:
    small = pruned(family, LOST[1:])
    folder = cl.save_pruned(small, tmp_path / "small")
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, trust_remote_code=True, num_labels=3
    ).eval()
    ids = tiny_text(2).input_ids
    with torch.no_grad():
        hidden = small.base_model(ids).last_hidden_state[:, -1]
        assert (model(ids[:1]).logits - model.score(hidden[:1])).abs().max() < 1e-5


# Uniform folders in transformers 4; `.ci/newest` puts it into a folder of its own ----------------

OLDER = Path(__file__).resolve().parents[3] / ".venv-transformers4"
needs_older = pytest.mark.skipif(
    not OLDER.is_dir(), reason=f"{OLDER.name} with transformers 4 is not there: run `make newest`"
)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"type": "longrope", "short_factor": [1.0, 1.5] * 2, "long_factor": [2.0, 3.0] * 2}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama 3": ("llama", LLAMA3 | {"original_max_position_embeddings": 16}),
    "qwen2": ("qwen2", {}),
    "phi3": ("phi3", LONG),
    "gemma3": ("gemma3_text", {}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5}),
}
READ = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.save(model(torch.tensor(json.loads(sys.argv[1]))).logits, folder + "/logits.pt")
    words = AutoTokenizer.from_pretrained(folder)("w1 <more> w2")["input_ids"]
    print(json.dumps(words))
"""


def uniform(family: str, rope: dict[str, Any]) -> tuple[Any, cl.Selection]:
    """A model with rotary settings that no class has by default, and a plan for it."""
    model = tiny_model(family, "gqa")
    content = model.config.to_dict()
    whole = content["rope_parameters"].get("full_attention", content["rope_parameters"])
    whole |= {"rope_theta": 77777.0, **rope}
    if "type" in rope:
        del whole["rope_type"]
        content["original_max_position_embeddings"] = 16
    if "sliding_attention" in content["rope_parameters"]:
        content["rope_parameters"]["sliding_attention"]["rope_theta"] = 555.0
    config = type(model.config).from_dict(content)
    torch.manual_seed(0)
    model = type(model)(config).eval().requires_grad_(False)
    units = cl.enumerate_units(model, 4)
    return model, cl.Selection.from_pruned(units, [f"L{layer}.ffn[1]" for layer in range(3)])


@needs_older
def test_transformers_4_computes_the_same(tmp_path: Path) -> None:
    ids, tokenizer = tiny_text(2).input_ids, word_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<more>"]})
    wanted: dict[str, Any] = {}
    for name, (family, rope) in SETTINGS.items():
        model, plan = uniform(family, rope)
        small = cl.prune(model, plan)
        cl.save_pruned(small, tmp_path / name, tokenizer=tokenizer)
        wanted[name] = full_logits(small, ids)
        if name == "llama 3":
            cl.prune(model, plan, out=tmp_path / "on disk", tokenizer=tokenizer)
            wanted["on disk"] = wanted[name]
    folders = [str(tmp_path / name) for name in wanted]
    found = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(ids.tolist()), *folders],
        env=os.environ | {"PYTHONPATH": str(OLDER), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    for name, words in zip(wanted, found.stdout.splitlines(), strict=True):
        off = torch.load(tmp_path / name / "logits.pt") - wanted[name]
        assert off.abs().max() < 1e-4, name
        assert json.loads(words) == tokenizer("w1 <more> w2")["input_ids"], name


# The card: what it states, and that its code repeats the model ------------------------------------


def card_of(folder: Path, facts: CardFacts | None = None) -> tuple[dict[str, Any], str]:
    """Front matter and text of the card of one tiny model."""
    model = tiny_model()
    plan = plan_of(model, UNEVEN, GAINS)
    cl.save_pruned(cl.prune(model, plan), folder, evaluation=facts, overwrite=True)
    _, front, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


def measured(value: float, protocol: str = "One text.") -> Perplexity:
    return Perplexity(value, 1.5, 10, protocol, 8, 4, (15.0,), (10,))


def test_the_card_states_what_was_given_and_no_more(tmp_path: Path) -> None:
    front, text = card_of(tmp_path / "small")
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "text-generation")
    assert not {"base_model", "license"} & set(front)
    assert text.count("not measured") >= 3
    perplexities = {"dense_perplexity": measured(4.5), "pruned_perplexity": measured(9.25)}
    facts = CardFacts(
        "someone/a-model", "mit", 0.125, 0.03, "8 rows of a test text.", **perplexities
    )
    front, text = card_of(tmp_path / "small", facts)
    assert (front["base_model"], front["license"]) == ("someone/a-model", "mit")
    said = ("0.125 ± 0.03", "8 rows of a test text.", "| 9.25 (", "| 4.5 (", "One text.")
    assert all(words in text for words in said)
    assert "not measured" not in text
    with pytest.raises(cl.MismatchError):
        CardFacts(dense_perplexity=measured(4.0), pruned_perplexity=measured(5.0, "Another."))


def test_the_card_counts_what_was_removed(tmp_path: Path) -> None:
    _, text = card_of(tmp_path / "small")
    model = tiny_model()
    plan = plan_of(model, UNEVEN, GAINS)
    left = model.num_parameters() - plan.pruned_cost
    for number in (f"{plan.realized_ratio:.2%}", f"{plan.pruned_cost:,} ", f"{left:,} in float32"):
        assert number in text
    rows = re.findall(r"^\| (\d+(?: \| \d+){5}) \|$", text, re.MULTILINE)
    assert [list(map(int, row.split(" | "))) for row in rows] == [
        [0, 1, 16, 42, 1, 0],
        [1, 2, 32, 31, 0, 1],
        [2, 2, 32, 21, 0, 2],
    ]


def test_the_card_repeats_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = cl.load_model("demo", device="cpu")
    units = cl.enumerate_units(model)
    plan = cl.Selection.from_pruned(units, range(0, len(units), 3)).with_gains({5: 1.5})
    pruned = cl.prune(model, plan)
    folder = cl.save_pruned(pruned, tmp_path / "small", tokenizer=tokenizer)
    card = (folder / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[-1]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names: dict[str, Any] = {}
    exec(code, names)
    again = names["pruned"].to("cpu").state_dict()
    assert all(torch.equal(again[key], value) for key, value in pruned.state_dict().items())


# Foreign text: parsed again, the structure is that of a harmless text --------------------------

HOSTILE = {
    "a tag": '"><script>alert(1)</script>',
    "a link": "x](javascript:alert(1)) [y](http://e)",
    "a picture": "![x](http://e/x.png)",
    "an address": "<http://e> https://e.example www.e.example",
    "a comment": "<!-- x",
    "an entity": "&lt;b&gt; &#124;",
    "a cell": "a | b \\| c \\\\| d",
    "lines": "x\n\n# Title\n\n- item\r\n***\x0b\x85\u2028y",
    "code": "`x` ``y``\n```python\nimport os\n```",
    "emphasis": "*x* **y** _z_ ~~w~~",
    "front matter": "x\n---\nlicense: mit\n---\n",
    "a template": "{{ 7 * 7 }}{% raw %}",
    "a formula": "=1+1",
    "a spaced formula": " \u00a0\ufeff=cmd|' /C calc'!A0",
    "a formula below": "\n@SUM(1)",
    "a zero": "x\x00\x1b[31my",
    "one sign": "|",
    "a call": '"; __import__("os").abort(); "\n```\n',
}
hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})


def structure(markdown: str) -> list[Any]:
    """Types of all tokens, inside lines too; not the texts, nor how many there are in a row."""
    found: list[Any] = []
    for token in MARKDOWN.parse(markdown):
        found.append((token.type, token.tag))
        found += [child.type for child in token.children or () if child.type != "text"]
    return found


def contents(markdown: str) -> str:
    tokens = MARKDOWN.parse(markdown)
    return "".join(child.content for token in tokens for child in token.children or ())


@hostile
def test_a_line_of_markdown_shows_the_text(text: str) -> None:
    line = f"# {as_markdown_text(text)}, pruned"
    assert structure(line) == structure("# harmless, pruned")
    plain = "".join(c if c.isprintable() else " " for c in text)
    assert contents(line) == f"{' '.join(plain.split())}, pruned"


@hostile
def test_a_cell_stays_in_its_markdown_table(text: str) -> None:
    table = as_markdown((text, "b"), [("c", text), (text, 1)])
    cells = [token for token in structure(table) if token in (("td_open", "td"), ("th_open", "th"))]
    assert len(cells) == 6
    assert len(table.splitlines()) == 4


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    model = tiny_model()
    plan = cl.Selection.from_pruned(cl.enumerate_units(model, 4), [0, 5])
    found = manifest_on(cl.prune(model, plan))
    assert found is not None
    refit = {"kinds": ["ffn"], "ridge": 1.0, "positions": 9, "sequential": False, "sequences": 3}
    marks = {"calibration": "TEXT", "calibration_fingerprint": "0" * 64, "target": "dense"}
    changes: dict[str, Any] = {"repair": refit | marks, "interaction_strength": 1.0}
    changes |= {"selection_fingerprint": "TEXT", "ffn_groups": "TEXT"}
    known = {"parameters": 1, "loads_with": "stock", "base_model": "TEXT", "target": "TEXT"}
    return found | changes | known | {"guards": {"depth": "TEXT"}}


def card(manifest: dict[str, Any], text: str) -> str:
    changed = json.loads(json.dumps(manifest).replace('"TEXT"', json.dumps(text)))
    facts = CardFacts(kl=0.1, kl_text=text, base_model=text, license=text)
    return model_card(changed, facts, has_tokenizer=False)


@hostile
def test_a_card_keeps_its_structure(manifest: dict[str, Any], text: str) -> None:
    made = card(manifest, text)
    _, front, body = made.split("---\n", 2) if text.count("---") == 0 else _front(made)
    stated, harmless = yaml.safe_load(front), card(manifest, "harmless").split("---\n", 2)[2]
    assert (stated["license"], "base_model" in stated) == (text, False)
    assert structure(body) == structure(harmless)
    assert code_of(body) == code_of(harmless)


def code_of(markdown: str) -> list[type[ast.AST]]:
    """The types of all nodes of all Python of a card: what is foreign stays one literal."""
    blocks = [token.content for token in MARKDOWN.parse(markdown) if token.info == "python"]
    return [type(node) for block in blocks for node in ast.walk(ast.parse(block))]


def _front(made: str) -> list[str]:
    """The parts of a card whose front matter has lines of signs inside a value."""
    front, _, body = made.removeprefix("---\n").partition("\n---\n\n# ")
    return ["", front, "\n# " + body]
