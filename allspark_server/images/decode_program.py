"""The program of the processes that decode images (Pillow): see decoder.py and limited_process.py.

A request is a file; the answer is the size of its image as [width, height]. The request that continues it is [width,
height, a filter by Pillow's number], or [] if the image is not needed; the answer is null, then the pixels of the image
in that size (RGB, 8 bits, rows from the top). Answers begin with a line of JSON, which is a text if something is wrong
with the file.
"""

from __future__ import annotations

import io
import json
import re
import warnings

from PIL import Image, ImageOps, WebPImagePlugin  # noqa: F401 (Image.open finds WebP only if it is imported)

MAX_PIXELS = 3 << 24  # of a file: a photograph of 50 megapixels takes 400 MB while it is turned upright
STRIP_ROWS = 256  # converted at a time, so that there are no further copies of a large image
KINDS = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF87a": "GIF", b"GIF89a": "GIF", b"RIFF": "WEBP"}

Image.MAX_IMAGE_PIXELS = MAX_PIXELS
warnings.simplefilter("ignore")
warnings.simplefilter("error", Image.DecompressionBombWarning)  # from one time to two times as many

_image: Image.Image | None = None  # of the request before, until one continues it


class _RefusedError(Exception):
    """Says what is wrong with a file; the text continues its name."""


def answer(request: bytes, continues: bool) -> list[bytes]:
    """See the top of this file. Without memory the process ends, as it does when it takes too long."""
    global _image
    image, _image = _image, None
    try:
        if not continues:
            _image = _decoded(request)
            return [json.dumps(_image.size).encode() + b"\n"]
        size = json.loads(request)
        return [b"null\n", _resized(image, *size) if image is not None and size else b""]
    except _RefusedError as error:
        return [json.dumps(str(error)).encode() + b"\n"]


def _decoded(content: bytes) -> Image.Image:
    """The image as RGB, upright."""
    kind = next((kind for start, kind in KINDS.items() if content.startswith(start)), None)
    if kind is None or (kind == "WEBP" and content[8:12] != b"WEBP"):
        found = f"begins with the bytes {content[:8].hex(' ')}" if content else "is empty"
        raise _RefusedError(f"{found}: allowed are PNG, JPEG, WebP and GIF files")
    try:
        if kind == "WEBP" and (pixels := _webp_pixels(content)) > MAX_PIXELS:
            raise _bomb(pixels)  # Pillow checks the size when its decoder has taken the memory for it
        image = Image.open(io.BytesIO(content), formats=[kind])
        image.load()
        _turn_upright(image)
        return _rgb(image)
    except (_RefusedError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _bomb(int(re.findall(r"\d+", str(error))[0])) from None
    except Image.UnidentifiedImageError:
        raise _RefusedError(f"is a broken {kind} file: its header cannot be read") from None
    except Exception as error:  # a broken file can cause any
        if "out of memory" in str(error):
            raise MemoryError from error
        raise _RefusedError(f"is a broken {kind} file: {str(error)[:200] or type(error).__name__}") from None


def _bomb(pixels: int) -> _RefusedError:
    return _RefusedError(f"is too large, perhaps a decompression bomb: its header says {pixels} pixels; at most "
                         f"{MAX_PIXELS} are allowed")


def _webp_pixels(content: bytes) -> int:
    """Width times height in the header of a WebP file (RFC 9649, 2.5 to 2.7)."""
    kind, start = content[12:16], content[20:30].ljust(10, b"\0")
    if kind == b"VP8X":
        return (1 + int.from_bytes(start[4:7], "little")) * (1 + int.from_bytes(start[7:10], "little"))
    if kind == b"VP8L":
        bits = int.from_bytes(start[1:5], "little")
        return (1 + (bits & 0x3FFF)) * (1 + (bits >> 14 & 0x3FFF))
    return (int.from_bytes(start[6:8], "little") & 0x3FFF) * (int.from_bytes(start[8:10], "little") & 0x3FFF)


def _turn_upright(image: Image.Image) -> None:
    """Turns the image as its EXIF data say, if they can be read."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
    except MemoryError:
        raise
    except Exception:
        return


def _rgb(image: Image.Image) -> Image.Image:
    """The image as RGB; transparent parts over white, as in transformers.image_transforms.convert_to_rgb."""
    has_alpha = "A" in image.getbands() or image.info.get("transparency") is not None
    if image.mode == "RGB" and not has_alpha:
        return image
    result = Image.new("RGB", image.size)
    for top in range(0, image.height, STRIP_ROWS):
        strip = image.crop((0, top, image.width, min(top + STRIP_ROWS, image.height)))
        if strip.mode.startswith("I;16"):  # 16 bits of gray: the upper ones, which Pillow also takes of color
            strip = Image.frombytes("L", strip.size, strip.tobytes()[strip.mode != "I;16B"::2])
        elif has_alpha:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, (255, 255, 255, 255)), strip)
        result.paste(strip.convert("RGB"), (0, top))
    return result


def _resized(image: Image.Image, width: int, height: int, resample: int) -> bytes:
    """The pixels of the image in another size."""
    # Across first, then down, as torchvision does; Pillow chooses the cheaper order since version 13. The order changes
    # pixels, since values between the two are rounded.
    for size in ((width, image.height), (width, height)):
        if size != image.size:
            image = image.resize(size, resample)
    return image.tobytes()
