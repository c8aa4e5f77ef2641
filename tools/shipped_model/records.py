"""Requests for small JSON records and their answers, with what an answer must hold so that it can be judged."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lexicon as lex

LAST_NAMES = (
    "Stone Baker Rivers Hill Brown Green Woods Field Snow Young King Fisher Miller Carter Bell Cole Lane Marsh Frost "
    "Reed "
    "Shaw Wells Byrd Chen Kaya Novak Rossi Silva Weber Moreau"
).split()
CITIES = (
    "Paris Rome Berlin Madrid Vienna London Oslo Athens Lisbon Dublin Prague Warsaw Cairo Tokyo Lima Quito Delhi "
    "Sydney "
    "Toronto Boston Chicago Nairobi Hanoi Seoul Milan Porto Geneva Krakow"
).split()
COUNTRIES = (
    "France Italy Germany Spain Austria England Norway Greece Portugal Ireland Poland Egypt Japan Peru India Canada "
    "Kenya "
    "Vietnam Brazil Chile"
).split()
WORDS: dict[str, list[str]] = {
    "job": "teacher doctor baker farmer engineer nurse pilot painter lawyer driver cook writer".split(),
    "hobby": "reading swimming chess running cooking painting hiking dancing singing fishing sailing gardening".split(),
    "language": "English French German Spanish Italian Greek Japanese Arabic Hindi Polish Turkish Dutch".split(),
    "color": "red blue green yellow white black brown orange purple gray silver".split(),
    "genre": "fantasy history mystery romance adventure science comedy drama poetry".split(),
    "music": "rock jazz folk pop blues classical techno".split(),
    "species": "cat dog rabbit parrot hamster turtle goldfish pony canary".split(),
    "brand": "Volta Norden Falcon Astra Delta Orion Lumen Kestrel Nova Terra".split(),
    "model": "S1 X3 Mini Sport Cargo City Prime Alpha Zero Trail".split(),
    "product": "lamp chair table phone laptop backpack bottle jacket camera clock kettle blanket".split(),
    "category": "home kitchen garden sports office toys clothing music".split(),
    "ingredient": "flour sugar butter eggs milk salt rice onion garlic tomato pepper cheese lemon basil".split(),
    "dish": ["tomato soup", "apple pie", "rice salad", "onion bread", "lemon cake", "pasta", "pancakes",
    "vegetable stew"],
    "difficulty": "easy medium hard".split(),
    "subject": "math physics biology art music history geography chemistry".split(),
    "street": ["Main Street", "Oak Lane", "Hill Road", "River Street", "Park Avenue", "Mill Road", "Lake Drive",
    "Station Road"],
    "school": ["Hill School", "River College", "Oak Academy", "Central School", "Lake School"],
    "sky": "clear cloudy rainy snowy foggy stormy".split(),
    "cuisine": "Italian French Indian Greek Japanese Thai Mexican".split(),
    "place": ["town hall", "central park", "city library", "old theater", "market square", "music school"],
    "sport": "football tennis hockey rowing basketball judo".split(),
    "feature": "radio heating camera sunroof navigation alarm".split(),
    "toy": "ball rope bone mouse feather ring".split(),
    "currency": "euro dollar yen peso rupee crown".split(),
    "continent": "Europe Asia Africa America Australia".split(),
    "material": "wood steel glass cotton paper plastic leather".split(),
    "wind": "north south east west".split(),
    "season": "spring summer autumn winter".split(),
}
Value = Callable[[random.Random], Any]


def _word(kind: str) -> Value:
    return lambda rng: rng.choice(WORDS[kind])


def _words(kind: str) -> Value:
    return lambda rng: rng.sample(WORDS[kind], rng.choice((2, 3, 3, 4)))


def _number(low: int, high: int) -> Value:
    return lambda rng: rng.randint(low, high)


def _price(rng: random.Random) -> float:
    return round(rng.randint(1, 300) + rng.choice((0.5, 0.25, 0.75, 0.99, 0.49, 0.95)), 2)


def _flag(rng: random.Random) -> bool:
    return rng.random() < 0.5


def _first(rng: random.Random) -> str:
    return rng.choice(lex.NAMES[rng.choice("fm")])


def _full(rng: random.Random) -> str:
    return f"{_first(rng)} {rng.choice(LAST_NAMES)}"


def _names(rng: random.Random) -> list[str]:
    return rng.sample(lex.FEMALE_NAMES + lex.MALE_NAMES, rng.choice((2, 3, 3, 4)))


def _title(rng: random.Random) -> str:
    thing = rng.choice(lex.ITEMS).title()
    return rng.choice((f"The {thing}", f"{_first(rng)} and the {thing}", f"The {rng.choice(lex.ANIMALS).title()} of "
                       f"{rng.choice(CITIES)}", f"A {rng.choice(lex.FREE['color']).title()} Night"))


def _date(rng: random.Random) -> str:
    return f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _time(rng: random.Random) -> str:
    return f"{rng.randint(7, 22):02d}:{rng.choice((0, 15, 30, 45)):02d}"


def _email(rng: random.Random) -> str:
    return f"{_first(rng).lower()}@{rng.choice(('mail', 'post', 'home', 'work'))}.example"


def _choice(values: list[str]) -> Value:
    return lambda rng: rng.choice(values)


# Fields by name; a kind lists the fields that suit it. List-valued fields come with the word for "a list of three ...".
FIELDS: dict[str, Value] = {
    "name": _full, "age": _number(1, 99), "city": _choice(CITIES), "country": _choice(COUNTRIES), "email": _email,
    "job": _word("job"), "married": _flag, "height_cm": _number(20, 210), "title": _title, "author": _full,
    "year": _number(1950, 2026), "pages": _number(40, 900), "genre": _word("genre"), "price": _price, "in_stock": _flag,
    "population": _number(1000, 999999), "mayor": _full, "capital": _flag, "area_km2": _number(10, 9000),
    "species": _word("species"), "color": _word("color"), "owner": _full, "weight_kg": _number(1, 90),
    "vaccinated": _flag,
    "brand": _word("brand"), "model": _word("model"), "doors": _number(2, 5), "electric": _flag,
    "product": _word("product"),
    "category": _word("category"), "stock": _number(0, 500), "material": _word("material"), "dish": _word("dish"),
    "servings": _number(1, 8), "minutes": _number(5, 180), "difficulty": _word("difficulty"), "vegetarian": _flag,
    "director": _full, "rating": lambda rng: round(rng.randint(10, 50) / 10, 1), "artist": _full, "album": _title,
    "seconds": _number(90, 400), "style": _word("music"), "grade": _number(1, 12), "school": _word("school"),
    "sport": _word("sport"), "coach": _full, "founded": _number(1850, 2025), "wins": _number(0, 60),
    "losses": _number(0, 60),
    "id": _number(100, 9999), "customer": _full, "date": _date, "time": _time, "total": _price, "paid": _flag,
    "place": _word("place"), "seats": _number(10, 400), "employees": _number(2, 900), "ceo": _full,
    "street": _word("street"),
    "rooms": _number(1, 9), "floors": _number(1, 5), "garden": _flag, "temperature": _number(-20, 40),
    "humidity": _number(10, 100), "wind": _word("wind"), "sky": _word("sky"), "gate": _number(1, 60),
    "from": _choice(CITIES), "to": _choice(CITIES), "cuisine": _word("cuisine"), "open": _flag,
    "currency": _word("currency"),
    "continent": _word("continent"), "language": _word("language"), "season": _word("season"),
    "quantity": _number(1, 20),
    "number": _number(1, 200), "phone": lambda rng: f"555-{rng.randint(1000, 9999)}", "teacher": _full,
}
LISTS: dict[str, Value] = {
    "hobbies": _words("hobby"), "languages": _words("language"), "tags": _words("category"),
    "districts": _words("place"),
    "toys": _words("toy"), "features": _words("feature"), "ingredients": _words("ingredient"), "actors": _names,
    "subjects": _words("subject"), "scores": lambda rng: [rng.randint(0, 100) for _ in range(rng.choice((2, 3, 4)))],
    "players": _names, "guests": _names, "colors": _words("color"), "products": _words("product"),
    "dishes": _words("dish"),
    "cities": lambda rng: rng.sample(CITIES, rng.choice((2, 3, 4))), "friends": _names, "students": _names,
}
KINDS: dict[str, str] = {
    "person": "name age city country email job married height_cm phone hobbies languages friends",
    "book": "title author year pages genre price in_stock language tags",
    "city": "name country population mayor area_km2 capital founded districts",
    "pet": "name species age color owner weight_kg vaccinated toys",
    "car": "brand model year color doors electric price owner seats features",
    "product": "product brand price category stock color material weight_kg colors tags",
    "recipe": "dish servings minutes difficulty vegetarian author cuisine ingredients",
    "movie": "title director year genre rating minutes language country actors",
    "song": "title artist album year seconds style language",
    "student": "name age grade school city teacher email subjects scores hobbies",
    "team": "name sport city coach founded wins losses players",
    "order": "id customer date total paid city products",
    "event": "title date time place city price seats guests",
    "company": "name city country employees founded ceo phone products",
    "house": "street city rooms floors price garden color owner",
    "weather report": "city date temperature humidity wind sky",
    "flight": "number from to date time gate seats price",
    "restaurant": "name city cuisine rating open street phone dishes",
    "country": "name capital population language currency continent cities",
    "plant": "name color height_cm season country price colors",
    "course": "title teacher place seats price date students",
    "teacher": "name age school city email subjects languages",
}
PLURALS = {"person": "persons", "city": "cities", "country": "countries", "company": "companies"}
COMPANY_ENDINGS = "Sons Daughters Partners Friends".split()
TEAM_ANIMALS = "Lions Bears Foxes Owls Tigers Wolves".split()
SPECIAL: dict[tuple[str, str], Value] = {   # fields that mean something else for one kind
    ("city", "name"): _choice(CITIES), ("country", "name"): _choice(COUNTRIES), ("country", "capital"): _choice(CITIES),
    ("pet", "name"): _first,
    ("plant", "name"): _choice("rose tulip daisy lily basil mint fern cactus ivy moss".split()),
    ("company", "name"): lambda rng: f"{rng.choice(LAST_NAMES)} and {rng.choice(COMPANY_ENDINGS)}",
    ("team", "name"): lambda rng: f"{rng.choice(CITIES)} {rng.choice(TEAM_ANIMALS)}",
    ("restaurant", "name"): lambda rng: (
        f"The {rng.choice(lex.FREE['color']).title()} {rng.choice(lex.ANIMALS).title()}"),
    ("city", "population"): _number(1000, 9999999), ("house", "price"): lambda rng: rng.randint(50, 999) * 1000,
    ("car", "price"): lambda rng: rng.randint(20, 990) * 100, ("student", "age"): _number(6, 25),
    ("teacher", "age"): _number(23, 68), ("pet", "age"): _number(1, 20),
}
COUNTS = {2: "two", 3: "three", 4: "four"}
NESTED = {   # field: (its fields)
    "address": ("street", "number", "city", "country"), "owner": ("name", "age", "phone", "email"),
    "contact": ("email", "phone", "name"), "size": ("height_cm", "weight_kg"), "school": ("name", "city", "street"),
}


@dataclass
class Spec:
    """What an answer must be: an object, or ``count`` objects in a list, with exactly these fields."""

    fields: list[str]
    count: int | None = None                                    # None: one object
    given: dict[str, Any] = field(default_factory=dict)         # field -> value that the request fixed
    lengths: dict[str, int] = field(default_factory=dict)       # field -> length of its list
    # field -> fields of the object (or of each listed object)
    nested: dict[str, list[str]] = field(default_factory=dict)

    def problem(self, answer: str) -> str | None:
        """None if the answer is right, else what is wrong with it."""
        try:
            value = json.loads(answer)
        except ValueError as error:
            return f"not JSON: {error}"
        if not isinstance(value, (dict, list)):
            return f"not JSON: neither an object nor a list: {answer!r}"
        records = value if isinstance(value, list) else [value]
        if isinstance(value, list) != (self.count is not None) or (self.count or 1) != len(records):
            return f"{self.count or 'one object'} wanted, got {type(value).__name__} of {len(records)}"
        return next((p for p in map(self._record_problem, records) if p), None)

    def _record_problem(self, record: Any) -> str | None:
        if not isinstance(record, dict) or sorted(record) != sorted(self.fields):
            return f"fields {self.fields} wanted, got {list(record) if isinstance(record, dict) else record}"
        for name, wanted in self.given.items():
            if record[name] != wanted:
                return f"{name} is {record[name]!r}, not {wanted!r}"
        for name, length in self.lengths.items():
            if not isinstance(record[name], list) or len(record[name]) != length:
                return f"{name} should be a list of {length}, got {record[name]!r}"
        for name, fields in self.nested.items():
            inner = record[name] if isinstance(record[name], list) else [record[name]]
            if any(not isinstance(i, dict) or sorted(i) != sorted(fields) for i in inner):
                return f"{name} should have {fields}, got {record[name]!r}"
        return None


def _join(parts: list[str], last: str = "and") -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}"


def value_of(name: str, rng: random.Random, kind: str = "") -> Any:
    """A value for a field of a kind of record; unknown fields get a word."""
    make = SPECIAL.get((kind, name)) or FIELDS.get(name) or LISTS.get(name)
    return make(rng) if make else rng.choice(WORDS[rng.choice(list(WORDS))])


def _sized(name: str, length: int, rng: random.Random) -> list[Any]:
    values: list[Any] = []
    while len(values) < length:
        values += [v for v in LISTS[name](rng) if v not in values]
    return values[:length]


def _pick_fields(rng: random.Random, kind: str) -> list[str]:
    names = KINDS[kind].split()
    roll = rng.random()
    fields = rng.sample(names, rng.randint(2, min(6, len(names))))
    if roll < 0.12:            # fields that do not suit the kind, or that are no known field at all
        pool = list(FIELDS) + list(LISTS) + [w for words in WORDS.values() for w in words
                                             if w.isalpha() and w.islower()]
        fields = list(dict.fromkeys(rng.choice(pool) for _ in range(rng.randint(2, 5))))
    return fields


def held_out(text: str) -> bool:
    """Whether a request is kept for evaluation (one in 32)."""
    return zlib.crc32(text.encode()) % 32 == 0


def request(rng: random.Random, evaluation: bool = False) -> tuple[str, str, Spec]:
    """(request, answer, what the answer must hold), from the held-out requests if ``evaluation``, else from the
    others.
    """
    while True:
        text, answer, spec = _request(rng)
        if held_out(text) == evaluation:
            return text, answer, spec


def _request(rng: random.Random) -> tuple[str, str, Spec]:
    kind = rng.choice(list(KINDS))
    if rng.random() < 0.04:               # no fields named: the kind's first ones
        spec = Spec(fields=KINDS[kind].split()[:4])
        a_kind = f"{lex.article(kind)} {kind}"
        text = rng.choice(("Give me a JSON record of {}.", "Write a JSON object for {}.", "Give me JSON for {}.",
            "JSON for {}",
                           "Describe {} as JSON.", "Return {} as JSON.", "Create a JSON record of {}."))
        return text.format(a_kind), _answer(rng, spec, kind), spec
    fields = _pick_fields(rng, kind)
    spec = Spec(fields=fields)
    if rng.random() < 0.18:
        spec.count = rng.choice((2, 3)) if len(fields) < 5 else 2
    spoken = []
    for name in fields:
        roll = rng.random()
        if name in LISTS and roll < 0.6:
            spec.lengths[name] = rng.choice((2, 3, 3, 4))
            spoken.append(f"a list of {rng.choice((COUNTS[spec.lengths[name]], str(spec.lengths[name])))} {name}")
        elif spec.count is None and roll < 0.2 and not isinstance(value_of(name, rng, kind), (bool, list)):
            value = spec.given[name] = value_of(name, rng, kind)
            bare = not isinstance(value, str) or (name in FIELDS and " and " not in value and rng.random() < 0.4)
            spoken.append(f"{name} {value}" if bare else f'{name} "{value}"')
        else:
            spoken.append(name)
    if rng.random() < 0.18 and spec.count is None and len(fields) < 6:
        _add_nested(rng, spec, spoken)
    return _phrase(rng, kind, spec, spoken), _answer(rng, spec, kind), spec


def _add_nested(rng: random.Random, spec: Spec, spoken: list[str]) -> None:
    """Adds an object, or a list of objects, as the last field."""
    if rng.random() < 0.6:
        name = rng.choice([n for n in NESTED if n not in spec.fields] or ["details"])
        pool = NESTED.get(name, ("color", "price", "year"))
        inner = rng.sample(pool, rng.randint(2, min(3, len(pool))))
        spoken.append(f"{lex.article(name)} {name} with {_join(inner)}")
    else:
        name = rng.choice([n for n in ("items", "products", "members", "books", "pets") if n not in spec.fields])
        inner = rng.sample(("name", "price", "quantity", "color", "year", "title", "age", "id"), 2)
        spec.lengths[name] = rng.choice((2, 3))
        spoken.append(f"a list of {rng.choice((COUNTS[spec.lengths[name]], str(spec.lengths[name])))} {name}, "
                      f"each with {_join(inner)}")
    spec.fields.append(name)
    spec.nested[name] = inner


def _phrase(rng: random.Random, kind: str, spec: Spec, spoken: list[str]) -> str:
    if spec.count is not None:
        number = rng.choice((COUNTS[spec.count], str(spec.count)))
        plural = PLURALS.get(kind, kind + "s")
        start = rng.choice((f"Give me a JSON list of {number} {plural} with ",
                            f"Write a JSON array of {number} {plural}, each with ",
                            f"JSON list: {number} {plural} with ", f"I need {number} {plural} as a JSON list with "))
        return start + _join(spoken) + rng.choice((".", ".", ""))
    a_kind = f"{lex.article(kind)} {kind}"
    start = rng.choice((
        f"Give me a JSON record of {a_kind} with ", f"Give me a JSON record of {a_kind} with ",
        f"Give me JSON for {a_kind} with ",
        f"Write a JSON object for {a_kind} with ", f"Create a JSON record for {a_kind} with ",
        f"Please give me {a_kind} as JSON with ",
        f"Return {a_kind} as JSON with ", f"Make a small JSON record of {a_kind} with ",
        f"Describe {a_kind} as JSON with ",
        f"I need a JSON object of {a_kind} with ", f"JSON record of {a_kind}: ", f"JSON for {a_kind}: ",
    ))
    if not spec.nested and rng.random() < 0.12:
        return start + rng.choice(("the fields ", "these fields: ", "fields ")) + _join(spoken) + "."
    return start + _join(spoken) + rng.choice((".", ".", ".", "", "!", " please."))


def _answer(rng: random.Random, spec: Spec, kind: str) -> str:
    def record() -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name in spec.fields:
            if name in spec.nested:
                objects = [{f: value_of(f, rng) for f in spec.nested[name]} for _ in range(spec.lengths.get(name, 1))]
                out[name] = objects if name in spec.lengths else objects[0]
            elif name in spec.given:
                out[name] = spec.given[name]
            else:
                out[name] = _sized(name, spec.lengths[name], rng) if name in spec.lengths else value_of(name, rng, kind)
        return out

    return json.dumps(record() if spec.count is None else [record() for _ in range(spec.count)])


if __name__ == "__main__":
    generator = random.Random(0)
    for _ in range(20):
        question, answer, wanted = request(generator)
        print(question, answer, wanted.problem(answer), sep="\n", end="\n\n")
