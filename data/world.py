"""A small closed world and the text about it: the corpus of the embedded demo model.

Five capability families, each a miniature of one part of a language-model test suite:

    stories      short tales in simple English, consistent with the facts
    commonsense  properties, uses, places and kinds of everyday things
    knowledge    fixed facts about forty people: job, city, pet, food, colour, friend
    arithmetic   sums and differences of numbers from 10 to 99
    code         tiny Python functions, called, with the result of really executing them

Every text belongs to one of four splits by construction. What decides is a stable hash of the
combination that makes the text what it is, so a combination met in one split occurs in no other:

    stories      (first person, second person, place, object)
    commonsense  (thing, attribute, form of the sentence, other thing or value in the question)
    knowledge    (person, attribute, form of the sentence)
    arithmetic   the unordered pair {a, b}: it settles a + b, b + a, (a + b) - a and (a + b) - b
    code         the same pair for functions of numbers, the word for functions of strings

The facts themselves are shared: a test prompt asks for a known fact in a form that training never
showed for it (or, where the question names a second thing, never with that thing). Always in
training are the plain form of every fact, and the answers "yes", which held away would leave a
thing only the contrary.

Run `python data/world.py` to write texts/*.jsonl and prompts/*.jsonl beside this file.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lexicon

SPLITS = ("train", "calibration", "held_out", "test")
FAMILIES = ("stories", "commonsense", "knowledge", "arithmetic", "code")
# Shares of the combinations in percent, in the order of SPLITS. Facts have few combinations, so
# more of them are held away; that costs nothing, because each fact is taught in other forms.
FACT_SHARES, OTHER_SHARES = (67, 9, 9, 15), (90, 3, 3, 4)
# Documents per hundred. What a small model learns last (comparing two things, carrying a digit,
# running a function) gets more than what it learns first.
MIXTURE = {"stories": 16, "commonsense": 20, "knowledge": 12, "arithmetic": 30, "code": 22}
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


def _shuffled(rng: random.Random, *values: str) -> list[str]:
    return rng.sample(values, len(values))


def fact_split(who: str, attribute: str, form: int, other: str = "") -> str:
    """The split of a fact in one form; the plain form, number 0, is always in training."""
    return split_of(FACT_SHARES, who, attribute, form, other) if form else "train"


def knowledge(rng: random.Random, split: str) -> dict:
    """A fact about a person, in one of eight forms."""
    while True:
        n, attribute = rng.choice(lexicon.PEOPLE), rng.choice(tuple(lexicon.KNOWLEDGE_FORMS))
        form = rng.randrange(len(lexicon.KNOWLEDGE_FORMS[attribute]))
        if fact_split(n, attribute, form) == split:
            break
    v = FACTS[n][attribute]
    wrong = rng.sample([w for w in VALUES[attribute] if w not in (v, n)], 3)
    x, y = _shuffled(rng, v, wrong[0])
    prompt = lexicon.KNOWLEDGE_FORMS[attribute][form]
    wrong = wrong[:1] if "{x}" in prompt else wrong
    return _exercise(prompt.format(n=n, x=x, y=y), v, wrong)


def _about_thing(rng: random.Random) -> tuple[str, dict]:
    """An exercise about a thing, and the split that it belongs to."""
    attribute = rng.choice(("property", "property", "use", "place", "kind"))
    values = lexicon.THINGS[attribute]
    t, form = rng.choice(tuple(values)), rng.randrange(len(lexicon.COMMONSENSE_FORMS[attribute]))
    v, is_property = values[t], attribute == "property"
    o = lexicon.OPPOSITE[v] if is_property else rng.choice(sorted(set(values.values()) - {v}))
    u = rng.choice([thing for thing, value in values.items() if value == o])
    (x, y), (p, q) = _shuffled(rng, v, o), _shuffled(rng, t, u)
    template, answer = rng.choice(lexicon.COMMONSENSE_FORMS[attribute][form])
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


def commonsense(rng: random.Random, split: str) -> dict:
    """A property, use, place or kind of a thing, in one of ten forms."""
    while True:
        found, exercise = _about_thing(rng)
        if found == split:
            return exercise


def pair_split(a: int, b: int) -> str:
    """The split of the unordered pair."""
    return split_of(OTHER_SHARES, "pair", min(a, b), max(a, b))


def number_pair(rng: random.Random, split: str, small: int | None = None) -> tuple[int, int]:
    """(a, b) from 10 with a + b < 100 whose pair belongs to the split; b = small if given."""
    while True:
        a, b = rng.randrange(10, 100), rng.randrange(10, 100) if small is None else small
        if a + b < 100 and pair_split(a, b) == split:
            return a, b


def arithmetic(rng: random.Random, split: str) -> dict:
    """A sum or a difference, written with signs or in words."""
    a, b = number_pair(rng, split)
    if rng.random() < 0.5:
        left, right, sign, word, answer = a, b, "+", "plus", a + b
    else:
        left, right, sign, word, answer = a + b, b, "-", "minus", a
    if rng.random() < 0.8:
        return _exercise(f"{left} {sign} {right} =", str(answer))
    return _exercise(f"Question: what is {left} {word} {right}? Answer:", str(answer))


def _word(rng: random.Random, split: str) -> str:
    while True:
        word = "".join(rng.sample(lexicon.LETTERS, rng.randint(2, 3)))
        if split_of(OTHER_SHARES, "word", word) == split:
            return word


def code_calls(rng: random.Random, split: str, calls: int) -> tuple[str, list[tuple[str, str]]]:
    """The source of a function and up to `calls` distinct (call, printed result) pairs."""
    name, kind = rng.choice("fgh"), rng.choice(("number", "number", "pair", "word", "word", "word"))
    if kind == "number":
        body = rng.choice(tuple(lexicon.NUMBER_BODIES))
        shape, k = lexicon.NUMBER_BODIES[body]
        if not any(pair_split(a, k) == split for a in range(10, 100 - k)):
            return code_calls(rng, split, calls)
        added = k if shape == "rest" else 0
        arguments = [(number_pair(rng, split, k)[0] + added,) for _ in range(calls)]
        parameters = "x"
    elif kind == "pair":
        body, parameters = rng.choice(lexicon.PAIR_BODIES), "x, y"
        arguments = [number_pair(rng, split) for _ in range(calls)]
    else:
        body, parameters = rng.choice(lexicon.WORD_BODIES), "s"
        arguments = [(_word(rng, split),) for _ in range(calls)]
    source = f"def {name}({parameters}):\n    return {body}\n"
    namespace: dict = {}
    exec(source, namespace)  # the result is what Python says, not what we think it says
    results = {}
    for values in arguments:
        results[f"{name}({', '.join(map(repr, values))})"] = repr(namespace[name](*values))
    return source, list(results.items())


def code(rng: random.Random, split: str) -> dict:
    """A function of one line, called once."""
    source, [(call, result)] = code_calls(rng, split, 1)
    return _exercise(f"{source}>>> {call}\n", result)


def stories(rng: random.Random, split: str) -> dict:
    """A whole story; its prompt stops before the last word, which the story or a fact settles."""
    while True:
        a, b = rng.sample(lexicon.PEOPLE, 2)
        p, o = rng.choice(tuple(lexicon.PLACES)), rng.choice(lexicon.OBJECTS)
        if split_of(OTHER_SHARES, "story", a, b, p, o) == split:
            break
    plot = rng.choice(tuple(lexicon.PLOTS))
    fields = {key: rng.choice(words) for key, words in lexicon.WORDS.items()}
    fields |= {"a": a, "b": b, "p": p, "o": o, "at": f"{lexicon.PLACES[p]} the {p}", **FACTS[a]}
    fields |= {f"b{key}": value for key, value in FACTS[b].items()}
    fields["q"] = rng.choice([place for place in lexicon.PLACES if place != p])
    fields["c"] = FACTS[b]["colour"] if plot == "gift" else rng.choice(VALUES["colour"])
    for prefix, person in (("", a), ("b", b)):
        he, him, his = (
            ("she", "her", "her") if person in lexicon.WOMEN.split() else ("he", "him", "his")
        )
        fields |= {f"{prefix}he": he, f"{prefix}him": him, f"{prefix}his": his}
    fields |= {"He": fields["he"].capitalize(), "His": fields["his"].capitalize()}
    closing, answer, source = rng.choice(lexicon.CLOSINGS)
    lines = [
        rng.choice(lexicon.OPENINGS),
        *(rng.choice(options) for options in lexicon.PLOTS[plot]),
    ]
    prompt = " ".join([*lines, rng.choice(lexicon.MOODS) + closing]).format(**fields)
    answer = answer.format(**fields)
    pool = lexicon.OBJECTS if source == "object" else VALUES[source]
    return _exercise(prompt, answer, rng.sample([w for w in pool if w not in (answer, a)], 3))


# --- the two doors -------------------------------------------------------------------------------

EXERCISES = {
    "stories": stories,
    "commonsense": commonsense,
    "knowledge": knowledge,
    "arithmetic": arithmetic,
    "code": code,
}


def document(rng: random.Random, split: str, family: str) -> str:
    """One document: a story, some exercises, or two functions with two to five calls each."""
    if family == "stories":
        return sentence(stories(rng, split))
    if family == "code":
        shown = [code_calls(rng, split, rng.randint(2, 5)) for _ in range(2)]
        lines = [s + "\n".join(f">>> {call}\n{result}" for call, result in c) for s, c in shown]
        return "\n".join(lines)
    count = rng.randint(7, 9) if family == "arithmetic" else rng.randint(5, 7)
    return " ".join(sentence(EXERCISES[family](rng, split)) for _ in range(count))


def documents(split: str, n: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """n documents of a split as (family, text), drawn by MIXTURE."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; use one of {SPLITS}")
    rng = random.Random(f"{split} {seed}")
    for family in rng.choices(list(MIXTURE), list(MIXTURE.values()), k=n):
        yield family, document(rng, split, family)


def prompts(split: str, family: str, n: int) -> list[dict]:
    """Up to n distinct exercises of a split, {family, prompt, answer, choices where natural}.

    A reply is right if its part before the first "." or line end, stripped, is the answer.
    Prompt and answer are joined by one space, except after a line end (code).
    """
    rng, found = random.Random(f"prompts {split} {family}"), {}
    for _ in range(50 * n):
        exercise = EXERCISES[family](rng, split)
        found.setdefault(exercise["prompt"], {"family": family, **exercise})
        if len(found) == n:
            break
    return list(found.values())


def _write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the shipped texts and test prompts beside this file."""
    here = Path(__file__).parent
    for split, n in TEXTS.items():
        rows = [{"family": family, "text": text} for family, text in documents(split, n)]
        _write(here / "texts" / f"{split}.jsonl", rows)
        print(f"texts/{split}.jsonl: {len(rows)} documents")
    for family in FAMILIES:
        rows = prompts("test", family, PROMPTS_PER_FAMILY)
        _write(here / "prompts" / f"{family}.jsonl", rows)
        print(f"prompts/{family}.jsonl: {len(rows)} prompts")


if __name__ == "__main__":
    main()
