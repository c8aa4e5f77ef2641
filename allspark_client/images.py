"""Images in requests: what callers give becomes encoded files, which travel to rank 0 and are decoded there."""
from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from .errors import embeddings_not_available
from .fields import as_int, wrong_type

T = TypeVar("T")
#: the most bytes of one encoded image, and the most images of one request
MAX_BYTES, MAX_IMAGES = 64 << 20, 256
#: the most frames of a video, and the frames of a second where a request does not say
MAX_FRAMES, DEFAULT_FPS = 768, 2.0
#: the most pixels of an image by its `detail` in OpenAI's form; 0: as the model's processor has it
DETAIL_PIXELS = {"auto": 0, "low": 512 * 512, "high": 0, "original": 0}
_INT32_MAX = 2**31 - 1
#: characters in which a data URL's head must end
_HEAD = 200
#: beginnings of the files of each format
_BEGINNINGS = {"PNG": rb"\x89PNG\r\n\x1a\n", "JPEG": rb"\xff\xd8\xff", "GIF": rb"GIF8[79]a", "WebP": rb"RIFF.{4}WEBP"}
_ANY_FORMAT = re.compile(b"|".join(_BEGINNINGS.values()), re.DOTALL)
#: where a part of a chat in Hugging Face's form has its image
_SOURCES = ("image", "url", "path", "base64")
#: the types of parts with a video
_VIDEOS = ("video", "video_url")
#: modes of Pillow that PNG stores as they are; of others, those with transparency become RGBA, the rest RGB
_PNG_MODES, _ALPHA_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), ("PA", "RGBa")
_GIVEN = ("the bytes of an encoded file, a pathlib.Path, a data URL, a PIL image or a uint8 array of shape [height, "
          "width, 3]")


@dataclass(frozen=True)
class Image:
    """An encoded image, PNG, JPEG, WebP or GIF (its first frame), and the bounds that it is resized to.

    `min_pixels`, `max_pixels`: as the processors of checkpoints have them; 0: the model's own. Raises ValueError or
    TypeError for other content or bounds; whether the rest of the file can be decoded is found out on rank 0.
    """

    content: bytes
    min_pixels: int = 0
    max_pixels: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.content, bytes):
            raise wrong_type("content", self.content, "the bytes of an encoded image")
        if len(self.content) > MAX_BYTES:
            raise ValueError(f"the image has {len(self.content)} bytes; allowed: at most {MAX_BYTES}")
        if not _ANY_FORMAT.match(self.content):
            begins = f"begins with {self.content[:12]!r}" if self.content else "is empty"
            raise ValueError(f"the image {begins}: that is none of {', '.join(_BEGINNINGS)}")
        for name in ("min_pixels", "max_pixels"):
            as_int(name, getattr(self, name), 0, _INT32_MAX)
        if 0 < self.max_pixels < self.min_pixels:
            raise ValueError(f"min_pixels={self.min_pixels} is above max_pixels={self.max_pixels}")

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal for equal images."""
        bounds = f"{self.min_pixels} {self.max_pixels} ".encode()
        return hashlib.blake2b(bounds + self.content, digest_size=16).digest()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.content)


@dataclass(frozen=True)
class Video:
    """A video as its frames, encoded images of one size, of which `fps` are for a second.

    `min_pixels`, `max_pixels`: as of an Image, of each frame, or for Qwen3-VL of all frames. Raises ValueError or
    TypeError for other frames.
    """

    frames: tuple[bytes, ...]
    fps: float = DEFAULT_FPS
    min_pixels: int = 0
    max_pixels: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.frames, tuple) or not self.frames:
            raise wrong_type("frames", self.frames, "a tuple of encoded images, at least one")
        if len(self.frames) > MAX_FRAMES:
            raise ValueError(f"the video has {len(self.frames)} frames; allowed: at most {MAX_FRAMES}")
        for i, frame in enumerate(self.frames):
            named(f"frames[{i}]", Image, frame, self.min_pixels, self.max_pixels)
        if isinstance(self.fps, bool) or not isinstance(self.fps, (int, float)) or not 0.01 <= self.fps <= 1000:
            raise ValueError(f"fps={self.fps!r}: a video has from 0.01 to 1000 frames a second")
        object.__setattr__(self, "fps", float(self.fps))

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal for equal videos."""
        head = f"video {len(self.frames)} {self.fps} {self.min_pixels} {self.max_pixels} ".encode()
        contents = [hashlib.blake2b(frame, digest_size=16).digest() for frame in self.frames]
        return hashlib.blake2b(head + b"".join(contents), digest_size=16).digest()

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(map(len, self.frames))


