"""The story grammar: which sentences exist, how they are filled, and in which order a plot uses them.

Markup of a sentence: ``{slot}`` is filled from the story's cast (the same everywhere in one story) or drawn from a
free list; ``{He}`` and the like are the hero's pronouns, ``{fHe}`` the friend's, ``{rHe}`` the relative's; ``[walk]``
is a verb in the tense of the story (third person singular), ``[walk*]`` its plural; ``@`` is the article a or an.
Sentences of one alternative are separated by `` | ``. An alternative that names the friend is used only in stories
that have one.
"""

from __future__ import annotations

import random
import re

import lexicon as lex

STAGES: dict[str, list[str]] = {
    "open": [
        "Once upon a time there [be] @ {trait} {kind} named {hero}.",
        "Once upon a time, in {home}, there [live] @ {trait} {kind} named {hero}.",
        "Once upon a time, @ {trait} {kind} named {hero} [live] in {home}.",
        "Once upon a time there [be] @ {kind} who [love] {hobby}. | The name of the {kind} [be] {hero}.",
        "Once upon a time there [be*] two friends, {hero} the {kind} and {friend} the {fkind}. | {hero} [live] in "
        "{home}.",
        "There once [be] @ {trait} and {trait} {kind} whose name [be] {hero}.",
        "In {home} there [live] @ {kind} called {hero}.",
        "{hero} [be] @ {trait} {kind} who [live] in {home}.",
        "Long ago, @ {kind} named {hero} [live] in {home}.",
        "This is the story of {hero}, @ {trait} {kind}.",
        "Far away, in {home}, @ {kind} named {hero} [live] with {his} {relative}.",
    ],
    "life": [
        "{He} [love] {hobby}.",
        "{He} [love] {hobby}, but {he} [do] not like {hobby}.",
        "Every {daytime}, {hero} [spend] hours {hobby}.",
        "{hero} and {his} {relative} [be*] poor but {goodfeel}.",
        "{His} {relative} [cook] the best {food} in the world.",
        "{He} always [wear] @ {color} hat and @ {color} coat.",
        "Everyone [like] {hero}, because {he} [be] so {trait}.",
        "At night {he} often [dream] of {dreamplace}.",
        "{He} [have] {number} {color} stones and one {size} secret.",
        "{hero} [have] never seen {dreamplace}, and {he} often [think] about it.",
        "In {season}, {he} [help] {his} {relative} in the garden.",
        "{He} [be] not very {weak}, but {he} [have] a good heart.",
        "{His} best friend [be] {friend}, @ {trait} {fkind}.",
        "{His} {relative} [tell] {him} a story every {daytime}.",
    ],
    "lost": [
        "One {weather} {daytime}, {hero} [can] not find {his} {item}. | \"Where is my {item}?\" {he} [ask]. | "
        "{His} {relative} [shake] {rhis} head. | \"I have not seen it,\" {rhe} [say].",
        "One {daytime}, a strong wind [blow] the {item} of {hero} far away. | \"I must get it back,\" [say] {hero}.",
        "One {weather} {daytime}, a crow [take] the {item} and [fly] away with it. | \"Stop!\" [shout] {hero}, but "
        "the crow "
        "[do] not listen.",
        "One {daytime}, {hero} [wake] up and [see] that the {item} [be] gone. | {He} [be] very {badfeel}. | "
        "\"Somebody has hidden it {where},\" [say] {his} {relative}.",
    ],
    "gift": [
        "It [be] almost the birthday of {his} {relative}. | \"What do you wish for?\" [ask] {hero}. | "
        "\"I have always dreamed of @ {item},\" [say] {his} {relative}.",
        "{hero} [want] to give {his} {relative} something special. | \"I will bring you @ {item},\" {he} [promise].",
        "One {weather} {daytime}, {hero} [have] an idea. | \"My {relative} would be so happy with @ {item},\" {he} "
        "[think].",
    ],
    "legend": [
        "One {daytime}, {his} {relative} [tell] {him} about @ {item}. | \"It lies {where},\" [say] {his} {relative}, "
        "\"and "
        "nobody has ever found it.\"",
        "One {weather} {daytime}, {hero} [find] an old letter. | It [say]: \"Look for the {item} {where}.\"",
        "People [say*] that @ {item} [be] hidden {where}. | {hero} [want] to see it with {his} own eyes.",
        "One {daytime}, {hero} [hear] a song about @ {item}. | \"Is it true?\" {he} [ask] {his} {relative}. | "
        "\"Nobody knows,\" {rhe} [answer].",
    ],
    "sick": [
        "One {weather} {daytime}, {his} {relative} [become] very sick. | \"Only @ {item} can help,\" [say] the "
        "doctor. | "
        "\"It grows {where}.\"",
        "In {season}, {his} {relative} [fall] ill. | {hero} [be] {badfeel}. | \"I will find @ {item} for you,\" {he} "
        "[say], \"and "
        "you will be well again.\"",
        "One {daytime}, {his} {relative} [do] not get up. | {rHe} [have] a fever and [need] @ {item}.",
    ],
    "deliver": [
        "One {weather} {daytime}, {his} {relative} [give] {him} @ {item}. | \"Please bring it to the old {keeper}, "
        "who lives {where},\" "
        "{rhe} [say].",
        "One {daytime}, {hero} [find] @ {item} in front of the door. | \"It belongs to the {keeper} {where},\" [say] "
        "{his} "
        "{relative}. | \"Somebody must bring it there.\"",
        "\"Who can carry this {item} to the {keeper}?\" [ask] {his} {relative}. | \"I can!\" [say] {hero}. | "
        "\"But the {keeper} lives {where},\" [warn] {his} {relative}.",
    ],
    "rescue": [
        "One {weather} {daytime}, {hero} [hear] a cry for help. | @^ {trait} {baby} [have] lost its mother.",
        "One {daytime}, @ {baby} [knock] at the door. | \"I cannot find my way home,\" it [cry]. | \"My family lives "
        "{where}.\"",
        "One {weather} {daytime}, {hero} [see] @ {baby} alone in the rain. | \"Where is your mother?\" {he} [ask]. | "
        "\"She is {where},\" the {baby} [answer].",
    ],
    "depart": [
        "So {hero} [pack] some {food} and [leave] early in the morning.",
        "{hero} [take] @ {thing} and some {food} and [go] {route}.",
        "\"I am not afraid,\" [say] {hero}, and {he} [start] to walk {route}.",
        "\"Be careful,\" [say] {his} {relative}. | \"I will,\" {hero} [answer].",
        "The next {daytime}, {he} [put] on {his} {color} coat and [walk] {route}.",
        "{His} {relative} [give] {him} {food} for the journey and [hug] {him}.",
        "{hero} [say] goodbye to {his} {relative} and [follow] the path {route}.",
        "It [be] @ {weather} {daytime} when {hero} and {friend} [leave*] home.",
        "The sun [shine], and the birds [sing*] in the trees.",
        "\"When will you come back?\" [ask] {his} {relative}. | \"In {number} days,\" [say] {hero}.",
    ],
    "meet": [
        "On the way, {he} [meet] @ {fkind} named {friend}. | \"Where are you going?\" [ask] {friend}. | "
        "\"I am looking for help,\" [answer] {hero}. | \"Then I will come with you,\" [say] {friend}.",
        "Near the road, {hero} [see] @ {trait} {fkind}. | \"My name is {friend},\" {fhe} [say]. | \"May I come with "
        "you?\" | "
        "\"Of course,\" [say] {hero}.",
        "{friend} the {fkind} [wait] at the gate. | \"I have heard about your journey,\" {fhe} [say]. | \"Let us go "
        "together.\"",
        "Soon {he} [hear] somebody behind {him}. | It [be] {friend}, {his} old friend. | \"You should not go alone,\" "
        "[say] "
        "{friend}.",
        "Under a tree [sit] {friend}, @ {trait} {fkind}. | {fHe} [be] {badfeel}, so {hero} [give] {fhim} some {food}. "
        "| "
        "After that, the two [walk*] on together.",
    ],
    "walk": [
        "{hero} [walk] {route} for {number} hours.",
        "The path [go] {route}, and the {daytime} [be] {weather}.",
        "{hero} and {friend} [walk*] {route} and [talk*] about {dreamplace}.",
        "After {number} days, {hero} [be] {badfeel}, but {he} [do] not stop.",
        "When {he} [be] hungry, {he} [eat] some {food} under @ {bigsize} tree.",
        "In the evening {hero} [make] a small fire and [sleep] under the stars.",
        "{friend} [sing] a song, and {hero} [laugh].",
        "\"Is it still far?\" [ask] {friend}. | \"Not very far,\" [answer] {hero}.",
        "{He} [see] {number} {color} birds in the sky and [smile].",
        "\"We have walked all {daytime},\" [say] {friend}. | \"Let us rest a little.\"",
    ],
    "end": [
        "From that day on, {hero} [know] that {moral}.",
        "And so {hero} [learn] that {moral}.",
        "\"You see,\" [say] {his} {relative}, \"{moral}.\"",
        "{hero} and {friend} [be*] friends forever.",
        "And they all [live*] happily ever after.",
        "That {daytime}, {hero} [sleep] well and [dream] of {dreamplace}.",
        "In the evening everyone [eat] {food} and [be] {goodfeel}.",
        "{hero} never [forget] this {mood} journey.",
        "It [be] the most {grand} day of {his} life.",
        "The people of the village still [tell*] the story of {hero} today.",
    ],
    "find": [
        "At last {hero} [come] to the place {where}. | There, under @ {bigsize} stone, {he} [find] the {item}.",
        "Then {he} [see] it: the {item} [lie] {where}. | \"I have found it!\" [shout] {hero}.",
        "Finally {hero} and {friend} [stand*] {where}. | \"Look!\" [say] {friend}. | \"There is the {item}!\"",
        "The {item} [be] {where}, just as {he} [hope]. | {hero} [take] it {gently} and [put] it in {his} bag.",
        "{hero} [look] for a long time {where}. | When {he} [want] to give up, {he} [see] the {item} between {number} "
        "{color} flowers.",
    ],
    "return": [
        "{hero} [run] all the way home. | {His} {relative} [be] waiting at the door. | \"I am so {goodfeel} that you "
        "are back,\" "
        "{rhe} [say].",
        "When {hero} [come] home, {his} {relative} [hug] {him}. | \"Look what I have found,\" [say] {hero}.",
        "The way home [be] easy. | {His} {relative} [be] {goodfeel} when {rhe} [see] the {item}.",
        "{hero} [bring] the {item} home and [show] it to {his} {relative}. | \"You are so {virtue}!\" {rhe} [say].",
    ],
    "heal": [
        "{hero} [run] all the way home and [make] hot tea with the {item}. | The next {daytime}, {his} {relative} "
        "[be] well again.",
        "{His} {relative} [eat] the {item}, and the fever [go] away. | \"You have saved me,\" {rhe} [say] to {hero}.",
    ],
    "given": [
        "At last {hero} [come] to the house of the {keeper}, {where}. | \"Here is your {item},\" {he} [say]. | "
        "\"Thank you!\" [say] the {keeper}. | \"I have waited for it for {number} years.\"",
        "The {keeper} [live] {where}. | When {hero} [give] {keeperhim} the {item}, the {keeper} [begin] to smile. | "
        "\"Please stay and eat some {food} with me,\" the {keeper} [say].",
    ],
    "rescued": [
        "Then they [hear*] a voice {where}. | It [be] the mother of the {baby}! | \"How can I thank you?\" she [ask] "
        "{hero}. | "
        "\"You do not have to,\" {he} [answer].",
        "At last {hero} [find] the family of the {baby} {where}. | The {baby} [jump] for joy. | "
        "\"You will always be our friend,\" its mother [say] to {hero}.",
    ],
    "carry": [
        "\"Do not cry,\" [say] {hero} to the {baby}. | \"I will take you home.\"",
        "{hero} [give] the {baby} some {food} and [take] it by the hand.",
    ],
}

