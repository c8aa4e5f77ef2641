"""Images of LLaVA: one square for LLaVA 1.5 and LLaVA-Interleave; the whole image and tiles of it, each a square, for
LLaVA-NeXT.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..models.fields import Fields
from .processor import MAX_PIXELS, EncodedImage, ImageInput, ImageProcessor
from .settings import BICUBIC, CLIP_MEAN, CLIP_STD, Settings

_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]     # transformers' own


@dataclass(frozen=True, kw_only=True, eq=False)
class LlavaProcessor(ImageProcessor):
    """`CLIPImageProcessor` of transformers: the shorter side is resized to `side` pixels, and the middle is seen.
    `SiglipImageProcessor`, unless `cropped`: the whole image is resized to a square.

    leading: rows of zeros before the patches of a view, for the class token, whose output is not an embedding row. If
    `side` is no multiple of a patch, the tower leaves out what remains.
    """

    side: int
    leading: int
    cropped: bool = True

    def size(self, height: int, width: int, image: EncodedImage) -> tuple[int, int]:
        """See ImageProcessor: of the image before its ends are left out."""
        if not self.cropped:
            return self.side, self.side
        longer = int(self.side * max(height, width) / min(height, width))
        if self.side * longer > 3 * MAX_PIXELS:
            raise ValueError(f"has {width} x {height} pixels: with {self.side} on the shorter side it would have more "
                             f"than {3 * MAX_PIXELS}")
        return (self.side, longer) if height <= width else (longer, self.side)

    def make(self, image: EncodedImage, digest: bytes, check: Callable[[int], None]) -> ImageInput:
        """See ImageProcessor."""
        check(self.across ** 2)
        pixels = self.decoder.decode(image.content, lambda high, wide: self.size(high, wide, image), self.resample)
        top, left = (int((length - self.side) / 2) for length in pixels.shape[:2])
        view = pixels[top:top + self.side, left:left + self.side]
        order = np.arange(self.leading, self.outputs, dtype=np.int32)
        return ImageInput(digest, self.rows([view]), (1, self.across, self.across), len(order), order)

    @property
    def across(self) -> int:
        """Patches along a side of a view."""
        return self.side // self.patch

    @property
    def outputs(self) -> int:
        """Rows of the tower for a view."""
        return self.leading + self.across ** 2

    def rows(self, views: list[np.ndarray]) -> np.ndarray:
        """The rows of patches of views, uint8 [side, side, 3] each."""
        found = np.zeros((len(views), self.outputs, 3 * self.patch ** 2), np.float32)
        seen = slice(self.across * self.patch)
        for room, view in zip(found, views):
            room[self.leading:] = self.cut(view[seen, seen])
        return found.reshape(len(views) * self.outputs, -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class LlavaNextProcessor(LlavaProcessor):
    """`LlavaNextImageProcessor` of transformers. pinpoints: the (height, width) in pixels that tiles may fill."""

    pinpoints: tuple[tuple[int, int], ...]

    def make(self, image: EncodedImage, digest: bytes, check: Callable[[int], None]) -> ImageInput:
        """See ImageProcessor: the image in one view, and tiles of it over black, from the top."""
        found: list[np.ndarray] = []
        order = np.zeros(0, np.int32)

        def resized(height: int, width: int) -> tuple[int, int]:
            nonlocal order, found
            high, wide = self.best(height, width)
            order = self.order(height, width, high, wide)
            check(len(order))
            found = [np.zeros((high, wide, 3), np.uint8)]
            across, down = wide / width, high / height
            if across < down:
                return min(math.ceil(height * across), high), wide
            return high, min(math.ceil(width * down), wide)

        pixels = self.decoder.decode(image.content, resized, self.resample)
        (high, wide), side = found[0].shape[:2], self.side
        top, left = (high - pixels.shape[0]) // 2, (wide - pixels.shape[1]) // 2
        found[0][top:top + pixels.shape[0], left:left + pixels.shape[1]] = pixels
        whole = self.decoder.decode(image.content, lambda *_: (side, side), self.resample)
        tiles = [found[0][y:y + side, x:x + side] for y in range(0, high, side) for x in range(0, wide, side)]
        return ImageInput(digest, self.rows([whole, *tiles]), (1 + len(tiles), self.across, self.across), len(order),
                          order)

    def best(self, height: int, width: int) -> tuple[int, int]:
        """The size whose tiles show most of the image, and waste least."""
        def fit(size: tuple[int, int]) -> tuple[int, int]:
            high, wide = size
            scale = min(wide / width, high / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            return shown, shown - high * wide

        return max(self.pinpoints, key=fit)

    def order(self, height: int, width: int, high: int, wide: int) -> np.ndarray:
        """ImageInput.order of an image of this size in tiles that fill `high` x `wide` pixels: the whole image, then
        the rows of the tiles together, without those of padding, each with a row end.
        """
        across = self.across
        down_tiles, across_tiles = high // self.side, wide // self.side
        views = 1 + np.arange(down_tiles * across_tiles).reshape(down_tiles, across_tiles)
        patches = self.leading + np.arange(across * across).reshape(across, across)
        places = (views[:, None, :, None] * self.outputs + patches[None, :, None, :]).reshape(down_tiles * across, -1)
        rows, columns = places.shape
        if width / height > columns / rows:
            padding = (rows - int(round(height * (columns / width), 7))) // 2
            places = places[padding:rows - padding]
        else:
            padding = (columns - int(round(width * (rows / height), 7))) // 2
            places = places[:, padding:columns - padding]
        ends = np.full((len(places), 1), -1)
        return np.concatenate([patches.reshape(-1), np.hstack([places, ends]).reshape(-1)]).astype(np.int32)


def read(settings: Settings, config: Fields) -> LlavaProcessor:
    """The processor of a checkpoint of LLaVA or LLaVA-NeXT with a tower of CLIP or SigLIP."""
    tower, fields = config.inner("vision_config"), settings.fields
    siglip = tower.get("model_type", str, "clip_vision_model") == "siglip_vision_model"
    side = tower.get("image_size", int, 224 if siglip else 336)
    patch = tower.get("patch_size", int, 16 if siglip else 14)
    square = {"height": side, "width": side}
    tiled = config.values.get("model_type") == "llava_next"
    resizes = not tiled and fields.get("image_processor_type", str, "Siglip" if siglip else "CLIP").startswith("Siglip")
    size = settings.size(square if resizes else {"shortest_edge": side})
    cropped = size == {"shortest_edge": side} and not resizes
    settings.refuse(do_resize=True, **({"do_center_crop": True} if cropped or tiled else {}))
    if not cropped and size != square:
        raise fields.error("size", f"is {size}: the vision tower takes {side} x {side} pixels" + (
            "" if resizes else ", of a shortest_edge of as many"))
    if not 0 < patch <= side:
        raise tower.error("patch_size", f"is {patch}: expected 1 to image_size ({side})")
    if (cropped or tiled) and (crop := settings.number("crop_size", side)) != side:
        raise fields.error("crop_size", f"is {crop}: the vision tower takes {side} x {side} pixels")
    mean, std = ([0.5] * 3, [0.5] * 3) if resizes else (CLIP_MEAN, CLIP_STD)
    common: dict[str, Any] = {
        "token": config.get("image_token_index", int, 32000), "patch": patch, "merge": 1, "side": side,
        "leading": 0 if siglip else 1, "cropped": cropped, "normalization": settings.normalization(mean, std),
        "resample": settings.resample(BICUBIC)}
    if not tiled:
        settings.refuse(do_pad=False)
        return LlavaProcessor(**common)
    pinpoints = fields.get("image_grid_pinpoints", list, _PINPOINTS)
    if config.get("image_grid_pinpoints", list, _PINPOINTS) != pinpoints:
        raise config.error("image_grid_pinpoints", f"is {config.values.get('image_grid_pinpoints')}, and that of the "
                                                   f"image processor {pinpoints}")
    for each in pinpoints:
        if not isinstance(each, list) or len(each) != 2 or any(
                not isinstance(n, int) or not 0 < n <= 1 << 12 or n % side for n in each):
            raise fields.error("image_grid_pinpoints", f"holds {each!r}: expected a height and a width, multiples of "
                                                       f"{side} pixels up to 4096")
    if not pinpoints:
        raise fields.error("image_grid_pinpoints", "is empty")
    return LlavaNextProcessor(pinpoints=tuple((high, wide) for high, wide in pinpoints), **common)
