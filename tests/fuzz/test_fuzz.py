"""A short selection of the inputs that tests/fuzz runs by the million."""

from __future__ import annotations

import pytest

from fuzz.__main__ import BLOCK, Findings, run
from fuzz.bodies import Bodies
from fuzz.targets import TARGETS

BLOCKS = {
    "plan": 12,
    "wire": 8,
    "safetensors": 6,
    "index": 4,
    "config": 4,
    "graph": 3,
    "tokenizer": 2,
    "tokenizer_config": 1,
    "http": 1,
}


@pytest.mark.parametrize("kind", TARGETS, ids=lambda kind: kind.name)
def test_hostile_inputs(kind, tmp_path, capfd, request):
    findings = Findings(tmp_path)
    if kind is Bodies:
        kind = type("Bodies", (Bodies,), {"group": request.getfixturevalue("http_server").group})
    done, accepted = run(kind, 2026, range(BLOCKS[kind.name]), tmp_path, findings, max_rss=float("inf"))
    assert not findings.seen, capfd.readouterr()
    assert done == BLOCKS[kind.name] * BLOCK
    assert 0 < accepted < done  # the inputs are neither all invalid nor all valid