# Obstacles: the trouble, then (mostly) a failed attempt, then a way out.
OBSTACLES: dict[str, tuple[list[str], list[str], list[str]]] = {
    "river": (
        ["Soon {he} [come] to @ {bigsize} river, and there [be] no bridge.", "But then @ {bigsize} river [block] the "
                                                                             "way."],
        ["{hero} [try] to swim, but the water [be] too cold.", "{He} [throw] @ {thing} into the water, and it [be] "
                                                               "gone at once."],
        ["@^ {helper} [show] {him} a place where the water [be] not deep.", "{He} [build] a raft of old wood and "
                                                                            "[cross] the "
         "river {gently}.", "\"Hold my hand,\" [say] {friend}, and together they [jump*] from stone to stone.",
         "\"Sit on my back,\" [say] @ old turtle, and it [carry] {him} to the other side."],
    ),
    "gate": (
        ["Then {hero} [stand] in front of @ {bigsize} gate. | \"Nobody may pass,\" [say] the {guard}.",
         "@^ {guard} [stand] in the middle of the road. | \"Answer my question, or go home,\" the {guard} [say]."],
        ["\"Please let me pass,\" [beg] {hero}, but the {guard} [shake] {guardhis} head."],
        ["\"What has {number} legs and cannot walk?\" [ask] the {guard}. | \"A table!\" [say] {hero}, and the gate "
         "[open].",
         "\"What grows when you share it?\" [ask] the {guard}. | {hero} [think] for a while. | \"Joy,\" {he} [say]. | "
         "\"That is right,\" [say] the {guard}.",
         "{friend} [tell] the {guard} a joke, and the {guard} [laugh] so much that the gate [open].",
         "{hero} [give] the {guard} some {food}. | \"You are kind,\" [say] the {guard}. | \"You may pass.\""],
    ),
    "storm": (
        ["Suddenly the sky [become] dark, and a storm [begin].", "In the evening it [begin] to rain, and the wind "
                                                                 "[blow] "
         "through the trees."],
        ["{hero} [hide] under a bush, but soon {his} coat [be] wet.", "\"I am so cold,\" [say] {friend}."],
        ["Then {he} [find] a dry cave and [wait] there until the rain [stop].", "\"Come in!\" [call] @ {helper} from "
                                                                                "a hollow tree. | "
         "There {hero} [be] safe and warm.", "{hero} and {friend} [hold*] each other until the storm [be] over."],
    ),
    "fog": (
        ["Then a thick fog [come], and {hero} [can] not see the path.", "When it [become] dark, {hero} [lose] {his} "
                                                                        "way."],
        ["{He} [go] left, and then right, but every tree [look] the same.", "\"We have been here before,\" [say] "
                                                                            "{friend}."],
        ["@^ {helper} [say], \"Follow me,\" and [lead] {him} back to the path.", "Far away {he} [hear] a bell. | {He} "
                                                                                 "[follow] the "
         "sound and [find] the road again.", "{friend} [climb] @ {bigsize} tree and [see] a light. | \"We must go "
                                             "that way!\" {fhe} [say]."],
    ),
    "beast": (
        ["Behind a rock [stand] @ {bigsize} {beast}. | \"I will eat you,\" it [say].", "Suddenly @ {beast} [jump] out "
                                                                                       "of the "
         "bushes. | Its eyes [be*] {color}, and its teeth [be*] sharp."],
        ["{hero} [want] to run away, but {his} legs [do*] not move.", "\"Go away!\" [shout] {hero}, but the {beast} "
                                                                      "only [laugh]."],
        ["\"Are you hungry?\" [ask] {hero}, and {he} [give] the {beast} all {his} {food}. | The {beast} [eat] it and "
         "[become] "
         "friendly.", "{hero} [sing] a soft song until the {beast} [sleep] like a baby.",
         "Then {he} [see] a thorn in its foot and {gently} [take] it out. | \"Thank you,\" [say] the {beast}. | "
         "\"Nobody has ever "
         "helped me.\"", "{friend} [make] so much noise with @ {thing} that the {beast} [run] away."],
    ),
    "wall": (
        ["Then there [be] @ {bigsize} wall, and it [have] no door.", "The path [end] at @ {bigsize} wall of {color} "
                                                                     "stones."],
        ["{He} [try] to climb it, but {he} [slip] and [fall].", "{hero} [push] with both hands, but nothing [happen]."],
        ["{hero} [make] a rope from {his} coat and [climb] over the wall.", "{He} [stand] on the back of {friend} and "
                                                                            "[reach] the top.",
         "@^ {helper} [know] a secret hole behind @ {color} bush.", "{He} [dig] a tunnel with @ {thing}, and after "
                                                                    "{number} hours {he} "
         "[be] on the other side."],
    ),
    "cave": (
        ["The only way [lead] through a cave, and it [be] darker than night.",
         "Then the path [go] into a dark tunnel."],
        ["{hero} [can] not see {his} own hands.", "\"Who is there?\" [call] {hero}, but nobody [answer]."],
        ["{friend} [have] a candle, and its light [be] enough for two.", "@^ {helper} [fly] ahead and [shine] like a "
                                                                         "little star.",
         "{He} [count] {his} steps {gently}, and after {number} steps {he} [see] the sun again."],
    ),
    "hole": (
        ["Suddenly {hero} [fall] into @ {bigsize} hole.", "{He} [step] on a dry branch and [fall] into an old trap."],
        ["\"Help!\" {he} [call], but only the wind [answer].", "{He} [jump] as high as {he} [can], but it [be] not "
                                                               "enough."],
        ["{friend} [throw] {him} a rope and [pull] {him} out.", "@^ {helper} [hear] {him} and [bring] @ {thing}. | "
                                                                "{hero} [use] it "
         "to climb out.", "{He} [put] {number} stones on top of each other and [climb] out."],
    ),
}
REACTIONS = [
    "\"That was close,\" [say] {friend}.", "{hero} [thank] everyone and [go] on.", "{hero} [be] very {goodfeel}.",
    "\"I am so {goodfeel}!\" [say] {hero}.", "\"Now I am not {badfeel} anymore,\" {he} [say].",
    "\"We can do it if we try,\" [say] {hero} to {friend}.", "Then {he} [rest] a little and [drink] some water.",
    "\"Thank you for your help,\" [say] {hero}.", "{He} [be] tired, but {he} [feel] {goodfeel}.",
]

