"""A small closed world and the text about it: the corpus of the embedded demo model.

Five capability families, each a miniature of one part of a language-model test suite:

    stories      tales in simple English about one of 26 topics, consistent with the facts
    commonsense  properties, uses, places and kinds of everyday things
    knowledge    fixed facts about forty people: job, city, pet, food, colour, friend
    arithmetic   sums and differences of numbers from 10 to 99
    code         tiny Python functions, called, with the result of really executing them

Every text belongs to one of four splits by construction. What decides is a stable hash of the
combination that makes the text what it is, so a combination met in one split occurs in no other:

    stories      (first person, second person, topic, object)
    commonsense  (thing, attribute, form of the sentence, other thing or value in the question)
    knowledge    (person, attribute, form of the sentence)
    arithmetic   the unordered pair {a, b}: it settles a + b, b + a, (a + b) - a and (a + b) - b
    code         the same pair for functions of numbers, the word for functions of strings

Stories are most of the text. Their words are drawn from a grammar (prose.py), so that the next word
is mostly a real choice, as it is in natural text. Every choice is drawn from a `Draws`, which adds
up what the choices of a document cost: a bound on the loss that a model can reach.

The facts themselves are shared: a test prompt asks for a known fact in a form that training never
showed for it (or, where the question names a second thing, never with that thing). Always in
training are the plain form of every fact, and the answers "yes", which held away would leave a
thing only the contrary.

Run `python -m data.make.world` to write texts/*.jsonl and prompts/*.jsonl in data/.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from . import lexicon
from .draws import Draws
from .prose import Narrator, article, pronouns
from .topics import TOPICS

SPLITS = ("train", "calibration", "held_out", "test")
FAMILIES = ("stories", "commonsense", "knowledge", "arithmetic", "code")
# Shares of the combinations in percent, in the order of SPLITS. Facts have few combinations, so
# more of them are held away; that costs nothing, because each fact is taught in other forms.
FACT_SHARES, OTHER_SHARES = (67, 9, 9, 15), (90, 3, 3, 4)
# Documents per hundred. Arithmetic and code settle most of their tokens, so they are few: a model
# that is sure of everything hides what pruning does to it.
MIXTURE = {"stories": 74, "commonsense": 9, "knowledge": 5, "arithmetic": 8, "code": 4}
TEXTS = {"calibration": 1000, "held_out": 500, "test": 500}  # documents in the shipped files
PROMPTS_PER_FAMILY = 200


def stable_number(*key: object) -> int:
    """A number that depends on the key alone, on every machine and Python version."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


@cache
def split_of(shares: tuple[int, ...], *key: object) -> str:
    """The split that a combination belongs to; `shares` are percentages in the order of SPLITS."""
    place = stable_number("split of", *key) % 100
    for split, share in zip(SPLITS, shares, strict=True):
        if place < share:
            return split
        place -= share
    raise ValueError(f"shares {shares} sum to less than 100")


def _facts() -> dict[str, dict[str, str]]:
    facts = {
        n: {k: v[stable_number(n, k) % len(v)] for k, v in lexicon.VALUES.items()}
        for n in lexicon.PEOPLE
    }
    pairs = sorted(lexicon.PEOPLE, key=lambda n: stable_number(n, "friend"))
    for one, other in zip(pairs[::2], pairs[1::2], strict=True):  # friendship is mutual
        facts[one]["friend"], facts[other]["friend"] = other, one
    return facts


FACTS = _facts()
VALUES = {**lexicon.VALUES, "friend": lexicon.PEOPLE}


class Document(NamedTuple):
    family: str
    text: str
    nats: float  # -log of the probability of the generator's choices that made the text


# --- exercises: one prompt with its answer, drawn from one split ---------------------------------


def _exercise(prompt: str, answer: str, wrong: list[str] | None = None) -> dict:
    """`choices` (the answer and the wrong ones, sorted) only where there are wrong ones."""
    exercise = {"prompt": prompt, "answer": answer}
    if wrong:
        exercise["choices"] = sorted([answer, *wrong])
    return exercise


def sentence(exercise: dict) -> str:
    """Prompt, answer and delimiter as they stand in a document: what training shows."""
    if exercise["prompt"].endswith("\n"):
        return exercise["prompt"] + exercise["answer"]
    return f"{exercise['prompt']} {exercise['answer']}."


def fact_split(who: str, attribute: str, form: int, other: str = "") -> str:
    """The split of a fact in one form; the plain form, number 0, is always in training."""
    return split_of(FACT_SHARES, who, attribute, form, other) if form else "train"


def knowledge(draws: Draws, split: str) -> dict:
    """A fact about a person, in one of eight forms."""

    def tried() -> tuple[str, str, int]:
        attribute = draws.choice(tuple(lexicon.KNOWLEDGE_FORMS))
        form = draws.choice(range(len(lexicon.KNOWLEDGE_FORMS[attribute])))
        return draws.choice(lexicon.PEOPLE), attribute, form

    n, attribute, form = draws.until(tried, lambda fact: fact_split(*fact) == split)
    v, prompt = FACTS[n][attribute], lexicon.KNOWLEDGE_FORMS[attribute][form]
    others = [w for w in VALUES[attribute] if w not in (v, n)]
    if "{x}" not in prompt:
        return _exercise(prompt.format(n=n), v, draws.unseen.sample(others, 3))
    other = draws.choice(others)
    x, y = draws.sample((v, other), 2)
    return _exercise(prompt.format(n=n, x=x, y=y), v, [other])


