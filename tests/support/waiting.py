"""Waits for other processes."""

import time


def wait_for(condition, seconds: float = 30.0):
    """Returns the first true value of `condition()`; raises AssertionError if there is none within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")
