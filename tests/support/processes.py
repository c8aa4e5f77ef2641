"""Processes of a server group."""
from __future__ import annotations

import psutil


def ranks_of(pid: int) -> list[psutil.Process]:
    """The server processes of the group whose supervisor has this process id."""
    return [process for process in psutil.Process(pid).children(recursive=True)
            if _command(process)[1:3] == ["-m", "allspark_server"]]


def _command(process: psutil.Process) -> list[str]:
    """A process' command line; empty if it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
