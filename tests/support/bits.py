"""What tests of a request's bits share: sampling penalties, and floats compared to the last bit."""
from __future__ import annotations

import struct

PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.1, "no_repeat_ngram_size": 3}


def bits(values: list[float]) -> list[str]:
    """The floats as they are in float32; equal only if equal to the last bit."""
    return [struct.pack("<f", value).hex() for value in values]
