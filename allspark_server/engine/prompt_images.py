"""From the images of a request to the rows that its prompt takes: what the input stage does of it."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus

from ..images import ImageInput
from ..scheduler import PlacedImage, PromptImages
from .image_encoder import ImageEncoder

if TYPE_CHECKING:
    from allspark_client.images import Image

    from ..images import ImageProcessor

_NO_PATCHES = np.zeros((0, 0), np.float32)
_MOST_SIZES = 10_000    # images whose sizes are kept


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
        self._sizes: dict[bytes, tuple[tuple[int, int, int], int]] = {}     # grid and tokens of images, by digest

    @property
    def settings(self) -> str:
        """What the patches of an image depend on besides it."""
        return self._processor.settings

    def read(self, ids: list[int], images: Sequence[Image], most_tokens: int, scope: str
             ) -> tuple[list[int], ReadImages]:
        """The ids of a prompt with those of its images, and the images. `most_tokens`: of the prompt. `scope`: requests
        share rows within one. ValueError or AllSparkError if an image is wrong, or if they do not fit the prompt.
        """
        rows: dict[bytes, np.ndarray] = {}

        def known(digest: bytes) -> ImageInput | None:
            size = self._sizes.get(digest)
            if size is None or (kept := self.encoder.kept(scope, digest)) is None:
                return None
            rows[digest] = kept     # it may leave the encoder meanwhile
            return ImageInput(digest, _NO_PATCHES, *size)

        found = self._processor.process(images, most_tokens, known)
        for number, image in enumerate(found, 1):
            if image.tokens > self.encoder.most_tokens:
                raise AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                                    f"image {number} of the request has {image.tokens} tokens: this model takes at "
                                    f"most {self.encoder.most_tokens} an image (max_image_tokens)")
        while len(self._sizes) > _MOST_SIZES:
            self._sizes.pop(next(iter(self._sizes)), None)
        self._sizes.update({image.digest: (image.grid, image.tokens) for image in found})
        return self._processor.expand(ids, found), ReadImages(found, rows)

    def place(self, ids: list[int], images: ReadImages) -> PromptImages:
        """Where a prompt takes the rows of its images."""
        places = np.flatnonzero(np.array(ids, np.int32) == self._processor.token).astype(np.int32)
        ends = list(itertools.accumulate(image.tokens for image in images.inputs))
        placed = []
        for image, end in zip(images.inputs, ends):
            own = places[end - image.tokens:end]
            placed.append(PlacedImage(image.digest, int(own[0]), int(own[-1]) + 1, own, images.rows.get(image.digest)))
        if not self._rotary_parts:
            return PromptImages(placed, together=self.together)
        return PromptImages(placed, *rotary_positions(placed, [self._units(image) for image in images.inputs]))

    def compute(self, scope: str, images: ReadImages, placed: PromptImages,
                wanted: Callable[[], bool]) -> Future[bool] | None:
        """Has the vision tower compute the rows of images, which `placed` then has; done when it has all of them. None
        if it has them already.
        """
        missing = [(image, place) for image, place in zip(images.inputs, placed.images) if place.rows is None]
        if not missing:
            return None
        done: Future[bool] = Future()
        left, lock = len(missing), threading.Lock()

        def take(place: PlacedImage, found: Future[np.ndarray]) -> None:
            nonlocal left
            if found.cancelled():
                done.cancel()
            elif (error := found.exception()) is not None:
                with lock:
                    if not done.done():
                        done.set_exception(error)
            else:
                place.rows = found.result()
                with lock:
                    left -= 1
                    if not left and not done.done():
                        done.set_result(False)

        for image, place in missing:
            self.encoder.request(scope, image, wanted).add_done_callback(functools.partial(take, place))
        return done

    def close(self) -> None:
        """Ends the processes that decode images."""
        self._processor.close()

    def _units(self, image: ImageInput) -> tuple[int, int, int]:
        """Frames, rows and columns of an image's embedding rows."""
        frames, height, width = image.grid
        side = math.isqrt(self.encoder.vision.merge)
        return frames, height // side, width // side


def rotary_positions(images: Sequence[PlacedImage], grids: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, int]:
    """The rotary positions (time, height, width), int32 [n, 3], of a prompt up to the end of its last image, and how
    far those of later positions are ahead of their number: transformers' get_rope_index. grids: frames, rows and
    columns of the images, whose rows are adjacent.
    """
    parts, end, following = [], 0, 0
    for image, (frames, height, width) in zip(images, grids):
        text = np.arange(following, following + image.first - end, dtype=np.int32)
        following += image.first - end
        grid = np.indices((frames, height, width)).reshape(3, -1).T
        parts += [np.repeat(text[:, None], 3, 1), (following + grid).astype(np.int32)]
        following += max(frames, height, width)
        end = image.end
    return np.concatenate(parts), following - end
