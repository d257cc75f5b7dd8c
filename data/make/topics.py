"""What the stories are about: topics with their places, workers, and scenes.

Tables only; prose.py makes sentences of them. A scene has verbs, adjectives and things that all go
together, so that any of its verbs may take any of its things. Words stand in the order of their
frequency, the most frequent first.

    verb   "peel"; "cut:cut" where the past tense is irregular or doubles a consonant
    thing  "onion"; "knife:knives" where the plural is irregular; "~soup" where there is none
"""

from typing import NamedTuple


class Scene(NamedTuple):
    verbs: tuple[str, ...]  # "infinitive" or "infinitive:past"
    adjectives: tuple[str, ...]
    things: tuple[str, ...]  # "singular", "singular:plural" or "~mass noun"


class Topic(NamedTuple):
    goal: str  # where one goes: "the kitchen"
    places: tuple[str, ...]  # where something happens: "at the stove"
    workers: tuple[str, ...]
    scenes: tuple[Scene, ...]


def _topic(goal: str, places: str, workers: str, *scenes: str) -> Topic:
    """A topic from lines of words; a scene is "verbs | adjectives | things"."""
    parts = [Scene(*(tuple(part.split()) for part in scene.split("|"))) for scene in scenes]
    return Topic(goal, tuple(places.split(", ")), tuple(workers.split()), tuple(parts))


