"""Copies of checkpoints that tests may spoil."""

from __future__ import annotations

import json
import shutil

import pytest


@pytest.fixture
def copy(tmp_path):
    """A function that copies a checkpoint to where it may be spoilt."""
    def make(name="qwen2-gqa-tied"):
        from support.checkpoints import checkpoint

        return shutil.copytree(checkpoint(name), tmp_path / name)
    return make


def spoil_config(directory, **changes):
    values = json.loads((directory / "config.json").read_text())
    for name, value in changes.items():
        if value is ...:
            values.pop(name)
        else:
            values[name] = value
    (directory / "config.json").write_text(json.dumps(values))
