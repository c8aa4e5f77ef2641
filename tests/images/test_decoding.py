"""Decoding of every format and mode, against what transformers makes of them."""

import contextlib
import io
import os
import subprocess
import sys

import numpy as np
import psutil
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from allspark_client import AllSparkError, AsStatus
from allspark_server import limited_process
from allspark_server.images.decoder import Decoder
from support.images import encoded, noise
from support.seed import SEED
from support.waiting import wait_for

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
    """Gray of 16 bits keeps the upper ones, as color does. Pillow's conversion makes everything from 256 on white."""
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


def test_processes_start_again_and_end(rng):
    """A process that was ended from outside is replaced; one that works when its decoder is closed ends afterwards."""
    decoder, content = Decoder(), encoded(noise(rng, 12, 5))
    before = set(psutil.Process().children())
    decoder.start()
    first, = set(psutil.Process().children()) - before
    assert decoded(decoder, content).shape == (5, 12, 3)
    first.kill()
    first.wait(10)
    assert decoded(decoder, content).shape == (5, 12, 3)
    second, = set(psutil.Process().children()) - before
    assert second.pid != first.pid

    def close(height, width):
        decoder.close()
        assert second.is_running()
        return height, width

    assert decoder.decode(content, close, Image.Resampling.BICUBIC).shape == (5, 12, 3)
    assert set(psutil.Process().children()) <= before


def test_a_process_that_gets_no_processor(rng, monkeypatch):
    """The file is not blamed, and the next image has a process again."""
    monkeypatch.setattr(limited_process, "WAIT_SECONDS", 0.5)
    decoder, content = Decoder(), encoded(noise(rng, 12, 5))
    decoder.start()
    stopped = psutil.Process(decoder._pool._idle[0]._process.pid)
    stopped.suspend()
    with pytest.raises(AllSparkError, match="too busy: images are being decoded, and this one got less than 2 s of a "
                                            "processor within 0.5 s; send the request again later") as caught:
        decoded(decoder, content)
    assert caught.value.retryable and caught.value.status is AsStatus.ALLSPARK_RUNTIME_ERROR
    monkeypatch.undo()
    assert decoded(decoder, content).shape == (5, 12, 3) and not psutil.pid_exists(stopped.pid)
    decoder.close()


def test_processes_end_with_their_parent():
    script = ("import os; from allspark_server.images.decoder import Decoder; decoder = Decoder(); decoder.start(); "
              "print(decoder._pool._idle[0]._process.pid, flush=True); os._exit(0)")
    number = int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60).stdout)
    wait_for(lambda: not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE)


def test_forks_have_processes_of_their_own(rng, decoder):
    """A child of a fork does not use the pipes of its parent."""
    content = encoded(noise(rng, 12, 5))
    decoded(decoder, content)
    number = os.fork()
    if not number:
        with contextlib.suppress(BaseException):
            os._exit(0 if decoded(decoder, content).shape == (5, 12, 3) else 1)
        os._exit(2)
    assert os.waitpid(number, 0)[1] == 0
    assert decoded(decoder, content).shape == (5, 12, 3)
