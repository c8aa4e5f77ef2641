"""Stop strings: they end a text. Text that may be the beginning of one is held back until the match is decided."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request and the tables for finding them. The request's samples share them."""

    def __init__(self, strings: Sequence[str], included: bool = False):
        """`included`: the text ends with the string that ends it."""
        self.strings, self.included = tuple(dict.fromkeys(strings)), included
        self.borders = [_borders(string) for string in self.strings]
        self.first = re.compile("[" + "".join(sorted({re.escape(string[0]) for string in self.strings})) + "]")


class StopMatcher:
    """Finds stop strings in a text that arrives in parts of any size.

    The text ends at the character that first completes a stop string, and is returned without that string, unless it is
    included. If one character completes several, the longest counts. Each string is searched by the algorithm of Knuth,
    Morris and Pratt: constant time for each character.
    """

    def __init__(self, stops: StopStrings):
        self._stops = stops
        self._matched = [0] * len(stops.strings)  # length of the prefix of each string that ends the text so far
        self._held = ""  # the longest of these prefixes
        #: the string that was found; no more text may follow
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Takes further text; returns the text that certainly belongs to no stop string."""
        if not self._held and self._stops.first.search(text) is None:
            return text
        matched, strings, borders = self._matched, self._stops.strings, self._stops.borders
        for at, character in enumerate(text):
            found = ""
            for i, string in enumerate(strings):
                length = matched[i]
                while length and string[length] != character:
                    length = borders[i][length - 1]
                if string[length] == character:
                    length += 1
                    if length == len(string):
                        found = max(found, string, key=len)
                        length = 0  # nothing follows
                matched[i] = length
            if found:
                self.found = found
                whole, self._held = self._held + text[: at + 1], ""
                return whole if self._stops.included else whole[: len(whole) - len(found)]
        whole, held = self._held + text, max(matched)
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held]

    def finish(self) -> str:
        """Ends the text; returns what was held back."""
        held, self._held = self._held, ""
        return held


def _borders(string: str) -> array:
    """For each prefix of the string, the length of the longest shorter prefix that ends it."""
    borders = array("H", [0]) * len(string)
    length = 0
    for at in range(1, len(string)):
        while length and string[at] != string[length]:
            length = borders[length - 1]
        if string[at] == string[length]:
            length += 1
        borders[at] = length
    return borders