PLOTS: dict[str, tuple[str, list[str]]] = {   # motif: (which list the item comes from, finishing stages)
    "lost": ("item", ["find", "return"]),
    "gift": ("item", ["find", "return"]),
    "legend": ("item", ["find", "return"]),
    "sick": ("remedy", ["find", "heal"]),
    "deliver": ("parcel", ["given"]),
    "rescue": ("item", ["rescued"]),
}
ITEM_LISTS = {"item": lex.ITEMS, "remedy": lex.REMEDIES, "parcel": lex.PARCELS}
CAST_LISTS: dict[str, list[str]] = {
    "home": lex.HOMES, "where": lex.WHERES, "guard": lex.GUARDS, "keeper": lex.KEEPERS, "baby": lex.BABIES,
    "beast": lex.BEASTS,
    "item": lex.ITEMS + lex.REMEDIES + lex.PARCELS,
    "hero": lex.FEMALE_NAMES + lex.MALE_NAMES, "friend": lex.FEMALE_NAMES + lex.MALE_NAMES,
    "kind": sorted({*lex.KINDS["f"], *lex.KINDS["m"]}), "fkind": sorted({*lex.KINDS["f"], *lex.KINDS["m"]}),
    "relative": lex.RELATIVES["f"] + lex.RELATIVES["m"],
}
FREE_LISTS: dict[str, list[str]] = {**lex.FREE, "route": lex.ROUTES, "helper": lex.HELPERS}
FREE_ONCE = {"hobby", "dreamplace", "moral", "route"}     # never the same word twice in a story
PRONOUN_OWNERS = {"": "hero", "f": "friend", "r": "relative", "guard": "guard", "keeper": "keeper"}

