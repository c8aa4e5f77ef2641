"""The client runs where POSIX's own modules are missing, as on Windows."""

import subprocess
import sys

from support.paths import ROOT

# Takes away what Windows does not have. sys.platform stays, because Python's own modules look at it.
PROGRAM = """
import os, runpy, signal, socket, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios", "syslog", "allspark_launch", "allspark_server"):
    sys.modules[name] = None
for module, names in (
        (os, "fork register_at_fork sched_getaffinity sched_setaffinity getuid geteuid getgid killpg setsid "
             "O_DIRECTORY O_CLOEXEC"),
        (signal, "SIGKILL SIGHUP SIGUSR1 SIGUSR2 pthread_sigmask sigwait"),
        (socket, "AF_UNIX send_fds recv_fds")):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_the_client_needs_no_posix():
    program = ROOT / "tests" / "package" / "check_client.py"
    done = subprocess.run([sys.executable, "-c", PROGRAM, program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
