"""The images of a prompt: which of its positions take their rows."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..runtime.plan import IMAGES, positions_section, rows_section


@dataclass(eq=False)
class PlacedImage:
    """An image in a prompt.

    digest: identifies its rows. first, end: its positions in the prompt, which may have others in between. places:
    int32 [rows], ascending: the positions that take its rows. rows: float32 [rows, width], once the vision tower has
    computed them.
    """

    digest: bytes
    first: int
    end: int
    places: np.ndarray
    rows: np.ndarray | None = None


@dataclass(eq=False)
class PromptImages:
    """The images of a prompt, in its order.

    positions: rotary positions (time, height, width) of the prompt up to the end of its last image, int32 [n, 3]; None
    for models that turn rows by the number of their position. delta: how far those of later positions are ahead.
    together: rows of an image see each other, so that a step computes all that are left of them.
    """

    images: Sequence[PlacedImage]
    positions: np.ndarray | None = None
    delta: int = 0
    together: bool = False

    def begin(self, slot: int) -> list[tuple[int, np.ndarray]]:
        """The plan's sections for a slot that the sequence enters."""
        sections = [] if self.positions is None else [positions_section(slot, self.positions, self.delta)]
        if self.together:
            ranges = [place for image in self.images for place in (image.first, image.end)]
            sections.append((IMAGES, np.array([slot, *ranges], np.int32)))
        return sections

    def rows_of_chunk(self, begin: int, count: int, most: int) -> int:
        """How many of the next `count` rows, from position `begin` on, a chunk may have: it does not end within an
        image whose rows see each other. `most`: rows that the step has left, for an image that needs more than `count`;
        without room for it, there are none.
        """
        for image in self.images if self.together else ():
            if image.first < begin + count < image.end:
                if image.first > begin:
                    return image.first - begin
                return image.end - begin if image.end - begin <= most else 0
        return count

    def rows(self, slot: int, begin: int, end: int) -> list[tuple[int, np.ndarray]]:
        """The plan's sections for a chunk with positions [begin, end): the images' rows in it."""
        sections = []
        for image in self.images:
            first, last = np.searchsorted(image.places, (begin, end)).tolist()
            if first == last:
                continue
            assert image.rows is not None, "a prompt is scheduled once its images are computed"
            places = image.places[first:last]
            cuts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
            sections += [rows_section(slot, int(places[a]), image.rows[first + a:first + b])
                         for a, b in itertools.pairwise(cuts)]
        return sections

    def content(self, begin: int, end: int) -> bytes:
        """What identifies the images that positions [begin, end) show, besides the prompt's ids."""
        return b"".join(struct.pack("<q", image.first - begin) + image.digest
                        for image in self.images if image.first < end and begin < image.end)

    @property
    def size(self) -> int:
        """Bytes that its arrays take, rows not included, which requests share."""
        own = 0 if self.positions is None else self.positions.nbytes
        return own + sum(image.places.nbytes for image in self.images)