def _about_thing(draws: Draws) -> tuple[str, dict]:
    """An exercise about a thing, and the split that it belongs to."""
    attribute = draws.weighted(tuple(lexicon.THINGS), (2, 1, 1, 1))
    values, forms = lexicon.THINGS[attribute], lexicon.COMMONSENSE_FORMS[attribute]
    # Comparing two things is what a small model learns last, so it is shown twice as often.
    form = draws.weighted(range(len(forms)), [1 + ("{p}" in f[0][0]) for f in forms])
    t, (template, answer) = draws.choice(tuple(values)), draws.choice(forms[form])
    v, is_property = values[t], attribute == "property"
    opposites = [lexicon.OPPOSITE[v]] if is_property else sorted(set(values.values()) - {v})
    o = draws.unseen.choice(opposites)
    u = draws.unseen.choice([thing for thing, value in values.items() if value == o])
    if "{p}" in template:
        draws.nats += math.log(len([w for w in values.values() if w in opposites]))
    elif "{x}" in template or "{o}" in template:
        draws.nats += math.log(len(opposites))
    (x, y), (p, q) = draws.unseen.sample((v, o), 2), draws.unseen.sample((t, u), 2)
    if "{x}" in template or "{p}" in template:
        draws.nats += math.log(2)
    fields = {"t": t, "v": v, "o": o, "x": x, "y": y, "p": p, "q": q}
    prompt, answer = template.format(**fields), answer.format(**fields)
    # What the question names beside the thing belongs to the combination.
    other = u if "{p}" in template else o if "{x}" in template or answer == "no" else ""
    split = fact_split(t, attribute, form, other)
    # Held-out "yes", or the one "no" of a property, would leave only its contrary in training.
    if answer == "yes" or (answer == "no" and is_property):
        split = "train"
    wrong = {"yes": ["no"], "no": ["yes"], v: [o], t: [u]}[answer]
    return split, _exercise(prompt, answer, wrong)


def commonsense(draws: Draws, split: str) -> dict:
    """A property, use, place or kind of a thing, in one of ten forms."""
    return draws.until(lambda: _about_thing(draws), lambda made: made[0] == split)[1]


PAIRS = [(a, b) for a in range(10, 90) for b in range(10, 100 - a)]


def pair_split(a: int, b: int) -> str:
    """The split of the unordered pair."""
    return split_of(OTHER_SHARES, "pair", min(a, b), max(a, b))


def number_pair(draws: Draws, split: str) -> tuple[int, int]:
    """(a, b) from 10 with a + b < 100 whose pair belongs to the split."""
    return draws.until(lambda: draws.choice(PAIRS), lambda pair: pair_split(*pair) == split)


def arithmetic(draws: Draws, split: str) -> dict:
    """A sum or a difference, written with signs or in words."""
    a, b = number_pair(draws, split)
    if draws.chance(0.5):
        left, right, sign, word, answer = a, b, "+", "plus", a + b
    else:
        left, right, sign, word, answer = a + b, b, "-", "minus", a
    if draws.chance(0.8):
        return _exercise(f"{left} {sign} {right} =", str(answer))
    return _exercise(f"Question: what is {left} {word} {right}? Answer:", str(answer))


def _word(draws: Draws, split: str) -> str:
    return draws.until(
        lambda: "".join(draws.sample(lexicon.LETTERS, draws.between(2, 3))),
        lambda word: split_of(OTHER_SHARES, "word", word) == split,
    )


@cache
def _numbers(split: str) -> dict[str, list[int]]:
    """The bodies of functions of numbers, with the a whose pair (a, k) belongs to the split."""
    found = {
        body: [a for a in range(10, 100 - k) if pair_split(a, k) == split]
        for body, (_, k) in lexicon.NUMBER_BODIES.items()
    }
    return {body: numbers for body, numbers in found.items() if numbers}


def code_calls(draws: Draws, split: str, calls: int) -> tuple[str, list[tuple[str, str]]]:
    """The source of a function and up to `calls` distinct (call, printed result) pairs."""
    name, kind = draws.choice("fgh"), draws.weighted(("number", "pair", "word"), (2, 1, 3))
    if kind == "number":
        possible = _numbers(split)
        body = draws.choice(tuple(possible))
        shape, k = lexicon.NUMBER_BODIES[body]
        added = k if shape == "rest" else 0
        arguments = [(draws.choice(possible[body]) + added,) for _ in range(calls)]
        parameters = "x"
    elif kind == "pair":
        body, parameters = draws.choice(lexicon.PAIR_BODIES), "x, y"
        arguments = [number_pair(draws, split) for _ in range(calls)]
    else:
        body, parameters = draws.choice(lexicon.WORD_BODIES), "s"
        arguments = [(_word(draws, split),) for _ in range(calls)]
    source = f"def {name}({parameters}):\n    return {body}\n"
    namespace: dict = {}
    exec(source, namespace)  # the result is what Python says, not what we think it says
    results = {}
    for values in arguments:
        results[f"{name}({', '.join(map(repr, values))})"] = repr(namespace[name](*values))
    return source, list(results.items())


