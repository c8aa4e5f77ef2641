"""Repeatedly kills processes under load. Every output must be the same as without kills, and no process or file may be
left behind.

    kills.py [--of ranks|supervisors|http] [--cycles N] [--ranks N] [--gpus 0,1] [--model DIR] [--starts N]

ranks        a random rank of a group. Each cycle waits for every stream's first token after the previous kill. In
             `--starts` of the cycles it is killed once more during the restart, before the group serves
supervisors  the supervisor of a group, which is then started again, as systemd would do it
http         a random worker of an HTTP server: its connections are lost, and their requests are sent again

Prints the time from a kill to the next token, the machine's load, and the memory of the supervisor and its client.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil

from allspark_client import ClientEngine
from allspark_launch.group.background import shipped_model
from allspark_launch.group.processes import processes_of_session

TOKENS, STREAMS, WAIT_SECONDS = 120, 4, 300.0


def ranks_of(supervisor: int) -> list[int]:
    """Process ids of the ranks."""
    with contextlib.suppress(psutil.Error):
        return [p.pid for p in psutil.Process(supervisor).children(recursive=True)
                if p.cmdline()[1:3] == ["-m", "allspark_server"]]
    return []


def resources_of(pid: int) -> str:
    """Resources of a process that could leak."""
    process = psutil.Process(pid)
    return f"{process.memory_info().rss >> 20} MiB, {process.num_fds()} descriptors, {process.num_threads()} threads"


def wait(condition, what: str) -> None:
    """Waits until `condition` holds."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        time.sleep(0.005)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {WAIT_SECONDS:g} s")


class Service:
    """`allspark serve` or `allspark http`."""

    def __init__(self, folder: Path, name: str, *words: str):
        self._words, self._ready, self._log = [name, *words], folder / f"{name}.ready", folder / f"{name}.log"
        self.start()

    def start(self) -> None:
        """Starts it and waits until it serves."""
        self._ready.unlink(missing_ok=True)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "allspark_launch", *self._words, "--ready-file", str(self._ready)],
                stdout=subprocess.DEVNULL, stderr=log, start_new_session=True)
        wait(lambda: self._ready.exists() or self.process.poll() is not None, "the start")
        assert self.process.poll() is None, self._log.read_text()[-2000:]
        self.address = json.loads(self._ready.read_text()).get("address", "")

    def files(self) -> list[str]:
        """Files of its own that it has open."""
        links = [os.readlink(link) for link in Path(f"/proc/{self.process.pid}/fd").iterdir() if os.path.islink(link)]
        return [path for path in links if "allspark-run-" in path]

    def workers(self) -> list[int]:
        """Process ids of an HTTP server's workers."""
        found = []
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):     # it has just ended
                if "allspark_server.http" in process.cmdline():
                    found.append(process.pid)
        return found

    def stop(self) -> list:
        """Stops it; returns what is left of it."""
        files = self.files()
        self.process.terminate()
        self.process.wait(60)
        return processes_of_session(self.process.pid) + [path for path in files if os.path.exists(path)]


class Load:
    """Streams requests one after the other until it is stopped. `again`: errors after which a request is sent again."""

    again: tuple[type[Exception], ...] = ()

    def __init__(self, streams: int = STREAMS):
        self.last_tokens = [0.0] * streams      # when each stream had its last token
        self.expected = {i: self._output(i) for i in range(streams)}
        self.outputs, self.repeated, self.wrong, self._end = 0, 0, [], threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(streams)]
        for thread in self._threads:
            thread.start()

    def _output(self, stream: int) -> list | str:
        raise NotImplementedError

    def _run(self, stream: int) -> None:
        while not self._end.is_set():
            try:
                output = self._output(stream)
            except self.again:
                self.repeated += 1
                continue
            except Exception as error:  # any other end is a failure
                self.wrong.append(f"stream {stream}: {error}")
                print(self.wrong[-1], flush=True)
                continue
            self.outputs += 1
            if output != self.expected[stream]:
                self.wrong.append(f"stream {stream}: an output of length {len(output)} that differs")
                print(self.wrong[-1], flush=True)

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


class GroupLoad(Load):
    """Requests to a group, which the client continues."""

    def __init__(self, address: str, streams: int = STREAMS):
        self._engine = ClientEngine(address, reconnect_timeout=WAIT_SECONDS)
        self._model = self._engine.list_models()[0].name
        self.longest_wait = 0.0     # for a token of a request, in seconds
        super().__init__(streams)

    def _output(self, stream: int) -> list:
        config = {"max_new_tokens": TOKENS, "seed": stream, "early_stopping": False}
        _, handle, queue = self._engine.start_request(self._model, {"input_ids": [5 + stream, 6, 7]}, config)
        last, ids = time.monotonic(), []
        for elements in queue:
            ids += elements.ids_from_generate
            now = time.monotonic()
            self.longest_wait = max(self.longest_wait, now - last)
            self.last_tokens[stream] = last = now
        self._engine.release_request(self._model, handle)
        return ids

    def stop(self) -> None:
        super().stop()
        self._engine.close()


