"""`allspark batch`: answers a file of requests in OpenAI's batch form, by the HTTP server's code in this process."""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import IO, Any

from allspark_server.http.batch_lines import MAX_LINE, NoRequest, parse_line

from ..pool.members import environment_addresses
from ..progress import Progress
from . import AddCommand
from .own_group import add_group_flags, own_group

logger = logging.getLogger(__name__)

EXIT_FAILED_LINES = 3

Answer = tuple[int, Any]

EPILOG = """\
A line of IN is {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}, with the url
/v1/chat/completions, /v1/completions or /v1/embeddings. A line of OUT has the custom_id and the answer:
  {"id": …, "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": {…}}, "error": null}
Fields of requests mean the same as over HTTP, and the same requests are refused: their status_code is 400. For a line
that is not a request, "response" is null and "error" has the reason. Lines of OUT are in the order of the answers.

Run again with the same files, the command continues: requests with an answer in OUT are not sent again, and an
incomplete last line of OUT is repaired. Failed lines are kept; remove them from OUT to send these requests again.

exit status: 0 if every line is answered; 3 if every line has an outcome, but some failed, now or in an earlier run; 1
if the batch could not be completed, for example because the disk is full: then the command can be run again.

examples:
  allspark batch in.jsonl out.jsonl                                  the model that ships
  allspark batch --model ~/Qwen2.5-7B-Instruct --weight-dtype w8a8 --max-batch 64 in.jsonl out.jsonl
  allspark batch --address unix:/run/allspark/a --address unix:/run/allspark/b in.jsonl out.jsonl"""


# --- the output file -----------------------------------------------------------------------------------------


class Output:
    """The file OUT. One process at a time may write it."""

    def __init__(self, path: Path):
        """Repairs an incomplete last line. Raises ValueError if the file is not the output of a batch, or if another
        process writes it.
        """
        self._file = open(path, "a+b", buffering=0)     # what cannot be written must not be left in a buffer
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ValueError(f"{path} is being written by another batch") from None
        try:
            #: keys of lines with an outcome, and of those that failed
            self.done: set[str] = set()
            self.failed: set[str] = set()
            self._read(path)
        except BaseException:
            self._file.close()
            raise

    def _read(self, path: Path) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            whole = line.endswith(b"\n")
            try:
                self._note(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                if whole and line.strip():
                    raise ValueError(f"{path}, line {number} is not a line of a batch's output ({error}); "
                                     "choose another file, or remove it") from None
                if not whole:
                    break
            end += len(line)
            if not whole:
                self._file.write(b"\n")
                end += 1
        self._file.truncate(end)

    def _note(self, entry: dict[str, Any]) -> None:
        key = entry["id"] if entry["custom_id"] is None else "custom " + entry["custom_id"]
        self.done.add(key)
        if entry["response"] is None or entry["response"]["status_code"] != 200:
            self.failed.add(key)

    def has(self, number: int, custom_id: str | None) -> bool:
        """Whether a line of IN, by its number or its custom_id, has an outcome."""
        return key_of(number, custom_id) in self.done

    def write(self, number: int, custom_id: str | None, answer: Answer | None, error: str = "") -> None:
        """Writes the outcome of a line. Raises OSError; then nothing more can be written."""
        response = None
        if answer is not None:
            body = answer[1]
            request_id = body.get("id") if isinstance(body, dict) else None
            response = {"status_code": answer[0], "request_id": request_id or f"req_{number}", "body": body}
        entry = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": response,
                 "error": {"code": "invalid_request", "message": error, "line": number} if error else None}
        data = json.dumps(entry, ensure_ascii=False).encode(errors="replace") + b"\n"
        try:
            while data:
                data = data[self._file.write(data):]
        except OSError as error:
            raise OSError(error.errno, f"{self._file.name} cannot be written: {error.strerror}; run the command again "
                                       "to continue") from None
        self._note(entry)

    def close(self) -> None:
        """Writes everything to disk and closes the file. Raises OSError."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def key_of(number: int, custom_id: str | None) -> str:
    """The key of a line in `Output.done`."""
    return f"batch_req_{number}" if custom_id is None else f"custom {custom_id}"


# --- requests ------------------------------------------------------------------------------------------------------


class Endpoints:
    """The HTTP server's application without HTTP."""

    def __init__(self, addresses: list[str], token_file: str | None):
        from allspark_server.access import Access, pool_token
        from allspark_server.http.app import Application
        from allspark_server.http.bodies import BodyReader
        from allspark_server.http.call import HttpWorker
        from allspark_server.http.metrics import Metrics
        from allspark_server.http.pool import Pool
        token, names_tenants = pool_token(token_file)
        self._pool = Pool(addresses, token)
        worker = HttpWorker(self._pool, Access(), BodyReader(MAX_LINE, 1 << 40), Metrics(), names_tenants)
        self._application = Application(worker)

    async def open(self) -> list[str]:
        """Connects to the groups. Returns the models that run there. Raises RuntimeError."""
        from allspark_server.http.errors import ApiError
        await self._pool.open()
        try:
            return [model.name for model in await self._pool.models() if model.running or model.on_demand]
        except ApiError as error:
            raise RuntimeError(error.message) from error

    async def close(self) -> None:
        """Disconnects."""
        await self._pool.close()

    async def post_until_taken(self, url: str, body: dict[str, Any]) -> Answer:
        """The status and the JSON of the answer to a request, which waits while the pool is full or unreachable."""
        from allspark_server.http.internal import post_until_taken
        status, data = await post_until_taken(self._application, url, json.dumps(body).encode())
        return status, json.loads(data)


