"""Lockstep text is what each model writes alone; the ribbon is the measured risk by token."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import cocurve_lab as cl
from cocurve_lab.extensions.judging.answers import (
    ALL,
    AnswerOptions,
    AnswerTable,
    ReplyEngine,
    judge,
)
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
from cocurve_lab.models import logits
from cocurve_lab.models.runtime import exclusive
from helpers.builds import plan_of
from helpers.problems import make_units
from helpers.tiny_models import (
    CHAT,
    GROUPS,
    VOCAB,
    full_logits,
    masked_by_hand,
    tiny_double,
    tiny_model,
    word_tokenizer,
)

PROMPT = "w1 w5 w7 w20"
UNITS = (0, 3, 8, 13)


def in_lockstep(model: Any, tokenizer: Any, prompt: str, plan: Any, *sampling: Sampling) -> Any:
    """The dense model's text beside that of a plan."""
    return generate_rows(model, tokenizer, prompt, ([], plan), *sampling)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return word_tokenizer()


@pytest.fixture(scope="module")
def demo() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return cl.load_model("demo", device="cpu")


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
    [("llama", {}), ("phi3", {}), ("mistral", {"sliding_window": 6})],
)
def test_greedy_rows_are_the_texts_of_each_alone(
    family: str, changes: dict[str, Any], tokenizer: Any
) -> None:
    model = tiny_model(family, **changes)
    plan, prompt = plan_of(model, UNITS).with_gains({4: 1.9, 9: 0.1}), PROMPT + " w3 w4 w9"
    pair = cl.compare_text(model, tokenizer, prompt, plan, Sampling(20))
    assert pair.dense_ids == ids_alone(model, tokenizer, prompt, 20)
    assert pair.pruned_ids == ids_alone(model, tokenizer, prompt, 20, plan)
    assert pair.dense == cl.continue_text(model, tokenizer, prompt, 20)
    with cl.ablate(model, plan):
        assert pair.pruned == cl.continue_text(model, tokenizer, prompt, 20)
    assert pair.dense_ids != pair.pruned_ids
    cold = cl.compare_text(model, tokenizer, prompt, plan, Sampling(20, 1e-12))
    assert (cold.dense_ids, cold.pruned_ids) == (pair.dense_ids, pair.pruned_ids)


def test_next_token_probabilities_are_those_of_the_ablated_model(tokenizer: Any) -> None:
    model = tiny_model()
    plans = [plan_of(model, UNITS), plan_of(model, ())]
    found = next_token_probabilities(model, tokenizer, plans, PROMPT)
    ids = torch.tensor([encode_prompt(model, tokenizer, PROMPT)])
    for row, one in zip(found, plans, strict=True):
        with cl.ablate(model, one), torch.no_grad():
            expected = model(input_ids=ids).logits[0, -1].double().softmax(-1)
        np.testing.assert_allclose(row, expected, rtol=1e-4)


def test_a_prompt_is_a_turn_of_a_chat_where_there_is_a_template(tokenizer: Any) -> None:
    model, chatting = tiny_model(), word_tokenizer()
    chatting.chat_template = CHAT
    plan, asked = plan_of(model, UNITS), f"w80 {PROMPT} w81 w82"
    for chat, prompt in ((None, asked), (True, asked), (False, PROMPT)):
        ids = tuple(tokenizer(prompt)["input_ids"])
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
        given = (model, chatting, [plan_of(model, ())], questions)
        table = cl.answer_accuracy(*given, options=AnswerOptions(6, chat=chat), progress=False)
        assert table.right.tolist() == [[True, False, True, False]]
    with pytest.raises(cl.InputError):
        cl.continue_text(model, tokenizer, PROMPT, chat=True)
    chatting.chat_template = "{{ raise_exception('no users') }}"
    with pytest.raises(cl.InputError):
        cl.continue_text(model, chatting, PROMPT)


