"""Words of the story grammar: names, things, places, and how its verbs are conjugated."""

from __future__ import annotations

FEMALE_NAMES = (
    "Mia Anna Ella Rosa Lily Nora Ruby Clara Emma Sofia Maya Zoe Ivy Luna Hazel Olive Alice Daisy Greta Ida Julia "
    "Kira Lena "
    "Marta Nina Paula Stella Tessa Vera Willow Amber Bella Cora Dora Elsa Freya Gina Hanna Iris Jade"
).split()
MALE_NAMES = (
    "Tom Ben Max Leo Sam Finn Oscar Hugo Felix Noah Jack Theo Emil Otto Paul Victor Adam Bruno Carl David Eric Frank "
    "George "
    "Henry Ivan Jonas Karl Lucas Martin Nils Oliver Peter Ralf Simon Toby Walter Anton Boris Daniel Milo"
).split()
NAMES = {"f": FEMALE_NAMES, "m": MALE_NAMES}

ANIMALS = (
    "fox rabbit bear mouse owl cat dog squirrel hedgehog duck frog turtle wolf deer badger otter penguin goat pony "
    "lion tiger elephant monkey parrot raccoon beaver sparrow swan goose pig"
).split()
JOBS = (
    "baker farmer sailor painter gardener shepherd knight tailor carpenter fisher teacher doctor cook clockmaker "
    "potter "
    "singer dancer inventor miller weaver robot dragon giant wizard"
).split()
KINDS = {"f": ["girl", "princess", "queen", *ANIMALS, *JOBS], "m": ["boy", "prince", "king", *ANIMALS, *JOBS]}

RELATIVES = {
    "f": ["mother", "grandmother", "aunt", "sister", "cousin"],
    "m": ["father", "grandfather", "uncle", "brother", "neighbor"],
}

# Pronoun slots are named after the masculine forms.
PRONOUNS = {
    "he": {"m": "he", "f": "she"},
    "him": {"m": "him", "f": "her"},
    "his": {"m": "his", "f": "her"},
    "himself": {"m": "himself", "f": "herself"},
}

HOMES = [
    f"{size} {kind} {near}"
    for size in ("a small", "a quiet", "an old", "a cozy", "a lonely", "a pretty")
    for kind in ("village", "town", "cottage", "house", "farm", "castle")
    for near in (
        "by the sea", "near the river", "at the edge of the forest", "on top of a hill", "beside a lake",
        "in a green valley", "at the foot of a mountain", "not far from the desert",
    )
]
ITEMS = [
    f"{quality} {thing}"
    for quality in ("golden", "silver", "magic", "ancient", "blue", "red", "wooden", "shiny", "tiny", "crystal")
    for thing in (
        "key", "bell", "lantern", "map", "stone", "flute", "kite", "ring", "crown", "box", "cup", "feather", "clock",
        "mirror",
        "book", "necklace",
    )
]
REMEDIES = [
    f"{quality} {plant}"
    for quality in ("white", "purple", "sweet", "rare", "wild", "yellow", "glowing", "bitter")
    for plant in ("herb", "flower", "berry", "mushroom", "root", "leaf", "apple", "plum")
]
PARCELS = [
    f"{quality} {thing}"
    for quality in ("heavy", "small", "secret", "colorful", "strange", "square", "long", "precious")
    for thing in ("letter", "parcel", "basket", "package", "bottle", "painting", "scarf", "drum")
]
BABIES = (
    "lamb kitten puppy duckling foal chick calf fawn cub owlet piglet bunny"
).split()
WHERES = [
    "behind the waterfall", "in the old tower", "at the bottom of the well", "under the stone bridge",
    "on the highest mountain",
    "in the dark cave", "inside a hollow tree", "beyond the seven hills", "in the middle of the swamp",
    "on the island of birds",
    "at the end of the long road", "in the ruins of a temple", "near the frozen lake", "in the garden of the giant",
    "on the far side of the desert", "in the house of the wizard", "below the old mill", "at the top of the lighthouse",
]
ROUTES = [
    "through the forest", "across the meadow", "along the river", "over the hills", "past the old mill",
    "down the dusty road",
    "through the tall grass", "across the fields", "up the steep path", "along the shore", "through the quiet valley",
]
GUARDS = "gatekeeper troll wizard knight giant ogre goblin guard ghost statue".split()
KEEPERS = "hermit magician poet astronomer merchant captain librarian smith judge healer".split()
HELPERS = "owl crow beaver mole firefly butterfly deer turtle heron lizard bee snail".split()
BEASTS = "wolf bear lion tiger dragon giant troll crocodile snake boar".split()
FOODS = [
    "bread", "cheese", "apples", "honey cake", "soup", "nuts", "berries", "pancakes", "pears", "carrots", "cookies",
    "pie",
    "dried fish", "sandwiches",
]

