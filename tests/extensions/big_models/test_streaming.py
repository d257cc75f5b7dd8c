"""Models whose layers are read when they run: the same numbers, and never the whole model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.evaluation.efficiency import measure_efficiency
from cocurve_lab.extensions.big_models.layerwise import LayerwisePasses
from cocurve_lab.extensions.judging.lockstep import Sampling, compare_text, forced_kl
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.identity import fingerprint_model, weight_marks
from cocurve_lab.models.layers import weights_of
from cocurve_lab.pruner.cutting import cut
from helpers.contract import plans
from helpers.tiny_models import (
    FURTHER,
    GROUPS,
    HYBRIDS,
    MHA_ONLY,
    MORE_FAMILIES,
    MULTIMODAL,
    tiny_model,
    tiny_text,
    word_tokenizer,
    write_model,
)

TEXT = tiny_text(2, 20, 6)
# tied embeddings, fused projections, weights under other names, blocks without a module
KINDS = ["llama", "phi3", "gemma2", "gpt_neox", "gpt2", "opt_350m"]


def saved(folder: Path, family: str = "llama", shard: str = "1GB", **changes: Any) -> Path:
    heads = "mha" if family in MHA_ONLY else "gqa"
    write_model(folder, tiny_model(family, heads, **changes), max_shard_size=shard)
    return folder


def pair(folder: Path, **options: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model of a folder, in memory and streamed."""
    whole, _ = cl.load_model(folder, device="cpu", **options)
    streamed, _ = cl.load_model(folder, device="cpu", stream=True, **options)
    return whole, streamed


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(TEXT.input_ids).logits


@pytest.mark.parametrize(
    ("family", "shard"),
    [
        *((family, "1GB") for family in dict.fromkeys([*KINDS, *MORE_FAMILIES, *FURTHER])),
        *((family, "1GB") for family in ("gemma3", "qwen2_5_vl", "llava", "lfm2")),
        *((family, "20KB") for family in ("llama", "gpt2", "granitemoehybrid")),
    ],
)
def test_a_streamed_model_computes_what_the_loaded_one_does_and_is_cut_like_it(
    tmp_path: Path, family: str, shard: str
) -> None:
    tied = {"tie_word_embeddings": True} if family in (*MULTIMODAL, *HYBRIDS) else {}
    whole, streamed = pair(saved(tmp_path / "dense", family, shard, layers=2, **tied))
    parts = list((tmp_path / "dense").glob("*.safetensors"))
    assert (len(parts) > 1) == (shard == "20KB")
    stream = weights_of(streamed)
    assert sorted(stream.layers) == [0, 1]
    for _ in range(2):
        assert torch.equal(logits(streamed), logits(whole))
    assert all(weight.is_meta for weight in describe(streamed).layers[1].parameters())
    assert stream.bytes_read == 2 * sum(layer.bytes for layer in stream.layers.values())
    assert fingerprint_model(streamed) == fingerprint_model(whole)
    units = cl.enumerate_units(whole, GROUPS)
    assert cl.enumerate_units(streamed, GROUPS).fingerprint == units.fingerprint
    plan = plans(units)["whole blocks"]
    found = cl.load_pruned(cl.prune(streamed, plan, out=tmp_path / "small"), device="cpu")
    assert weight_marks(found) == weight_marks(cl.prune(whole, plan))
    if tied:
        assert found.lm_head.weight is found.get_input_embeddings().weight
    if shard == "1GB" and family in KINDS:
        several = [cl.Selection.from_pruned(units, chosen) for chosen in ([0], [1, 5], [3, 7, 9])]
        tables = [cl.measure_plans(m, several, TEXT, progress=False) for m in (whole, streamed)]
        assert np.array_equal(tables[0].kl, tables[1].kl)
        assert tables[0].kl.min() > 0


def test_at_most_two_layers_are_in_memory(tmp_path: Path) -> None:
    _, streamed = pair(saved(tmp_path))
    stream, layers, seen = weights_of(streamed), streamed.model.layers, []
    for layer in layers:
        layer.mlp.register_forward_hook(
            lambda *_: seen.append([not x.mlp.up_proj.weight.is_meta for x in layers])
        )
    logits(streamed)
    assert seen == [[at == run for at in range(3)] for run in range(3)]
    assert stream.bytes_present == 2 * stream.layers[2].bytes
    with stream.present(1):
        logits(streamed)
        assert not layers[1].mlp.up_proj.weight.is_meta
    assert layers[1].mlp.up_proj.weight.is_meta


