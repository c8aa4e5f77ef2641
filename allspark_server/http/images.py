"""Images and videos in bodies of chats, responses and messages, and how they come into the request to the pool."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from allspark_client.images import (
    DEFAULT_FPS,
    DETAIL_PIXELS,
    MAX_IMAGES,
    Image,
    Video,
    content_of_base64,
    content_of_data_url,
    frames_of_data_url,
    lower_bound,
)
from allspark_client.request import LARGE, RequestSpec
from allspark_client.types import ModelInfo

from .call import Call
from .errors import bad_value
from .files import find_file, read_file
from .image_urls import ALL_SECONDS, OF_REQUEST
from .wire import CUT, INT32_MAX, Wire

Detail = Literal["auto", "low", "high", "original"]
Fps = Annotated[float | None, Field(ge=0.01, le=1000)]
Pixels = Annotated[int | None, Field(ge=1, le=INT32_MAX)]
FileId = Annotated[str, Field(min_length=1, max_length=200), CUT]


class ImageUrl(Wire):
    """Where an image is, and what size of it the model sees."""

    url: str
    detail: Detail | None = None
    min_pixels: Annotated[Pixels, Field(description="The model sees at least so many pixels")] = None
    max_pixels: Annotated[Pixels, Field(description="The model sees at most so many pixels")] = None
    #: DashInfer's names
    min_pixel: Pixels = None
    max_pixel: Pixels = None


class VideoUrl(Wire):
    """A video: a data URL of its frames, and how many of them are for a second."""

    url: str
    fps: Annotated[Fps, Field(description="So many frames are for a second; 2 by default")] = None
    min_pixels: Pixels = None
    max_pixels: Pixels = None


class ProcessorKwargs(Wire):
    """vLLM's options of the processor of images, for all images of a request; `fps`: of its videos."""

    min_pixels: Pixels = None
    max_pixels: Pixels = None
    fps: Fps = None


@dataclass
class ImageSource:
    """An image or a video as a body has it. `place`: its field there. `url` or `base64` has it, or `file_id` names the
    uploaded file; the bounds are those of Image. `fps`: of a video, None if the body does not say; 0 of an image.
    """

    place: str
    url: str = ""
    base64: str | None = None
    min_pixels: int = 0
    max_pixels: int = 0
    fps: float | None = 0
    file_id: str = ""

    @classmethod
    def of_url(cls, place: str, given: ImageUrl | str) -> ImageSource:
        """That of OpenAI's field."""
        if isinstance(given, str):
            return cls(place, given)
        return cls(place, given.url, None, given.min_pixels or given.min_pixel or 0,
                   lower_bound(given.max_pixels or given.max_pixel or 0, DETAIL_PIXELS[given.detail or "auto"]))

    @classmethod
    def of_file(cls, place: str, name: str, detail: Detail | None = None) -> ImageSource:
        """That of a file that the client has uploaded."""
        return cls(place, file_id=name, max_pixels=DETAIL_PIXELS[detail or "auto"])

    @classmethod
    def of_video(cls, place: str, given: VideoUrl | str) -> ImageSource:
        """That of vLLM's field."""
        if isinstance(given, str):
            return cls(place, given, fps=None)
        return cls(place, given.url, None, given.min_pixels or 0, given.max_pixels or 0, given.fps)

    def part(self) -> dict[str, Any]:
        """The part of a message that stands for it until `read_images`."""
        return {"type": "image" if self.fps == 0 else "video", "source": self}


def check_sees(info: ModelInfo, messages: list[dict[str, Any]]) -> list[ImageSource]:
    """The images of a chat's messages, in order. Raises ApiError if they are too many, or the model sees none."""
    sources = [part["source"] for message in messages if isinstance(message.get("content"), list)
               for part in message["content"] if part["type"] in ("image", "video")]
    if sources and not info.sees_images:
        why = info.no_images_reason and f": {info.no_images_reason}"
        raise bad_value(sources[0].place, f"the model '{info.name}' sees no images{why}")
    if len(sources) > MAX_IMAGES:
        raise bad_value(sources[MAX_IMAGES].place, f"it is one image too many; a request may have {MAX_IMAGES}")
    return sources


async def read_images(call: Call, info: ModelInfo, spec: RequestSpec, bounds: ProcessorKwargs | None = None) -> None:
    """Read the images of a request's messages into the request. Raises ApiError naming the field that is wrong.

    `bounds`: for images that have none of their own, or higher ones.
    """
    messages = spec.messages or []
    sources = check_sees(info, messages)
    if not sources:
        return
    call.image_places = [source.place for source in sources]
    of_request = asyncio.Semaphore(OF_REQUEST)
    reads = [asyncio.ensure_future(_read(call, source, bounds or ProcessorKwargs(), of_request)) for source in sources]
    try:
        spec.set_images(await asyncio.wait_for(asyncio.gather(*reads), ALL_SECONDS))
    except asyncio.TimeoutError:
        late = next(source for source, read in zip(sources, reads) if read.cancelled())
        raise bad_value(late.place, f"the request's images did not arrive within {ALL_SECONDS:g} s") from None
    finally:
        for read in reads:
            read.cancel()
    spec.messages = [{**message, "content": [_bare(part) for part in message["content"]]}
                     if isinstance(message.get("content"), list) else message for message in messages]


def _bare(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": part["type"]} if part["type"] in ("image", "video") else part


def _check_size(call: Call, size: int) -> None:
    limit = call.worker.images.max_bytes
    if size > limit:
        raise ValueError(f"it has {size} bytes; an image may have at most {limit} (--max-image-mib)")


async def _read_video(call: Call, source: ImageSource, bounds: ProcessorKwargs) -> Video:
    text = source.url
    frames = await asyncio.to_thread(frames_of_data_url, text) if len(text) > LARGE else frames_of_data_url(text)
    for frame in frames:
        _check_size(call, len(frame))
    return Video(frames, source.fps or bounds.fps or DEFAULT_FPS, source.min_pixels or bounds.min_pixels or 0,
                 lower_bound(source.max_pixels, bounds.max_pixels or 0))


async def _read(call: Call, source: ImageSource, bounds: ProcessorKwargs, of_request: asyncio.Semaphore
                ) -> Image | Video:
    try:
        if source.fps != 0:
            return await _read_video(call, source, bounds)
        if source.file_id:
            if call.worker.jobs is None:
                raise ValueError("this server keeps no files: its operator starts it with --store for that")
            stored = await find_file(call, source.file_id, source.place)
            _check_size(call, stored.chunk_bytes)
            call.hold_image(stored.chunk_bytes)
            content = await read_file(call, stored)
        elif source.base64 is not None or source.url[:5].lower() == "data:":
            decode, text = (content_of_data_url, source.url) if source.base64 is None else \
                (content_of_base64, source.base64)
            content = await asyncio.to_thread(decode, text) if len(text) > LARGE else decode(text)
        else:
            content = await call.worker.images.fetch(source.url, of_request)
            call.hold_image(len(content))
        _check_size(call, len(content))
        return Image(content, source.min_pixels or bounds.min_pixels or 0,
                     lower_bound(source.max_pixels, bounds.max_pixels or 0))
    except ValueError as error:
        raise bad_value(source.place, str(error)) from None
