"""The draft head's bookkeeping against a model of it, under AddressSanitizer and UndefinedBehaviorSanitizer.

draft_layers.cpp runs random steps of random sequences: prompts in chunks, drafts of the head, of others, and none,
tokens from elsewhere, and sequences that end. Instead of networks it has hashes of all that a row depends on, so each
draft is compared with one that is made anew from its sequence's tokens.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.native_program import NoSanitizers, native_program

SOURCES = ["batch/draft_head", "batch/draft_model", "batch/drafter", "batch/lookup", "batch/plan", "batch/slots",
           "sampling/sampler", "sampling/sampler_shard"]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """draft_layers.cpp, compiled; with sanitizers if the compiler has them."""
    folder, main = tmp_path_factory.mktemp("layers"), Path(__file__).with_name("draft_layers.cpp")
    try:
        return native_program(folder, main, SOURCES, ["-O1"])
    except NoSanitizers:
        return native_program(folder, main, SOURCES, ["-O1"], sanitize=False)


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
def test_drafts_are_those_of_the_sequence_alone(program, layers):
    for seed in range(3):
        done = subprocess.run([program, str(seed), str(layers), "1000"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        drafts, right = map(int, done.stdout.split())
        assert drafts > 2000 and right > 500
