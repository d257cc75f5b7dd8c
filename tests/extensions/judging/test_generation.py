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
from cocurve_lab.extensions.judging.answers import AnswerOptions
from cocurve_lab.extensions.judging.generation import (
    GrowingText,
    Question,
    encode_prompt,
    read_questions,
    token_pieces,
)
from cocurve_lab.extensions.judging.lockstep import (
    Sampling,
    first_divergence,
    forced_kl,
    generate_rows,
    next_token_probabilities,
)
from cocurve_lab.measuring import logits
from cocurve_lab.models.runtime import exclusive
from helpers.tiny_models import (
    CHAT,
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


def in_lockstep(model: Any, tokenizer: Any, prompt: str, plan: Any, *sampling: Sampling) -> Any:
    """The dense model's text beside that of a plan."""
    return generate_rows(model, tokenizer, prompt, ([], plan), *sampling)


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


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in FAMILIES), ("mistral", {"sliding_window": 6})],
)
def test_greedy_rows_are_the_texts_of_each_alone(
    family: str, changes: dict[str, Any], tokenizer: Any
) -> None:
    model = tiny_model(family, **changes)
    plan, prompt = plan_of(model), PROMPT + " w3 w4 w9"
    pair = cl.compare_text(model, tokenizer, prompt, plan, Sampling(20))
    assert pair.dense_ids == ids_alone(model, tokenizer, prompt, 20)
    assert pair.pruned_ids == ids_alone(model, tokenizer, prompt, 20, plan)
    assert pair.dense == cl.continue_text(model, tokenizer, prompt, 20)
    with cl.ablate(model, plan):
        assert pair.pruned == cl.continue_text(model, tokenizer, prompt, 20)
    assert pair.dense_ids != pair.pruned_ids
    assert len(pair.dense_ids) == len(pair.pruned_ids) == 20


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
    assert not np.allclose(found[0], found[1])


def test_a_prompt_is_a_turn_of_a_chat_where_there_is_a_template(tokenizer: Any) -> None:
    model, chatting = tiny_model(), word_tokenizer()
    chatting.chat_template = CHAT
    plan, asked = plan_of(model), f"w80 {PROMPT} w81 w82"
    for chat, prompt in ((None, asked), (True, asked), (False, PROMPT)):
        ids = tuple(tokenizer(prompt)["input_ids"])
        assert tuple(encode_prompt(model, chatting, PROMPT, chat)) == ids
        said = cl.continue_text(model, tokenizer, prompt, 6)
        assert cl.continue_text(model, chatting, PROMPT, 6, chat=chat) == said
        pair = cl.compare_text(model, chatting, PROMPT, plan, Sampling(6), chat=chat)
        assert (pair.prompt_ids, pair.dense, pair.chat) == (ids, said, chat is not False)
        np.testing.assert_array_equal(
            next_token_probabilities(model, chatting, [plan], PROMPT, chat=chat),
            next_token_probabilities(model, tokenizer, [plan], prompt),
        )
        questions = [Question("a", PROMPT, text.strip()) for text in (said, said + " w1")]
        words = said.split()  # the last of them ends the reply
        questions += [Question("a", PROMPT, text, within=True) for text in (words[-1], "w999")]
        table = cl.answer_accuracy(
            model,
            chatting,
            [plan_of(model, ())],
            questions,
            options=AnswerOptions(6, chat=chat),
            progress=False,
        )
        assert table.right.tolist() == [[True, False, True, False]]
    assert cl.compare_text(model, tokenizer, PROMPT, plan, Sampling(2)).chat is False
    with pytest.raises(cl.InputError, match="chat"):
        cl.continue_text(model, tokenizer, PROMPT, chat=True)
    chatting.chat_template = "{{ raise_exception('no users') }}"
    with pytest.raises(cl.InputError, match="no users"):
        cl.continue_text(model, chatting, PROMPT)


def test_an_answer_may_stand_within_a_reply() -> None:
    question = Question("capitals", "?", "Paris", within=True)
    replies = {"Paris": True, "The capital is PARIS.": True, "It is Rome. Paris": False}
    replies |= {"Parisian": False, "": False, "\nParis": False}
    assert {reply: question.is_right(reply) for reply in replies} == replies


