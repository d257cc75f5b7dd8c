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

OBJECTS = "ball, box, hat, kite, lamp, cup, book, coin, key, drum, boat, bell"
OBJECTS = tuple(OBJECTS.split(", "))
WORDS = {  # most frequent first
    "time": "morning evening day afternoon night",
    "weather": "sunny windy cold warm rainy grey",
    "warm": "warm bright low pale",
    "long": "a while, an hour, a long time, a moment, two days",
    "hide": "bush tree stone bench chair box",
    "mood": "happy glad proud tired content",
}
WORDS = {
    key: tuple(words.split(", ") if "," in words else words.split()) for key, words in WORDS.items()
}
# Fields of a story: a and b the two people, he/him/his and bhe/bhim/bhis their pronouns, their
# facts (bjob is the job of b), o the object, a_c_o "a red kite" with its colour c, place, goal and
# worker of the topic, and WORDS.
OPENINGS = (
    "One {time} {a} went to {goal}",
    "{a} and {b} went to {goal}",
    "{a} the {job} was {mood}",
    "{a} and {b} met {place}",
    "{a} the {job} went to {goal} with {b}",
    "{a} lived in {city}",
    "{a} and {his} {pet} were {place}",
    "{b} came from {bcity} to see {a}",
    "{a} waited for {long} {place}",
    "{a} was {mood}, because {b} had come",
    "One {time} {a} came to {goal} with {b}",
    "{a} was {mood} that {time}",
    "{a} the {job} lived in {city}",
    "{a} and {b} met {place} one {time}",
)
# The object and its colour come once, in one of these; the person named first stays the subject.
FINDINGS = (
    "{a} had {a_c_o}", "{b} gave {a} {a_c_o}", "{a} found {a_c_o} {place}", "{a} found {a_c_o}",
    "{a} brought {a_c_o}", "Under a {hide} {a} saw {a_c_o}", "{b} showed {a} {a_c_o}",
    "The {worker} sold {a_c_o} to {a}", "{a} bought {a_c_o} from the {worker}",
    "Behind the {hide} lay {a_c_o}", '"Look, {a_c_o}!" said {b}', "{b} sent {a} {a_c_o}",
    '"Do you want {a_c_o}?" asked {b}', "{a} wished for {a_c_o}, and {b} had one",
    "{b} had lost {a_c_o}, and {a} found it", "{a} and {b} wanted {a_c_o}",
    "{b} mended {a_c_o} for {a}",
    "Near a {hide} lay {a_c_o}, and {a} took it", "The {worker} lent {a} {a_c_o}",
    "{a} painted {a_c_o} for {b}",
)  # fmt: skip
FACTS_TOLD = (
    "{a} was a {job}", "{a} was at home in {city}", "{b} was a {bjob} from {bcity}",
    "{a} loved everything {colour}", "{b} had left {bhis} {bpet} at home",
    "{a} would rather eat {food}",
    "{b} dreamed of {bfood}", "{a} was a friend of {friend}", "{b} wore something {bcolour}",
    "{a} spoke of {his} {pet}",
)  # fmt: skip
MOODS = (
    "",
    "{a} was {mood}",
    "They laughed",
    "{b} was {mood}",
    "Everyone was {mood}",
    "Time passed",
)
# (prompt, answer, where the wrong choices come from). Each beginning settles what kind of word ends
# it: only then has the question one answer.
CLOSINGS = (
    ("{a} went home to", "{city}", "city"),
    ("{b} took the road to", "{bcity}", "city"),
    ("At home {a} fed the", "{pet}", "pet"),
    ("For supper {a} ate", "{food}", "food"),
    ("At night {a} dreamed of the {c}", "{o}", "object"),
    ("Everyone admired the {c}", "{o}", "object"),
    ("{a} said goodbye to", "{b}", "friend"),
)
