"""Checks stories against the rules of the grammar in story.py: is every sentence one of its sentences, and
do names, things, pronouns, articles and tense agree over the whole story?
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import lexicon as lex
import story

_CAST_SLOTS = {**story.CAST_LISTS}
_NEXT_SENTENCE = re.compile(r"[.!?]\"?\s+(?=[\"A-Z])")


def _alternation(values: list[str]) -> str:
    return "|".join(re.escape(v) for v in sorted(set(values), key=len, reverse=True))


def _pattern(sentence: str, past: bool) -> re.Pattern[str]:
    """A regular expression for one marked-up sentence; cast and pronoun slots become named groups."""
    out: list[str] = []
    seen: set[str] = set()
    for piece in story.parse(sentence):
        if piece[0] == "text":
            out.append(re.escape(piece[1]))
        elif piece[0] == "verb":
            out.append(lex.conjugate(piece[1], past, bool(piece[2])))
        elif piece[0] == "article":
            first = "A" if piece[1] else "a"
            out.append(f"(?:{first}(?= [^aeiouAEIOU])|{first}n(?= [aeiouAEIOU])) ")
        elif piece[1] in seen:
            out.append(f"(?P={piece[1]})")
        elif piece[1] in story.FREE_LISTS:
            out.append(f"(?:{_alternation(story.FREE_LISTS[piece[1]])})")
        else:
            seen.add(piece[1])
            pronoun = story.pronoun_slot(piece[1])
            if pronoun:
                words = list(lex.PRONOUNS[pronoun[1]].values())
                words = [w.capitalize() for w in words] if pronoun[2] else words
            else:
                words = _CAST_SLOTS[piece[1]]
            out.append(f"(?P<{piece[1]}>{_alternation(words)})")
    return re.compile("".join(out) + r"(?=\s|$)")


@dataclass
class Report:
    """The result of checking one story. An incomplete last sentence is not counted."""

    sentences: int = 0
    unknown: list[str] = field(default_factory=list)        # sentences that the grammar does not have
    inconsistent: list[str] = field(default_factory=list)   # known sentences that contradict the story so far

    @property
    def good(self) -> bool:
        return self.sentences > 0 and not self.unknown and not self.inconsistent


class Checker:
    """Checks stories against the sentences of the grammar, which it compiles once."""

    def __init__(self) -> None:
        self._patterns = []
        for sentence in story.sentences():
            past, present = _pattern(sentence, True), _pattern(sentence, False)
            if past.pattern == present.pattern:
                self._patterns.append((past, None))
            else:
                self._patterns += [(past, "past"), (present, "present")]

    def check(self, text: str) -> Report:
        """text: a story as generated; line breaks count as spaces."""
        text = re.sub(r"\s+", " ", text).strip()
        bound: dict[str, str] = {}
        report = Report()
        position = 0
        while position < len(text):
            matches = self._matches(text, position)
            if not matches:
                following = _NEXT_SENTENCE.search(text, position)
                if following is None and not re.search(r"[.!?]\"?$", text):
                    break                                    # cut off by the length limit
                end = following.end() if following else len(text)
                report.unknown.append(text[position:end])
                report.sentences += 1
                position = end
                continue
            report.sentences += 1
            consistent = [m for m in matches if all(bound.get(k, v) == v for k, v in m[1].items())]
            end, facts = max(consistent or matches, key=lambda m: m[0])
            if consistent:
                bound.update(facts)
            else:
                wrong = {k: (bound[k], v) for k, v in facts.items() if bound.get(k, v) != v}
                report.inconsistent.append(f"{text[position:end]} {wrong}")
            position = end + 1
        if not report.sentences:
            report.sentences, report.unknown = 1, [text]
        return report

    def _matches(self, text: str, position: int) -> list[tuple[int, dict[str, str]]]:
        """(end, facts) of every sentence of the grammar that begins at position."""
        found = []
        for pattern, tense in self._patterns:
            match = pattern.match(text, position)
            if not match:
                continue
            facts = {"tense": tense} if tense else {}
            for slot, value in match.groupdict().items():
                pronoun = story.pronoun_slot(slot)
                if pronoun:
                    masculine, _feminine = (lex.PRONOUNS[pronoun[1]][g] for g in "mf")
                    gender = "m" if value.lower() == masculine else "f"
                    key = pronoun[0] + " gender"
                    if facts.setdefault(key, gender) != gender:
                        facts[key] = "mixed"
                elif slot in ("home", "where"):
                    continue                                 # a story may name several places
                else:
                    facts[slot] = value
            found.append((match.end(), facts))
        return found
