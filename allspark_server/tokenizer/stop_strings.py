"""Stop strings: where a text ends because one of them stands in it. Their beginnings are held back until decided."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .text import StreamDetokenizer


class StopStrings:
    """The stop strings of a request, with what looking for them needs; its samples share it."""

    def __init__(self, strings: Sequence[str]):
        self.strings = tuple(dict.fromkeys(strings))
        self.borders = [_borders(string) for string in self.strings]
        self.first = re.compile("[" + "".join(sorted({re.escape(string[0]) for string in self.strings})) + "]")


class StopMatcher:
    """Looks for stop strings in a text that comes in pieces, however it is cut.

    The text ends with the character that completes a stop string first, and is given without that string; of several
    that one character completes, without the longest. Knuth, Morris and Pratt's way, for each of the strings: constant
    time a character.
    """

    def __init__(self, stops: StopStrings):
        self._stops = stops
        self._matched = [0] * len(stops.strings)    # how long a beginning of each string ends the text so far
        self._held = ""                             # the longest of these
        #: the string that was found; nothing more is taken then
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Takes further text; returns what is certain not to belong to a stop string."""
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
                        length = 0      # nothing follows
                matched[i] = length
            if found:
                self.found = found
                whole, self._held = self._held + text[: at + 1], ""
                return whole[: len(whole) - len(found)]
        whole, held = self._held + text, max(matched)
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held]

    def finish(self) -> str:
        """The text ends here: what was held back."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """The text of one sample as its tokens come, up to a stop string. Its tokens end with the one that completes that
    string.
    """

    def __init__(self, detokenizer: StreamDetokenizer, stops: StopStrings | None, wanted: bool):
        """`wanted`: whether somebody reads the text, or it is there for the stop strings alone."""
        self._detokenizer = detokenizer
        self._matcher = None if stops is None else StopMatcher(stops)
        self._wanted = wanted

    @property
    def found(self) -> str | None:
        """The stop string that has ended the text."""
        return None if self._matcher is None else self._matcher.found

    def push(self, ids: Iterable[int], last: bool = False) -> str | None:
        """Takes further ids; returns the text that they make certain, None unless it is wanted. `last`: none follow."""
        text = self._detokenizer.push(ids)
        matcher = self._matcher
        if matcher is not None:
            text = matcher.push(text)
        if last and self.found is None:
            rest = self._detokenizer.finish()
            if matcher is not None:
                rest = matcher.push(rest)
                rest += matcher.finish()
            text += rest
        return text if self._wanted else None


def _borders(string: str) -> array:
    """For each beginning of the string the length of the longest shorter beginning that ends it."""
    borders = array("H", [0]) * len(string)
    length = 0
    for at in range(1, len(string)):
        while length and string[at] != string[length]:
            length = borders[length - 1]
        if string[at] == string[length]:
            length += 1
        borders[at] = length
    return borders