class HttpLoad(Load):
    """Streams of an HTTP server."""

    again = (httpx.TransportError,)

    def __init__(self, address: str):
        self._url = f"http://{address}/v1"
        self._model = httpx.get(f"{self._url}/models", timeout=60).json()["data"][0]["id"]
        super().__init__()

    def _output(self, stream: int) -> str:
        body = {"model": self._model, "prompt": [5 + stream, 6, 7], "max_tokens": TOKENS, "seed": stream,
                "ignore_eos": True, "stream": True}
        text = ""
        with httpx.stream("POST", f"{self._url}/completions", json=body, timeout=WAIT_SECONDS) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return text
                if line.startswith("data: "):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    self.last_tokens[stream] = time.monotonic()
        raise httpx.ReadError("the stream ended early")


def kill_rank(group: Service, load: Load, at_start: bool) -> float:
    """Kills a rank; returns the seconds to the next token.

    Waits until every stream has had a token: a request that is computed alone after a kill and is killed twice more
    before its first token is rejected, since it seems to be what ends its servers.
    """
    before = ranks_of(group.process.pid)
    killed = time.monotonic()
    os.kill(random.choice(before), signal.SIGKILL)
    if at_start:
        while not (new_ranks := set(ranks_of(group.process.pid)) - set(before)):
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.5))
        with contextlib.suppress(ProcessLookupError):
            os.kill(random.choice(sorted(new_ranks)), signal.SIGKILL)
    # A token that was on its way when the rank was killed does not count as one after the kill.
    first = 0.0

    def over() -> bool:
        nonlocal first
        if not first and (newest := max(load.last_tokens)) > killed + 0.1:
            first = newest - killed
        return min(load.last_tokens) > killed + 0.1 and set(ranks_of(group.process.pid)).isdisjoint(before)

    wait(over, "a token of every stream")
    return first or max(load.last_tokens) - killed


def kill_supervisor(group: Service, load: Load) -> float:
    """Kills the supervisor and starts another one, which has to find nothing in its way; returns the seconds to the
    next token.
    """
    process, files = group.process, group.files()
    killed = time.monotonic()
    process.kill()
    process.wait()
    wait(lambda: not processes_of_session(process.pid), "the end of the ranks")
    group.start()
    ready = time.monotonic()        # what arrives from now on is no longer of the old ranks
    # Any start of a group removes them. Another one on this machine may be about to.
    wait(lambda: not any(map(os.path.exists, files)), f"the removal of {files}")
    wait(lambda: min(load.last_tokens) > ready, "a token of every stream")
    return max(load.last_tokens) - killed


def kill_worker(http: Service, load: Load) -> float:
    """Kills an HTTP worker after a while; returns the seconds until another runs and every stream has had a token."""
    time.sleep(random.uniform(0, 2))        # requests are not continued: some should end
    before = http.workers()
    killed, victim = time.monotonic(), random.choice(before)
    os.kill(victim, signal.SIGKILL)
    wait(lambda: victim not in (now := http.workers()) and len(now) == len(before), "a new worker")
    wait(lambda: min(load.last_tokens) > killed + 0.1, "a token of every stream")
    return time.monotonic() - killed


def run(options: argparse.Namespace, service: Service, load: Load) -> dict[bool, list[float]]:
    """All cycles; returns the seconds that each took, of those with and without a kill during the start."""
    kill_at_start = [True] * options.starts + [False] * (options.cycles - options.starts)
    random.shuffle(kill_at_start)
    times, recent_times = {False: [], True: []}, []
    try:
        for number, at_start in enumerate(kill_at_start, 1):
            if options.of == "ranks":
                seconds = kill_rank(service, load, at_start)
            else:
                seconds = (kill_worker if options.of == "http" else kill_supervisor)(service, load)
            recent_times.append(seconds)
            times[at_start].append(seconds)
            if number % min(50, max(1, options.cycles // 4)) == 0:
                print(f"{number} kills, {load.outputs} outputs, {load.repeated} repeated, {len(load.wrong)} wrong; "
                      f"median {statistics.median(recent_times):.2f} s lately, load {os.getloadavg()[0]:.1f}; server "
                      f"{resources_of(service.process.pid)}, client {resources_of(os.getpid())}", flush=True)
                recent_times.clear()
    finally:
        load.stop()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=["ranks", "supervisors", "http"], default="ranks", help="what is killed")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", help="GPUs of the group, one a rank, instead of --ranks: 0,1")
    parser.add_argument("--model", default=str(shipped_model()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, address = Path(name), f"unix:{name}/s"
        ranks = ["--gpus", options.gpus] if options.gpus else ["--ranks", str(options.ranks), "--cpus-per-rank", "1"]
        group = Service(folder, "serve", "--model", options.model, *ranks, "--address", address, "--max-length", "512")
        started = [group]
        try:
            if options.of == "http":
                started.append(Service(folder, "http", "--http", "127.0.0.1:0", "--insecure", "--workers", "2",
                                       "--address", address))
            load = HttpLoad(started[1].address) if started[1:] else GroupLoad(address)
            times = run(options, started[-1], load)
            left = [left for service in reversed(started) for left in service.stop()]
        finally:
            for service in started:
                service.process.kill()
        for at_start, kind in ((False, "kills under load"), (True, "and again during the start")):
            if found := sorted(times[at_start]):
                print(f"{len(found)} {kind}: median {statistics.median(found):.2f} s to the next token, "
                      f"slowest {found[-1]:.2f} s")
        print(f"{load.outputs} outputs of {TOKENS} tokens, {load.repeated} repeated, {len(load.wrong)} wrong "
              f"{load.wrong[:3]}; left behind: {left}")
        return 1 if load.wrong or left or not load.outputs else 0


if __name__ == "__main__":
    sys.exit(main())
