"""The words of the closed world in world.py: people, things, and the forms of its sentences.

Tables only. A field in braces is filled in by world.py; `prompt answer.` makes a sentence.
"""

# --- knowledge: people and their facts -----------------------------------------------------------

WOMEN = "Ada Cleo Eve Hana Jill Lena Nora Pia Rosa Tess Uma Wren Xena Zoe Bea Dora Fay Hope Joy May"
MEN = "Ben Dan Finn Gus Ivo Kai Milo Otto Quinn Sam Vic Yuri Abel Cy Emil Gil Ian Kit Lou Ned"
PEOPLE = tuple(sorted((WOMEN + " " + MEN).split()))
VALUES = {
    "job": "baker farmer pilot nurse miner tailor painter teacher sailor doctor singer smith",
    "city": "Arden Brook Corin Dale Elm Ford Glen Haven Isle Jarrow",
    "pet": "cat dog fox frog goat mouse hen pony",
    "food": "soup bread cheese rice fish cake plums beans",
    "colour": "red blue green black white yellow",
}
VALUES = {attribute: tuple(words.split()) for attribute, words in VALUES.items()}

# Prompts; the answer is the value. Fields: n the person, x and y the value and another one in
# random order.
KNOWLEDGE_FORMS = {
    "job": (
        "The job of {n} is", "{n} works as a",
        "Question: what is the job of {n}? Answer:",
        "What does {n} do all day? {n} is a",
        "Question: is {n} a {x} or a {y}? Answer:", "Everyone calls {n} the",
        "If you ask for {n}, you get the", "Name: {n}. Job:",
    ),
    "city": (
        "{n} lives in", "The home of {n} is in",
        "Question: where does {n} live? Answer:", "Letters for {n} go to",
        "Question: does {n} live in {x} or in {y}? Answer:",
        "Where is {n} at home? In", "To visit {n}, take the road to",
        "Name: {n}. City:",
    ),
    "pet": (
        "{n} has a pet, a", "The pet of {n} is a",
        "Question: which pet does {n} have? Answer:",
        "At home {n} is never alone, there is a",
        "Question: does {n} have a {x} or a {y}? Answer:",
        "What animal does {n} feed? A", "Every day {n} plays with the",
        "Name: {n}. Pet:",
    ),
    "food": (
        "{n} likes to eat", "The favourite food of {n} is",
        "Question: what does {n} like to eat? Answer:",
        "For dinner {n} always wants",
        "Question: does {n} like {x} or {y}? Answer:",
        "What should we cook for {n}? We cook", "When {n} is hungry, {n} eats",
        "Name: {n}. Food:",
    ),
    "colour": (
        "{n} loves the colour", "The favourite colour of {n} is",
        "Question: what is the colour that {n} loves? Answer:",
        "The door of {n} is painted",
        "Question: does {n} love {x} or {y}? Answer:",
        "What does the coat of {n} look like? It is", "All hats of {n} are",
        "Name: {n}. Colour:",
    ),
    "friend": (
        "The best friend of {n} is", "{n} is the best friend of",
        "Question: who is the best friend of {n}? Answer:",
        "{n} shares every secret with",
        "Question: is {x} or {y} the best friend of {n}? Answer:",
        "Whom does {n} visit most? {n} visits", "Together with {n} you often see",
        "Name: {n}. Friend:",
    ),
}  # fmt: skip

# --- commonsense: things, what they are like, what they are for, where they are ------------------

