"""Lockstep text is what each model writes alone; the ribbon is the measured risk by token."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import cocurve_lab as cl
from cocurve_lab.measuring import logits
from cocurve_lab.measuring.generation import (
    GrowingText,
    Question,
    demo_questions,
    read_questions,
    token_pieces,
)
from cocurve_lab.measuring.lockstep import (
    Sampling,
    TokenPair,
    compare_text,
    encode_prompt,
    first_divergence,
    forced_kl,
    generate_lockstep,
    next_token_probabilities,
)
from cocurve_lab.models.runtime import exclusive
from helpers.tiny_models import (
    FAMILIES,
    GROUPS,
    VOCAB,
    full_logits,
    masked_by_hand,
    naive_risk,
    tiny_double,
    tiny_model,
    word_tokenizer,
)

PROMPT = "w1 w5 w7 w20"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return word_tokenizer()


@pytest.fixture(scope="module")
def demo() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return cl.load_model("demo", device="cpu")


def plan_of(model: PreTrainedModel, indices: tuple[int, ...] = (0, 3, 8, 13)) -> cl.Selection:
    return cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), indices)


def ids_alone(
    model: PreTrainedModel, tokenizer: Any, prompt: str, new: int, plan: Any = ()
) -> tuple[int, ...]:
    """What Hugging Face's own greedy loop writes, under hooks of our own."""
    encoded = tokenizer(prompt, return_tensors="pt")
    units = [plan.units[i] for i in plan.pruned] if plan else []
    gains = {plan.units[i]: gain for i, gain in plan.gains.items()} if plan else {}
    with masked_by_hand(model, units, gains):
        output = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(output[0, encoded["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("family", list(FAMILIES))
def test_greedy_rows_are_the_texts_of_each_alone(family: str, tokenizer: Any) -> None:
    model = tiny_model(family)
    plan = plan_of(model)
    pair = compare_text(model, tokenizer, PROMPT, plan, Sampling(20))
    assert pair.dense_ids == ids_alone(model, tokenizer, PROMPT, 20)
    assert pair.pruned_ids == ids_alone(model, tokenizer, PROMPT, 20, plan)
    assert pair.dense == cl.continue_text(model, tokenizer, PROMPT, 20)
    with cl.ablate(model, plan):
        assert pair.pruned == cl.continue_text(model, tokenizer, PROMPT, 20)
    assert pair.dense_ids != pair.pruned_ids
    assert len(pair.dense_ids) == len(pair.pruned_ids) == 20


def test_a_sliding_window(tokenizer: Any) -> None:
    model = tiny_model("mistral", sliding_window=6)
    plan = plan_of(model)
    pair = compare_text(model, tokenizer, PROMPT + " w3 w4 w9", plan, Sampling(20))
    assert pair.dense_ids == ids_alone(model, tokenizer, PROMPT + " w3 w4 w9", 20)
    assert pair.pruned_ids == ids_alone(model, tokenizer, PROMPT + " w3 w4 w9", 20, plan)


def test_next_token_probabilities_are_those_of_the_ablated_model(tokenizer: Any) -> None:
    model = tiny_model()
    plan = plan_of(model)
    dense = cl.Selection.from_pruned(plan.units, [])
    found = next_token_probabilities(model, tokenizer, [plan, dense], PROMPT)
    ids = torch.tensor([encode_prompt(model, tokenizer, PROMPT)])
    for row, one in zip(found, (plan, dense), strict=True):
        with cl.ablate(model, one), torch.no_grad():
            expected = model(input_ids=ids).logits[0, -1].double().softmax(-1)
        np.testing.assert_allclose(row, expected, rtol=1e-4)
        assert row.sum() == pytest.approx(1)
    assert not np.allclose(found[0], found[1])
    with pytest.raises(cl.InputError, match="no plan"):
        next_token_probabilities(model, tokenizer, [], PROMPT)


def test_half_precision(tokenizer: Any) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    plan = plan_of(model)
    pair = compare_text(model, tokenizer, PROMPT, plan, Sampling(8))
    assert pair.dense_ids[0] == ids_alone(model, tokenizer, PROMPT, 1)[0]
    row = cl.CalibrationSet(torch.tensor([[*pair.prompt_ids, *pair.dense_ids]]))
    kl = forced_kl(model, plan, row.input_ids[0])
    assert kl.mean() == pytest.approx(cl.pruning_risk(model, plan, row), rel=0.02)


def test_texts_of_the_embedded_model(demo: Any) -> None:
    model, tokenizer = demo
    plan = cl.Selection.from_pruned(cl.enumerate_units(model), range(2, 160, 6))
    for prompt in cl.example_prompts("demo", None, tokenizer):  # type: ignore[arg-type]
        pair = compare_text(model, tokenizer, prompt, plan, Sampling(24))
        assert pair.dense == cl.continue_text(model, tokenizer, prompt, 24)
        with cl.ablate(model, plan):
            assert pair.pruned == cl.continue_text(model, tokenizer, prompt, 24)


def test_a_row_ends_while_the_other_goes_on(tokenizer: Any) -> None:
    model = tiny_model()
    plan = plan_of(model)
    free = compare_text(model, tokenizer, PROMPT, plan, Sampling(12))
    only_dense = [i for i, t in enumerate(free.dense_ids) if t not in free.pruned_ids and i < 10]
    assert only_dense, "another seed is needed"
    place = free.dense_ids.index(free.dense_ids[only_dense[0]])
    model.generation_config.eos_token_id = [free.dense_ids[place], 10**6]
    steps = list(generate_lockstep(model, tokenizer, PROMPT, plan, Sampling(12)))
    assert [pair.dense for pair in steps] == [
        *free.dense_ids[: place + 1],
        *[None] * (12 - place - 1),
    ]
    assert tuple(pair.pruned for pair in steps) == free.pruned_ids
    stopped = compare_text(model, tokenizer, PROMPT, plan, Sampling(12))
    assert stopped.dense_ids == ids_alone(model, tokenizer, PROMPT, 12)
    assert stopped.pruned_ids == ids_alone(model, tokenizer, PROMPT, 12, plan)


def test_both_rows_end(tokenizer: Any) -> None:
    model = tiny_model()
    first = compare_text(model, tokenizer, PROMPT, [], Sampling(4)).dense_ids[0]
    model.generation_config.eos_token_id = first
    steps = list(generate_lockstep(model, tokenizer, PROMPT, [], Sampling(50)))
    assert steps == [TokenPair(first, first)]


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("masked", [False, True])
def test_equal_models_write_equal_text(tokenizer: Any, temperature: float, masked: bool) -> None:
    """`masked` runs two rows, whose mask is all ones; else the empty plan's single row."""
    model = tiny_model()
    units = cl.enumerate_units(model, GROUPS)
    plan = cl.Selection.from_pruned(units, [])
    if masked:
        plan = plan.with_gains({units.index("L1.ffn[0]"): 1.0})
    texts = set()
    for seed in range(4):
        pair = compare_text(model, tokenizer, PROMPT, plan, Sampling(16, temperature, seed))
        assert pair.dense_ids == pair.pruned_ids
        assert pair.divergence is None
        texts.add(pair.dense_ids)
    assert len(texts) == (1 if temperature < 0.01 else 4)


def test_sampling_is_the_inverse_cdf_of_one_draw_per_step(tokenizer: Any) -> None:
    model = tiny_model()
    plan = plan_of(model)
    pair = compare_text(model, tokenizer, PROMPT, plan, Sampling(10, 0.8, seed=3))
    again = compare_text(model, tokenizer, PROMPT, plan, Sampling(10, 0.8, seed=3))
    assert (pair.dense_ids, pair.pruned_ids) == (again.dense_ids, again.pruned_ids)
    draws = torch.Generator().manual_seed(3)
    uniform = torch.rand(10, generator=draws, dtype=torch.float64).tolist()
    wide = tiny_double(model)
    for ids, units in (
        (pair.dense_ids, []),
        (pair.pruned_ids, [plan.units[i] for i in plan.pruned]),
    ):
        row = torch.tensor([*pair.prompt_ids, *ids])
        with masked_by_hand(wide, units):
            logits = full_logits(wide, row[None])[0, len(pair.prompt_ids) - 1 : -1]
        for token, u, shares in zip(ids, uniform, torch.softmax(logits / 0.8, -1), strict=True):
            order = sorted(range(VOCAB), key=lambda v: -float(shares[v]))
            reached = np.cumsum([float(shares[v]) for v in order])
            place = order.index(token)
            assert reached[place] > u - 1e-5
            assert place == 0 or reached[place - 1] < u + 1e-5


def test_sampled_tokens_have_the_models_distribution(tokenizer: Any) -> None:
    model = tiny_model()
    ids = encode_prompt(model, tokenizer, PROMPT)
    logits = full_logits(model, torch.tensor([ids]))[0, -1]
    expected = torch.softmax(logits, dim=-1).numpy()
    found = np.zeros(VOCAB)
    for seed in range(400):
        (pair,) = generate_lockstep(model, tokenizer, PROMPT, [], Sampling(1, 1.0, seed))
        found[pair.dense] += 1 / 400
    assert np.abs(found - expected).max() < 0.1
    assert np.abs(found - expected).sum() < 0.5  # 97 outcomes, 400 draws


def test_gains_are_honoured(tokenizer: Any) -> None:
    model = tiny_model()
    units = cl.enumerate_units(model, GROUPS)
    plan = cl.Selection.from_pruned(units, ["L1.ffn[0]"])
    gained = plan.with_gains({2: 1.9, 9: 0.1})
    pair = compare_text(model, tokenizer, PROMPT, gained, Sampling(16))
    assert pair.pruned_ids == ids_alone(model, tokenizer, PROMPT, 16, gained)
    kl = forced_kl(model, gained, [*pair.prompt_ids, *pair.dense_ids])
    chosen, gains = [units["L1.ffn[0]"]], {units[2]: 1.9, units[9]: 0.1}
    row = cl.CalibrationSet(torch.tensor([[*pair.prompt_ids, *pair.dense_ids]]))
    assert kl.mean() == pytest.approx(naive_risk(model, chosen, row, gains)[0], rel=1e-4)
    assert abs(kl.mean() / forced_kl(model, plan, row.input_ids[0]).mean() - 1) > 1e-2


def test_units_by_name_and_index(tokenizer: Any) -> None:
    model = tiny_model(intermediate_size=48)
    units = cl.enumerate_units(model)
    plan = cl.Selection.from_pruned(units, [1, 5])
    found = {
        compare_text(model, tokenizer, PROMPT, form, Sampling(8)).pruned_ids
        for form in ([1, 5], [units[1].name, units[5].name], plan)
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([5], [], 0),
        ([], [], None),
    ],
)
def test_first_divergence(left: list[int], right: list[int], expected: int | None) -> None:
    assert first_divergence(left, right) == expected
    assert first_divergence(right, left) == expected


# The model afterwards ---------------------------------------------------------------------------


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Everything a run could leave behind."""
    return (
        [module.training for module in model.modules()],
        sum(len(module._forward_pre_hooks) for module in model.modules()),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
    )


def test_stopping_midway_restores_everything(tokenizer: Any) -> None:
    model = tiny_model()
    plan = plan_of(model)
    model.train()
    model.lm_head.eval()  # modes may differ from the top
    before, weights = state_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    whole = list(generate_lockstep(model, tokenizer, PROMPT, plan, Sampling(9)))
    steps = generate_lockstep(model, tokenizer, PROMPT, plan, Sampling(9))
    begun = [next(steps) for _ in range(3)]
    assert state_of(model) == before  # nothing is held between two tokens either
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(exclusive(model).acquire(timeout=5)))
    thread.start()
    thread.join()
    assert taken == [True]
    steps.close()  # type: ignore[attr-defined]
    assert begun == whole[:3]
    assert state_of(model) == before
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


def test_the_model_may_be_used_between_steps(tokenizer: Any) -> None:
    model = tiny_model()
    plan = plan_of(model)
    whole = list(generate_lockstep(model, tokenizer, PROMPT, plan, Sampling(8)))
    found = []
    for pair in generate_lockstep(model, tokenizer, PROMPT, plan, Sampling(8)):
        with cl.ablate(model, cl.enumerate_units(model, GROUPS)):
            cl.continue_text(model, tokenizer, PROMPT, 2)
        found.append(pair)
    assert found == whole


def test_an_error_in_a_step_restores_everything(tokenizer: Any) -> None:
    model = tiny_model()
    before = state_of(model)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(cl.NumericalError, match="NaN"):
        compare_text(model, tokenizer, PROMPT, plan_of(model))
    with pytest.raises(cl.NumericalError, match="NaN"):
        forced_kl(model, plan_of(model), [3, 4, 5])
    assert state_of(model) == before


# The KL along one text --------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(FAMILIES))
def test_forced_kl_is_the_kl_of_full_logits(family: str) -> None:
    model = tiny_model(family)
    plan = plan_of(model)
    row = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(5))
    wide = tiny_double(model)
    log_p = torch.log_softmax(full_logits(wide, row[None])[0, :-1], dim=-1)
    with masked_by_hand(wide, [plan.units[i] for i in plan.pruned]):
        log_q = torch.log_softmax(full_logits(wide, row[None])[0, :-1], dim=-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(dim=-1).numpy()
    found = forced_kl(model, plan, row.tolist())
    assert found.shape == (29,)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-7)
    risk = cl.pruning_risk(model, plan, cl.CalibrationSet(row[None]))
    assert found.mean() == pytest.approx(risk, rel=1e-5)


def test_forced_kl_in_pieces_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    whole = forced_kl(model, plan_of(model), list(range(20)))
    monkeypatch.setattr(logits, "LOGIT_BYTES", 16 * VOCAB * 3)  # three positions at a time
    np.testing.assert_allclose(forced_kl(model, plan_of(model), list(range(20))), whole, rtol=1e-5)


def test_forced_kl_of_the_embedded_model(demo: Any) -> None:
    model, tokenizer = demo
    plan = cl.Selection.from_pruned(cl.enumerate_units(model), range(0, 160, 5))
    ids = tokenizer("Ben and his frog liked to be in the barn.")["input_ids"]
    kl = forced_kl(model, plan, ids)
    assert kl.mean() == pytest.approx(
        cl.pruning_risk(model, plan, cl.CalibrationSet(torch.tensor([ids]))), rel=1e-5
    )
    assert forced_kl(model, cl.Selection.from_pruned(plan.units, []), ids).max() == 0


# Bad input --------------------------------------------------------------------------------------


def test_bad_prompts_and_texts(tokenizer: Any) -> None:
    model = tiny_model()
    plan = plan_of(model)
    for prompt in ("", "  \n"):
        with pytest.raises(cl.InputError, match="prompt is empty"):
            generate_lockstep(model, tokenizer, prompt, plan)  # before the first step
    with pytest.raises(cl.InputError, match="64 tokens, the model's context 64"):
        generate_lockstep(model, tokenizer, "w1 " * 64, plan)
    with pytest.raises(cl.InputError, match="embedding has 9 rows"):
        generate_lockstep(tiny_model(vocab_size=9), tokenizer, PROMPT, [])
    with pytest.raises(cl.InputError, match="at least two tokens"):
        forced_kl(model, plan, [4])
    with pytest.raises(cl.InputError, match="context is 64"):
        forced_kl(model, plan, [4] * 65)
    with pytest.raises(cl.MismatchError):
        compare_text(tiny_model(layers=2), tokenizer, PROMPT, plan)
    with pytest.raises(cl.InputError):
        compare_text(model, tokenizer, PROMPT, ["L9.ffn[0]"])


def test_the_context_ends_a_text(tokenizer: Any) -> None:
    model = tiny_model()
    pair = compare_text(model, tokenizer, "w1 " * 60, plan_of(model), Sampling(30))
    assert len(pair.dense_ids) == len(pair.pruned_ids) == 4


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_sampling(values: dict[str, Any], words: str) -> None:
    with pytest.raises(cl.InputError, match=words):
        Sampling(**values)


# Decoding and prompts ---------------------------------------------------------------------------


def test_pieces_join_to_the_text(demo: Any) -> None:
    _, tokenizer = demo
    prompt = tokenizer("A day at the")["input_ids"]
    text = " zoo: œufs, 雪 and 🦊 for 12 + 30.\nEnd"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > len(text.split())
    pieces = token_pieces(tokenizer, prompt, [*ids, tokenizer.eos_token_id])
    assert "".join(pieces) == text
    assert len(pieces) == len(ids) + 1
    assert pieces[-1] == ""  # the end token has no text
    assert not any("\ufffd" in piece for piece in pieces)
    growing = GrowingText(tokenizer, prompt)
    assert [growing.add(token) for token in ids] == pieces[:-1]
    assert (growing.text, growing.ids) == (text, ids)


def test_a_character_cut_in_the_middle_is_not_shown(demo: Any) -> None:
    _, tokenizer = demo
    ids = tokenizer(" a🦊")["input_ids"]
    assert token_pieces(tokenizer, [], ids[:-1])[-1] == ""


def test_right_answers() -> None:
    question = Question("arithmetic", "2 + 3 =", "5")
    assert question.is_right(" 5. 1 + 1 = 2")
    assert question.is_right("5\n6")
    assert question.is_right("5")
    assert not question.is_right(" 56.")
    assert not question.is_right("")
    assert not question.is_right("\n5")
    assert Question("own", "Hello").is_right("5") is None


def test_demo_questions_are_the_files(measure: Any, demo: Any) -> None:
    questions = demo_questions(2)
    names = {question.capability for question in questions}
    assert names == {"arithmetic", "code", "commonsense", "knowledge", "stories"}
    assert len(questions) == 10
    assert all(question.prompt and question.answer for question in questions)
    with pytest.raises(cl.InputError, match="per_capability is 0"):
        demo_questions(0)
    model, tokenizer = demo
    said = measure.replies(model, tokenizer, [question.prompt for question in questions])
    for question, reply in zip(questions, said, strict=True):  # the model card's own rule
        text = cl.continue_text(model, tokenizer, question.prompt, measure.ANSWER_TOKENS)
        assert question.is_right(text) == (reply == question.answer)


def test_notebook_exercise_has_a_solution(demo: Any) -> None:
    """The first divergence, from one teacher-forced pass (notebook 05)."""
    model, tokenizer = demo
    plan = cl.Selection.from_pruned(cl.enumerate_units(model), range(0, 160, 5))
    found = []
    for question in demo_questions(2):
        pair = compare_text(model, tokenizer, question.prompt, plan, Sampling(16))
        ids = torch.tensor([[*pair.prompt_ids, *pair.dense_ids]])
        with cl.ablate(model, plan):
            likeliest = full_logits(model, ids)[0, len(pair.prompt_ids) - 1 : -1].argmax(dim=-1)
        parting = (likeliest != torch.tensor(pair.dense_ids)).nonzero()
        found.append(int(parting[0]) if len(parting) else None)
        assert found[-1] == pair.divergence
    assert any(place is not None for place in found)


def test_questions_are_read_from_a_file_or_a_folder(tmp_path: Path) -> None:
    lines = [{"family": f, "prompt": f"{f} {i}?", "answer": str(i)} for i in (1, 2) for f in "ab"]
    file = tmp_path / "one.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    assert len(read_questions(file)) == 4
    assert [q.prompt for q in read_questions(tmp_path, 1)] == ["a 1?", "b 1?"]
    assert read_questions(tmp_path)[3] == Question("b", "b 2?", "2")
    with pytest.raises(cl.InputError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(cl.InputError, match="per_capability is 0"):
        read_questions(file, 0)
    for line in ("no json", '{"family": "a", "prompt": "b"}', "[1]", '{"family": 1}'):
        file.write_text(line, encoding="utf-8")
        with pytest.raises(cl.InputError, match=r"line 1 of .*one\.jsonl is no question"):
            read_questions(file)
    file.write_text("", encoding="utf-8")
    with pytest.raises(cl.InputError, match="holds no question"):
        read_questions(file)
