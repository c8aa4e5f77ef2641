"""Images and videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: any size, in multiples of merged patches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..models.fields import Fields
from .processor import MAX_PIXELS, EncodedImage, EncodedVideo, ImageInput, ImageProcessor, Normalization, blocks
from .settings import BICUBIC, CLIP_MEAN, CLIP_STD, Settings, check_tower, read_video_settings

MAX_RATIO = 200  # of the longer side to the shorter
_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # transformers' own


@dataclass(frozen=True, kw_only=True, eq=False)
class QwenProcessor(ImageProcessor):
    """`Qwen2VLImageProcessor` of transformers. An image is one frame, which fills all `frames` of a temporal patch."""

    takes_pixels = True

    frames: int
    min_pixels: int
    max_pixels: int
    videos: VideoSettings

    def size(self, height: int, width: int, image: EncodedImage) -> tuple[int, int]:
        """See ImageProcessor: as near to the image's size as the number of pixels allows."""
        return self._fit(height, width, *self._limits(image, self.min_pixels, self.max_pixels))

    def _fit(self, height: int, width: int, least: int, most: int, frames: int = 1, counted: int = 1
             ) -> tuple[int, int]:
        """The size that is nearest to an image's within so many pixels of all frames, of which `counted` are compared
        with the limits.
        """
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ValueError(f"has {width} x {height} pixels: the longer side may have at most {MAX_RATIO} times the "
                             "pixels of the shorter")
        side = self.patch * self.merge
        rows, columns = round(height / side), round(width / side)
        if counted * rows * columns * side * side > most:
            shrink = math.sqrt(frames * height * width / most)
            rows, columns = (max(1, math.floor(length / shrink / side)) for length in (height, width))
        elif counted * rows * columns * side * side < least:
            grow = math.sqrt(least / (frames * height * width))
            rows, columns = (math.ceil(length * grow / side) for length in (height, width))
        return rows * side, columns * side

    def within(self, tokens: int) -> QwenProcessor:
        """See ImageProcessor."""
        cap = tokens * (self.patch * self.merge) ** 2
        most, videos = min(self.max_pixels, cap), self.videos
        videos = replace(videos, view_pixels=min(videos.view_pixels, cap))
        if not videos.stamped:
            videos = replace(videos, min_pixels=min(videos.min_pixels, cap), max_pixels=min(videos.max_pixels, cap))
        return replace(self, min_pixels=min(self.min_pixels, most), max_pixels=most, videos=videos)

    def _limits(self, image: EncodedImage | EncodedVideo, least: int, most: int) -> tuple[int, int]:
        """The least and the most pixels of an image. One that the image has overrides the other of the settings."""
        least, most = image.min_pixels or least, image.max_pixels or most
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

    # -- videos --------------------------------------------------------------------------------------------------------
    @property
    def video_token(self) -> int | None:
        """See ImageProcessor."""
        return self.videos.token

    def video_size(self, height: int, width: int, video: EncodedVideo) -> tuple[int, int]:
        """The size of each frame of a video. Limits are those of a frame, or of all where frames are among text."""
        videos, frames, side = self.videos, len(video.frames), self.patch * self.merge
        least, most = self._limits(video, videos.min_pixels, videos.max_pixels)
        if not videos.stamped:
            most = min(most, videos.view_pixels)
            return self._fit(height, width, min(least, most), most)
        counted = round(frames / self.frames) * self.frames
        most = min(most, videos.view_pixels * counted)
        if min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        return self._fit(height, width, min(least, most), most, frames, counted)

    def make_video(self, video: EncodedVideo, digest: bytes, check: Callable[[int], None]) -> ImageInput:
        """See ImageProcessor. The last frame fills what is missing in the last view."""
        if self.videos.token is None:
            return super().make_video(video, digest, check)
        if self.videos.stamped and len(video.frames) < self.frames:
            raise ValueError(f"has {len(video.frames)} frames: this model takes at least {self.frames}")
        views, given = -(-len(video.frames) // self.frames), (0, 0)

        def size(height: int, width: int) -> tuple[int, int]:
            nonlocal given
            if given not in ((0, 0), (height, width)):
                raise ValueError(f"has {width} x {height} pixels, and the first one {given[1]} x {given[0]}: all need "
                                 "one size")
            given = height, width
            high, wide = self.video_size(height, width, video)
            check(views * high * wide // (self.patch * self.merge) ** 2)
            return high, wide

        pixels = []
        for number, frame in enumerate(video.frames, 1):
            try:
                pixels.append(self.decoder.decode(frame, size, self.videos.resample))
            except ValueError as error:
                raise ValueError(f"has a frame, number {number}, that {error}") from None
        high, wide = (length // self.patch for length in pixels[0].shape[:2])
        rows = np.empty((views, high * wide, 3, self.frames, self.patch ** 2), np.float32)
        for i in range(views * self.frames):
            cut = blocks(pixels[min(i, len(pixels) - 1)], self.patch, self.merge)
            rows[i // self.frames, :, :, i % self.frames] = self.videos.normalization.apply(cut, 1).reshape(
                high * wide, 3, -1)
        tokens = views * high * wide // self.merge ** 2
        return ImageInput(digest, rows.reshape(views * high * wide, -1), (views, high, wide), tokens,
                          times=self._times(len(video.frames), video.fps), interval=self._interval(video.fps))

    def _times(self, count: int, fps: float) -> tuple[float, ...]:
        """The middle of each view, of frames at 0, 1 / fps, …"""
        return tuple((first / fps + min(first + self.frames - 1, count - 1) / fps) / 2
                     for first in range(0, count, self.frames))

    def _interval(self, fps: float) -> float:
        """ImageInput.interval, in single precision as transformers computes it."""
        if self.videos.stamped:
            return 0.0
        rate = self.videos.tokens_per_second
        return float(np.float32(rate) * np.float32(self.frames / fps)) if rate else 1.0

    def video_sequence(self, video: ImageInput, encode: Callable[[str], list[int]]) -> list[int]:
        """See ImageProcessor: Qwen3-VL has the time of each view before it."""
        videos = self.videos
        assert videos.token is not None
        if not videos.stamped:
            return [videos.token] * video.tokens
        each = [videos.start, *[videos.token] * (video.tokens // len(video.times)), videos.end]
        return [i for time in video.times for i in (*encode(f"<{time:.1f} seconds>"), *each)]

    def _replaced(self, ids: list[int], places: list[int], sequences: list[list[int]]) -> list[int]:
        """The marks of begin and end around a video of Qwen3-VL, which its views have, are replaced with it."""
        videos, found, end = self.videos, list[int](), 0
        for place, sequence in zip(places, sequences):
            marked = videos.stamped and ids[place] == videos.token and place > end and (
                ids[place - 1], *ids[place + 1:place + 2]) == (videos.start, videos.end)
            found += [*ids[end:place - marked], *sequence]
            end = place + 1 + marked
        return found + ids[end:]


@dataclass(frozen=True)
class VideoSettings:
    """How videos become rows. token, start, end: ids; None if the model takes none. stamped: each view is among text
    that says its time, and limits of pixels are those of all frames. view_pixels: of a frame, at most.
    tokens_per_second: how far the positions of a second are apart; 0: those of a view.
    """

    token: int | None
    start: int
    end: int
    stamped: bool
    min_pixels: int
    max_pixels: int
    view_pixels: int
    tokens_per_second: float
    normalization: Normalization
    resample: int


def _read_videos(settings: Settings, config: Fields, patch: int, merge: int, frames: int) -> VideoSettings:
    fields, kind = settings.fields, config.get("model_type", str, "")
    stamped = kind.startswith("qwen3")
    settings.refuse(do_resize=True, cap_pixels_per_frame=False)
    for name, value in (("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", frames)):
        if settings.number(name, value) != value:
            raise fields.error(name, f"is {fields.values[name]}, and that of the image processor {value}")
    block = (32 if stamped else 28) ** 2
    size = settings.size({"shortest_edge": 128 * block, "longest_edge": 768 * block})
    limits = [size.get("shortest_edge", 128 * block), size.get("longest_edge", 768 * block)]
    if not stamped:
        limits = [fields.get(name, int, value) for name, value in zip(("min_pixels", "max_pixels"), limits)]
    if min(limits) < 1:
        raise fields.error("size", f"asks for {limits[0]} to {limits[1]} pixels of a video")
    mean, std = ([0.5] * 3, [0.5] * 3) if stamped else (CLIP_MEAN, CLIP_STD)
    rate = config.inner("vision_config").get("tokens_per_second", float, 4.0) if kind == "qwen2_5_vl" else 0.0
    return VideoSettings(
        token=config.get("video_token_id", int), start=config.get("vision_start_token_id", int, 151652),
        end=config.get("vision_end_token_id", int, 151653), stamped=stamped, min_pixels=min(limits),
        max_pixels=limits[1], view_pixels=MAX_PIXELS, tokens_per_second=rate,
        normalization=settings.normalization(mean, std), resample=settings.resample(BICUBIC))


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
    own = read_video_settings(Path(config.path).parent) or settings
    videos = _read_videos(own, config, patch, merge, frames)
    return QwenProcessor(
        videos=videos, token=config.need("image_token_id", int), patch=patch, merge=merge, frames=frames,
        min_pixels=least, max_pixels=most, normalization=settings.normalization(CLIP_MEAN, CLIP_STD),
        resample=settings.resample(BICUBIC)
    )
