"""A supervisor and an HTTP server that can start no process for a while: requests go on once they can."""
from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys

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


def start(folder, *words: str) -> tuple[subprocess.Popen, dict]:
    ready, log = folder / "ready", folder / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "allspark_launch", *words, "--ready-file", str(ready)],
                                   stdout=output, stderr=output)
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
