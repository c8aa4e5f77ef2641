"""A worker of the HTTP server that notes when its event loop stands still.

`python -m support.probed_worker FILE …` takes the arguments of allspark_server.http after FILE. Each time that the loop
stood still for more than STALL seconds, while the process computed for as long, is a line of FILE: the seconds, and the
CPU seconds of the process meanwhile.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from allspark_server.http import __main__ as worker
from allspark_server.http.app import Application

STALL, PERIOD = 0.1, 0.005


async def watch(path: Path) -> None:
    while True:
        began, cpu = time.monotonic(), time.process_time()
        await asyncio.sleep(PERIOD)
        late, used = time.monotonic() - began - PERIOD, time.process_time() - cpu
        if min(late, used) > STALL:     # a busy machine delays processes, too
            with path.open("a") as file:
                file.write(f"{late:.3f} {used:.3f}\n")


class Probed(Application):
    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            self._probe = asyncio.create_task(watch(stalls))
        await super().__call__(scope, receive, send)


if __name__ == "__main__":
    stalls = Path(sys.argv.pop(1))
    worker.Application = Probed  # type: ignore[misc]
    worker.main()