def test_strings_of_the_checkpoint_end_a_text(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = demo
    prompt = cl.example_prompts("demo", None, tokenizer)[0]  # type: ignore[arg-type]
    whole = cl.continue_text(model, tokenizer, prompt, 8)
    monkeypatch.setattr(model.generation_config, "stop_strings", [whole.split()[0]])
    assert len(cl.continue_text(model, tokenizer, prompt, 8)) < len(whole)


def test_logits_that_overflow_are_no_text(tokenizer: Any) -> None:
    model = tiny_model()
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(cl.NumericalError, match="bfloat16"):
        cl.continue_text(model, tokenizer, PROMPT, 4)


def test_half_precision(tokenizer: Any) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    plan = plan_of(model)
    pair = cl.compare_text(model, tokenizer, PROMPT, plan, Sampling(8))
    assert pair.dense_ids[0] == ids_alone(model, tokenizer, PROMPT, 1)[0]
    row = cl.CalibrationSet(torch.tensor([[*pair.prompt_ids, *pair.dense_ids]]))
    kl = forced_kl(model, plan, row.input_ids[0])
    assert kl.mean() == pytest.approx(cl.pruning_risk(model, plan, row), rel=0.02)


def test_texts_of_the_embedded_model(demo: Any) -> None:
    model, tokenizer = demo
    plan = cl.Selection.from_pruned(cl.enumerate_units(model), range(2, 160, 6))
    prompt = cl.example_prompts("demo", None, tokenizer)[0]  # type: ignore[arg-type]
    pair = cl.compare_text(model, tokenizer, prompt, plan, Sampling(12))
    assert pair.dense == cl.continue_text(model, tokenizer, prompt, 12)
    with cl.ablate(model, plan):
        assert pair.pruned == cl.continue_text(model, tokenizer, prompt, 12)


def test_a_row_ends_while_the_other_goes_on(tokenizer: Any) -> None:
    model = tiny_model()
    plan = plan_of(model)
    free = cl.compare_text(model, tokenizer, PROMPT, plan, Sampling(12))
    end = next(token for token in free.dense_ids[:10] if token not in free.pruned_ids)
    place = free.dense_ids.index(end)
    model.generation_config.eos_token_id = [end, 10**6]
    steps = list(in_lockstep(model, tokenizer, PROMPT, plan, Sampling(12)))
    assert [dense for dense, _ in steps] == [*free.dense_ids[: place + 1], *[None] * (11 - place)]
    assert tuple(pruned for _, pruned in steps) == free.pruned_ids
    stopped = cl.compare_text(model, tokenizer, PROMPT, plan, Sampling(12))
    assert stopped.dense_ids == ids_alone(model, tokenizer, PROMPT, 12)
    assert stopped.pruned_ids == ids_alone(model, tokenizer, PROMPT, 12, plan)
    # and both rows end
    model.generation_config.eos_token_id = first = free.dense_ids[0]
    steps = list(in_lockstep(model, tokenizer, PROMPT, [], Sampling(50)))
    assert steps == [(first, first)]


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_equal_models_write_equal_text(tokenizer: Any, temperature: float, masked: bool) -> None:
    """`masked` runs two rows, whose mask is all ones; else the empty plan's single row."""
    model = tiny_model()
    units = cl.enumerate_units(model, GROUPS)
    plan = cl.Selection.from_pruned(units, [])
    if masked:
        plan = plan.with_gains({units.index("L1.ffn[0]"): 1.0})
    texts = set()
    for seed in range(2):
        pair = cl.compare_text(model, tokenizer, PROMPT, plan, Sampling(12, temperature, seed))
        assert pair.dense_ids == pair.pruned_ids
        assert pair.divergence is None
        texts.add(pair.dense_ids)
    assert len(texts) == (1 if temperature < 0.01 else 2)


def test_sampling_is_the_inverse_cdf_of_one_draw_per_step(tokenizer: Any) -> None:
    model = tiny_model()
    plan = plan_of(model)
    pair = cl.compare_text(model, tokenizer, PROMPT, plan, Sampling(10, 0.8, seed=3))
    again = cl.compare_text(model, tokenizer, PROMPT, plan, Sampling(10, 0.8, seed=3))
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


def test_gains_are_honoured(tokenizer: Any) -> None:
    model = tiny_model()
    units = cl.enumerate_units(model, GROUPS)
    plan = cl.Selection.from_pruned(units, ["L1.ffn[0]"])
    gained = plan.with_gains({2: 1.9, 9: 0.1})
    pair = cl.compare_text(model, tokenizer, PROMPT, gained, Sampling(16))
    assert pair.pruned_ids == ids_alone(model, tokenizer, PROMPT, 16, gained)
    row = cl.CalibrationSet(torch.tensor([[*pair.prompt_ids, *pair.dense_ids]]))
    kl = forced_kl(model, gained, row.input_ids[0])
    gains = {units[2]: 1.9, units[9]: 0.1}
    expected = naive_risk(model, [units["L1.ffn[0]"]], row, gains)[0]
    assert kl.mean() == pytest.approx(expected, rel=1e-4)
    assert abs(kl.mean() / forced_kl(model, plan, row.input_ids[0]).mean() - 1) > 1e-2


def test_first_divergence() -> None:
    for left, right, expected in (
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([5], [], 0),
    ):
        assert first_divergence(left, right) == first_divergence(right, left) == expected


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
    whole = list(in_lockstep(model, tokenizer, PROMPT, plan, Sampling(9)))
    steps = in_lockstep(model, tokenizer, PROMPT, plan, Sampling(9))
    begun = [next(steps) for _ in range(3)]
    assert state_of(model) == before  # nothing is held between two tokens either
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(exclusive(model).acquire(timeout=5)))
    thread.start()
    thread.join()
    assert taken == [True]
    steps.close()
    assert begun == whole[:3]
    assert state_of(model) == before
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