PIECE = re.compile(r"\{(\w+)\}|\[(\w+)(\*?)\]|@(\^?) ")


def parse(sentence: str) -> list[tuple[str, ...]]:
    """Split marked-up text into ("text", s), ("slot", name), ("verb", v, plural) and ("article", capital) pieces."""
    pieces: list[tuple[str, ...]] = []
    end = 0
    for match in PIECE.finditer(sentence):
        if match.start() > end:
            pieces.append(("text", sentence[end:match.start()]))
        slot, verb, plural, capital = match.groups()
        pieces.append(("slot", slot) if slot else ("verb", verb, plural) if verb else ("article", capital))
        end = match.end()
    if end < len(sentence):
        pieces.append(("text", sentence[end:]))
    return pieces


def pronoun_slot(name: str) -> tuple[str, str, bool] | None:
    """(owner, form, capital) of a pronoun slot such as his, fHe or guardhim; None for other slots."""
    match = re.fullmatch(r"(f|r|guard|keeper|)(He|he|him|His|his|himself)", name)
    return (PRONOUN_OWNERS[match[1]], match[2].lower(), match[2][0].isupper()) if match else None


class Alternative:
    """One alternative of a stage, parsed once."""

    def __init__(self, text: str):
        self.text = text
        self.pieces = parse(text.replace(" | ", " "))
        slots = {piece[1] for piece in self.pieces if piece[0] == "slot"}
        self.needs_friend = any(s in ("friend", "fkind") or (pronoun_slot(s) or ("",))[0] == "friend" for s in slots)


