"""Fixtures of the CUDA backend's tests."""
import pytest

from support.gpu_toys import SEED


@pytest.fixture(autouse=True)
def seed():
    """Shown with a failure; ALLSPARK_TEST_SEED makes the same inputs again."""
    print(f"ALLSPARK_TEST_SEED={SEED}")