def code(draws: Draws, split: str) -> dict:
    """A function of one line, called once."""
    source, [(call, result)] = code_calls(draws, split, 1)
    return _exercise(f"{source}>>> {call}\n", result)


def stories(draws: Draws, split: str) -> dict:
    """A whole story; its prompt stops before the last word, which the story or a fact settles."""
    a, b, topic, o = draws.until(
        lambda: (
            *draws.sample(lexicon.PEOPLE, 2),
            draws.choice(tuple(TOPICS)),
            draws.choice(lexicon.OBJECTS),
        ),
        lambda who_and_what: split_of(OTHER_SHARES, "story", *who_and_what) == split,
    )
    c = draws.choice(VALUES["colour"])
    fields = {"a": a, "b": b, "o": o, "c": c, "a_c_o": article(f"{c} {o}"), **FACTS[a]}
    fields |= {f"b{key}": value for key, value in FACTS[b].items()}
    for prefix, person in (("", a), ("b", b)):
        he, him, his = pronouns(person)
        fields |= {f"{prefix}he": he, f"{prefix}him": him, f"{prefix}his": his}
    narrator = Narrator(draws, topic, a, b, fields)
    narrator.tell(draws.zipf(lexicon.OPENINGS))
    if draws.chance(0.3):
        narrator.tell(draws.choice(lexicon.FACTS_TOLD))
    narrator.go_on(draws.between(3, 6))
    # By now the second person is named: the closing may ask for the name.
    findings = [form for form in lexicon.FINDINGS if narrator.met() or "{b}" in form]
    narrator.tell(draws.zipf(findings))
    narrator.go_on(draws.between(3, 6))
    closing, answer, source = draws.choice(lexicon.CLOSINGS)
    if mood := draws.zipf(lexicon.MOODS):
        narrator.tell(mood)
    prompt = " ".join([*narrator.lines, closing.format(**fields)])
    answer = answer.format(**fields)
    pool = lexicon.OBJECTS if source == "object" else VALUES[source]
    wrong = draws.unseen.sample([w for w in pool if w not in (answer, a)], 3)
    return _exercise(prompt, answer, wrong)


# --- the two doors -------------------------------------------------------------------------------

EXERCISES = {
    "stories": stories,
    "commonsense": commonsense,
    "knowledge": knowledge,
    "arithmetic": arithmetic,
    "code": code,
}


def document(draws: Draws, split: str, family: str) -> str:
    """One document: a story, some exercises, or two functions with two to five calls each."""
    if family == "stories":
        return sentence(stories(draws, split))
    if family == "code":
        shown = [code_calls(draws, split, draws.between(2, 5)) for _ in range(2)]
        lines = [s + "\n".join(f">>> {call}\n{result}" for call, result in c) for s, c in shown]
        return "\n".join(lines)
    count = draws.between(6, 8) if family == "arithmetic" else draws.between(5, 7)
    return " ".join(sentence(EXERCISES[family](draws, split)) for _ in range(count))


def documents(split: str, n: int, seed: int = 0) -> Iterator[Document]:
    """n documents of a split, drawn by MIXTURE."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; use one of {SPLITS}")
    draws = Draws(f"{split} {seed}")
    for _ in range(n):
        draws.nats = 0.0
        family = draws.weighted(tuple(MIXTURE), tuple(MIXTURE.values()))
        text = document(draws, split, family)
        yield Document(family, text, draws.nats)


def prompts(split: str, family: str, n: int) -> list[dict]:
    """Up to n distinct exercises of a split, {family, prompt, answer, choices where natural}.

    A reply is right if its part before the first "." or line end, stripped, is the answer.
    Prompt and answer are joined by one space, except after a line end (code).
    """
    draws, found = Draws(f"prompts {split} {family}"), {}
    for _ in range(50 * n):
        exercise = EXERCISES[family](draws, split)
        found.setdefault(exercise["prompt"], {"family": family, **exercise})
        if len(found) == n:
            break
    return list(found.values())


def _write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the shipped texts and test prompts in data/."""
    here = Path(__file__).parents[1]
    for split, n in TEXTS.items():
        rows = [{"family": made.family, "text": made.text} for made in documents(split, n)]
        _write(here / "texts" / f"{split}.jsonl", rows)
        print(f"texts/{split}.jsonl: {len(rows)} documents")
    for family in FAMILIES:
        rows = prompts("test", family, PROMPTS_PER_FAMILY)
        _write(here / "prompts" / f"{family}.jsonl", rows)
        print(f"prompts/{family}.jsonl: {len(rows)} prompts")


if __name__ == "__main__":
    main()