def test_strings_of_the_checkpoint_end_a_text(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = demo
    prompt = cl.example_prompts("demo", None, tokenizer)[0]
    whole = cl.continue_text(model, tokenizer, prompt, 8)
    monkeypatch.setattr(model.generation_config, "stop_strings", [whole.split()[0]])
    assert len(cl.continue_text(model, tokenizer, prompt, 8)) < len(whole)


def test_a_row_ends_while_the_other_goes_on(tokenizer: Any) -> None:
    model = tiny_model()
    plan = plan_of(model, UNITS)
    free = cl.compare_text(model, tokenizer, PROMPT, plan, Sampling(12))
    end = next(token for token in free.dense_ids[:10] if token not in free.pruned_ids)
    place = free.dense_ids.index(end)
    model.generation_config.eos_token_id = [end, 10**6]
    steps = list(in_lockstep(model, tokenizer, PROMPT, plan, Sampling(12)))
    assert [dense for dense, _ in steps] == [*free.dense_ids[: place + 1], *[None] * (11 - place)]
    assert tuple(pruned for _, pruned in steps) == free.pruned_ids
    # and both rows end
    model.generation_config.eos_token_id = first = free.dense_ids[0]
    assert list(in_lockstep(model, tokenizer, PROMPT, [], Sampling(50))) == [(first, first)]


def test_sampling_is_the_inverse_cdf_of_one_draw_per_step(tokenizer: Any) -> None:
    model = tiny_model()
    plan = plan_of(model, UNITS)
    pair = cl.compare_text(model, tokenizer, PROMPT, plan, Sampling(10, 0.8, seed=3))
    draws = torch.Generator().manual_seed(3)
    uniform = torch.rand(10, generator=draws, dtype=torch.float64).tolist()
    wide, units = tiny_double(model), [plan.units[i] for i in plan.pruned]
    for ids, gone in ((pair.dense_ids, []), (pair.pruned_ids, units)):
        row = torch.tensor([*pair.prompt_ids, *ids])
        with masked_by_hand(wide, gone):
            logits = full_logits(wide, row[None])[0, len(pair.prompt_ids) - 1 : -1]
        for token, u, shares in zip(ids, uniform, torch.softmax(logits / 0.8, -1), strict=True):
            order = sorted(range(VOCAB), key=lambda v: -float(shares[v]))
            reached = np.cumsum([0.0, *(float(shares[v]) for v in order)])
            place = order.index(token)
            assert reached[place] - 1e-5 < u < reached[place + 1] + 1e-5


def test_the_model_may_be_used_between_steps_and_is_restored(tokenizer: Any) -> None:
    model = tiny_model("gpt2", "mha", attn_pdrop=0.5, resid_pdrop=0.5)
    plan = plan_of(model, UNITS)
    expected = cl.continue_text(model, tokenizer, PROMPT, 9)
    model.train()
    model.lm_head.eval()  # modes may differ from the top
    before, weights = state_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    assert cl.continue_text(model, tokenizer, PROMPT, 9) == expected  # as in eval mode
    whole = list(in_lockstep(model, tokenizer, PROMPT, plan, Sampling(9)))
    steps, begun, taken = in_lockstep(model, tokenizer, PROMPT, plan, Sampling(9)), [], []
    for _ in range(5):
        begun.append(next(steps))
        assert state_of(model) == before  # nothing is held between two tokens either
        with cl.ablate(model, cl.enumerate_units(model, GROUPS)):
            cl.continue_text(model, tokenizer, PROMPT, 2)
    thread = threading.Thread(target=lambda: taken.append(exclusive(model).acquire(timeout=5)))
    thread.start()
    thread.join()
    assert taken == [True]
    steps.close()
    assert begun == whole[:5]
    assert state_of(model) == before
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


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
        torch.backends.cuda.matmul.fp32_precision,
    )


def test_an_error_in_a_step_restores_everything(tokenizer: Any) -> None:
    model = tiny_model()
    before = state_of(model)
    model.model.norm.weight.data[0] = float("nan")
    for call in (
        lambda: cl.compare_text(model, tokenizer, PROMPT, plan_of(model, UNITS)),
        lambda: cl.continue_text(model, tokenizer, PROMPT, 4),
        lambda: forced_kl(model, plan_of(model, UNITS), [3, 4, 5]),
    ):
        with pytest.raises(cl.NumericalError):
            call()
        assert state_of(model) == before


