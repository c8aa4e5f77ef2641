"""From the images of a request to the rows that its prompt takes: what the input stage does of it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus

from ..images import ImageInput
from ..scheduler import PlacedImage, PromptImages
from .image_encoder import ImageEncoder

if TYPE_CHECKING:
    from allspark_client.images import Image, Video

    from ..images import ImageProcessor

_NO_PATCHES = np.zeros((0, 0), np.float32)
_MOST_SIZES = 1_000     # images whose sizes are kept, without patches


@dataclass(frozen=True)
class ReadImages:
    """The images of a prompt, and the rows of those that are kept, by digest: these have no patches."""

    inputs: list[ImageInput]
    rows: dict[bytes, np.ndarray]

    @property
    def size(self) -> int:
        """Bytes of their patches."""
        return sum(image.patches.nbytes for image in self.inputs)


class ImageStage:
    """The images of one model's requests. Any thread.

    `encoder`: the model's vision tower. `together`: rows of an image see each other in prompts.
    """

    def __init__(self, processor: ImageProcessor, encoder: ImageEncoder, rotary_parts: bool):
        """`rotary_parts`: whether the model turns rows by time, height and width of their positions."""
        self.encoder, self.together = encoder, encoder.vision.together
        self._processor = processor.within(encoder.most_tokens)
        self._rotary_parts = rotary_parts
        self._sizes: dict[bytes, ImageInput] = {}   # images without patches, by digest

    @property
    def fingerprint(self) -> str:
        """A digest of what the patches of an image depend on besides it, with the bound of its tokens."""
        return hashlib.sha256(self._processor.settings.encode()).hexdigest()[:32]

    def read(self, ids: list[int], images: Sequence[Image | Video], most_tokens: int, scope: str,
             encode: Callable[[str], list[int]]) -> tuple[list[int], ReadImages]:
        """The ids of a prompt with those of its images, and the images. `most_tokens`: of the prompt. `scope`: requests
        share rows within one. `encode`: the ids of a text. ValueError or AllSparkError if an image is wrong, or if they
        do not fit the prompt.
        """
        rows: dict[bytes, np.ndarray] = {}

        def known(digest: bytes) -> ImageInput | None:
            image = self._sizes.get(digest)
            if image is None:
                return None
            kept = [self.encoder.kept(scope, view.digest) for view in self._views(image)]
            if any(each is None for each in kept):
                return None
            rows[digest] = self._joined(image, kept)     # it may leave the encoder meanwhile
            return image

        found = self._processor.process(images, most_tokens, known)
        for number, image in enumerate(found, 1):
            if image.grid[0] == 1 and image.tokens > self.encoder.most_tokens:
                raise AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                                    f"image {number} of the request has {image.tokens} tokens: this model takes at "
                                    f"most {self.encoder.most_tokens} an image (max_image_tokens)")
        while len(self._sizes) > _MOST_SIZES:
            self._sizes.pop(next(iter(self._sizes)), None)
        self._sizes.update({image.digest: replace(image, patches=_NO_PATCHES) for image in found})
        return self._processor.expand(ids, found, encode), ReadImages(found, rows)

    def place(self, ids: list[int], images: ReadImages) -> PromptImages:
        """Where a prompt takes the rows of its images."""
        places = np.flatnonzero(np.isin(np.array(ids, np.int32), self._processor.tokens)).astype(np.int32)
        ends = list(itertools.accumulate(image.tokens for image in images.inputs))
        placed = []
        for image, end in zip(images.inputs, ends):
            own = places[end - image.tokens:end]
            placed.append(PlacedImage(image.digest, int(own[0]), int(own[-1]) + 1, own, images.rows.get(image.digest)))
        if not self._rotary_parts:
            return PromptImages(placed, together=self.together)
        grids = [grid for image, place in zip(images.inputs, placed) for grid in self._grids(image, place)]
        return PromptImages(placed, *rotary_positions(grids))

    def compute(self, scope: str, images: ReadImages, placed: PromptImages,
                wanted: Callable[[], bool]) -> Future[bool] | None:
        """Has the vision tower compute the rows of images, which `placed` then has; done when it has all of them. None
        if it has them already.
        """
        missing = [(image, place) for image, place in zip(images.inputs, placed.images) if place.rows is None]
        if not missing:
            return None
        done: Future[bool] = Future()
        views = [self._views(image) for image, _ in missing]
        found: list[list[np.ndarray | None]] = [[None] * len(of_image) for of_image in views]
        left, lock = sum(map(len, views)), threading.Lock()

        def take(i: int, j: int, computed: Future[np.ndarray]) -> None:
            nonlocal left
            if computed.cancelled():
                done.cancel()
                return
            error = computed.exception()
            with lock:
                if error is None:
                    found[i][j] = computed.result()
                    left -= 1
                if done.done() or (left and error is None):
                    return
                if error is None:
                    for (image, place), rows in zip(missing, found):
                        place.rows = self._joined(image, rows)
                    done.set_result(False)
                else:
                    done.set_exception(error)

        for i, of_image in enumerate(views):
            for j, view in enumerate(of_image):
                self.encoder.request(scope, view, wanted).add_done_callback(functools.partial(take, i, j))
        return done

    def close(self) -> None:
        """Ends the processes that decode images."""
        self._processor.close()

    def _views(self, image: ImageInput) -> list[ImageInput]:
        """What the tower computes of an image, each by itself."""
        _, height, width = image.grid
        return image.views(self.encoder.vision.leading + height * width // self.encoder.vision.merge)

    def _joined(self, image: ImageInput, views: Sequence[np.ndarray | None]) -> np.ndarray:
        """An image's rows, of those of its views."""
        known = [view for view in views if view is not None]
        assert len(known) == len(views)
        rows = known[0] if len(known) == 1 else np.concatenate(known)
        if image.order is None:
            return rows
        found = rows[image.order]
        if self.encoder.row_end is not None:
            found[image.order < 0] = self.encoder.row_end
        return found

    def _grids(self, image: ImageInput, place: PlacedImage) -> list[Grid]:
        """The grids of positions of an image: one, or one for each view of a video that is among text."""
        frames, height, width = image.grid
        side = math.isqrt(self.encoder.vision.merge)
        height, width = height // side, width // side
        if not image.times or image.interval:
            return [Grid(place.first, frames, height, width, image.interval or 1.0)]
        return [Grid(int(place.places[i * height * width]), 1, height, width) for i in range(frames)]


