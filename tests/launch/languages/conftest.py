"""Groups with the model that ships with the package, for clients in other languages."""
from __future__ import annotations

import shutil

import pytest

from allspark_launch.group.background import background_group, shipped_model


def need(*programs: str) -> None:
    """Skips a test where one of these programs is not installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.fixture(scope="session")
def group():
    """The address of a group that serves the model "fable"."""
    with background_group(["--ranks", "1", "--model", str(shipped_model())], timeout=60) as found:
        yield found.addresses[0]