def test_an_interrupted_pass_leaves_nothing_behind(tmp_path: Path) -> None:
    whole, streamed = pair(saved(tmp_path))

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = streamed.model.layers[1].mlp.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        logits(streamed)
    hook.remove()
    assert torch.equal(logits(streamed), logits(whole))
    assert all(weight.is_meta for weight in streamed.model.layers.parameters())


@pytest.mark.parametrize("how", ["from_pretrained", "cpu_offload"])
def test_what_accelerate_offloaded_is_measured_too(tmp_path: Path, how: str) -> None:
    import accelerate

    whole, _ = cl.load_model(saved(tmp_path / "model"), device="cpu")
    places: dict[str, Any] = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{at}": "disk" if at else "cpu" for at in range(3)}
    places |= {"model.norm": "disk", "lm_head": "disk"}
    if how == "from_pretrained":
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=places).eval()
    else:
        model = accelerate.cpu_offload(tiny_model(), torch.device("cpu"))
    plan = cl.Selection.from_pruned(cl.enumerate_units(whole, GROUPS), [0, 5, 9])
    assert cl.pruning_risk(model, plan, TEXT) == cl.pruning_risk(whole, plan, TEXT)
    stream = weights_of(model)
    assert sorted(stream.layers) == ([0, 1, 2] if how == "cpu_offload" else [1, 2])
    assert fingerprint_model(model) == fingerprint_model(whole)
    for remove in (cl.prune, cut):
        with pytest.raises(cl.InputError):
            remove(model, plan)


def test_texts_perplexity_and_questions_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    both, tokenizer = pair(saved(tmp_path)), word_tokenizer()
    plan = cl.Selection.from_pruned(cl.enumerate_units(both[0], 16), [0, 20, 40])
    text = " ".join(f"w{at % 90}" for at in range(80))
    for measure in (
        lambda m: cl.continue_text(m, tokenizer, "w3 w9 w4 w1", max_new_tokens=6),
        lambda m: cl.perplexity(m, tokenizer, text, context=16, stride=8),
        lambda m: compare_text(m, tokenizer, "w3 w9 w4", plan, Sampling(6)),
        lambda m: forced_kl(m, plan, TEXT.input_ids[0]).tolist(),
        lambda m: cl.split_risk(m, plan, TEXT, progress=False).kl_of_joint.tolist(),
    ):
        found, expected = (measure(model) for model in both)
        assert found == expected


# each gets the model, a plan, and the model pruned by the plan
NEED_ALL: dict[str, Callable[[Any, Any, Any], Any]] = {
    "prune": lambda m, plan, small: cl.prune(m, plan),
    "prune in place": lambda m, plan, small: cl.prune(m, plan, inplace=True, verify=TEXT),
    "cut": lambda m, plan, small: cut(m, plan),
    "repair": lambda m, plan, small: cl.repair(m, plan, TEXT),
    "efficiency": lambda m, plan, small: measure_efficiency(m, small),
    "best plan": lambda m, plan, small: cl.best_plan(m, word_tokenizer(), 0.2),
    "LLM-Pruner": lambda m, plan, small: cl.get_method("llm-pruner").measure(
        m, plan.units, TEXT, progress=False
    ),
    "training": lambda m, plan, small: cl.recover(small, m, TEXT),
}


def test_what_needs_all_weights_says_so_before_it_runs(tmp_path: Path) -> None:
    whole, streamed = pair(saved(tmp_path))
    units = cl.enumerate_units(whole, GROUPS)
    plan = cl.Selection.from_pruned(units, [0, 5])
    small = cl.prune(whole, plan)
    for use in NEED_ALL.values():
        with pytest.raises(cl.InputError):
            use(streamed, plan, small)
    assert weights_of(streamed).bytes_read == 0


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "to dtype": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "bfloat16 inside": lambda m: m.model.bfloat16(),
    "double of a layer": lambda m: m.model.layers[1].double(),
    "float of a projection": lambda m: m.model.layers[1].mlp.up_proj.half(),
    "to device": lambda m: m.to("meta"),
    "cpu": lambda m: m.cpu(),
    "cuda": lambda m: m.cuda(),
}