COMPILED = {stage: [Alternative(text) for text in texts] for stage, texts in STAGES.items()}
COMPILED_OBSTACLES = {name: tuple([Alternative(t) for t in part] for part in parts) for name,
                      parts in OBSTACLES.items()}
COMPILED_REACTIONS = [Alternative(text) for text in REACTIONS]


def sentences() -> list[str]:
    """Every marked-up sentence of the grammar (for the checker)."""
    texts = [t for stage in STAGES.values() for t in stage] + REACTIONS
    texts += [t for parts in OBSTACLES.values() for part in parts for t in part]
    return sorted({s for text in texts for s in text.split(" | ")})


class Story:
    """One story in the making: its cast, its tense and its text."""

    def __init__(self, rng: random.Random, **fixed: str):
        """fixed: parts of the cast that a request asked for (hero, kind, gender, plot, item, friend)."""
        self.rng = rng
        self.past = rng.random() < 0.85
        self.plot = fixed.get("plot") or rng.choice(list(PLOTS))
        self.gender = {who: rng.choice("fm") for who in ("hero", "friend", "relative", "guard", "keeper")}
        self.gender["hero"] = fixed.get("gender", self.gender["hero"])
        hero_gender, friend_gender = self.gender["hero"], self.gender["friend"]
        self.cast = {name: rng.choice(values) for name, values in CAST_LISTS.items() if name not in ("item", "hero",
            "friend")}
        self.cast["hero"] = fixed.get("hero") or rng.choice(lex.NAMES[hero_gender])
        self.cast["kind"] = fixed.get("kind") or rng.choice(lex.KINDS[hero_gender])
        self.cast["friend"] = rng.choice([n for n in lex.NAMES[friend_gender] if n != self.cast["hero"]])
        self.cast["fkind"] = rng.choice([k for k in lex.KINDS[friend_gender] if k != self.cast["kind"]])
        self.cast["relative"] = rng.choice(lex.RELATIVES[self.gender["relative"]])
        self.cast["item"] = fixed.get("item") or rng.choice(ITEM_LISTS[PLOTS[self.plot][0]])
        self.has_friend = rng.random() < 0.6
        self.used: set[str] = set()
        self.told: set[str] = set()       # words of FREE_ONCE that the story already has

    def fill(self, alternative: Alternative) -> str:
        """The text of an alternative with this story's cast and tense."""
        out: list[str] = []
        pending: list[int] = []
        recent: set[str] = set()      # a free word is not repeated within one alternative
        for piece in alternative.pieces:
            if piece[0] == "text":
                word = piece[1]
            elif piece[0] == "verb":
                word = lex.conjugate(piece[1], self.past, bool(piece[2]))
            elif piece[0] == "article":
                pending.append(len(out))
                out.append(piece[1])
                continue
            else:
                word = self._slot(piece[1], recent)
            if pending:
                index = pending.pop()
                word_article = lex.article(word)
                out[index] = (word_article.capitalize() if out[index] else word_article) + " "
            out.append(word)
        return "".join(out)

    def _slot(self, name: str, recent: set[str]) -> str:
        if name in self.cast:
            return self.cast[name]
        if name in FREE_LISTS:
            word = self.rng.choice(FREE_LISTS[name])
            avoid = self.told if name in FREE_ONCE else recent
            while word in avoid:
                word = self.rng.choice(FREE_LISTS[name])
            avoid.add(word)
            return word
        owner, form, capital = pronoun_slot(name) or ("", "", False)
        word = lex.PRONOUNS[form][self.gender[owner]]
        return word.capitalize() if capital else word

    def pick(self, alternatives: list[Alternative], friend: bool) -> str:
        """A not yet used alternative that fits, filled; "" when none is left."""
        fitting = [a for a in alternatives if a.text not in self.used and (friend or not a.needs_friend)]
        if not fitting:
            return ""
        alternative = self.rng.choice(fitting)
        self.used.add(alternative.text)
        return self.fill(alternative)

    def tell(self) -> str:
        """The whole story: paragraphs separated by one newline."""
        rng = self.rng
        beginning = [self.pick(COMPILED["open"], self.has_friend)]
        knows_friend = self.cast["friend"] in beginning[0]
        beginning += [self.pick(COMPILED["life"], knows_friend) for _ in range(rng.choice((1, 2, 2, 3)))]
        knows_friend = any(self.cast["friend"] in sentence for sentence in beginning)
        start = [self.pick(COMPILED[self.plot], knows_friend)]
        if self.plot == "rescue":
            start.append(self.pick(COMPILED["carry"], knows_friend))
        start += [self.pick(COMPILED["depart"], knows_friend) for _ in range(rng.choice((1, 1, 2)))]
        middle = []
        if self.has_friend and not knows_friend:
            middle.append(self.pick(COMPILED["meet"], True))
        middle.append(self.pick(COMPILED["walk"], self.has_friend))
        for name in rng.sample(list(COMPILED_OBSTACLES), rng.choice((1, 1, 2))):
            trouble, attempt, way_out = COMPILED_OBSTACLES[name]
            middle.append(self.pick(trouble, self.has_friend))
            if rng.random() < 0.7:
                middle.append(self.pick(attempt, self.has_friend))
            middle.append(self.pick(way_out, self.has_friend))
            if rng.random() < 0.6:
                middle.append(self.pick(COMPILED_REACTIONS, self.has_friend))
        finish = [self.pick(COMPILED[stage], self.has_friend) for stage in PLOTS[self.plot][1]]
        finish += [self.pick(COMPILED["end"], self.has_friend) for _ in range(rng.choice((1, 1, 2)))]
        paragraphs = (beginning, start, middle, finish)
        return "\n".join(" ".join(s for s in part if s) for part in paragraphs)