THINGS = {
    "property": {
        "cold": "ice, snow, winter, frost", "hot": "fire, an oven, the sun, steam",
        "soft": "a pillow, wool, a blanket", "hard": "a stone, a brick, a bone",
        "big": "an elephant, a whale, a mountain", "small": "an ant, a pea, a bee",
        "fast": "a rocket, a train, a rabbit", "slow": "a snail, a tortoise, a worm",
        "sweet": "honey, sugar, candy", "sour": "a lemon, vinegar, a lime",
        "heavy": "an anvil, iron, a truck", "light": "a feather, a leaf, paper",
        "loud": "thunder, a trumpet, a siren", "quiet": "a whisper, a shadow, a library",
        "wet": "rain, a river, the sea", "dry": "a desert, dust, straw",
    },
    "use": {
        "cut": "a knife", "write": "a pen", "drink": "a cup", "sleep": "a bed", "sew": "a needle",
        "open a door": "a key", "sweep": "a broom", "sit": "a chair", "dig": "a spade",
        "wash": "soap", "climb": "a ladder", "read": "a book", "paint": "a brush",
        "eat soup": "a spoon", "stay dry": "an umbrella", "tell the time": "a clock",
        "boil water": "a kettle", "drive a nail": "a hammer", "cross the sea": "a ship",
        "see at night": "a lamp", "catch a fish": "a net", "fly": "a plane",
    },
    "place": {
        "in the kitchen": "a pan, a plate, an oven", "in the sea": "a shark, a wave, a whale",
        "on a farm": "a cow, a barn, a pig", "in the forest": "a tree, a wolf, a bear",
        "in the sky": "a cloud, a star, the moon", "at school": "a desk, a pupil, chalk",
        "in the bathroom": "a towel, a bath, soap", "on the road": "a car, a bus, a truck",
    },
    "kind": {
        "an animal": "a dog, a horse, a lion", "a fruit": "an apple, a pear, a plum",
        "a tool": "a saw, a hammer, a spade", "a flower": "a rose, a tulip, a daisy",
        "a bird": "a crow, an owl, a duck", "a metal": "gold, iron, silver",
    },
}  # fmt: skip
THINGS = {
    attribute: {t: v for v, things in values.items() for t in things.split(", ")}
    for attribute, values in THINGS.items()
}
_PAIRS = ("cold hot", "soft hard", "big small", "fast slow", "sweet sour", "heavy light")
_PAIRS += ("loud quiet", "wet dry")
OPPOSITE = {a: b for pair in _PAIRS for a, b in (pair.split(), pair.split()[::-1])}

# Fields: t the thing, v its value, o another value (for properties the opposite), u a thing with
# that other value; x and y are v and o, p and q are t and u, each in random order. A form with two
# members is a yes/no question; the second member asks about the other value.
COMMONSENSE_FORMS = {
    "property": (
        (("We know that {t} is", "{v}"),), (("What is {t} like? It is", "{v}"),),
        (("Is {t} {v}? Answer:", "yes"), ("Is {t} {o}? Answer:", "no")),
        (("Question: is {t} {x} or {y}? Answer:", "{v}"),), (("Never {o}: {t} is", "{v}"),),
        (("Which one is {v}, {p} or {q}? It is", "{t}"),), (("A child says that {t} is", "{v}"),),
        (("Thing: {t}. Property:", "{v}"),), (("Remember: {t} is", "{v}"),),
        (("Of {p} and {q}, the {v} one is", "{t}"),),
    ),
    "use": (
        (("We use {t} to", "{v}"),), (("What is {t} for? It is there to", "{v}"),),
        (("Do we use {t} to {v}? Answer:", "yes"), ("Do we use {t} to {o}? Answer:", "no")),
        (("Question: what do you need to {v}? Answer:", "{t}"),),
        (("If you want to {v}, take", "{t}"),),
        (("Which one helps to {v}, {p} or {q}? It is", "{t}"),), (("With {t} we can", "{v}"),),
        (("Thing: {t}. Use:", "{v}"),), (("Remember: {t} helps to", "{v}"),),
        (("Of {p} and {q}, the one to {v} with is", "{t}"),),
    ),
    "place": (
        (("You find {t}", "{v}"),), (("Question: where is {t}? Answer:", "{v}"),),
        (("Do you find {t} {v}? Answer:", "yes"), ("Do you find {t} {o}? Answer:", "no")),
        (("Question: is {t} {x} or {y}? Answer:", "{v}"),),
        (("If you want to see {t}, look", "{v}"),),
        (("Which one is {v}, {p} or {q}? It is", "{t}"),),
        (("Where should we look for {t}?", "{v}"),),
        (("Thing: {t}. Place:", "{v}"),), (("Remember where {t} is:", "{v}"),),
        (("Of {p} and {q}, the one {v} is", "{t}"),),
    ),
    "kind": (
        (("Everyone knows that {t} is", "{v}"),), (("What kind of thing is {t}? It is", "{v}"),),
        (("Can we say that {t} is {v}? Answer:", "yes"),
         ("Can we say that {t} is {o}? Answer:", "no")),
        (("Question: is {t} {x} or {y}? Answer:", "{v}"),), (("If you draw {t}, you draw", "{v}"),),
        (("Which one is {v}, {p} or {q}? It is", "{t}"),), (("When you see {t}, you see", "{v}"),),
        (("Thing: {t}. Kind:", "{v}"),), (("Remember: {t} counts as", "{v}"),),
        (("Of {p} and {q}, the one that is {v} is", "{t}"),),
    ),
}  # fmt: skip