def test_what_is_streamed_or_offloaded_is_not_converted(tmp_path: Path) -> None:
    import accelerate

    whole, streamed = pair(saved(tmp_path))
    offloaded, _ = cl.load_model(tmp_path, device="cpu")
    accelerate.cpu_offload(offloaded, torch.device("cpu"))
    assert weights_of(offloaded).devices
    for model, conversions in ((streamed, CONVERSIONS), (offloaded, {"half": CONVERSIONS["half"]})):
        for convert in conversions.values():
            with pytest.raises(cl.InputError):
                convert(model)
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        assert torch.equal(logits(model), logits(whole))


def test_what_is_streamed_is_not_saved_as_a_whole(tmp_path: Path) -> None:
    whole, streamed = pair(saved(tmp_path / "model"))
    plan = cl.Selection.from_pruned(cl.enumerate_units(whole, GROUPS), [0, 7])
    small = cl.load_pruned(cl.prune(streamed, plan, out=tmp_path / "small"), stream=True)
    saves = streamed.save_pretrained, small.save_pretrained, partial(cl.save_pruned, small)
    for save in saves:
        with pytest.raises(cl.InputError):
            save(tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "small"]


# Plans: the bits of the loaded model in one reading ---------------------------------------------

CHOSEN = ([0], [], [1, 5], [3, 7, 9], [2, 4], [17], [0, 16])


def streamed(folder: Path, model: PreTrainedModel) -> tuple[PreTrainedModel, Any]:
    """The same model, its layers left in files, and what brings them."""
    write_model(folder, model, max_shard_size="20KB")
    own, _ = cl.load_model(folder, device="cpu", dtype=model.dtype, stream=True)
    return own, weights_of(own)


def plans_of(model: PreTrainedModel) -> list[cl.Selection]:
    units = cl.enumerate_units(model, GROUPS)
    plans = [
        cl.Selection.from_pruned(units, [at for at in chosen if at < len(units)])
        for chosen in CHOSEN
    ]
    return [*plans, plans[2].with_gains({4: 1.25})]


@pytest.mark.parametrize(
    ("family", "heads", "dtype"),
    [
        ("llama", "mqa", torch.float32),
        ("phi3", "gqa", torch.float32),
        ("gpt_neox", "mha", torch.float32),
        ("opt_350m", "mha", torch.float32),
        ("olmo2", "gqa", torch.float32),
        ("gpt2", "mha", torch.bfloat16),
        ("gemma2", "gqa", torch.bfloat16),
    ],
)
def test_all_plans_of_a_row_take_one_reading_and_keep_their_bits(
    tmp_path: Path, family: str, heads: str, dtype: torch.dtype
) -> None:
    own, stream = streamed(tmp_path, tiny_model(family, heads, dtype=dtype))
    model, _ = cl.load_model(tmp_path, device="cpu", dtype=dtype)
    plans = plans_of(model)
    expected = cl.measure_plans(model, plans, TEXT, plans_per_batch=3, progress=False)
    cl.pruning_risk(own, plans[0], TEXT)  # what is checked once is checked now
    before = stream.bytes_read
    found = cl.measure_plans(own, plans, TEXT, plans_per_batch=3, progress=False)
    assert stream.bytes_read - before == len(TEXT) * 3 * stream.bytes_present // 2
    assert np.array_equal(found.kl, expected.kl)
    assert np.array_equal(found.nll, expected.nll)
    assert cl.pruning_risk(own, plans[3], TEXT) == cl.pruning_risk(model, plans[3], TEXT)


def test_what_does_not_fit_together_is_halved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    own, _ = streamed(tmp_path, model)
    plans = plans_of(model)
    expected = cl.measure_plans(model, plans, TEXT, plans_per_batch=1, progress=False)
    real, tried = LayerwisePasses.run, []

    def tight(passes: Any, ids: Any, positions: Any, parts: Any) -> list[torch.Tensor]:
        tried.append([len(rows) for rows in parts])
        if sum(tried[-1]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(passes, ids, positions, parts)

    monkeypatch.setattr(LayerwisePasses, "run", tight)
    found = cl.measure_plans(own, plans, TEXT, plans_per_batch=2, progress=False)
    assert tried[:3] == [[2, 2, 2, 1], [2, 1], [1]]
    assert all(sizes == [1] for sizes in tried[3:])
    assert np.array_equal(found.kl, expected.kl)
