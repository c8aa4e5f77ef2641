"""Which CPU each compute thread is pinned to."""

from __future__ import annotations

import os

import pytest

from allspark_client import AsModelConfig
from allspark_server.runtime.runner import ModelRunner


def pinned(cpus: list[int], threads: int) -> list[int]:
    return ModelRunner(AsModelConfig("m", "/none", num_threads=threads), cpus=cpus)._pinned()


@pytest.fixture(autouse=True)
def affinity(monkeypatch):
    """The process may run on CPUs 0 to 3."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def test_planned_cpus():
    assert pinned([2, 1, 0], 0) == [2, 1, 0]
    assert pinned([2, 1, 0], 2) == [2, 1]
    assert pinned([], 3) == []


def test_no_two_threads_share_a_cpu():
    assert pinned([2, 1, 0], 4) == [2, 1, 0, 3]     # the CPU that was left to the service
    assert pinned([2, 1, 0], 5) == []               # the system places them