# Free slots: drawn anew each time they appear.
FREE = {
    "trait": "brave kind clever curious gentle cheerful loyal patient shy lazy proud young old little quiet funny "
             "friendly "
             "stubborn careful hungry".split(),
    "badfeel": "sad worried afraid lonely tired angry nervous upset".split(),
    "goodfeel": "happy proud glad grateful delighted excited calm cheerful".split(),
    "weather": "sunny rainy cold warm windy foggy snowy cloudy bright stormy".split(),
    "daytime": "morning afternoon evening day night".split(),
    "season": "spring summer autumn winter".split(),
    "mood": "beautiful wonderful strange terrible lovely perfect difficult long exciting".split(),
    "size": "big small huge tiny sad old dark funny heavy strange".split(),
    "bigsize": "big huge great enormous old mighty strange gray".split(),
    "weak": "brave clever patient rich tall fast strong careful".split(),
    "grand": "beautiful wonderful exciting difficult interesting important".split(),
    "virtue": "brave kind clever gentle good strong wonderful helpful".split(),
    "color": "red blue green yellow white black brown orange purple golden".split(),
    "number": "two three four five six seven eight nine ten twelve".split(),
    "gently": "quietly slowly quickly carefully happily bravely softly gently calmly suddenly".split(),
    "dreamplace": ["the sea", "the mountains", "the moon", "the big city", "the stars", "the north", "a far country"],
    "hobby": [
        "singing songs", "climbing trees", "reading old books", "looking at the stars", "painting pictures",
        "baking bread",
        "telling jokes", "collecting stones", "growing flowers", "playing the drum", "swimming in the lake",
        "making kites",
        "asking questions", "drawing maps", "building boats", "listening to the rain", "dancing in the rain",
        "fixing clocks",
        "watching birds", "counting clouds",
    ],
    "moral": [
        "a true friend is worth more than gold", "it is good to ask for help", "being kind costs nothing",
        "small steps can lead to great things", "courage means going on when we are afraid",
        "it is better to share than to keep",
        "patience opens every door", "nobody is too small to help", "the truth is always the best answer",
        "home is the best place of all", "mistakes can teach us a lot", "every day is a new chance",
    ],
    "thing": "stick stone rope blanket hat coat boot ladder bucket candle spoon chair".split(),
    "food": FOODS,
}

IRREGULAR = {
    "be": ("was", "is"), "have": ("had", "has"), "do": ("did", "does"), "go": ("went", "goes"), "say": ("said", "says"),
    "tell": ("told", "tells"), "find": ("found", "finds"), "take": ("took", "takes"), "give": ("gave", "gives"),
    "see": ("saw", "sees"), "hear": ("heard", "hears"), "think": ("thought", "thinks"), "know": ("knew", "knows"),
    "feel": ("felt", "feels"), "run": ("ran", "runs"), "sit": ("sat", "sits"), "stand": ("stood", "stands"),
    "begin": ("began", "begins"), "come": ("came", "comes"), "leave": ("left", "leaves"), "lose": ("lost", "loses"),
    "hold": ("held", "holds"), "keep": ("kept", "keeps"), "fall": ("fell", "falls"), "sleep": ("slept", "sleeps"),
    "eat": ("ate", "eats"), "drink": ("drank", "drinks"), "bring": ("brought", "brings"), "build": ("built", "builds"),
    "make": ("made", "makes"), "put": ("put", "puts"), "swim": ("swam", "swims"), "sing": ("sang", "sings"),
    "fly": ("flew", "flies"), "blow": ("blew", "blows"), "hide": ("hid", "hides"), "shake": ("shook", "shakes"),
    "wake": ("woke", "wakes"), "speak": ("spoke", "speaks"), "win": ("won", "wins"), "dig": ("dug", "digs"),
    "shine": ("shone", "shines"), "lie": ("lay", "lies"), "become": ("became", "becomes"), "meet": ("met", "meets"),
    "forget": ("forgot", "forgets"), "get": ("got", "gets"), "throw": ("threw", "throws"), "stop": ("stopped", "stops"),
    "nod": ("nodded", "nods"), "hug": ("hugged", "hugs"), "plan": ("planned", "plans"), "catch": ("caught", "catches"),
    "can": ("could", "can"), "bake": ("baked", "bakes"), "understand": ("understood", "understands"),
    "let": ("let", "lets"),
    "hurt": ("hurt", "hurts"), "grow": ("grew", "grows"), "ride": ("rode", "rides"), "spend": ("spent", "spends"),
    "stick": ("stuck", "sticks"), "beg": ("begged", "begs"), "drop": ("dropped", "drops"), "wear": ("wore", "wears"),
    "lead": ("led", "leads"), "step": ("stepped", "steps"), "slip": ("slipped", "slips"),
}


def conjugate(verb: str, past: bool, plural: bool = False) -> str:
    """Third person of a verb in the simple past or present: walk -> walked / walks (plural: walk)."""
    if verb == "be":
        return ("were" if plural else "was") if past else ("are" if plural else "is")
    if plural and not past:
        return verb
    if verb in IRREGULAR:
        return IRREGULAR[verb][0 if past else 1]
    if verb[-1] == "y" and verb[-2] not in "aeiou":
        return verb[:-1] + ("ied" if past else "ies")
    if past:
        return verb + ("d" if verb[-1] == "e" else "ed")
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "o")) else "s")


def article(following: str) -> str:
    """'a' or 'an' for the word that follows; the lexicon has no words that break the vowel rule."""
    return "an" if following[:1].lower() in "aeiou" else "a"
