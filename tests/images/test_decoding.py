"""Decoding of every format and mode, against what transformers makes of them."""

import io
import os
import secrets

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from allspark_server.images.decoder import Decoder
from support.images import encoded, noise

SEED = int(os.environ.get("ALLSPARK_TEST_SEED", secrets.randbits(32)))
HIGH = 300  # more rows than are converted at a time


@pytest.fixture(params=[SEED], ids=lambda s: f"seed{s}")
def rng(request):
    return np.random.default_rng(request.param)


@pytest.fixture(scope="module")
def decoder():
    found = Decoder()
    yield found
    found.close()


def decoded(decoder, content):
    return decoder.decode(content, lambda height, width: (height, width), Image.Resampling.BICUBIC)


def expected(content):
    """As transformers' load_image and image processors do it."""
    return convert_to_rgb(ImageOps.exif_transpose(Image.open(io.BytesIO(content))), return_numpy=True)


def files(rng):
    """Files by name, in the modes and forms that each format has."""
    found = {}
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        found[f"png {mode}"] = encoded(noise(rng, 33, HIGH, mode))
    found["png P, some entries transparent"] = encoded(noise(rng, 33, HIGH, "P"), transparency=rng.bytes(200))
    found["png P, one entry transparent"] = encoded(noise(rng, 33, HIGH, "P"), transparency=7)
    found["png RGB, one color transparent"] = encoded(Image.new("RGB", (9, HIGH), (1, 2, 3)), transparency=(1, 2, 3))
    found["png L, one level transparent"] = encoded(noise(rng, 33, HIGH, "L"), transparency=9)
    found["png with a profile"] = encoded(noise(rng, 9, 9), icc_profile=rng.bytes(999))
    for mode in ("L", "RGB", "CMYK"):
        found[f"jpeg {mode}"] = encoded(noise(rng, 41, HIGH, mode), "JPEG")
    found["jpeg progressive"] = encoded(noise(rng, 41, 37), "JPEG", progressive=True, quality=20)
    found["jpeg whole colors"] = encoded(noise(rng, 41, 37), "JPEG", subsampling=0, quality=98)
    found["jpeg of two pictures"] = encoded(noise(rng, 20, 10), "MPO", save_all=True, append_images=[noise(rng, 9, 9)])
    for mode in ("RGB", "RGBA"):
        found[f"webp {mode}"] = encoded(noise(rng, 41, HIGH, mode), "WEBP")
        found[f"webp {mode} lossless"] = encoded(noise(rng, 41, 37, mode), "WEBP", lossless=True, exact=True)
    found["gif"] = encoded(noise(rng, 41, HIGH, "P"), "GIF")
    found["gif L"] = encoded(noise(rng, 41, 37, "L"), "GIF")
    found["gif transparent"] = encoded(noise(rng, 41, HIGH, "P"), "GIF", transparency=5)
    for form in ("GIF", "WEBP", "PNG"):
        frames = [noise(rng, 31, 17) for _ in range(3)]
        found[f"{form} animated"] = encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=40)
    for form in ("JPEG", "PNG", "WEBP"):
        for orientation in range(1, 9):
            exif = Image.Exif()
            exif[0x0112] = orientation
            found[f"{form} turned {orientation}"] = encoded(noise(rng, 40, 23), form, exif=exif)
    return found


def test_formats(rng, decoder):
    for name, content in files(rng).items():
        wanted = expected(content)
        found = decoded(decoder, content)
        assert found.shape == wanted.shape and np.array_equal(found, wanted), name
    assert len(decoder._pool._idle) == 1        # one process did all


def test_16_bits(rng, decoder):
    """Gray of 16 bits keeps the upper ones; transformers would make everything from 256 on white."""
    values = rng.integers(0, 1 << 16, (HIGH, 21), dtype=np.uint16)
    found = decoded(decoder, encoded(Image.frombytes("I;16", (21, HIGH), values.tobytes())))
    assert np.array_equal(found, np.repeat((values >> 8).astype(np.uint8)[:, :, None], 3, axis=2))


def test_broken_orientation_is_ignored(rng, decoder):
    """Viewers show such photographs."""
    image = noise(rng, 40, 23)
    plain = decoded(decoder, encoded(image, "JPEG"))
    assert np.array_equal(decoded(decoder, encoded(image, "JPEG", exif=b"Exif\0\0" + rng.bytes(40))), plain)


def test_an_image_that_is_not_wanted(rng, decoder):
    """What the size function raises reaches the caller, and the process goes on."""
    def refuse(height, width):
        raise ValueError(f"has {width} x {height} pixels")

    content = encoded(noise(rng, 12, 5))
    decoded(decoder, content)
    number = decoder._pool._idle[0]._process.pid
    with pytest.raises(ValueError, match="has 12 x 5 pixels"):
        decoder.decode(content, refuse, Image.Resampling.BICUBIC)
    assert decoded(decoder, content).shape == (5, 12, 3) and decoder._pool._idle[0]._process.pid == number