REQUESTS = [
    "Tell me a story.", "Tell me a short story.", "Please tell me a story!", "Can you tell me a story?",
    "Write a short story.",
    "I want to hear a story.", "Once upon a time", "Another story, please.",
    "Tell me a story about @ {kind}.", "Write a short story about @ {kind}.", "Can you write a story about @ {kind}?",
    "A story about @ {kind}, please.",
    "Tell me a story about @ {kind} named {hero}.", "Write a story about {hero} the {kind}.",
    "Please tell me a story about {hero}, @ {kind}.", "Tell me a short story about {hero}.",
    "Tell me a story about {hero} and @ {item}.", "Write a short story about @ {kind} and @ {item}.",
]


def request_and_story(rng: random.Random) -> tuple[str, str]:
    """A chat request and a story that answers it (it has the hero, kind and item that the request names)."""
    gender = rng.choice("fm")
    story = Story(rng, gender=gender, plot=rng.choice([p for p in PLOTS if p != "rescue"]))
    return story.fill(Alternative(rng.choice(REQUESTS))), story.tell()


def plain_story(rng: random.Random) -> str:
    """A story as plain text."""
    return Story(rng).tell()


if __name__ == "__main__":
    import sys

    generator = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    for _ in range(5):
        print(plain_story(generator), end="\n\n")