@dataclass(frozen=True)
class Grid:
    """Adjacent embedding rows of a prompt from position `first` on. interval: how far frames are apart in time."""

    first: int
    frames: int
    height: int
    width: int
    interval: float = 1.0

    @property
    def positions(self) -> np.ndarray:
        """Time, height and width of each row, int32 [rows, 3]."""
        places = np.indices((self.frames, self.height, self.width)).reshape(3, -1).T
        times = (np.arange(self.frames, dtype=np.float32) * np.float32(self.interval)).astype(np.int32)
        return np.column_stack([times[places[:, 0]], places[:, 1:]]).astype(np.int32)


def rotary_positions(grids: Sequence[Grid]) -> tuple[np.ndarray, int]:
    """The rotary positions (time, height, width), int32 [n, 3], of a prompt up to the end of its last image, and how
    far those of later positions are ahead of their number: transformers' get_rope_index. What is generated continues
    the text, as in transformers' generate, also where the time of a long video ends behind it.
    """
    parts, end, following = [], 0, 0
    for grid in grids:
        text = np.arange(following, following + grid.first - end, dtype=np.int32)
        following += grid.first - end
        parts += [np.repeat(text[:, None], 3, 1), following + grid.positions]
        following += max(grid.height, grid.width)
        end = grid.first + grid.frames * grid.height * grid.width
    return np.concatenate(parts), following - end