def test_the_model_may_be_used_between_steps(tokenizer: Any) -> None:
    model = tiny_model()
    plan = plan_of(model)
    whole = list(in_lockstep(model, tokenizer, PROMPT, plan, Sampling(8)))
    found = []
    for pair in in_lockstep(model, tokenizer, PROMPT, plan, Sampling(8)):
        with cl.ablate(model, cl.enumerate_units(model, GROUPS)):
            cl.continue_text(model, tokenizer, PROMPT, 2)
        found.append(pair)
    assert found == whole


def test_an_error_in_a_step_restores_everything(tokenizer: Any) -> None:
    model = tiny_model()
    before = state_of(model)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(cl.NumericalError):
        cl.compare_text(model, tokenizer, PROMPT, plan_of(model))
    with pytest.raises(cl.NumericalError):
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


# Bad input --------------------------------------------------------------------------------------


TINY = tiny_model()
WORDS = word_tokenizer()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        # refused before the first step
        *((lambda p=p: in_lockstep(TINY, WORDS, p, []), cl.InputError) for p in ("", "  \n")),
        (lambda: in_lockstep(TINY, WORDS, "w1 " * 64, []), cl.InputError),
        (lambda: in_lockstep(tiny_model(vocab_size=9), WORDS, PROMPT, []), cl.InputError),
        (lambda: next_token_probabilities(TINY, WORDS, [], PROMPT), cl.InputError),
        (lambda: forced_kl(TINY, plan_of(TINY), [4]), cl.InputError),
        (lambda: forced_kl(TINY, plan_of(TINY), [4] * 65), cl.InputError),
        (
            lambda: cl.compare_text(tiny_model(layers=2), WORDS, PROMPT, plan_of(TINY)),
            cl.MismatchError,
        ),
        (lambda: cl.compare_text(TINY, WORDS, PROMPT, ["L9.ffn[0]"]), cl.InputError),
        (lambda: Sampling(max_new_tokens=0), cl.InputError),
        *((lambda t=t: Sampling(temperature=t), cl.InputError) for t in (-0.1, np.nan, np.inf)),
        (lambda: Sampling(seed=-1), cl.InputError),
        (lambda: cl.demo_questions(0), cl.InputError),
    ],
)
def test_bad_input_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def test_the_context_ends_a_text(tokenizer: Any) -> None:
    model = tiny_model()
    pair = cl.compare_text(model, tokenizer, "w1 " * 60, plan_of(model), Sampling(30))
    assert len(pair.dense_ids) == len(pair.pruned_ids) == 4


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
    # a character cut in the middle is not shown
    assert token_pieces(tokenizer, [], tokenizer(" a🦊")["input_ids"][:-1])[-1] == ""


def test_right_answers() -> None:
    question = Question("arithmetic", "2 + 3 =", "5")
    assert all(map(question.is_right, (" 5. 1 + 1 = 2", "5\n6", "5")))
    assert not any(map(question.is_right, (" 56.", "", "\n5")))
    assert Question("own", "Hello").is_right("5") is None


def test_demo_questions_are_the_files(measure: Any, demo: Any) -> None:
    questions = cl.demo_questions(1)
    names = {question.capability for question in questions}
    assert names == {"arithmetic", "code", "commonsense", "knowledge", "stories"}
    assert len(questions) == 5
    model, tokenizer = demo
    said = measure.replies(model, tokenizer, [question.prompt for question in questions])
    for question, reply in zip(questions, said, strict=True):  # the model card's own rule
        text = cl.continue_text(model, tokenizer, question.prompt, measure.ANSWER_TOKENS)
        assert question.is_right(text) == (reply == question.answer)


def test_questions_are_read_from_a_file_or_a_folder(tmp_path: Path) -> None:
    lines = [{"family": f, "prompt": f"{f} {i}?", "answer": str(i)} for i in (1, 2) for f in "ab"]
    file = tmp_path / "one.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    assert len(read_questions(file)) == 4
    assert [q.prompt for q in read_questions(tmp_path, 1)] == ["a 1?", "b 1?"]
    assert read_questions(tmp_path)[3] == Question("b", "b 2?", "2")
    with pytest.raises(cl.InputError):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(cl.InputError):
        read_questions(file, 0)
    for line in ("no json", '{"family": "a", "prompt": "b"}', "[1]", '{"family": 1}', ""):
        file.write_text(line, encoding="utf-8")
        with pytest.raises(cl.InputError, match=r"one\.jsonl"):
            read_questions(file)


def test_a_model_left_in_training_writes_as_in_eval_mode_and_stays_as_it_was() -> None:
    model = tiny_model("gpt2", "mha", attn_pdrop=0.5, resid_pdrop=0.5)
    expected = cl.continue_text(model, word_tokenizer(), "w1 w2", 8)
    model.train()
    assert [cl.continue_text(model, word_tokenizer(), "w1 w2", 8) for _ in range(3)] == [
        expected
    ] * 3
    assert model.training
