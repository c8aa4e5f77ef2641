"""Tests that need a GPU: pytest -m cuda tests/cuda. Suites of the whole engine run on it, too:
ALLSPARK_TEST_UNIT=CUDA:0 pytest tests/test_conformance.py tests/test_invariance.py."""

from __future__ import annotations

import pytest


def _why_not() -> str:
    try:
        from allspark_server import _native  # noqa: F401
        from allspark_server import _cuda
    except ImportError as error:
        return f"no CUDA backend: {error}"
    try:
        return "" if _cuda.device_count() else "no GPU"
    except ValueError as error:
        return str(error)


def pytest_collection_modifyitems(items):
    wanted = [item for item in items if item.get_closest_marker("cuda")]
    if wanted and (why := _why_not()):
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason=why))
