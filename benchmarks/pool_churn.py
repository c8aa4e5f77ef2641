"""Members of a pool come and are killed under load. No request may be lost, and every output must be the same.

    pool_churn.py [--members N] [--seconds S] [--every S] [--streams N] [--model DIR]

Clients find the members in a file that is watched. At each interval, the oldest member is killed with SIGKILL, its
supervisor and its ranks, and a new one is started and listed. The goal is ten minutes with 8 members and 5 s. Prints
the outputs, the longest wait for a token, and what is left behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

from kills import TOKENS, GroupLoad, Service

from allspark_launch.group.background import shipped_model
from allspark_launch.group.processes import processes_of_session


class Members:
    """The groups, and the file that lists them."""

    def __init__(self, folder: Path, model: str):
        self._folder, self._model, self._count = folder, model, 0
        self.listed, self.running = folder / "members", list[tuple[str, Service]]()

    def add(self) -> None:
        """Starts a group and lists it."""
        self._count += 1
        place = self._folder / str(self._count)
        place.mkdir()
        address = f"unix:{place}/s"
        service = Service(place, "serve", "--model", self._model, "--ranks", "1", "--cpus-per-rank", "1", "--address",
                          address, "--max-length", "512")
        self.running.append((address, service))
        self._write()

    def kill_oldest(self) -> None:
        """Kills a group, which stays listed for half a second."""
        _, service = self.running.pop(0)
        for pid in [service.process.pid, *processes_of_session(service.process.pid)]:
            try:
                os.kill(int(str(pid).split()[0]), signal.SIGKILL)
            except (ProcessLookupError, ValueError):
                continue
        service.process.wait()
        time.sleep(0.5)
        self._write()

    def _write(self) -> None:
        new = self.listed.with_suffix(".new")
        new.write_text("".join(f"{address}\n" for address, _ in self.running))
        new.replace(self.listed)


def main() -> int:
    """Reads the command line; returns 1 if a request was lost or wrong, or something is left behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--model", default=str(shipped_model()))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        members = Members(Path(name), options.model)
        for _ in range(options.members):
            members.add()
        try:
            load = GroupLoad(f"file:{members.listed}", options.streams)
            began, changes, slow = time.monotonic(), 0, 0
            try:
                while time.monotonic() - began < options.seconds:
                    due = began + (changes + 1) * options.every
                    members.kill_oldest()
                    members.add()
                    changes += 1
                    slow += time.monotonic() > due
                    time.sleep(max(0.0, due - time.monotonic()))
                    if changes % 20 == 0:
                        print(f"{changes} changes, {load.outputs} outputs, {len(load.wrong)} wrong, longest wait "
                              f"{load.longest_wait:.1f} s, load {os.getloadavg()[0]:.1f}", flush=True)
            finally:
                load.stop()
            seconds = time.monotonic() - began
            left = [left for _, service in members.running for left in service.stop()]
        finally:
            for _, service in members.running:
                service.process.kill()
        print(f"{options.members} members, {changes} killed and as many added in {seconds:.0f} s ({slow} later than "
              f"every {options.every:g} s), {options.streams} streams: {load.outputs} outputs of {TOKENS} tokens, "
              f"{len(load.wrong)} lost or wrong {load.wrong[:3]}; longest wait for a token {load.longest_wait:.1f} s; "
              f"left behind: {left}")
        return 1 if load.wrong or left or not load.outputs else 0


if __name__ == "__main__":
    raise SystemExit(main())
