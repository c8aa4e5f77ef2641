"""Makes a launcher see the machine below $FABRICATED_MACHINE (support/machines.py) when this folder is on PYTHONPATH.

CPUs are real. Memory is never bound, because its nodes do not exist.
"""

import os
import sys


def fabricate(root: str) -> None:
    from allspark_launch.machine import topology
    from allspark_server.runtime import binding

    read = topology.read_topology
    topology.read_topology = lambda: read(root)
    binding.memory_policy_allowed = lambda: False


if "allspark_launch" in sys.orig_argv and "FABRICATED_MACHINE" in os.environ:
    fabricate(os.environ["FABRICATED_MACHINE"])
