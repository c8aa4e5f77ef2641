"""Images for tests: noise in every mode, files of it, and Hugging Face's processors as torchvision resizes."""

import io
import json
from dataclasses import dataclass

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from allspark_server.images import ImageProcessor, read_processor

# Width and height: one pixel, strips, odd ones, ones of which one side grows and one shrinks, multiples of 14 and 16.
SIZES = [(1, 1), (1, 150), (27, 29), (33, 27), (1000, 31), (56, 56), (96, 64), (640, 480)]


@dataclass(frozen=True)
class EncodedFile:
    """An image as a request has it."""

    content: bytes
    min_pixels: int = 0
    max_pixels: int = 0


def noise(rng: np.random.Generator, width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Random pixels, which show any difference between filters."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    image = Image.frombytes(mode, (width, height), rng.bytes(width * height * bands * (2 if "16" in mode else 1)))
    if mode == "P":
        image.putpalette(rng.bytes(768))
    return image


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    """The image as a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def processor_of(directory, config: dict, settings: dict) -> ImageProcessor:
    """The processor of a checkpoint with these files; without `settings` if they are {}."""
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    found = read_processor(directory, config)
    assert found is not None
    return found


def resize_as_torchvision(monkeypatch) -> None:
    """Lets Pillow resize across first and then down, as torchvision does. Pillow alone takes the cheaper order."""
    resize = Image.Image.resize

    def across_first(image, size, resample=None, **rest):
        return resize(resize(image, (size[0], image.height), resample), size, resample)

    monkeypatch.setattr(Image.Image, "resize", across_first)


def add_image_tokens(directory) -> Tokenizer:
    """Writes a tokenizer of bytes, with ids 7, 8 and 9 for the tokens of images, and tokens of up to 5 newlines."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"[IMG]": 7, "[8]": 8, "[9]": 9, "[IMG_BREAK]": 10, "[IMG_END]": 11}
    others = (i for i in range(len(alphabet) + len(special)) if i not in special.values())
    tokenizer = Tokenizer(models.BPE({**special, **dict(zip(alphabet, others))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken("\n" * length, normalized=False) for length in range(1, 6)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer
