"""A group in the background, for commands that need one for a while."""
from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import allspark_server

from .folders import private_folder, short_parent

#: begins the lines in which a group in the background reports how much of a model is loaded
PROGRESS_MARK = b"@progress "
ASSETS = Path(allspark_server.__file__).resolve().parent / "assets"


def shipped_model() -> Path:
    """The directory of the model that ships with the package."""
    shipped = sorted(p.parent for p in ASSETS.glob("*/config.json"))
    if not shipped:
        raise ValueError(f"no model ships with this installation ({ASSETS} has none); name one with --model DIR")
    return shipped[0]


@dataclass
class BackgroundGroup:
    """A group that another process supervises."""

    addresses: list[str]
    supervisor_pid: int


@contextlib.contextmanager
def background_group(arguments: list[str], timeout: float = 300.0, verbose: bool = False,
                     on_progress: Callable[[str, float], None] | None = None) -> Iterator[BackgroundGroup]:
    """`allspark serve` with these arguments on a private Unix socket, for the length of a with block.

    timeout: seconds until the group must serve. Otherwise RuntimeError is raised with its last lines.
    verbose: forward what the group prints.
    on_progress: gets a model's name and the part of it that is loaded, from another thread.
    """
    with private_folder(short_parent()) as folder:
        ready = folder / "ready"
        # The folder's mode guards the socket, so clients may name any model path.
        words = [sys.executable, "-m", "allspark_launch", "serve", *arguments, "--address", f"unix:{folder}/socket",
                 "--model-root", "/", "--ready-file", str(ready), "--parent-pid", str(os.getpid())]
        if on_progress is not None:
            words.append("--progress-lines")
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        tail: list[bytes] = []

        def drain() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(PROGRESS_MARK):
                    if on_progress is not None:
                        part, _, name = line[len(PROGRESS_MARK):].decode().strip().partition(" ")
                        on_progress(name, float(part))
                    continue
                tail[:] = [*tail[-30:], line]
                if verbose:
                    sys.stderr.buffer.write(line)
                    sys.stderr.flush()

        reader = threading.Thread(target=drain, daemon=True)
        reader.start()
        try:
            deadline = time.monotonic() + timeout
            while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            state = json.loads(ready.read_text()) if ready.exists() else {}
            if "addresses" not in state:
                reader.join(1.0)
                reason = state.get("error") or b"".join(tail).decode(errors="replace") or f"not ready in {timeout:g} s"
                raise RuntimeError(f"the server group did not start: {reason.strip()}")
            yield BackgroundGroup(state["addresses"], process.pid)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reader.join(1.0)