# --- code and stories: the pieces ----------------------------------------------------------------

LETTERS = "ABCDEFGHIJKL"  # words in code are capitals, so that the tokenizer can keep letters apart
# Body -> what its argument is, and k: "sum" x + k stays below 100, "rest" x - k is at least 10.
NUMBER_BODIES = {f"x + {k}": ("sum", k) for k in range(1, 6)}
NUMBER_BODIES |= {f"x - {k}": ("rest", k) for k in range(1, 6)}
PAIR_BODIES = ("max(x, y)", "min(x, y)")
WORD_BODIES = ("s[::-1]", "s + s", "len(s)", "s[0]", "s[-1]", "s[0] + s[-1]", "s[1:]")

PLACES = {
    "park": "in", "garden": "in", "forest": "in", "barn": "in", "school": "at", "market": "at",
    "river": "by", "lake": "by", "bridge": "on", "hill": "on", "beach": "on", "road": "on",
}  # fmt: skip
OBJECTS = "ball, box, hat, kite, lamp, cup, book, coin, key, drum, boat, bell"
WORDS = {
    "time": "morning, afternoon, day, evening",
    "weather": "sunny, windy, cold, warm",
    "hide": "bush, tree, stone, bench",
    "long": "a long time, an hour, a while",
    "glad": "happy, glad, proud",
}
OBJECTS, WORDS = OBJECTS.split(", "), {key: words.split(", ") for key, words in WORDS.items()}
# Fields of a story: a and b the two people, he/him/his/He/His and bhe/bhim/bhis the pronouns,
# their facts (bjob is the job of b), o the object, c its colour, p the place, at "in the park",
# q another place, and WORDS.
OPENINGS = (
    "One {time} {a} went to the {p}.",
    "{a} was a {job} in {city}. One {time} {he} walked to the {p}.",
    "It was a {weather} {time}, and {a} was {at}.",
    "{a} and {his} {pet} liked to be {at}. One {weather} {time} they went there again.",
    "Once there was a {job} called {a}. On a {weather} {time} {he} was {at}.",
)
PLOTS = {
    "lost": (
        ("{He} looked for {his} {c} {o}, but it was gone.", "There {he} lost {his} {c} {o}."),
        ('"Have you seen my {o}?" {he} asked {b}.', '{He} saw {b} and asked, "Where is my {o}?"'),
        ('"No, but I can help you," said {b}.', '"I think it is near the {q}," said {b}.'),
        ("They looked for {long}.", "They walked to the {q} and looked for {long}."),
        ("At last {b} found the {o} under a {hide}.", "Then {a} saw the {o} behind a {hide}."),
    ),
    "gift": (
        ("There {he} met {b} the {bjob}.", "{b} was there too."),
        ("It was the birthday of {b}.", "{b} was sad that day."),
        ('"I have something for you," said {a}.', '"Close your eyes," said {a}.'),
        ("It was a {c} {o}.", "{He} gave {bhim} a {c} {o}."),
        ('"I love {c} things!" said {b}.', '"How did you know that I love {c}?" asked {b}.'),
    ),
    "rain": (
        ("Soon it began to rain.", "Dark clouds came, and it started to rain."),
        ("{b} stood under a {hide} and was wet.", "{a} saw that {b} had no coat."),
        ('"Come with me," said {a}.', '"You can have my coat," said {a}.'),
        ("They ran to the {q} and waited for {long}.", "They sat near the {q} until it was dry."),
        ("{b} showed {him} a {c} {o}.", "There they played with a {c} {o}."),
    ),
    "meal": (
        ("{He} had a basket with {food}, because {he} likes it best.",
         "{He} had {food} with {him}."),
        ('{b} came along. "May I eat with you?" {bhe} asked.',
         "Then {b} came, and {bhe} was hungry."),
        ('"Yes, but I only have {food}," said {a}.', '"Please sit down," said {a}.'),
        ('"I like {bfood} more, but thank you," said {b}.', "{b} ate and dreamed of {bfood}."),
        ("After that {b} gave {him} a {c} {o}.", "They found a {c} {o} in the grass."),
    ),
    "pet": (
        ("Suddenly the {pet} of {a} ran away.", "{He} called {his} {pet}, but it did not come."),
        ('"Have you seen a {pet}?" {he} asked {b}.', 'Then {he} met {b}. "My {pet} is gone!"'),
        ('"Yes, it ran to the {q}," said {b}.', '"My {bpet} can find it," said {b}.'),
        ("The {pet} sat under a {hide} near the {q}.", "After {long} they heard the {pet}."),
        ("It was playing with a {c} {o}.", "Beside it they saw a {c} {o}."),
    ),
    "quarrel": (
        ("{He} and {b} both saw a {c} {o}.", "A {c} {o} was there, and {b} wanted it too."),
        ('"It is mine!" said {a}.', '"I saw it first!" said {b}.'),
        ("They did not speak for {long}.", "{b} was angry and went to the {q}."),
        ('Then {a} said, "I am sorry."', '"We can share it," said {b} at last.'),
        ("So they played with the {o} together.", "{b} smiled, and they were friends again."),
    ),
    "mend": (
        ("{He} had a {c} {o}, but it was broken.", "There {he} fell and broke {his} {c} {o}."),
        ("{b} the {bjob} came by.", "{He} took it to {b}, who is a {bjob}."),
        ('"Can you mend it?" asked {a}.', '"Do not cry, I can mend it," said {b}.'),
        ("{b} worked for {long}.", "They sat down near the {q}, and {b} worked for {long}."),
        ("Then the {o} was as good as new.", '"Here is your {o}," said {b}.'),
    ),
    "visit": (
        ("{b} had come from {bcity} to see {him}.", "There {he} waited for {b} from {bcity}."),
        ('"How is your {bpet}?" asked {a}.', '"Is {bcity} far away?" asked {a}.'),
        ('"Fine, and how is your {pet}?" said {b}.',
         '"Yes, I was on the road for {long}," said {b}.'),
        ("They walked to the {q}.", "{a} showed {bhim} the {q}."),
        ("{b} had brought a {c} {o}.", "On the way {b} bought a {c} {o}."),
    ),
}  # fmt: skip
MOODS = ("", "{a} was very {glad}. ", "They laughed. ", "{b} was {glad} too. ")
# (prompt, answer, where the wrong choices come from)
CLOSINGS = (
    ("In the evening {a} went home to", "{city}", "city"),
    ("At home {a} told everything to the", "{pet}", "pet"),
    ("That night {a} dreamed of the {c}", "{o}", "object"),
    ("It was a good day, and {a} said thank you to", "{b}", "friend"),
)