# The KL along one text --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_forced_kl_is_the_kl_of_full_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    plan = plan_of(model, UNITS)
    row = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(5))
    wide = tiny_double(model)
    log_p = torch.log_softmax(full_logits(wide, row[None])[0, :-1], dim=-1)
    with masked_by_hand(wide, [plan.units[i] for i in plan.pruned]):
        log_q = torch.log_softmax(full_logits(wide, row[None])[0, :-1], dim=-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(dim=-1).numpy()
    np.testing.assert_allclose(forced_kl(model, plan, row), expected, rtol=1e-3, atol=1e-7)
    monkeypatch.setattr(logits, "LOGIT_BYTES", 16 * VOCAB * 3)  # three positions at a time
    np.testing.assert_allclose(forced_kl(model, plan, row), expected, rtol=1e-3, atol=1e-7)


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
        (lambda: forced_kl(TINY, plan_of(TINY, UNITS), [4]), cl.InputError),
        (lambda: forced_kl(TINY, plan_of(TINY, UNITS), [4] * 65), cl.InputError),
        (
            lambda: cl.compare_text(tiny_model(layers=2), WORDS, PROMPT, plan_of(TINY, UNITS)),
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
    pair = cl.compare_text(model, tokenizer, "w1 " * 60, plan_of(model, UNITS), Sampling(30))
    assert len(pair.dense_ids) == len(pair.pruned_ids) == 4


# Decoding and prompts ---------------------------------------------------------------------------


def test_pieces_join_to_the_text(demo: Any) -> None:
    _, tokenizer = demo
    prompt = tokenizer("A day at the")["input_ids"]
    text = " zoo: œufs, 雪 and 🦊 for 12 + 30.\nEnd"
    ids = tokenizer(text)["input_ids"]
    pieces = token_pieces(tokenizer, prompt, [*ids, tokenizer.eos_token_id])
    assert "".join(pieces) == text
    assert (len(pieces), pieces[-1]) == (len(ids) + 1, "")  # the end token has no text
    assert not any("\ufffd" in piece for piece in pieces)
    growing = GrowingText(tokenizer, prompt)
    assert [growing.add(token) for token in ids] == pieces[:-1]
    assert (growing.text, growing.ids) == (text, ids)
    # a character cut in the middle is not shown
    assert token_pieces(tokenizer, [], tokenizer(" a🦊")["input_ids"][:-1])[-1] == ""


@pytest.mark.parametrize(
    ("said", "within", "right"),
    [
        *((said, False, True) for said in (" 5. 1 + 1 = 2", "5\n6", "5")),
        *((said, False, False) for said in (" 56.", "", "\n5")),
        *((said, True, True) for said in ("5", "The sum is 5.")),
        *((said, True, False) for said in ("It is 6. 5", "56", "", "\n5")),
    ],
)
def test_right_answers(said: str, within: bool, right: bool) -> None:
    assert Question("arithmetic", "2 + 3 =", "5", within=within).is_right(said) is right


def test_questions_are_read_from_a_file_or_a_folder(tmp_path: Path) -> None:
    lines = [{"family": f, "prompt": f"{f} {i}?", "answer": str(i)} for i in (1, 2) for f in "ab"]
    file = tmp_path / "one.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    assert [q.prompt for q in read_questions(tmp_path, 1)] == ["a 1?", "b 1?"]
    assert read_questions(file)[3] == Question("b", "b 2?", "2")
    with pytest.raises(cl.InputError):
        read_questions(file, 0)
    for line in ("no json", '{"family": "a", "prompt": "b"}', "[1]", '{"family": 1}', ""):
        file.write_text(line, encoding="utf-8")
        with pytest.raises(cl.InputError):
            read_questions(file)


# Answers ------------------------------------------------------------------------------------------

LENGTH = 5  # tokens of a reply
PROMPTS = ["ab", "cda", "a.bd ", "dd c", "bca", "cab d", "adcb", "b", "ca\n", "dbd"]


def spelling_tokenizer() -> PreTrainedTokenizerFast:
    """Letters and pairs of letters: most texts have several spellings in tokens."""
    from tokenizers import Tokenizer, decoders, models

    letters, pairs = "abcd .\n", ["ab", "cd", "ca", "bd"]
    vocab = {token: i for i, token in enumerate(["<end>", "<unk>", *letters, *pairs])}
    merges = [(pair[0], pair[1]) for pair in pairs]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>", model_max_length=64
    )


TOKENIZER = spelling_tokenizer()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(vocab_size=len(TOKENIZER), eos_token_id=0, seed=3)


@pytest.fixture(scope="module")
def plans(model: PreTrainedModel) -> list[cl.Selection]:
    units = cl.enumerate_units(model, GROUPS)
    sets: list[list[int]] = [[], [0, 5], [3, 8, 14], [1, 2, 9, 16]]
    return [cl.Selection.from_pruned(units, chosen) for chosen in sets]


SAID: dict[tuple[tuple[int, ...], str], str] = {}


def reply(model: PreTrainedModel, plan: cl.Selection, prompt: str) -> str:
    """The greedy reply of the one fixture model, masked by hand; remembered."""
    if (plan.pruned, prompt) not in SAID:
        SAID[plan.pruned, prompt] = generate(model, plan, prompt)
    return SAID[plan.pruned, prompt]


def generate(model: PreTrainedModel, plan: cl.Selection, prompt: str) -> str:
    with masked_by_hand(model, [plan.units[u] for u in plan.pruned]):
        return cl.continue_text(model, TOKENIZER, prompt, LENGTH)


@pytest.fixture(scope="module")
def questions(model: PreTrainedModel, plans: list[cl.Selection]) -> list[Question]:
    """Answers that some plan gives, so that there are right and wrong replies of every plan."""
    found = []
    for number, prompt in enumerate(PROMPTS):
        for plan in plans:
            said = reply(model, plan, prompt).lstrip(" ")
            head = said.split(".")[0].split("\n")[0].strip()
            if head and "<" not in head:
                found.append(Question(f"kind {number % 2}", prompt, head))
    return found


OPTIONS = AnswerOptions(max_new_tokens=LENGTH)


def ask(
    model: PreTrainedModel,
    plans: list[cl.Selection],
    questions: list[Question],
    options: AnswerOptions = OPTIONS,
) -> AnswerTable:
    return cl.answer_accuracy(model, TOKENIZER, plans, questions, options=options, progress=False)


def test_the_verdict_is_that_of_a_whole_greedy_reply(
    model: PreTrainedModel, plans: list[cl.Selection], questions: list[Question]
) -> None:
    inside = [
        Question(q.capability, q.prompt, (q.answer or "").split()[-1], within=True)
        for q in questions
    ]
    questions = [*questions, *inside]
    table = ask(model, plans, questions)
    expected = [[q.is_right(reply(model, plan, q.prompt)) for q in questions] for plan in plans]
    assert table.right.tolist() == expected
    # other spellings of a right answer are what decoding is for
    for told in (table.decoded & table.right, table.decoded & ~table.right):
        assert told.any()
    assert (~table.decoded & table.right).any()


def test_the_likelihood_is_the_sum_over_the_answers_tokens(
    model: PreTrainedModel, plans: list[cl.Selection], questions: list[Question]
) -> None:
    table, wide = ask(model, plans, questions), tiny_double(model)
    for p, plan in enumerate(plans):
        for q in (0, len(questions) // 2, len(questions) - 1):
            asked = questions[q]
            prompt = TOKENIZER(asked.prompt)["input_ids"]
            space = "" if asked.prompt[-1] in " \n" else " "
            ids = TOKENIZER(asked.prompt + space + str(asked.answer))["input_ids"]
            if ids[: len(prompt)] != prompt:  # "a" + "b" would merge
                ids = prompt + TOKENIZER(space + str(asked.answer))["input_ids"]
            with masked_by_hand(wide, [plan.units[u] for u in plan.pruned]):
                logs = torch.log_softmax(full_logits(wide, torch.tensor([ids])), dim=-1)[0]
            expected = sum(float(logs[t - 1, ids[t]]) for t in range(len(prompt), len(ids)))
            assert table.log_likelihood[p, q] == pytest.approx(expected, rel=1e-4)


def test_a_checkpoint_remembers_plans_and_is_of_one_measurement(
    model: PreTrainedModel,
    plans: list[cl.Selection],
    questions: list[Question],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = [*questions, *questions, Question("words", "ab")]  # more than one part; one unanswered
    options = AnswerOptions(LENGTH, checkpoint=tmp_path / "replies.pkl")
    whole, measured = ReplyEngine.measure, []

    def counting(self: ReplyEngine, scales: Any, part: Any) -> np.ndarray:
        measured.append(len(scales))
        return whole(self, scales, part)

    first = ask(model, plans[:3], asked, options)
    monkeypatch.setattr(ReplyEngine, "measure", counting)
    again = ask(model, plans, asked, options)
    assert set(measured) == {1}  # only the fourth plan is new
    assert (again.log_likelihood[:3] == first.log_likelihood).all()
    assert (again.left_out, again.right.shape) == (1, (len(plans), 2 * len(questions)))
    other = tiny_model(vocab_size=len(TOKENIZER), seed=4)
    shorter = AnswerOptions(4, checkpoint=options.checkpoint)
    for call in ((model, asked[1:], options), (model, asked, shorter), (other, asked, options)):
        with pytest.raises(cl.MismatchError):
            ask(call[0], plans, *call[1:])


@pytest.mark.parametrize(
    ("said", "ended", "within", "verdict"),
    [
        ("", False, False, None),
        (" tw", False, False, None),
        (" two", False, False, None),
        (" two ", False, False, None),
        (" two.", False, False, True),
        ("two\nthree", False, False, True),
        (" two words.", False, False, False),
        (" two w", False, False, False),
        (" twe", False, False, False),
        ("\n two", False, False, False),
        (" two", True, False, True),
        (" tw", True, False, False),
        ("it is two", False, True, None),
        ("it is two,", False, True, True),
        ("it is twofold", False, True, None),
        ("it is one", False, True, None),
        ("it is one.", False, True, False),
        ("it is two", True, True, True),
    ],
)
def test_a_reply_is_judged_when_nothing_can_change_it(
    said: str, ended: bool, within: bool, verdict: bool | None
) -> None:
    assert judge(Question("words", "one", "two", within=within), said, ended) is verdict


def hand_made() -> AnswerTable:
    """Two plans; sums: 4 questions, plan 1 loses two and gains one; words: 2, nothing changes."""
    names = ["sums"] * 4 + ["words"] * 2
    right = np.array([[1, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 1]], dtype=bool)
    likelihood = np.array([[-1.0, -2, -3, -4, -1, -1], [-2.0, -4, -3, -4, -1, -3]])
    plan = cl.Selection.from_pruned(make_units(), [0])
    return AnswerTable(
        (plan, plan),
        tuple(Question(name, "p", "a") for name in names),
        right,
        likelihood,
        np.zeros((2, 6), dtype=bool),
    )


def test_differences_are_paired_and_flips_are_counted() -> None:
    sums, words, every = hand_made().paired(1, 0).to_dict("records")
    difference = np.array([-1, -1, 0, 1])
    expected = {
        "lost": 2,
        "gained": 1,
        "questions": 4,
        "accuracy": -0.25,
        "accuracy_error": pytest.approx(difference.std(ddof=1) / 2),
        "p_value": 1.0,  # 2 of 3: P(at least 2 or at most 1) = 1
        "log_likelihood": -0.75,
        "log_likelihood_error": pytest.approx(np.std([-1, -2, 0, 0], ddof=1) / 2),
    }
    assert expected == {name: sums[name] for name in expected}
    assert (words["lost"], words["accuracy_error"], words["p_value"]) == (0, 0, 1.0)
    assert (every["capability"], every["questions"], every["lost"]) == (ALL, 6, 2)


def test_rows_by_capability() -> None:
    rows = hand_made().table.to_dict("records")
    assert [(row["plan"], row["capability"]) for row in rows] == [
        (plan, name) for plan in (0, 1) for name in ("sums", "words", ALL)
    ]
    found = rows[0]["accuracy"], rows[0]["accuracy_error"], rows[3]["accuracy"]
    assert found == pytest.approx((0.75, 0.25, 0.5))
    bounds = rows[1]["accuracy_low"], rows[1]["accuracy_high"]
    assert bounds == pytest.approx((2 / (2 + 1.96**2), 1), rel=1e-4)
    assert rows[4]["log_likelihood"] == -2


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("ab", None),
        ("ab", "a.b"),  # a full stop ends an answer
        ("ab", ""),
        (" ", "cd"),
        ("ab", "c" * 80),  # more than the context
    ],
)
def test_questions_that_cannot_be_asked_are_refused(
    model: PreTrainedModel, plans: list[cl.Selection], prompt: str, answer: str | None
) -> None:
    with pytest.raises(cl.InputError):
        ask(model, plans, [Question("words", prompt, answer)])
    good = Question("words", "ab", "cd")
    with pytest.raises(cl.InputError):
        ask(model, [], [good])
    with pytest.raises(cl.MismatchError):
        ask(model, [cl.Selection.from_pruned(make_units(), [0])], [good])
