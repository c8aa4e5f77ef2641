"""Files that should not be decoded, or not at any price: each with what its error says."""

import struct
import zlib
from random import Random

import numpy as np
from PIL import Image

from fuzz.mutate import of_bytes
from support.images import encoded, noise

BOMB = "is too large, perhaps a decompression bomb: its header says"
COSTLY = "takes more than 2 s of a processor or 500 MiB of memory"
UNKNOWN = "allowed are PNG, JPEG, WebP and GIF files"


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, color: int = 2) -> bytes:
    """A PNG file with a header and these chunks."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"".join((b"\x89PNG\r\n\x1a\n", header, *chunks, chunk(b"IEND", b"")))


def zeros(count: int) -> bytes:
    """So many zero bytes, compressed."""
    compressor, block = zlib.compressobj(9), bytes(1 << 20)
    parts = [compressor.compress(block) for _ in range(count >> 20)]
    return b"".join([*parts, compressor.compress(bytes(count & 0xFFFFF)), compressor.flush()])


def jpeg_of(image: Image.Image, width: int, height: int, **options) -> bytes:
    """A JPEG file whose header says another size."""
    content = encoded(image, "JPEG", **options)
    at = next(content.index(mark) for mark in (b"\xff\xc0", b"\xff\xc2") if mark in content)
    return content[:at + 5] + struct.pack(">HH", height, width) + content[at + 9:]


def many_scans(image: Image.Image, count: int) -> bytes:
    """A progressive JPEG file whose last scan, which covers the whole image, is repeated."""
    content = encoded(image, "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:-2] + content[last:-2] * count + content[-2:]


def webp(kind: bytes, data: bytes) -> bytes:
    """A WebP file of one chunk."""
    body = b"WEBP" + kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif(width: int, height: int, frame: tuple[int, int], pixels: bytes, disposal: int = 0) -> bytes:
    """A GIF file of one frame; `pixels`: compressed."""
    return b"".join((
        b"GIF89a", struct.pack("<HHBBB", width, height, 0x80, 0, 0), bytes(6),
        b"\x21\xf9\x04", struct.pack("<BHBB", disposal << 2, 0, 0, 0), b"\x2c", struct.pack("<HHHHB", 0, 0, *frame, 0),
        b"\x02", bytes([len(pixels)]), pixels, b"\0\x3b"
    ))


def crafted(rng: np.random.Generator) -> dict[str, tuple[bytes, str]]:
    """Files by name, each with a part of its error; "" if the file may be decoded."""
    small = noise(rng, 40, 30)
    found = {"nothing": (b"", f"is empty: {UNKNOWN}"), "zeros": (bytes(100), UNKNOWN), "text": (b"hello", UNKNOWN),
             "html": (b"<!DOCTYPE html><html>", UNKNOWN), "svg": (b"<svg xmlns='x'/>", UNKNOWN),
             "pdf": (b"%PDF-1.7", "begins with the bytes 25 50 44 46 2d 31 2e 37: allowed are PNG, JPEG, WebP and GIF"),
             "wav": (b"RIFF\x24\0\0\0WAVEfmt ", UNKNOWN), "zip": (b"PK\3\4" + rng.bytes(99), UNKNOWN)}
    Image.init()  # all formats that this Pillow can write
    for form in ("BMP", "TIFF", "PPM", "ICO", "TGA", "PCX", "EPS", "AVIF", "PDF"):
        if form in Image.SAVE:
            found[form] = encoded(small, form), UNKNOWN
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        content = encoded(noise(rng, 40, 30, "P" if form == "GIF" else "RGB"), form)
        found[f"{form} start"] = content[:12], f"is a broken {form} file"
        found[f"{form} half"] = content[:len(content) // 2], f"is a broken {form} file"
        found[f"{form} noise"] = content[:20] + rng.bytes(9) + content[29:], ""
    found["png bomb"] = png(20_000, 20_000, chunk(b"IDAT", zeros(1 << 25))), f"{BOMB} 400000000 pixels"
    found["png of 2**31"] = png(2**31 - 1, 2**31 - 1, chunk(b"IDAT", b"")), BOMB
    found["png without size"] = png(0, 0, chunk(b"IDAT", zeros(9))), "is a broken PNG file"
    found["png in one row"] = png(50_000_000, 1, chunk(b"IDAT", zeros(9)), color=6), COSTLY
    found["png of 48 bits"] = png(7000, 7000, chunk(b"IDAT", zeros(1 << 20)), depth=16, color=6), "is a broken PNG file"
    found["png without pixels"] = png(5, 5), "is a broken PNG file"
    found["png of a wrong kind"] = png(5, 5, chunk(b"IDAT", zeros(99)), depth=3, color=7), "is a broken PNG file"
    found["png with a large text"] = png(5, 5, chunk(b"zTXt", b"a\0\0" + zeros(1 << 25))), "is a broken PNG file"
    found["png with a large profile"] = png(5, 5, chunk(b"iCCP", b"a\0\0" + zeros(1 << 25)),
                                            chunk(b"IDAT", zeros(80))), "is a broken PNG file: Decompressed data too"
    found["png of chunks"] = png(5, 5, *[chunk(b"tIME", b"")] * 50_000, chunk(b"IDAT", zeros(80))), ""
    found["jpeg bomb"] = jpeg_of(small, 65_500, 65_500), f"{BOMB} 4290250000 pixels"
    found["jpeg progressive bomb"] = jpeg_of(small, 40_000, 40_000, progressive=True), BOMB
    found["jpeg that is short of pixels"] = jpeg_of(small, 2000, 2000), ""
    found["gif bomb"] = gif(65_535, 65_535, (65_535, 65_535), b"\x84\x51"), f"{BOMB} 4294836225 pixels"
    found["gif with a large frame"] = gif(5, 5, (65_535, 60_000), b"\x84\x51", disposal=2), BOMB
    found["gif without size"] = gif(0, 0, (0, 0), b"\x84\x51"), "is a broken GIF file"
    found["gif without frames"] = b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0, 0, 0) + b"\x3b", "is a broken GIF file"
    found["webp bomb"] = webp(b"VP8X", struct.pack("<I", 2) + b"\xff\x3f\0\xff\x3f\0"), f"{BOMB} 268435456 pixels"
    found["webp lossless bomb"] = webp(b"VP8L", b"\x2f\xff\xff\xff\x0f" + rng.bytes(99)), f"{BOMB} 268435456 pixels"
    found["webp lossy bomb"] = webp(b"VP8 ", rng.bytes(3) + b"\x9d\x01\x2a\xff\x3f\xff\x3f" + rng.bytes(99)), BOMB
    return found


def fuzzed(rng: np.random.Generator, count: int) -> list[bytes]:
    """Changed files of all formats."""
    random, seeds = Random(int(rng.integers(1 << 62))), []
    for form, mode in (("PNG", "RGB"), ("PNG", "P"), ("PNG", "RGBA"), ("JPEG", "RGB"), ("JPEG", "CMYK"), ("GIF", "P"),
                       ("WEBP", "RGB"), ("WEBP", "RGBA")):
        image, exif = noise(rng, 37, 29, mode), Image.Exif()
        exif[0x0112] = 6
        seeds.append(encoded(image, form, **({} if form == "GIF" else {"exif": exif})))
    seeds.append(encoded(noise(rng, 37, 29), "JPEG", progressive=True))
    seeds.append(encoded(noise(rng, 30, 20), "WEBP", save_all=True, append_images=[noise(rng, 30, 20)]))
    return [of_bytes(random, random.choice(seeds), random.choice(seeds)) for _ in range(count)]
