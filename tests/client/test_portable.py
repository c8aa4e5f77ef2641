"""The client runs where POSIX's own modules are missing, as on Windows."""

import subprocess
import sys

# Takes away what Windows does not have. sys.platform stays, because Python's own modules look at it.
PROGRAM = """
import importlib, os, pkgutil, signal, socket, sys
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
import allspark_client as client
for found in pkgutil.iter_modules(client.__path__):
    if found.name != "setup":
        importlib.import_module(f"allspark_client.{found.name}")
client.pool._FIRST_CONTACT_SECONDS = 0.2
for arguments, told in (((), "the launcher is not installed"), (("127.0.0.1:9",), "127.0.0.1:9 cannot be reached")):
    try:
        client.ClientEngine(*arguments, reconnect_timeout=0)
    except client.AllSparkError as error:
        assert told in str(error), error
    else:
        raise AssertionError("no error")
"""


def test_the_client_needs_no_posix():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
