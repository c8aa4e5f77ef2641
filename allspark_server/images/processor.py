"""Preprocessing of images: from the files of a request to rows of patches for the vision tower, and the prompt's ids.

Results equal those of the Hugging Face processors that run on torchvision (their "fast" versions); docs/decisions/
vision.md says how closely.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeGuard

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus

from .decoder import Decoder

MAX_PIXELS = 1 << 24  # of a resized image: what the largest published settings allow


class EncodedImage(Protocol):
    """An image of a request. `content`: a PNG, JPEG, WebP or GIF file. `min_pixels` and `max_pixels` limit the resized
    image; 0 is for the checkpoint's.
    """

    @property
    def content(self) -> bytes: ...     # noqa: D102

    @property
    def min_pixels(self) -> int: ...    # noqa: D102

    @property
    def max_pixels(self) -> int: ...    # noqa: D102


class EncodedVideo(Protocol):
    """A video of a request. `frames`: files as of images, `fps` of them for each second; the rest as of an image."""

    @property
    def frames(self) -> Sequence[bytes]: ...    # noqa: D102

    @property
    def fps(self) -> float: ...         # noqa: D102

    @property
    def min_pixels(self) -> int: ...    # noqa: D102

    @property
    def max_pixels(self) -> int: ...    # noqa: D102


@dataclass(frozen=True, eq=False)
class ImageInput:
    """One image, or one video, as its model takes it.

    `digest`: 16 bytes that stand for the file, the options of the image and the settings of the processor. `patches`:
    float32 [rows, values of a patch]. `grid`: (views, rows, columns) of patches: the vision tower computes each view by
    itself, and all have as many rows. `tokens`: the number of its embedding rows, which are as many positions of the
    prompt. `order`: int32 [tokens], which output of the tower each of them is, the views' outputs one after the other,
    or -1 for the row that ends a row of the image; None for all as they are. `times`: of a video, the second that is
    the middle of each view; () of an image. `interval`: of a video, how far the views' positions in time are apart; 0
    if views are among text, with positions of their own.

    merge * merge adjacent rows of `patches` make one embedding row (`ImageProcessor.merge`): the rows are blocks of
    merge x merge patches in raster order, the patches of a block in raster order too. So merge = 1 is raster order. The
    values of a row are in the order [channel, frame, row, column] unless the processor's class says otherwise.
    """

    digest: bytes
    patches: np.ndarray
    grid: tuple[int, int, int]
    tokens: int
    order: np.ndarray | None = None
    times: tuple[float, ...] = ()
    interval: float = 0.0

    def views(self, outputs: int) -> list[ImageInput]:
        """The views as images of their own, whose tokens are all `outputs` of the tower for a view."""
        count, rows = self.grid[0], len(self.patches) // self.grid[0]
        if count == 1 and self.order is None:
            return [self]
        return [ImageInput(hashlib.blake2b(self.digest + i.to_bytes(4, "little"), digest_size=16).digest(),
                           self.patches[i * rows:(i + 1) * rows], (1, *self.grid[1:]), outputs) for i in range(count)]


@dataclass(frozen=True)
class Normalization:
    """From 8-bit values to float32: value * rescale, then (value - mean) / std for each of R, G, B if there are these.

    As transformers does with torchvision, the factor is first multiplied into mean and std, in float32.
    """

    rescale: float = 1 / 255
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None

    def apply(self, pixels: np.ndarray, channels: int) -> np.ndarray:
        """Normalizes uint8 pixels. `channels`: the axis of R, G, B."""
        values = pixels.astype(np.float32)
        if self.mean is None or self.std is None:
            return np.multiply(values, np.float32(self.rescale), out=values)
        shape = [3 if axis == channels else 1 for axis in range(pixels.ndim)]
        mean, std = (np.array(each, np.float32) * np.float32(1 / self.rescale) for each in (self.mean, self.std))
        np.subtract(values, mean.reshape(shape), out=values)
        return np.divide(values, std.reshape(shape), out=values)


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageProcessor(ABC):
    """Preprocesses images for one model. Safe to use from several threads.

    token: the id at whose positions a prompt takes embedding rows. patch: the side of a patch in pixels. merge: merge *
    merge patches make one embedding row. resample: the filter of resizing by its number in Pillow.
    """

    #: whether an image's min_pixels and max_pixels have an effect
    takes_pixels: ClassVar[bool] = False

    token: int
    patch: int
    merge: int
    normalization: Normalization
    resample: int
    decoder: Decoder = field(default_factory=Decoder, repr=False)

    @property
    def placeholder(self) -> int:
        """The id that stands for an image in a chat that a template has rendered."""
        return self.token

    @property
    def settings(self) -> str:
        """What the patches of an image depend on besides it."""
        return f"{self!r} {importlib.metadata.version('pillow')}"

    @abstractmethod
    def size(self, height: int, width: int, image: EncodedImage) -> tuple[int, int]:
        """The height and width in pixels that an image is resized to: multiples of patch * merge. ValueError if there
        are none; its text continues the image's name.
        """

    def within(self, tokens: int) -> ImageProcessor:
        """This processor with images of at most `tokens` embedding rows, if it can choose their size."""
        return self

    def sequence(self, image: ImageInput) -> list[int]:
        """The ids of an image in a prompt."""
        return [self.token] * image.tokens

    @property
    def video_token(self) -> int | None:
        """The id at whose positions a prompt takes embedding rows of videos, and which stands for one in a chat; None
        if the model takes none.
        """
        return None

    def video_sequence(self, video: ImageInput, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a video in a prompt. `encode`: those of a text."""
        raise NotImplementedError

    def make_video(self, video: EncodedVideo, digest: bytes, check: Callable[[int], None]) -> ImageInput:
        """As `make`, of a video."""
        raise ValueError("is one too many: this model takes images, but no videos")

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids at whose positions a prompt takes embedding rows."""
        return (self.token,) if self.video_token is None else (self.token, self.video_token)

    def cut(self, pixels: np.ndarray) -> np.ndarray:
        """The rows of ImageInput.patches of an image, uint8 [height, width, 3]."""
        return self.normalization.apply(blocks(pixels, self.patch, self.merge), 1).reshape(-1, 3 * self.patch ** 2)

    def digest(self, image: EncodedImage | EncodedVideo) -> bytes:
        """What stands for an image or a video once it is processed (ImageInput.digest)."""
        if _is_video(image):
            contents = b"".join(hashlib.blake2b(frame).digest() for frame in image.frames)
            options = repr((image.fps, image.min_pixels, image.max_pixels, self))
            return hashlib.blake2b(b"video" + contents + options.encode(), digest_size=16).digest()
        assert _is_image(image)
        options = repr((image.min_pixels, image.max_pixels, self)) if self.takes_pixels else repr(self)
        return hashlib.blake2b(hashlib.blake2b(image.content).digest() + options.encode(), digest_size=16).digest()

    def process(self, images: Sequence[EncodedImage | EncodedVideo], most_tokens: int | None = None,
                known: Callable[[bytes], ImageInput | None] = lambda digest: None) -> list[ImageInput]:
        """Decodes and cuts the images and videos of a request.

        `most_tokens`: of all images together. `known`: what is taken for the image of a digest without decoding it;
        None if it must be decoded. AllSparkError names the image that is wrong, or exceeds a limit, and why.
        """
        found: list[ImageInput] = []
        for number, image in enumerate(images, 1):
            left = None if most_tokens is None else most_tokens - sum(each.tokens for each in found)
            try:
                digest = self.digest(image)
                check = functools.partial(self._check, left)
                found.append(known(digest) or (self.make_video(image, digest, check) if _is_video(image) else
                                               self.make(image, digest, check)))  # type: ignore[arg-type]
            except ValueError as error:
                kind = "video" if _is_video(image) else "image"
                raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{kind} {number} of the request {error}") from None
        return found

    @staticmethod
    def _check(most_tokens: int | None, tokens: int) -> None:
        if most_tokens is not None and tokens > most_tokens:
            raise ValueError(f"has {tokens} tokens, and only {most_tokens} are left for it in the prompt")

    def make(self, image: EncodedImage, digest: bytes, check: Callable[[int], None]) -> ImageInput:
        """Decodes and cuts an image. `check`: raises ValueError if it has too many tokens."""
        def size(height: int, width: int) -> tuple[int, int]:
            height, width = self.size(height, width, image)
            check(height * width // side ** 2)
            return height, width

        side = self.patch * self.merge
        pixels = self.decoder.decode(image.content, size, self.resample)
        grid = (1, pixels.shape[0] // self.patch, pixels.shape[1] // self.patch)
        return ImageInput(digest, self.cut(pixels), grid, grid[1] * grid[2] // self.merge ** 2)

    def expand(self, ids: Sequence[int], images: Sequence[ImageInput],
               encode: Callable[[str], list[int]] = lambda text: []) -> list[int]:
        """The ids of a prompt in which each placeholder is replaced by the ids of its image or video.

        `encode`: the ids of a text, for videos. A prompt in which that was done already is returned as it is.
        ValueError if ids and images do not fit.
        """
        ids = list(ids)
        sequences = [self.video_sequence(image, encode) if image.times else self.sequence(image) for image in images]
        placeholders = [self.video_token if image.times else self.placeholder for image in images]
        places = [place for place, i in enumerate(ids) if i in (self.placeholder, self.video_token)]
        if self._is_expanded(ids, sequences, len(places)):
            return ids
        if self.video_token in (*ids, *placeholders):
            if (found := [ids[place] for place in places]) != placeholders:
                raise ValueError(
                    f"the prompt has {found.count(self.placeholder)} image placeholders (id {self.placeholder}) and "
                    f"{len(found) - found.count(self.placeholder)} video placeholders (id {self.video_token}), and the "
                    f"request {placeholders.count(self.placeholder)} images and {placeholders.count(self.video_token)} "
                    "videos: expected is one placeholder for each, in the same order, or their own ids")
        elif len(places) != len(images) or (self.token != self.placeholder and self.token in ids):
            raise ValueError(
                f"the prompt has {len(places)} image placeholders (id {self.placeholder}) and the request "
                f"{len(images)} images: expected is one placeholder an image, or the images' own ids, which have "
                f"{', '.join(str(image.tokens) for image in images) or 'no'} times id {self.token}"
            )
        return self._replaced(ids, places, sequences)

    def _is_expanded(self, ids: list[int], sequences: list[list[int]], placeholders: int) -> bool:
        if not sequences:
            return not placeholders and not set(self.tokens) & set(ids)
        end = 0
        for sequence in sequences:
            offset, token = next((i, token) for i, token in enumerate(sequence) if token in self.tokens)
            try:
                begin = ids.index(token, end) - offset
            except ValueError:
                return False
            if begin < end or ids[begin:begin + len(sequence)] != sequence:
                return False
            end = begin + len(sequence)
        return not set(self.tokens) & set(ids[end:])

    def _replaced(self, ids: list[int], places: list[int], sequences: list[list[int]]) -> list[int]:
        found, end = [], 0
        for place, sequence in zip(places, sequences):
            found += [*ids[end:place], *sequence]
            end = place + 1
        return found + ids[end:]

    def start(self) -> None:
        """Starts a process that decodes, so that the first image does not wait for it."""
        self.decoder.start()

    def close(self) -> None:
        """Ends the processes. Those that are still at work end with their request."""
        self.decoder.close()


def _is_video(given: EncodedImage | EncodedVideo) -> TypeGuard[EncodedVideo]:
    return hasattr(given, "frames")


def _is_image(given: EncodedImage | EncodedVideo) -> TypeGuard[EncodedImage]:
    return not hasattr(given, "frames")


def blocks(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """The patches of an image [height, width, 3] in the order of ImageInput: [rows, 3, patch, patch]."""
    down, across = (side // (patch * merge) for side in pixels.shape[:2])
    parts = pixels.reshape(down, merge, patch, across, merge, patch, 3)
    return parts.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch)
