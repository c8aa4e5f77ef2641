"""Images of Gemma 3 (one size) and Gemma 4 (any size of about as many patches)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..models.fields import Fields
from .processor import EncodedImage, ImageInput, ImageProcessor, blocks
from .settings import BICUBIC, BILINEAR, Settings, check_tower, token_ids, tokens_of

SOFT_TOKENS = (70, 140, 280, 560, 1120)  # that Gemma 4 was trained with


@dataclass(frozen=True, kw_only=True, eq=False)
class _GemmaProcessor(ImageProcessor):
    """An image's ids are begin, tokens, end."""

    begin: int
    end: int

    def sequence(self, image: ImageInput) -> list[int]:
        """See ImageProcessor."""
        return [self.begin, *[self.token] * image.tokens, self.end]


@dataclass(frozen=True, kw_only=True, eq=False)
class Gemma3Processor(_GemmaProcessor):
    """`Gemma3ImageProcessor` of transformers, without pan and scan.

    A chat has `begin` for an image. An empty line is before and after the image's ids, perhaps with further newlines.
    `newlines`: the ids of 1, 2, … newlines.
    """

    height: int
    width: int
    newlines: tuple[int, ...]

    @property
    def placeholder(self) -> int:
        """See ImageProcessor."""
        return self.begin

    def size(self, height: int, width: int, image: EncodedImage) -> tuple[int, int]:
        """See ImageProcessor: the same for all."""
        return self.height, self.width

    def _replaced(self, ids: list[int], places: list[int], sequences: list[list[int]]) -> list[int]:
        begins, ends = [0, *(place + 1 for place in places)], [*places, len(ids)]
        found = self._spaced(ids[begins[0]:ends[0]], 0, 2)
        for number, sequence in enumerate(sequences, 1):
            after = 2 if number < len(sequences) else 0
            found += [*sequence, *self._spaced(ids[begins[number]:ends[number]], 2, after)]
        return found

    def _spaced(self, ids: list[int], before: int, after: int) -> list[int]:
        """The ids with so many newlines more at either end, which join those that are there: the tokenizer makes one
        token of adjacent newlines.
        """
        lengths = {i: length for length, i in enumerate(self.newlines, 1)}
        begin, end = 0, len(ids)
        while before and begin < end and ids[begin] in lengths:
            before += lengths[ids[begin]]
            begin += 1
        while after and begin < end and ids[end - 1] in lengths:
            end -= 1
            after += lengths[ids[end]]
        if begin == end:
            return self._lines(before + after)
        return [*self._lines(before), *ids[begin:end], *self._lines(after)]

    def _lines(self, count: int) -> list[int]:
        most = len(self.newlines)
        return [self.newlines[-1]] * (count // most) + ([self.newlines[count % most - 1]] if count % most else [])


def read_gemma3(settings: Settings, config: Fields) -> Gemma3Processor:
    """The processor of a checkpoint of Gemma 3."""
    settings.refuse(do_resize=True, do_pan_and_scan=False)
    tower = config.inner("vision_config")
    size = settings.size({"height": 224, "width": 224})
    patch, image_size = tower.get("patch_size", int, 14), tower.get("image_size", int, 896)
    if size != {"height": image_size, "width": image_size}:
        raise settings.fields.error("size", f"is {size}: the vision tower takes {image_size} x {image_size} pixels")
    side, tokens = image_size // patch, config.get("mm_tokens_per_image", int, 256)
    merge = side // max(1, math.isqrt(tokens))
    if merge < 1 or (side // merge) ** 2 != tokens or side % merge:
        raise config.error("mm_tokens_per_image", f"is {tokens}: {side} x {side} patches cannot be averaged to as many")
    return Gemma3Processor(
        token=config.get("image_token_index", int, 262144), begin=config.get("boi_token_index", int, 255999),
        end=config.get("eoi_token_index", int, 256000), newlines=_newlines(Path(config.path).parent),
        height=image_size, width=image_size, patch=patch, merge=merge,
        normalization=settings.normalization([0.5] * 3, [0.5] * 3), resample=settings.resample(BILINEAR)
    )


def _newlines(directory: Path) -> tuple[int, ...]:
    """The ids of 1, 2, … newlines, as many as the tokenizer has tokens for."""
    token_ids(directory, ["\n"])
    tokens = tokens_of(directory)
    lengths = itertools.takewhile(lambda length: "\n" * length in tokens, itertools.count(1))
    return tuple(tokens["\n" * length] for length in lengths)


@dataclass(frozen=True, kw_only=True, eq=False)
class Gemma4Processor(_GemmaProcessor):
    """`Gemma4ImageProcessor` of transformers. The values of a patch are in the order [row, column, channel], and from
    -1 to 1, as the first layer of its tower scales them.
    """

    soft_tokens: int

    def size(self, height: int, width: int, image: EncodedImage) -> tuple[int, int]:
        """See ImageProcessor: the image's proportions with at most `soft_tokens` embedding rows."""
        side = self.patch * self.merge
        factor = math.sqrt(self.soft_tokens * side ** 2 / (height * width))
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if not rows:
            rows, columns = 1, min(width // height, self.soft_tokens)
        elif not columns:
            rows, columns = min(height // width, self.soft_tokens), 1
        return rows * side, columns * side

    def cut(self, pixels: np.ndarray) -> np.ndarray:
        """See ImageProcessor."""
        parts = blocks(pixels, self.patch, self.merge).transpose(0, 2, 3, 1)
        rows = np.ascontiguousarray(self.normalization.apply(parts, 3)).reshape(len(parts), -1)
        return np.multiply(np.subtract(rows, np.float32(0.5), out=rows), np.float32(2), out=rows)

    def within(self, tokens: int) -> Gemma4Processor:
        """See ImageProcessor."""
        return replace(self, soft_tokens=min(self.soft_tokens, tokens))


def soft_tokens(settings: Settings | None) -> int:
    """The most embedding rows of an image of Gemma 4. `settings`: of its image processor, None for the default ones."""
    most = 280 if settings is None else settings.number("max_soft_tokens", 280)
    if settings is not None and most not in SOFT_TOKENS:
        raise settings.fields.error("max_soft_tokens", f"is {most}: allowed are {SOFT_TOKENS}")
    return most


def read_gemma4(settings: Settings, config: Fields) -> Gemma4Processor:
    """The processor of a checkpoint of Gemma 4."""
    settings.refuse(do_resize=True)
    patch, merge = settings.number("patch_size", 16), settings.number("pooling_kernel_size", 3)
    check_tower(config, patch_size=patch, pooling_kernel_size=merge)
    return Gemma4Processor(
        token=config.get("image_token_id", int, 258880), begin=config.get("boi_token_id", int, 255999),
        end=config.get("eoi_token_id", int, 258882), soft_tokens=soft_tokens(settings),
        patch=patch, merge=merge,
        normalization=settings.normalization([0.0] * 3, [1.0] * 3, normalizes=False),
        resample=settings.resample(BICUBIC)
    )
