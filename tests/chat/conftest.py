"""Fixtures for tests of chat formats."""

from __future__ import annotations

import pytest

from allspark_server.guided import Guide
from support.grammars import EOS, FABLE, VOCAB


@pytest.fixture(scope="module")
def guide():
    guide = Guide((FABLE / "tokenizer.json").read_text(), VOCAB, [EOS])
    yield guide
    guide.close()