def as_image(given: Any, min_pixels: int = 0, max_pixels: int = 0) -> Image:
    """An image in any of the forms that callers have it in; see AbstractEngine.start_request.

    A file is read if it is given as a pathlib.Path (or another os.PathLike): a str may have come with a chat from
    elsewhere, and is a data URL. PIL images and arrays are encoded as PNG, without loss; Pillow is needed only for
    these two. An Image keeps its own bounds where none are given. Raises ValueError or TypeError for other forms, and
    for files that cannot be read, are too large or are no images.
    """
    if isinstance(given, Image):
        return Image(given.content, min_pixels or given.min_pixels, max_pixels or given.max_pixels)
    if isinstance(given, (bytes, bytearray, memoryview)):
        content = bytes(given)
    elif isinstance(given, str):
        content = content_of_data_url(given)
    elif isinstance(given, os.PathLike):
        path = os.fsdecode(given)
        return named(repr(path), Image, _read(path), min_pixels, max_pixels)
    elif isinstance(given, np.ndarray):
        content = _png_of_array(given)
    elif (pillow := sys.modules.get("PIL.Image")) is not None and isinstance(given, pillow.Image):
        content = _png(given)
    else:
        raise TypeError(f"an image must be {_GIVEN}, not {type(given).__name__}")
    return Image(content, min_pixels, max_pixels)


def as_video(given: Any, fps: float | None = None, min_pixels: int = 0, max_pixels: int = 0) -> Video:
    """A video in the forms that callers have it in: a list of frames, each as of `as_image`; a uint8 array of shape
    [frames, height, width, 3]; a data URL of frames, data:video/jpeg;base64,FRAME,FRAME,…; or a Video, which keeps its
    own fps and bounds where none are given. Raises ValueError or TypeError.
    """
    if isinstance(given, Video):
        return Video(given.frames, fps or given.fps, min_pixels or given.min_pixels, max_pixels or given.max_pixels)
    if isinstance(given, str):
        frames = frames_of_data_url(given)
    elif (given.ndim == 4 if isinstance(given, np.ndarray) else isinstance(given, Sequence) and not isinstance(
            given, (bytes, bytearray, memoryview))):
        if not 0 < len(given) <= MAX_FRAMES:
            raise ValueError(f"the video has {len(given)} frames; allowed: 1 to {MAX_FRAMES}")
        frames = tuple(named(f"frame {i}", as_image, frame).content for i, frame in enumerate(given))
    else:
        raise TypeError(f"a video must be a list of frames, each {_GIVEN}, or a data URL of them, not "
                        f"{type(given).__name__}: video files are not decoded")
    return Video(frames, DEFAULT_FPS if fps is None else fps, min_pixels, max_pixels)


def frames_of_data_url(url: str) -> tuple[bytes, ...]:
    """The frames of a data URL, data:video/jpeg;base64,FRAME,FRAME,…, as vLLM takes it. Raises ValueError."""
    head, comma, _ = url[:_HEAD].partition(",")
    if not comma or not re.fullmatch(r"(?i)data:video/(jpeg|png|webp);base64", head):
        raise ValueError(f"the text {url[:40]!r} is no data URL of a video's frames, data:video/jpeg;base64,FRAME,…: "
                         "video files are not decoded, and nothing is fetched")
    parts = url[len(head) + 1:].split(",", MAX_FRAMES)
    if len(parts) > MAX_FRAMES:
        raise ValueError(f"the video has more than {MAX_FRAMES} frames")
    return tuple(named(f"frame {i}", content_of_base64, part) for i, part in enumerate(parts))


def content_of_data_url(url: str) -> bytes:
    """The bytes of a data URL, data:image/…;base64,…. Raises ValueError for another text."""
    head, comma, _ = url[:_HEAD].partition(",")
    if not comma or not re.fullmatch(r"(?i)data:(image/[\w.+-]+)?(;[\w.=+-]+)*;base64", head):
        raise ValueError(f"the text {url[:40]!r} is no data URL of an image, data:image/png;base64,… (a file is given "
                         "as a pathlib.Path; this client fetches no URLs)")
    return content_of_base64(url[len(head) + 1:])


