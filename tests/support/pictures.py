"""Random pictures, as files and as other forms that requests have."""

from __future__ import annotations

import base64
import io

import numpy as np
import PIL.Image

RNG = np.random.default_rng()


def pixels(height: int = 0, width: int = 0) -> np.ndarray:
    """Random pixels, of a random awkward size where none is given."""
    return RNG.integers(0, 256, (height or RNG.integers(1, 40), width or RNG.integers(1, 40), 3), np.uint8)


def encoded(array: np.ndarray, form: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(array).save(file, form, **options)
    return file.getvalue()


def decoded(content: bytes) -> np.ndarray:
    """The pixels of a file, [height, width, 3]."""
    return np.asarray(PIL.Image.open(io.BytesIO(content)).convert("RGB"))


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(content)}"
