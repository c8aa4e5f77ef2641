"""Images of Pixtral and Mistral 3: any size up to a square, and a token at the end of each row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from ..models.fields import Fields
from .processor import EncodedImage, ImageInput, ImageProcessor
from .settings import BICUBIC, CLIP_MEAN, CLIP_STD, Settings, token_ids

BREAK, END = "[IMG_BREAK]", "[IMG_END]"  # after a row of an image, after the last one


@dataclass(frozen=True, kw_only=True, eq=False)
class PixtralProcessor(ImageProcessor):
    """`PixtralImageProcessor` of transformers."""

    max_height: int
    max_width: int
    row_end: int
    image_end: int

    def size(self, height: int, width: int, image: EncodedImage) -> tuple[int, int]:
        """See ImageProcessor: the image's own if it is small enough, rounded up."""
        side, found = self.patch * self.merge, (height, width)
        ratio = max(height / self.max_height, width / self.max_width)
        if ratio > 1:
            found = math.floor(height / ratio), math.floor(width / ratio)
        if min(found) < 1:
            raise ValueError(f"has {width} x {height} pixels, and nothing would be left of its shorter side if it were "
                             f"resized to at most {self.max_width} x {self.max_height}")
        return -(-found[0] // side) * side, -(-found[1] // side) * side

    def within(self, tokens: int) -> PixtralProcessor:
        """See ImageProcessor."""
        side = self.patch * self.merge
        longest = side * max(1, math.isqrt(tokens))
        return replace(self, max_height=min(self.max_height, longest), max_width=min(self.max_width, longest))

    def sequence(self, image: ImageInput) -> list[int]:
        """See ImageProcessor."""
        _, rows, columns = (length // self.merge for length in image.grid)
        row = [self.token] * columns
        return [*[*row, self.row_end] * (rows - 1), *row, self.image_end]


def read(settings: Settings, config: Fields) -> PixtralProcessor:
    """The processor of a checkpoint."""
    tower = config.inner("vision_config")
    settings.refuse(do_resize=True, do_center_crop=False)
    size = settings.size({"longest_edge": 1024})
    longest = size.get("longest_edge")
    if longest is None and not {"height", "width"} <= set(size):
        raise settings.fields.error("size", f"is {size}: expected longest_edge, or height and width")
    row_end, image_end = token_ids(Path(config.path).parent, [BREAK, END])
    merges = config.values.get("model_type") == "mistral3"
    return PixtralProcessor(
        token=config.need("image_token_index", int), row_end=row_end, image_end=image_end,
        patch=tower.get("patch_size", int, 16), merge=config.get("spatial_merge_size", int, 2) if merges else 1,
        max_height=longest or size["height"], max_width=longest or size["width"],
        normalization=settings.normalization(CLIP_MEAN, CLIP_STD), resample=settings.resample(BICUBIC)
    )
