"""Which CPU each compute thread is pinned to."""

from __future__ import annotations

import os

import pytest

from allspark_server.runtime.binding import cpus_of_threads


@pytest.fixture(autouse=True)
def affinity(monkeypatch):
    """The process may run on CPUs 0 to 3."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def test_planned_cpus():
    assert cpus_of_threads([2, 1, 0], 3) == [2, 1, 0]
    assert cpus_of_threads([2, 1, 0], 2) == [2, 1]
    assert cpus_of_threads([], 3) == []


def test_no_two_threads_share_a_cpu():
    assert cpus_of_threads([2, 1, 0], 4) == [2, 1, 0, 3]     # the CPU that was left to the service
    assert cpus_of_threads([2, 1, 0], 5) == []               # the system places them
