"""The sentences of the stories: a small English grammar over the topics of topics.py.

A `Narrator` writes one story. It knows the topic, the two people, who was the subject of the last
clause (only that person may become "he" or "she"), and what was mentioned before. Every choice is
drawn from its `Draws`, so the next word is mostly open.
"""

import re
from typing import NamedTuple

from . import lexicon
from .draws import Draws
from .topics import TOPICS, Scene

# What goes with the words of any topic, most frequent first. Verbs and nouns as in topics.py; an
# underscore stands for the space in "look for".
WORDS = {
    "adverb": (
        "quickly slowly carefully quietly happily often gladly gently proudly suddenly calmly "
        "secretly patiently bravely eagerly politely nervously cheerfully silently easily always "
        "never almost finally kindly sadly angrily really rarely wisely boldly briefly clumsily "
        "anxiously lazily loudly softly simply somehow still soon surely thoughtfully usually "
        "warmly willingly again alone first once together"
    ),
    "feeling adverb": ("really always never still often almost secretly soon somehow rarely"),
    "deed": (
        "see:saw find:found take:took bring:brought buy:bought watch keep:kept hide:hid look_for "
        "choose:chose carry:carried touch count draw:drew sell:sold show:showed check guard "
        "study:studied wait_for hold:held pick praise describe move point_at ask_for"
    ),
    "attitude": (
        "like want need notice lose:lost miss love dream_of hate prefer:preferred forget:forgot "
        "know:knew own"
    ),
    "adjective": (
        "old new little good big nice beautiful strange lovely wonderful ordinary perfect awful "
        "ugly funny curious plain odd fine special cheap great small bad pretty interesting "
        "valuable useful clean dirty heavy light large tiny huge famous common rare precious "
        "terrible splendid unusual charming silly simple real amazing dull graceful modern foreign "
        "excellent peculiar remarkable"
    ),
    "role": (
        "man:men boy girl woman:women child:children stranger neighbour friend visitor twin uncle "
        "aunt thief:thieves widow giant fool guest poet judge soldier traveller hero:heroes orphan "
        "beggar monk cousin dancer lawyer mayor inventor reporter barber priest wizard waiter"
    ),
    "degree": "very too quite rather so really almost hardly still always never terribly",
    "feeling": (
        "happy tired hungry sad proud angry afraid curious cold busy worried surprised thirsty "
        "lucky bored excited jealous lonely nervous calm ill awake asleep late ready brave glad "
        "upset content grateful careful polite silent alone"
    ),
    "lead": (
        "Then Later Soon Once Again Today Meanwhile Sometimes Suddenly Finally Afterwards Often "
        "Perhaps Usually Everywhere Luckily Secretly Next Nearby Sadly Outside Still Clearly "
        "Instead"
    ),
    "wish": (
        "wanted tried began hoped had learned decided forgot promised liked needed loved offered "
        "refused agreed pretended"
    ),
    "first": "When While Because After Before Although Since Once Whenever Unless",
    "tail": (
        "again today there then too alone once outside nearby together yesterday now forever "
        "inside upstairs everywhere somehow instead twice early late"
    ),
    "reply": (
        "Yes No Maybe Perhaps Certainly Sorry Thanks Wait Hurry Look Listen Stop Never Always "
        "Wonderful Nonsense Impossible Welcome Careful Goodbye Enough Please Nothing Everything"
    ),
    "saying": "said answered cried whispered thought replied shouted laughed",
    "wondering": "asked wondered cried whispered",
    "count": "two three some many four several ten",
}
WORDS = {name: tuple(words.split()) for name, words in WORDS.items()}
JOINS = (", and ", ", but ", " while ", " because ", ", so ", " before ", " after ", " until ")
SKY = (
    "The sun was {warm}", "The {time} was {weather}", "Snow fell", "It was {weather}", "Rain fell",
    "Everyone was {mood}", "Dogs barked", "Nobody spoke", "The {time} came", "Clouds came",
    "They waited for {long}", "Time passed", "Bells rang", "Birds sang",
)  # fmt: skip
ORDERS = (
    "We must", "I will", "You should", "I cannot", "We could", "Please", "Never", "You may",
    "They might", "We will", "I could", "You must", "Always", "I must", "We should", "They will",
)  # fmt: skip
ASKING = (
    "Can", "Will", "Could", "Should", "Shall", "Would", "Did", "Why do", "When can", "How can",
    "Where can", "Why did", "When will",
)  # fmt: skip
ASKED = ("you", "we", "I", "they")
VOWEL_SOUND = re.compile(r"(?!uni|use|one)[aeiou]|hour|honest")