class Batch:
    """All requests of IN, at most `concurrency` at a time. `counts`: answered, failed, had before."""

    def __init__(self, endpoints: Endpoints, output: Output, concurrency: int, progress: Progress):
        self._endpoints, self._output, self._progress = endpoints, output, progress
        self._room = asyncio.Semaphore(concurrency)
        self._tasks: set[asyncio.Task] = set()
        self._error: BaseException | None = None        # that ends the batch
        self.counts = {"answered": 0, "failed": 0, "had before": 0}

    async def run(self, lines: IO[bytes]) -> None:
        """Sends the requests of these lines and waits for all answers. Raises what ends the batch, such as OSError."""
        seen: set[str] = set()
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    await self._take(number, line, seen)
            while self._tasks and self._error is None:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._error is not None:
                raise self._error
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, number: int, line: bytes, seen: set[str]) -> None:
        try:
            custom_id, url, body = parse_line(line)
        except NoRequest as error:
            if self._output.has(number, error.custom_id):
                self._note("had before")
            else:
                self._output.write(number, error.custom_id, None, str(error))
                self._note("failed")
            return
        if custom_id in seen:
            raise ValueError(f"line {number} has the custom_id {custom_id!r} of an earlier line: their answers could "
                             "not be told apart")
        seen.add(custom_id)
        if self._output.has(number, custom_id):
            self._note("had before")
            return
        await self._room.acquire()
        if self._error is not None:
            raise self._error
        task = asyncio.create_task(self._ask(number, custom_id, url, body))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self._room.release()
        if not task.cancelled():
            self._error = self._error or task.exception()

    async def _ask(self, number: int, custom_id: str, url: str, body: dict[str, Any]) -> None:
        answer = await self._endpoints.post_until_taken(url, body)
        self._output.write(number, custom_id, answer)
        self._note("answered" if answer[0] == 200 else "failed")

    def _note(self, outcome: str) -> None:
        self.counts[outcome] += 1
        self._progress.advance()
        self._progress.show(f"{self.counts['failed']} failed" if self.counts["failed"] else "")


# --- the command -------------------------------------------------------------------------------------------------


def add_command(command: AddCommand) -> None:
    """Adds `batch` to the parser."""
    p = command("batch", run_batch,
                "answer a file of requests in OpenAI's batch form", epilog=EPILOG)
    p.add_argument("input", type=Path, metavar="IN.jsonl")
    p.add_argument("output", type=Path, metavar="OUT.jsonl")
    p.add_argument("--address", action="append", default=[],
                   help="a running group; repeatable (default: $ALLSPARK_ADDRESS, or a group started for the batch)")
    p.add_argument("--token-file", metavar="FILE",
                   help="present a token of this file to groups (default: $ALLSPARK_TOKEN_FILE)")
    p.add_argument("--concurrency", type=int, default=64, metavar="N",
                   help="requests at a time (default %(default)s); to keep groups busy, more than their batch sizes "
                        "together")
    p.add_argument("--model", metavar="DIR",
                   help="the model of a group of its own (default: the shipped model); its name is --model-name, or "
                        "the directory's name")
    p.add_argument("-v", "--verbose", action="store_true", help="show the log of the group's ranks")
    add_group_flags(p)


def run_batch(options: argparse.Namespace) -> int:
    """Runs the command."""
    if options.concurrency < 1:
        raise ValueError(f"--concurrency {options.concurrency} must be at least 1")
    if options.output.exists() and options.input.exists() and options.output.samefile(options.input):
        raise ValueError("IN and OUT are one file")
    addresses = options.address or environment_addresses()
    if addresses and options.model:
        raise ValueError("--model starts a group, and an address names one that runs: give one of them")
    if "ALLSPARK_LOG" not in os.environ:
        logging.getLogger().setLevel(logging.WARNING)
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(open(options.input, "rb"))
        total = sum(1 for line in lines if line.strip())
        output = stack.enter_context(contextlib.closing(Output(options.output)))
        progress = Progress(total)
        stack.callback(progress.close)
        if not addresses:
            progress.show("starting a group")
            addresses = [stack.enter_context(own_group(options))]
        lines.seek(0)
        counts = asyncio.run(_run(addresses, options, lines, output, progress))
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + f" of {total}", file=sys.stderr)
    return EXIT_FAILED_LINES if output.failed else 0


async def _run(addresses: list[str], options: argparse.Namespace, lines: IO[bytes], output: Output,
               progress: Progress) -> dict[str, int]:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):      # both end it in order, whichever thread gets them
        with contextlib.suppress(NotImplementedError, ValueError):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    endpoints = Endpoints(addresses, options.token_file or os.environ.get("ALLSPARK_TOKEN_FILE") or None)
    try:
        models = await endpoints.open()
        logger.info("models: %s", ", ".join(models))
        batch = Batch(endpoints, output, options.concurrency, progress)
        await batch.run(lines)
        return batch.counts
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        await endpoints.close()
