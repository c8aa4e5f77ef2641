"""Signals that the kernel gives to any thread of a process, and heartbeats that must arrive."""
from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from allspark_server.runtime import worker
from allspark_server.signals import Signals
from support.waiting import wait_for


def test_a_signal_for_another_thread_wakes_the_main_thread():
    signals = Signals(signal.SIGUSR1, signal.SIGHUP)
    try:
        assert signals.wait(0) == [] == signals.read()
        threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)).start()
        assert signals.wait(20) == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
        found = signals.wait(20)
        assert sorted(found + (signals.wait(20) if len(found) < 2 else [])) == [signal.SIGHUP, signal.SIGUSR1]
    finally:
        signals.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "tgkill"), reason="the C library has no tgkill")
def test_rank_0_stops_whichever_thread_gets_the_signal(tmp_path):
    """The kernel chooses the thread. Python runs handlers in the main thread only, which sleeps."""
    path = tmp_path / "socket"
    rank = subprocess.Popen([sys.executable, "-m", "allspark_server", "--address", f"unix:{path}"])
    try:
        wait_for(path.exists)
        time.sleep(0.2)     # the main thread waits for signals by now
        threads = [int(name) for name in os.listdir(f"/proc/{rank.pid}/task") if int(name) != rank.pid]
        names = {thread: Path(f"/proc/{rank.pid}/task/{thread}/comm").read_text() for thread in threads}
        assert threads, names
        assert ctypes.CDLL(None).tgkill(rank.pid, max(threads), signal.SIGTERM) == 0
        assert rank.wait(20) == 0
    finally:
        rank.kill()
        rank.wait()


def test_what_rank_0_must_tell_arrives_though_a_datagram_was_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "HEARTBEAT_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "heartbeat"))
        supervisor.settimeout(10)
        heartbeat = worker.Heartbeat(str(tmp_path / "heartbeat"), 0)
        heartbeat.add_details(lambda: {"addresses": ["unix:/a"]})
        for _ in range(2000):       # more than any queue holds
            heartbeat.send()
        heartbeat.state("ready")    # lost
        heartbeat.start()
        while (message := json.loads(supervisor.recv(65536)))["state"] != "ready":
            continue
        assert message["addresses"] == ["unix:/a"]
        heartbeat.stop()
        for _ in range(2000):
            heartbeat.send()
        read = threading.Timer(0.3, lambda: [*iter(lambda: "error" in json.loads(supervisor.recv(65536)), True)])
        read.start()                # it ends once it has read an error
        heartbeat.state("failed", error="the port is in use")
        read.join(20)
        assert not read.is_alive()
