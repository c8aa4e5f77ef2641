"""Images of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: any size, in multiples of a block of merged patches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ..models.fields import Fields
from .processor import MAX_PIXELS, EncodedImage, ImageProcessor
from .settings import BICUBIC, CLIP_MEAN, CLIP_STD, Settings, check_tower

MAX_RATIO = 200  # of the longer side to the shorter
_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # transformers' own


@dataclass(frozen=True, kw_only=True, eq=False)
class QwenProcessor(ImageProcessor):
    """`Qwen2VLImageProcessor` of transformers. An image is one frame, which fills all `frames` of a temporal patch."""

    takes_pixels = True

    frames: int
    min_pixels: int
    max_pixels: int

    def size(self, height: int, width: int, image: EncodedImage) -> tuple[int, int]:
        """See ImageProcessor: as near to the image's size as the number of pixels allows."""
        least, most = self._limits(image)
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ValueError(f"has {width} x {height} pixels: the longer side may have at most {MAX_RATIO} times the "
                             "pixels of the shorter")
        side = self.patch * self.merge
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > most:
            shrink = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(length / shrink / side)) for length in (height, width))
        elif rows * columns * side * side < least:
            grow = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(length * grow / side) for length in (height, width))
        return rows * side, columns * side

    def within(self, tokens: int) -> QwenProcessor:
        """See ImageProcessor."""
        most = min(self.max_pixels, tokens * (self.patch * self.merge) ** 2)
        return replace(self, min_pixels=min(self.min_pixels, most), max_pixels=most)

    def _limits(self, image: EncodedImage) -> tuple[int, int]:
        """The least and the most pixels of an image. One that the image has overrides the other of the settings."""
        least, most = image.min_pixels or self.min_pixels, image.max_pixels or self.max_pixels
        for name, value in (("min_pixels", image.min_pixels), ("max_pixels", image.max_pixels)):
            if not 0 <= value <= MAX_PIXELS:
                raise ValueError(f"has {name}={value}: allowed are 1 to {MAX_PIXELS}, or 0 for the checkpoint's")
        if image.min_pixels and image.max_pixels and least > most:
            raise ValueError(f"has min_pixels={least}, more than its max_pixels={most}")
        return (min(least, most), most) if image.max_pixels else (least, max(least, most))

    def cut(self, pixels: np.ndarray) -> np.ndarray:
        """See ImageProcessor; each frame of a patch is the image's."""
        rows = super().cut(pixels).reshape(-1, 3, 1, self.patch ** 2)
        found = np.empty((len(rows), 3, self.frames, self.patch ** 2), np.float32)
        found[:] = rows
        return found.reshape(len(rows), -1)


def read(settings: Settings, config: Fields) -> QwenProcessor:
    """The processor of a checkpoint."""
    settings.refuse(do_resize=True)
    fields, size = settings.fields, settings.size(_SIZE)
    least = fields.get("min_pixels", int, size.get("shortest_edge", _SIZE["shortest_edge"]))
    most = fields.get("max_pixels", int, size.get("longest_edge", _SIZE["longest_edge"]))
    if not 0 < least <= most <= MAX_PIXELS:
        raise fields.error("size", f"asks for {least} to {most} pixels: expected are 1 to {MAX_PIXELS}")
    patch, merge = settings.number("patch_size", 14), settings.number("merge_size", 2)
    frames = settings.number("temporal_patch_size", 2)
    check_tower(config, patch_size=patch, spatial_merge_size=merge, temporal_patch_size=frames)
    return QwenProcessor(
        token=config.need("image_token_id", int), patch=patch, merge=merge, frames=frames,
        min_pixels=least, max_pixels=most, normalization=settings.normalization(CLIP_MEAN, CLIP_STD),
        resample=settings.resample(BICUBIC)
    )
