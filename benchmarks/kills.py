"""Repeatedly kills ranks of a group under load. Every output must be the same as without kills, and no process or file
may be left behind.

    kills.py [--cycles N] [--ranks N] [--model DIR] [--starts N]

Each cycle waits for every stream's first token after the previous kill, then kills a random rank. `--starts` of the
cycles kill it during the restart, before the group serves. Prints the time from a kill to the next token, the machine's
load, and the memory of the supervisor and its client.
"""

from __future__ import annotations

import argparse
import contextlib
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

import psutil

from allspark_client import ClientEngine
from allspark_launch.group.background import shipped_model
from allspark_launch.group.processes import processes_of_session

TOKENS, STREAMS = 120, 4


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


class Load:
    """Streams requests one after the other until it is stopped."""

    def __init__(self, address: str):
        self._engine = ClientEngine(address, reconnect_timeout=300)
        self._model = self._engine.list_models()[0].name
        self.last_tokens = [0.0] * STREAMS      # when each stream had its last token
        self.expected = {i: self._ids(i) for i in range(STREAMS)}
        self.outputs, self.wrong, self._end = 0, [], threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _ids(self, stream: int) -> list[int]:
        config = {"max_new_tokens": TOKENS, "seed": stream, "early_stopping": False}
        _, handle, queue = self._engine.start_request(self._model, {"input_ids": [5 + stream, 6, 7]}, config)
        ids = []
        for elements in queue:
            ids += elements.ids_from_generate
            self.last_tokens[stream] = time.monotonic()
        self._engine.release_request(self._model, handle)
        return ids

    def _run(self, stream: int) -> None:
        while not self._end.is_set():
            try:
                ids = self._ids(stream)
            except Exception as error:  # any other end is a failure
                self.wrong.append(f"stream {stream}: {error}")
                print(self.wrong[-1], flush=True)
                continue
            self.outputs += 1
            if ids != self.expected[stream]:
                self.wrong.append(f"stream {stream}: {len(ids)} tokens that differ")
                print(self.wrong[-1], flush=True)

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._engine.close()


def cycle(load: Load, supervisor: int, at_start: bool) -> float:
    """Kills a rank; returns the seconds to the next token.

    Waits until every stream has had a token: a request that is computed alone after a kill and is killed twice more
    before its first token is rejected, since it seems to be what ends its servers.
    """
    before = ranks_of(supervisor)
    killed = time.monotonic()
    os.kill(random.choice(before), signal.SIGKILL)
    if at_start:
        while not (new_ranks := set(ranks_of(supervisor)) - set(before)):
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.5))
        with contextlib.suppress(ProcessLookupError):
            os.kill(random.choice(sorted(new_ranks)), signal.SIGKILL)
    # A token that was on its way when the rank was killed does not count as one after the kill.
    first = 0.0
    while not (min(load.last_tokens) > killed + 0.1 and set(ranks_of(supervisor)).isdisjoint(before)):
        time.sleep(0.005)
        if not first and (newest := max(load.last_tokens)) > killed + 0.1:
            first = newest - killed
        if time.monotonic() - killed > 300:
            raise TimeoutError("no token for 300 s")
    return first or max(load.last_tokens) - killed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default=str(shipped_model()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ready, address = Path(folder, "ready"), f"unix:{folder}/s"
        process = subprocess.Popen(
            [sys.executable, "-m", "allspark_launch", "serve", "--model", options.model, "--ranks", str(options.ranks),
             "--address", address, "--ready-file", str(ready), "--cpus-per-rank", "1", "--max-length", "512"],
            stdout=subprocess.DEVNULL, stderr=open(Path(folder, "log"), "wb"), start_new_session=True)
        while not ready.exists():
            time.sleep(0.05)
            assert process.poll() is None, Path(folder, "log").read_text()[-2000:]
        open_files = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir() if os.path.islink(link)]
        runtime_files = [path for path in open_files if "allspark-run-" in path]
        load = Load(address)
        kill_at_start = [True] * options.starts + [False] * (options.cycles - options.starts)
        random.shuffle(kill_at_start)
        times, recent_times = {False: [], True: []}, []
        for number, at_start in enumerate(kill_at_start, 1):
            recent_times.append(cycle(load, process.pid, at_start))
            times[at_start].append(recent_times[-1])
            if number % 50 == 0:
                print(f"{number} kills, {load.outputs} outputs, {len(load.wrong)} wrong; median "
                      f"{statistics.median(recent_times):.2f} s lately, load {os.getloadavg()[0]:.1f}; supervisor "
                      f"{resources_of(process.pid)}, client {resources_of(os.getpid())}", flush=True)
                recent_times.clear()
        load.stop()
        process.terminate()
        process.wait(30)
        left = processes_of_session(process.pid) + [path for path in runtime_files if os.path.exists(path)]
        for at_start, name in ((False, "kills under load"), (True, "and again during the start")):
            if found := sorted(times[at_start]):
                print(f"{len(found)} {name}: median {statistics.median(found):.2f} s to the next token, "
                      f"slowest {found[-1]:.2f} s")
        print(f"{load.outputs} outputs of {TOKENS} tokens, {len(load.wrong)} wrong {load.wrong[:3]}; left behind: "
              f"{left}")
        return 1 if load.wrong or left or not load.outputs else 0


if __name__ == "__main__":
    sys.exit(main())
