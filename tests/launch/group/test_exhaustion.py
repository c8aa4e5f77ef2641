"""A supervisor and an HTTP server that can start no process for a while, and a group that reaches the memory limit of
its cgroup: requests go on.
"""
from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from allspark_client import ClientEngine
from allspark_launch.group.background import shipped_model
from support.processes import ranks_of
from support.waiting import wait_for

pytestmark = pytest.mark.slow


def allow_files(pid: int, more: int | None) -> None:
    """Lets a process open `more` files, or as many as before (None)."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = most if more is None else psutil.Process(pid).num_fds() + more
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, most))


def start(folder, *words: str, cgroup: Path | None = None) -> tuple[subprocess.Popen, dict]:
    ready, log = folder / "ready", folder / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "allspark_launch", *words, "--ready-file", str(ready)],
                                   stdout=output, stderr=output, preexec_fn=lambda: cgroup and enter(cgroup))
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None, 120)
        return process, json.loads(ready.read_text())
    except BaseException:
        process.kill()
        process.wait()
        print(log.read_text(errors="replace"))
        raise


def test_a_group_without_descriptors_starts_again_once_there_are_some(tmp_path):
    process, _ = start(tmp_path, "serve", "--model", str(shipped_model()), "--ranks", "1", "--address",
                       f"unix:{tmp_path}/s")
    try:
        with ClientEngine(f"unix:{tmp_path}/s") as engine:
            model = engine.list_models()[0].name
            config = {"max_new_tokens": 600, "early_stopping": False, "seed": 1}
            answers = []
            for disturbed in (False, True):
                _, handle, queue = engine.start_request(model, {"input_ids": [1, 2, 3]}, config)
                answers.append(list(queue.Get().ids_from_generate))
                if disturbed:
                    allow_files(process.pid, 0)
                    ranks_of(process.pid)[0].kill()
                    wait_for(lambda: (tmp_path / "log").read_text().count("cannot be started") >= 2, 30)
                    allow_files(process.pid, None)
                for elements in queue:
                    answers[-1] += elements.ids_from_generate
                engine.release_request(model, handle)
            assert len(answers[0]) == 600 and answers[0] == answers[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_an_http_server_without_descriptors_starts_workers_once_there_are_some(tmp_path):
    words = ["--insecure", "--http", "127.0.0.1:0", "--address", f"unix:{tmp_path}/none"]
    process, state = start(tmp_path, "http", *words)
    try:
        allow_files(process.pid, 0)
        psutil.Process(process.pid).children()[0].kill()
        wait_for(lambda: (tmp_path / "log").read_text().count("cannot be started") >= 2, 30)
        allow_files(process.pid, None)
        with httpx.Client(base_url=f"http://{state['address']}", timeout=60) as client:
            assert client.get("/health/live").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def enter(cgroup: Path) -> None:
    """Runs in a new process, which becomes a member of the cgroup."""
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def memory_cgroup() -> Iterator[tuple[Path, Path]]:
    """A new cgroup that counts memory, of either version, and the file with its limit."""
    for parent, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        try:
            cgroup = Path(tempfile.mkdtemp(prefix="allspark-test-", dir=parent))
        except OSError:
            continue
        try:
            if (cgroup / name).exists():
                yield cgroup, cgroup / name
                return
        finally:
            with contextlib.suppress(AssertionError):
                wait_for(lambda cgroup=cgroup: not (cgroup / "cgroup.procs").read_text(), 10)
            cgroup.rmdir()
    pytest.skip("no cgroup with a memory limit can be made here: needs root, and the memory controller")


#: takes memory of the cgroup until a file appears: shared memory, for which the kernel does not choose this process
HOG = """
import pathlib, sys, tempfile, time
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
with tempfile.TemporaryFile(dir="/dev/shm", buffering=0) as file:
    while not pathlib.Path(sys.argv[2]).exists():
        file.write(bytes(1 << 20))
        time.sleep(0.002)
"""


def test_a_group_that_reaches_its_memory_limit_goes_on(tmp_path):
    config = {"max_new_tokens": 500, "early_stopping": False, "seed": 1}
    answers: list[dict[int, list[int]]] = [{}, {}]
    with memory_cgroup() as (cgroup, limit):
        log, enough = tmp_path / "log", tmp_path / "enough"
        process, _ = start(tmp_path, "serve", "--model", str(shipped_model()), "--ranks", "2", "--cpus-per-rank", "1",
                           "--address", f"unix:{tmp_path}/s", cgroup=cgroup)
        hog = None
        try:
            with ClientEngine(f"unix:{tmp_path}/s", reconnect_timeout=120) as engine:
                model = engine.list_models()[0].name

                def answer(into: dict[int, list[int]], number: int) -> None:
                    _, handle, queue = engine.start_request(model, {"input_ids": [1, 2, 3 + number]}, config)
                    into[number] = [i for elements in queue for i in elements.ids_from_generate]
                    engine.release_request(model, handle)

                for disturbed, into in enumerate(answers):
                    threads = [threading.Thread(target=answer, args=(into, number)) for number in range(4)]
                    for thread in threads:
                        thread.start()
                    if disturbed:
                        limit.write_text(str(6 << 30))
                        used = sum(rank.memory_info().rss for rank in ranks_of(process.pid))
                        limit.write_text(str(2 * used + (256 << 20)))
                        hog = subprocess.Popen([sys.executable, "-c", HOG, str(cgroup), str(enough)])
                        wait_for(lambda: "memory limit" in log.read_text(), 60)
                        enough.touch()
                        assert hog.wait(30) == 0
                    for thread in threads:
                        thread.join(180)
            assert answers[0] == answers[1] and [len(ids) for ids in answers[0].values()] == [500] * 4
            text = log.read_text()
            assert "GiB was reached and the kernel killed 1 process; allow more memory" in text, text
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            enough.touch()
            for one in filter(None, (hog, process)):
                one.kill()
                one.wait()
