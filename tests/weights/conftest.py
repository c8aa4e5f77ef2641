"""Fixtures of the weights' tests."""
from __future__ import annotations

import shutil

import pytest


@pytest.fixture
def copy(tmp_path):
    """A function that copies a checkpoint to a folder where a test may damage it."""
    def make(name="qwen2-gqa-tied"):
        from support.checkpoints import checkpoint

        return shutil.copytree(checkpoint(name), tmp_path / name)
    return make