def content_of_base64(data: str) -> bytes:
    """The bytes that base64 stands for; line breaks are allowed. Raises ValueError."""
    try:
        # Without `validate`, Python skips any other characters.
        return base64.b64decode(re.sub(r"[\r\n]+", "", data).encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(f"the image is not valid base64: {error}") from None


def _read(path: str) -> bytes:
    """The content of an image file, of at most MAX_BYTES bytes."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path!r} is no regular file")
        if found.st_size > MAX_BYTES:
            raise ValueError(f"{path!r} has {found.st_size} bytes; an image may have at most {MAX_BYTES}")
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"the image {path!r} cannot be read: {error.strerror or error}") from None


def _png_of_array(array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise ValueError(f"an array of type {array.dtype} and shape {list(array.shape)} is no image; allowed: uint8 of "
                         "shape [height, width, 3], in the order red, green, blue")
    try:
        import PIL.Image
    except ImportError:
        raise ValueError("an array becomes an image only with Pillow, which is not installed: pip install pillow, or "
                         "give an encoded file") from None
    return _png(PIL.Image.fromarray(np.ascontiguousarray(array)))


def _png(picture: Any) -> bytes:
    """A PIL image as a PNG file that stands upright, as its EXIF orientation asks."""
    from PIL import ImageOps

    file = io.BytesIO()
    try:
        picture = ImageOps.exif_transpose(picture)
        if picture.mode not in _PNG_MODES:
            picture = picture.convert("RGBA" if picture.mode in _ALPHA_MODES else "RGB")
        picture.save(file, "PNG", compress_level=1)
    except (OSError, ValueError, SyntaxError) as error:     # Pillow's errors of a file that it reads only now
        raise ValueError(f"the PIL image cannot be read: {error}") from None
    return file.getvalue()


class MultiMediaInfo:
    """DashInfer's carrier of embeddings that a caller's own vision tower has computed. Models compute them here."""

    def __init__(self) -> None:
        raise embeddings_not_available("MultiMediaInfo")


# --- in chats ----------------------------------------------------------------------------------------------------


def take_images(messages: Any, given: Any = None) -> tuple[Any, list[Image | Video]]:
    """A chat whose parts with images and videos have become {"type": "image"} and {"type": "video"}, as templates take
    them, and these images and videos in order.

    Args:
        messages: in OpenAI's form, {"type": "image_url", "image_url": {"url": a data URL, "detail": …}}, or Hugging
            Face's, {"type": "image", "image": …}, also with the keys "url", "path" or "base64"; both may have
            "min_pixels" and "max_pixels"; and {"type": "video", "video": frames, "fps": …} or {"type": "video_url",
            "video_url": {"url": a data URL of frames, "fps": …}}, see `as_video`. They are not changed. Other mistakes
            than those of images stay in it.
        given: images of the parts {"type": "image"} without one, in order; None: there are none.

    Raises:
        ValueError, TypeError: an image is wrong; the text names its place.
    """
    waiting = take_list(given)
    if not isinstance(messages, (list, tuple)):
        return messages, waiting
    images: list[Image | Video] = []
    taken = 0
    chat = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, (list, tuple)) and any(map(_is_image, content)):
            parts = list(content)
            for j, part in enumerate(parts):
                if not _is_image(part):
                    continue
                name = f"messages[{i}]['content'][{j}]"
                if len(images) == MAX_IMAGES:
                    raise ValueError(f"{name} is one image too many; a request may have {MAX_IMAGES}")
                if part["type"] in _VIDEOS:
                    images.append(named(name, _video_of_part, part))
                elif part["type"] == "image" and not any(part.get(key) is not None for key in _SOURCES):
                    if taken == len(waiting):
                        raise ValueError(f"{name} has no image, and inputs['images'] has none for it: it has "
                                         f"{len(waiting)}")
                    images.append(waiting[taken])
                    taken += 1
                else:
                    images.append(named(name, _of_part, part))
                parts[j] = {"type": "video" if part["type"] in _VIDEOS else "image"}
            message = {**message, "content": parts}
        chat.append(message)
    if taken < len(waiting):
        raise ValueError(f"inputs['images'] has {len(waiting)} images, and the messages have {taken} parts "
                         "{'type': 'image'} without one")
    return chat, images


def may_have_images(inputs: Any) -> bool:
    """Whether the inputs of start_request may have images, without looking into the parts of messages."""
    if not isinstance(inputs, dict):
        return False
    messages = inputs.get("messages")
    return "images" in inputs or (isinstance(messages, (list, tuple)) and any(
        isinstance(message, dict) and isinstance(message.get("content"), (list, tuple)) for message in messages))


def take_list(given: Any) -> list[Image | Video]:
    """A list of images in the forms of `as_image`, or Videos; None: an empty one. Raises ValueError or TypeError."""
    if given is None:
        return []
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes, bytearray, memoryview)):
        raise wrong_type("images", given, f"a list of images, each {_GIVEN}")
    if len(given) > MAX_IMAGES:
        raise ValueError(f"images has {len(given)} images; allowed: at most {MAX_IMAGES}")
    return [one if isinstance(one, Video) else named(f"images[{i}]", as_image, one) for i, one in enumerate(given)]


def images_in(message: dict[str, Any]) -> int:
    """The number of parts {"type": "image"} and {"type": "video"} of a checked message."""
    content = message.get("content")
    return sum(map(_is_image, content)) if isinstance(content, (list, tuple)) else 0


def check_count(messages: list[dict[str, Any]], images: list[Image | Video]) -> None:
    """Raises ValueError unless each part {"type": "image"} of checked messages has an image, each {"type": "video"} a
    video, and each of these a part, in the same order.
    """
    parts = [part["type"] for message in messages if images_in(message) for part in message["content"]
             if _is_image(part)]
    if len(parts) != len(images):
        raise ValueError(f"images has {len(images)} images, and the messages have {len(parts)} parts {{'type': "
                         "'image'}; each part needs one")
    for i, (part, image) in enumerate(zip(parts, images)):
        if (part == "video") != isinstance(image, Video):
            raise ValueError(f"images[{i}] is {'a video' if part != 'video' else 'an image'}, and the part of the "
                             f"messages is {{'type': {part!r}}}")


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url", *_VIDEOS)


def _bounds(part: dict[str, Any]) -> list[int]:
    """The least and the most pixels that a part of a chat asks for; 0: it does not."""
    return [as_int(key, part[key], 0, _INT32_MAX) if part.get(key) is not None else 0
            for key in ("min_pixels", "max_pixels")]


def _video_of_part(part: dict[str, Any]) -> Video:
    """The video of a part of a chat."""
    bounds = _bounds(part)
    source, fps = part.get(part["type"]), part.get("fps")
    if part["type"] == "video_url":
        fps = source.get("fps", fps) if isinstance(source, dict) else fps
        source = source.get("url") if isinstance(source, dict) else source
        if not isinstance(source, str):
            raise wrong_type("video_url", source, "a dict such as {'url': 'data:video/jpeg;base64,…', 'fps': 2}")
    if source is None:
        raise ValueError("it has no video; a video has its frames in 'video'")
    return as_video(source, fps, *bounds)


def named(name: str, make: Callable[..., T], *arguments: Any) -> T:
    """What `make` returns; its errors begin with `name`."""
    try:
        return make(*arguments)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None


def _of_part(part: dict[str, Any]) -> Image:
    """The image of a part of a chat."""
    bounds = _bounds(part)
    if part["type"] == "image_url":
        source = part.get("image_url")
        detail = source.get("detail") if isinstance(source, dict) else None
        url = source.get("url") if isinstance(source, dict) else source
        if not isinstance(url, str):
            raise wrong_type("image_url", source, "a dict such as {'url': 'data:image/png;base64,…'}")
        return as_image(url, bounds[0], lower_bound(bounds[1], pixels_of(detail)))
    given = [key for key in _SOURCES if part.get(key) is not None]
    if len(given) != 1:
        raise ValueError(f"it has {' and '.join(given)}; an image has one of {', '.join(_SOURCES)}")
    source = part[given[0]]
    if given[0] == "base64":
        if not isinstance(source, str):
            raise wrong_type("base64", source, "a str")
        source = content_of_base64(source)
    return as_image(source, *bounds)


def pixels_of(detail: Any) -> int:
    """The most pixels that OpenAI's `detail` stands for; 0: as the model's processor has it. Raises ValueError."""
    if detail is None:
        return 0
    if not isinstance(detail, str) or detail not in DETAIL_PIXELS:
        raise ValueError(f"detail={detail!r:.80} is not known; allowed: {', '.join(map(repr, DETAIL_PIXELS))}")
    return DETAIL_PIXELS[detail]


def lower_bound(first: int, second: int) -> int:
    """The lower of two bounds, of which 0 is none."""
    return min(first, second) if first and second else first or second