class Subject(NamedTuple):
    text: str
    plural: bool
    person: str | None  # of whom a pronoun may speak in the next clause


def article(words: str) -> str:
    """The words with "a" or "an" before them."""
    return f"{'an' if VOWEL_SOUND.match(words) else 'a'} {words}"


def plural(thing: str) -> str:
    """The plural of a countable thing of topics.py."""
    word, _, irregular = thing.partition(":")
    ending = "es" if word.endswith(("s", "x", "ch", "sh")) else "s"
    return irregular or word + ending


def past(verb: str) -> str:
    """The past tense of a verb of topics.py."""
    word, _, irregular = verb.partition(":")
    if irregular:
        return irregular
    if "_" in word:  # look_for
        verb, _, particle = word.partition("_")
        return f"{past(verb)} {particle}"
    if re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ied"
    return word + ("d" if word.endswith("e") else "ed")


def base(word: str) -> str:
    """The infinitive of a verb, or the singular of a thing."""
    return word.lstrip("~").partition(":")[0].replace("_", " ")


def pronouns(person: str) -> tuple[str, str, str]:
    """he, him, his."""
    return ("she", "her", "her") if person in lexicon.WOMEN.split() else ("he", "him", "his")


class Narrator:
    """Writes the sentences of one story."""

    def __init__(self, draws: Draws, topic: str, a: str, b: str, fields: dict[str, str]) -> None:
        self.draws, self.topic, self.people = draws, TOPICS[topic], (a, b)
        self.fields = fields | {"goal": self.topic.goal}  # of the ready-made sentences
        self.last: str | None = None  # the subject of the last clause, if one person
        self.lines: list[str] = []
        self.known: dict[Scene, list[str]] = {scene: [] for scene in self.topic.scenes}

    # --- parts of a sentence ---------------------------------------------------------------------

    def met(self) -> bool:
        """Whether the second person has been named."""
        return any(self.people[1] in line for line in self.lines)

    def told(self, form: str) -> str:
        """A ready-made sentence with the fields of this story and words drawn for it."""
        self.last = None
        drawn = {key: self.draws.zipf(words) for key, words in lexicon.WORDS.items() if key in form}
        if "{place}" in form:
            drawn["place"] = self.draws.zipf(self.topic.places)
        if "{worker}" in form:
            drawn["worker"] = base(self.draws.zipf(self.topic.workers))
        return form.format(**(self.fields | drawn))

    def subject(self) -> Subject:
        """Someone who does something: one of the two people, both, or a worker of the topic."""
        a, b = self.people
        who = self.draws.weighted((a, b, "they", "worker"), (5, 4, 2 * self.met(), 4))
        if who == "they":
            return Subject("they" if self.draws.chance(0.7) else f"{a} and {b}", True, None)
        if who == "worker":
            worker = self.worker()
            if self.draws.chance(0.25):
                return Subject(f"the {plural(worker)}", True, None)
            adjective = f"{self.draws.zipf(WORDS['adjective'])} " if self.draws.chance(0.2) else ""
            return Subject(f"the {adjective}{base(worker)}", False, None)
        if who == self.last and self.draws.chance(0.65):
            return Subject(pronouns(who)[0], False, who)
        return Subject(who, False, who)

    def someone(self) -> str:
        """The cook, an uncle."""
        worker = base(self.worker())
        return f"the {worker}" if self.draws.chance(0.7) else article(worker)

    def worker(self) -> str:
        """Someone of the topic, or anyone."""
        return self.draws.zipf(self.topic.workers if self.draws.chance(0.5) else WORDS["role"])

    def scene(self) -> Scene:
        return self.draws.weighted(self.topic.scenes, (3, 2))

    def verb(self, scene: Scene) -> str:
        return self.draws.zipf(scene.verbs if self.draws.chance(0.6) else WORDS["deed"])

    def adjective(self, scene: Scene) -> str:
        return self.draws.zipf(scene.adjectives if self.draws.chance(0.5) else WORDS["adjective"])

    def noun(self, scene: Scene) -> tuple[str, bool, bool]:
        """A thing of the scene as (its entry in the table, plural, mentioned before)."""
        known = self.known[scene]
        again = bool(known) and self.draws.chance(0.25)
        word = self.draws.choice(known) if again else self.draws.zipf(scene.things)
        if word not in known:
            known.append(word)
        return word, not word.startswith("~") and self.draws.chance(0.25), again

    def described(self, scene: Scene, word: str, many: bool) -> str:
        """A noun, mostly with an adjective, without an article."""
        noun = plural(word) if many else base(word)
        return f"{self.adjective(scene)} {noun}" if self.draws.chance(0.65) else noun

    def indefinite(self, scene: Scene, word: str, many: bool) -> str:
        """A thing not spoken of before: "a soft ball", "two balls", "some soup"."""
        noun = self.described(scene, word, many)
        if many:
            return f"{self.draws.zipf(WORDS['count'])} {noun}"
        return f"some {noun}" if word.startswith("~") else article(noun)

    def thing(self, scene: Scene, owner: Subject | None = None) -> str:
        """A thing of the scene with its article: "the", "a", or whose it is."""
        word, many, again = self.noun(scene)
        owned = owner is not None and (owner.plural or owner.person is not None)
        kind = "the" if again else self.draws.weighted(("the", "a", "his"), (4, 4, owned))
        if kind == "a":
            return self.indefinite(scene, word, many)
        article_word = "the"
        if kind == "his" and owner:
            article_word = pronouns(owner.person)[2] if owner.person else "their"
        return f"{article_word} {self.described(scene, word, many)}"

    def likeness(self, now: bool = False) -> str:
        """The soup was very hot."""
        scene = self.scene()
        word, many, _ = self.noun(scene)
        degree = f"{self.draws.zipf(WORDS['degree'])} " if self.draws.chance(0.5) else ""
        noun = plural(word) if many else base(word)
        first = self.adjective(scene)
        if now:
            is_or_are = ("are", "look") if many else ("is", "looks")
            verb = self.draws.weighted(is_or_are, (9, 1))
        else:
            verb = self.being(many)
        text = f"the {noun} {verb} {degree}{first}"
        if self.draws.chance(0.3):
            other = self.draws.until(lambda: self.adjective(scene), lambda word: word != first)
            text += f" {self.draws.choice(('and', 'but'))} {other}"
        return text

    def place(self) -> str:
        return f" {self.draws.zipf(self.topic.places)}" if self.draws.chance(0.2) else ""

    def to(self) -> str:
        if self.draws.chance(0.1):
            return f"{self.draws.zipf(('not', 'never', 'always', 'soon'))} to"
        return "to"

    def end(self, who: Subject) -> str:
        """What may follow the thing: a place, a companion, or someone it is done for."""
        kind = self.draws.weighted(("", "place", "with", "for"), (11, 4, 2, 3))
        if kind == "place":
            return f" {self.draws.zipf(self.topic.places)}"
        if kind:
            others = [person for person in self.people if person != who.person and not who.plural]
            return f" {kind} {self.draws.among([*others, self.someone])}"
        return ""

    # --- clauses: no capital, no full stop -------------------------------------------------------

    def act(self, who: Subject) -> str:
        """Someone does something to a thing."""
        scene = self.scene()
        felt = self.draws.chance(0.15)
        verb = past(self.draws.zipf(WORDS["attitude"]) if felt else self.verb(scene))
        adverbs = WORDS["feeling adverb"] if felt else WORDS["adverb"]
        adverb = f"{self.draws.zipf(adverbs)} " if self.draws.chance(0.35) else ""
        return f"{who.text} {adverb}{verb} {self.thing(scene, who)}{self.end(who)}"

    def wish(self, who: Subject) -> str:
        """Someone wants to do something."""
        scene = self.scene()
        verb = f"{self.draws.zipf(WORDS['wish'])} {self.to()} {base(self.verb(scene))}"
        return f"{who.text} {verb} {self.thing(scene, who)}"

    def feel(self, who: Subject) -> str:
        """Someone is happy."""
        degree = f"{self.draws.zipf(WORDS['degree'])} " if self.draws.chance(0.4) else ""
        return f"{who.text} {self.being(who.plural)} {degree}{self.draws.zipf(WORDS['feeling'])}"

    def being(self, many: bool) -> str:
        """Was or were, or a verb that stands in their place."""
        other = self.draws.weighted(("", "felt", "seemed", "looked", "became"), (16, 1, 1, 1, 1))
        return other or ("were" if many else "was")

    def help(self, who: Subject) -> str:
        """Someone helps another one to do something."""
        others = [person for person in self.people if person != who.person]
        if who.plural and who.person is None:
            others = [self.someone()]
        scene = self.scene()
        verb = self.draws.zipf(("helped", "asked", "taught", "told", "begged", "allowed", "wanted"))
        whom = self.draws.choice(others)
        done = f"{base(self.verb(scene))} {self.thing(scene)}"
        return f"{who.text} {verb} {whom} {self.to()} {done}"

    def go(self, who: Subject) -> str:
        """Someone goes somewhere."""
        verb = self.draws.zipf(("went", "walked", "ran", "came", "hurried", "returned"))
        back = "back " if self.draws.chance(0.2) and verb != "returned" else ""
        city = lambda: self.draws.choice(lexicon.VALUES["city"])  # noqa: E731
        goal = self.draws.among((self.topic.goal, self.someone, city), (7, 2, 2))
        return f"{who.text} {verb} {back}to {goal}"

    def clause(self, kind: str = "") -> str:
        """A clause with a person as its subject."""
        who = self.subject()
        kinds = ("act", "wish", "feel", "help", "go")
        kind = kind or self.draws.weighted(kinds, (9, 3, 2, 2, 1))
        text = getattr(self, kind)(who)
        self.last = who.person
        return text

    def state(self) -> str:
        """What a thing is like, or that it is there."""
        self.last = None
        if self.draws.chance(0.7):
            return self.likeness()
        scene = self.scene()
        word, many, _ = self.noun(scene)
        thing = self.indefinite(scene, word, many)
        return f"there {'were' if many else 'was'} {thing} {self.draws.zipf(self.topic.places)}"

    # --- sentences -------------------------------------------------------------------------------

    def speech(self) -> str:
        """Someone says something."""
        draws, scene = self.draws, self.scene()
        speaker = draws.among((*self.people, self.someone), (4, 4, 2))
        self.last = speaker if speaker in self.people else None
        form = draws.weighted(("order", "question", "state", "reply"), (4, 3, 3, 4))
        if form == "reply":
            said = draws.zipf(WORDS["reply"])
            return f'"{said}{self.stop()}" {draws.zipf(WORDS["saying"])} {speaker}'
        if form == "state":
            said = self.likeness(now=True)
            said = f"{said[0].upper()}{said[1:]}"
            return f'"{said}{self.stop()}" {draws.zipf(WORDS["saying"])} {speaker}'
        if form == "order":
            opening = draws.zipf(ORDERS)
        else:
            opening = f"{draws.zipf(ASKING)} {draws.zipf(ASKED)}"
        said = f"{opening} {base(self.verb(scene))} {self.thing(scene)}{self.place()}"
        if form == "question":
            return f'"{said}?" {draws.zipf(WORDS["wondering"])} {speaker}'
        return f'"{said}{self.stop()}" {draws.zipf(WORDS["saying"])} {speaker}'

    def stop(self) -> str:
        """What ends a sentence inside the quotation marks."""
        return self.draws.weighted((",", "!"), (4, 1))

    def sentence(self) -> str:
        """One sentence of the body of a story."""
        draws = self.draws
        kinds = ("plain", "state", "speech", "joined", "first", "lead", "sky")
        kind = draws.weighted(kinds, (8, 3, 5, 3, 2, 3, 1))
        if kind == "speech":
            text = self.speech()
        elif kind == "plain":
            text = self.clause()
        elif kind == "state":
            text = self.state()
        elif kind == "joined":
            text = self.clause() + draws.zipf(JOINS) + self.clause()
        elif kind == "first":
            text = f"{draws.zipf(WORDS['first'])} {self.clause()}, {self.clause('act')}"
        elif kind == "lead":
            text = f"{draws.zipf(WORDS['lead'])} {self.clause()}"
        else:
            text = self.told(draws.zipf(SKY))
        text = self.ended(text)
        return f"{text[0].upper()}{text[1:]}."

    def ended(self, text: str) -> str:
        """The sentence, which may go on by a word or a clause: so no full stop is certain."""
        tail = self.draws.weighted(("", "word", "clause"), (17, 2, 1))
        if tail == "word":
            return f"{text} {self.draws.zipf(WORDS['tail'])}"
        return f"{text}, and {self.clause()}" if tail else text

    def tell(self, form: str) -> None:
        """Add a ready-made sentence."""
        text = self.told(form)
        self.lines.append(f"{self.ended(text)}.")

    def go_on(self, count: int) -> None:
        """Add sentences of the grammar."""
        for _ in range(count):
            self.lines.append(self.sentence())