TOPICS = {
    "kitchen": _topic(
        "the kitchen", "in the kitchen, at the stove, on the table, by the window",
        "cook grandmother guest maid",
        "cook stir:stirred taste serve heat salt spill finish | hot thick thin spicy creamy rich "
        "| ~soup ~porridge stew sauce ~gravy ~broth pudding ~custard",
        "peel wash chop:chopped slice fry:fried boil grate weigh | fresh ripe raw tender rotten "
        "| onion carrot potato:potatoes turnip tomato:tomatoes pepper mushroom cabbage leek radish",
    ),
    "bakery": _topic(
        "the bakery", "in the bakery, at the oven, behind the counter, on the tray",
        "baker customer apprentice grocer",
        "bake eat:ate sell:sold slice share wrap:wrapped smell order | warm crisp brown stale "
        "golden burnt | cake pie loaf:loaves roll biscuit bun pastry:pastries cookie tart waffle",
        "mix sift measure pour spread:spread borrow sprinkle store | fine sticky smooth cold "
        "| ~flour ~dough ~butter ~cream ~syrup ~jam ~cinnamon ~yeast ~icing",
    ),
    "garden": _topic(
        "the garden", "in the garden, behind the shed, near the fence, along the path",
        "gardener neighbour florist botanist",
        "plant water pick grow:grew cut:cut trim:trimmed smell gather | pretty fresh tall wild "
        "delicate | flower rose tulip daisy:daisies bush hedge lily:lilies orchid vine fern",
        "dig:dug rake clear turn level cover inspect | damp dark muddy sandy stony fertile "
        "| ~soil bed patch ~grass lawn ditch ~compost ~gravel",
    ),
    "farm": _topic(
        "the farm", "on the farm, in the barn, at the gate, by the well",
        "farmer shepherd vet butcher",
        "feed:fed call wash count lead:led chase brush follow | hungry fat stubborn gentle lazy "
        "spotted | cow horse sheep:sheep pig chicken goose:geese donkey calf:calves lamb bull",
        "harvest load carry:carried store dry:dried collect weigh sell:sold | ripe golden heavy "
        "clean | ~hay ~wheat ~corn egg ~barley bale sack ~straw ~oats",
    ),
    "sea": _topic(
        "the harbour", "on deck, at the harbour, near the lighthouse, under the bridge",
        "sailor captain pilot fisherman:fishermen",
        "sail steer repair paint launch load anchor row | small sturdy swift leaky wooden "
        "| boat ship raft canoe ferry:ferries yacht barge dinghy:dinghies",
        "catch:caught hide:hid drop:dropped clean lift find:found examine sell:sold | slippery "
        "strange silver tiny salty | fish:fish shell crab rope net eel lobster oyster anchor",
    ),
    "forest": _topic(
        "the forest", "in the forest, under the trees, near the cave, along the trail",
        "hunter ranger woodcutter hiker",
        "see:saw hear:heard follow watch chase track frighten feed:fed | wild shy clever brown "
        "quick | deer:deer rabbit bird wolf:wolves bear squirrel owl badger hedgehog beaver",
        "gather carry:carried find:found collect pile break:broke burn drop:dropped | dry thin "
        "long crooked rotten | branch leaf:leaves log stick twig berry:berries acorn root pinecone",
    ),
    "market": _topic(
        "the market", "at the market, in the square, behind the stall, on the corner",
        "merchant seller shopkeeper thief:thieves",
        "buy:bought sell:sold choose:chose carry:carried want pay:paid hold:held drop:dropped "
        "| cheap ripe juicy sweet expensive fresh "
        "| apple pear basket melon plum cherry:cherries lemon peach orange coconut",
        "show:showed wear:wore wrap:wrapped admire trade steal:stole examine | precious shiny "
        "golden rare fake | ring scarf:scarves necklace bracelet belt purse watch:watches carpet",
    ),
    "school": _topic(
        "the school", "at school, in the classroom, at the desk, near the blackboard",
        "teacher pupil student principal",
        "read:read write:wrote learn finish copy:copied forget:forgot repeat explain | short hard "
        "boring difficult easy new | story:stories lesson poem word letter sentence riddle essay",
        "lose:lost sharpen borrow lend:lent hold:held break:broke replace share | long blunt "
        "broken cheap | pencil ruler crayon pen eraser notebook compass marker",
    ),
    "workshop": _topic(
        "the workshop", "in the workshop, at the bench, beside the saw, on the shelf",
        "carpenter smith mechanic plumber",
        "build:built repair measure paint polish carve sand move | wooden square broken old "
        "simple solid | chair table shelf:shelves box door cabinet stool drawer ladder bench",
        "use hold:held find:found clean need drop:dropped borrow sharpen | rusty sharp heavy dull "
        "useful | hammer saw nail screw drill wrench chisel file axe bolt",
    ),
    "music": _topic(
        "the concert hall", "on the stage, in the hall, behind the curtain, in the front row",
        "singer drummer violinist conductor",
        "play tune hold:held hear:heard buy:bought clean carry:carried borrow | loud old brass "
        "expensive tiny | violin drum guitar flute piano trumpet harp cello bell horn",
        "sing:sang learn practise hear:heard write:wrote enjoy whistle perform | slow sad happy "
        "gentle famous | song tune melody:melodies march waltz hymn ballad lullaby:lullabies",
    ),
    "tailor": _topic(
        "the tailor", "by the mirror, at the sewing machine, near the lamp, in the shop",
        "tailor weaver customer seamstress",
        "sew mend wear:wore wash fold iron stitch admire | warm woollen long loose elegant torn "
        "| coat shirt dress skirt sock glove jacket hat sweater apron",
        "cut:cut dye sell:sold roll weave:wove choose:chose measure stretch | soft smooth thin "
        "striped thick | ~cloth ~silk ~wool ~cotton ~linen ribbon thread ~velvet ~lace",
    ),
    "mountain": _topic(
        "the mountains", "on the summit, near the glacier, in the valley, on the ridge",
        "climber guide explorer geologist",
        "climb cross see:saw reach explore paint describe photograph | steep high rocky narrow "
        "dangerous | hill peak cliff valley ridge slope gorge glacier canyon plateau",
        "pack carry:carried tie test need forget:forgot unpack lift | light strong spare wet worn "
        "| rope tent backpack boot helmet map compass flask torch",
    ),
    "river": _topic(
        "the river", "at the river, on the bank, beside the mill, below the dam",
        "miller fisherman:fishermen ferryman:ferrymen boatman:boatmen",
        "cross watch draw:drew build:built see:saw reach study:studied visit | deep old wide "
        "narrow stone muddy | bridge dam mill stream waterfall canal island lock pool",
        "catch:caught watch feed:fed hear:heard see:saw chase spot:spotted count | old noisy "
        "slow nervous colourful | duck frog swan otter trout:trout heron turtle "
        "dragonfly:dragonflies",
    ),
    "hospital": _topic(
        "the hospital", "in the hospital, at the bedside, in the corridor, on the ward",
        "doctor nurse patient surgeon",
        "visit examine wake:woke comfort treat help wash thank | sick pale brave weak elderly "
        "| patient child:children baby:babies soldier visitor stranger twin widow",
        "prepare take:took fetch clean prescribe label pour swallow | bitter strong clean cold "
        "| ~medicine pill bandage ~tea syringe drop ~ointment tablet bottle",
    ),
    "library": _topic(
        "the library", "in the library, between the shelves, at the counter, by the fire",
        "librarian writer scholar printer",
        "read:read borrow open close find:found return print study:studied | thick dusty famous "
        "funny secret rare | book map diary:diaries novel letter atlas page newspaper magazine",
        "tell:told remember hear:heard write:wrote believe forget:forgot invent publish | true "
        "strange ancient sad wonderful | story:stories legend joke tale secret rumour proverb myth",
    ),
    "railway": _topic(
        "the station", "at the station, on the platform, in the tunnel, beside the track",
        "driver passenger conductor porter",
        "stop:stopped drive:drove see:saw hear:heard clean repair miss catch:caught | fast late "
        "early crowded noisy | train bus tram engine wagon carriage locomotive truck",
        "carry:carried lose:lost pack find:found open check leave:left guard | heavy leather "
        "small full | suitcase bag ticket trunk parcel box passport umbrella crate",
    ),
    "winter": _topic(
        "the frozen lake", "in the snow, on the ice, by the fire, outside the hut",
        "skater postman:postmen hunter traveller",
        "build:built see:saw push photograph shape decorate break:broke kick | huge round cold "
        "funny icy | snowman:snowmen snowball sled icicle igloo statue tower fort",
        "light:lit chop:chopped bring:brought stack fetch split:split carry:carried burn | dry "
        "hot thick damp | ~wood fire candle log lantern ~coal stove torch",
    ),
    "beach": _topic(
        "the beach", "on the beach, in the waves, under the umbrella, near the rocks",
        "swimmer tourist lifeguard diver",
        "find:found collect throw:threw wash show:showed keep:kept paint bury:buried | smooth "
        "flat heavy pretty broken pink | stone shell pebble coin starfish:starfish feather bottle",
        "build:built photograph draw:drew kick destroy admire decorate finish | large sandy "
        "round perfect lopsided | castle wall tower tunnel moat bridge pyramid",
    ),
    "castle": _topic(
        "the castle", "in the castle, on the wall, in the cellar, at the gate",
        "king queen knight servant",
        "guard open find:found lock enter search clean close | dark secret stone cold empty "
        "ancient | room door gate tower cellar hall dungeon chamber stairway chapel",
        "polish lift carry:carried steal:stole hide:hid wear:wore protect inherit | golden heavy "
        "bright cursed royal | sword crown shield helmet spear treasure cloak sceptre banner",
    ),
    "circus": _topic(
        "the circus", "in the ring, behind the tent, under the lights, on the rope",
        "clown acrobat juggler magician",
        "train feed:fed watch ride:rode lead:led brush cheer tease | clever huge tame funny old "
        "| elephant lion monkey tiger bear camel zebra seal parrot",
        "throw:threw catch:caught spin:spun drop:dropped balance hide:hid juggle roll "
        "| heavy round shiny magic | ball hoop hat card plate ring egg scarf:scarves",
    ),
    "studio": _topic(
        "the studio", "in the studio, at the easel, on the wall, near the window",
        "painter sculptor model collector",
        "paint draw:drew finish sell:sold frame admire hang:hung sketch | large beautiful ugly "
        "colourful modern | picture portrait landscape face drawing mural sketch mask",
        "mix buy:bought clean spill wash use choose:chose waste | bright thick wet dirty cheap "
        "| ~paint brush colour canvas palette ~ink ~clay ~chalk ~varnish",
    ),
    "post": _topic(
        "the post office", "at the post office, in the mailbox, on the doorstep, at the counter",
        "postman:postmen clerk messenger stranger",
        "send:sent open receive read:read write:wrote deliver seal tear:tore | long short strange "
        "urgent secret | letter card parcel postcard message invitation telegram package",
        "collect buy:bought stick:stuck count show:showed lose:lost print sort | rare old foreign "
        "small | stamp envelope coin label address photograph receipt",
    ),
    "night": _topic(
        "the observatory", "on the roof, at the telescope, in the dark, under the stars",
        "astronomer student watchman:watchmen poet",
        "see:saw watch count study:studied discover name describe photograph | bright distant "
        "tiny cold new | star planet comet moon cloud galaxy:galaxies meteor satellite",
        "adjust clean turn build:built use aim repair carry:carried | old broken tall simple "
        "| telescope lamp lens clock tripod mirror camera globe",
    ),
    "house": _topic(
        "the house", "in the house, on the stairs, under the bed, in the attic",
        "aunt uncle plumber landlord",
        "clean sweep:swept paint open lock decorate leave:left tidy:tidied | dirty empty large "
        "quiet dark | room kitchen window attic floor cellar hallway cupboard bedroom",
        "wash fold find:found break:broke dry:dried dust move fill | clean cracked old dusty "
        "| cup plate blanket pillow glass:glasses towel vase curtain bowl teapot",
    ),
    "sport": _topic(
        "the stadium", "on the field, at the finish, in the stands, near the goal",
        "player coach runner goalkeeper",
        "kick throw:threw catch:caught hit:hit lose:lost find:found pass roll | hard small wet "
        "flat muddy | ball disc puck racket bat javelin dart shuttlecock",
        "win:won lose:lost watch enjoy start finish remember organise | long difficult exciting "
        "famous final | game race match:matches tournament marathon contest relay final",
    ),
    "camp": _topic(
        "the camp", "at the camp, near the tent, around the fire, under the moon",
        "scout leader camper ranger",
        "pitch move pack repair share clean leave:left unpack | wet warm torn light cosy "
        "| tent blanket hammock bag mattress cot shelter tarpaulin",
        "roast eat:ate cook share burn smell turn enjoy | hot sweet delicious burnt smoky "
        "| sausage potato:potatoes marshmallow apple chestnut ~corn ~bacon pancake",
    ),
}  # fmt: skip
