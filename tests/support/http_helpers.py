"""A server group with the shipped model and an HTTP server in front of it; tests of the HTTP server share them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from allspark_client import ClientEngine
from allspark_launch.group.background import background_group, shipped_model
from allspark_launch.group.http_server import HttpOptions, http_server
from support.waiting import wait_for

MODEL = "fable"
KEYS = {"read": "key-read", "generate": "key-generate", "admin": "key-admin"}
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


@dataclass
class RunningServer:
    """A running HTTP server; `engine` is a client of the group behind it."""

    address: str
    engine: ClientEngine
    group: str

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def client(self, key: str = KEYS["generate"], **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=60, **options)

    def connect(self) -> socket.socket:
        """A plain TCP connection to the server."""
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def live(self) -> int:
        """Number of requests that run or wait in the group."""
        stat = self.engine.get_as_engine_stat(MODEL)
        return stat.running_request + stat.pending_request


def token_file(folder: Path) -> str:
    """Writes a token file with one key for each role."""
    path = folder / "keys"
    path.write_text("".join(f"{role} {key}\n" for role, key in KEYS.items()))
    path.chmod(0o600)
    return str(path)


@contextlib.contextmanager
def http_server_for(group: str, **options: Any) -> Iterator[str]:
    """Runs an HTTP server in front of a group; yields its address once it answers."""
    with http_server(HttpOptions(**{"address": "127.0.0.1:0", "pool": [group], **options})) as server:
        with httpx.Client(base_url=f"http://{server.address}", timeout=60) as client:
            wait_for(lambda: client.get("/health").status_code == 200, 60)
        yield server.address


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[RunningServer]:
    """Runs a group with the shipped model and an HTTP server in front of it that requires keys."""
    with contextlib.ExitStack() as stack:
        model = ["--model", str(shipped_model()), "--max-length", "1024"]
        group = stack.enter_context(background_group(model, timeout=60.0)).addresses[0]
        address = stack.enter_context(http_server_for(group, token_file=token_file(folder), strict_fields=True))
        yield RunningServer(address, stack.enter_context(ClientEngine(group)), group)


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    """Posts a request that must succeed; returns the answer's JSON."""
    answer = client.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(client: httpx.Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """Posts a body that must be refused with `status`; returns the error."""
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = client.post(path, **content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def within(seconds: float, condition: Any) -> bool:
    """Whether a condition becomes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
