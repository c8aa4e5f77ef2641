"""Read by the Python of launchers when this folder is on PYTHONPATH: the machine is the one below $FABRICATED_MACHINE
(machines.py). Its CPUs are real; memory stays where it is, for its nodes are not.
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
