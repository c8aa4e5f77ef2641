"""Opens files that a client or a checkpoint names. Only regular files are opened, and files that are read whole have a
size limit. Errors are AllSparkError and name the file, the problem and what is expected.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from allspark_client.errors import AllSparkError, AsStatus

MIB = 1 << 20
# Several times the sizes in the largest published checkpoints. Parsing can take twenty times as much memory.
MAX_CONFIG_BYTES = 4 * MIB  # config.json, generation_config.json
MAX_INDEX_BYTES = 32 * MIB  # *.index.json
MAX_GRAPH_BYTES = 8 * MIB  # .asgraph
MAX_TOKENIZER_BYTES = 128 * MIB  # tokenizer.json
MAX_STATE_BYTES = 32 * MIB  # the engine's state file

_KINDS = ((stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket"),
          (stat.S_ISCHR, "device"), (stat.S_ISBLK, "device"))


def _error(problem: str, status: AsStatus = AsStatus.ALLSPARK_IO_ERROR) -> AllSparkError:
    return AllSparkError(status, problem)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pauses the garbage collector, also as a decorator: opening and loading a model with thousands of experts makes
    many objects that stay, and collections would look through them again and again.
    """
    if not gc.isenabled():  # another thread loads, or the caller wants it so
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading. Links are followed. Other kinds of files are not opened even for a moment,
    since a FIFO would wait for a writer and a device may act on being opened.
    """
    try:
        # O_PATH refers to the file without opening it, so the file that is checked is the file that is opened.
        held = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _error(f"{path} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise _error(f"cannot open {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        mode = os.fstat(held).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "special file")
            raise _error(f"{path} is a {kind}: expected a regular file")
        return open(os.open(f"/proc/self/fd/{held}", os.O_RDONLY | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise _error(f"cannot open {path}: {error.strerror}") from error
    finally:
        os.close(held)


def read_file(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise _error(f"{path} has {size} bytes: a file of this kind may have at most {limit}")
        try:
            return file.read(size)
        except OSError as error:
            raise _error(f"cannot read {path}: {error.strerror}") from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], sync: bool = False) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once the with block has ended without an error; otherwise what was
    there stays. AllSparkError if it cannot be written. sync: it is on the disk before it takes the place.
    """
    partial = f"{os.fspath(path)}.partial"
    try:
        with open(partial, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise _error(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)


def parse_json(data: bytes | str) -> Any:
    """Parses JSON of untrusted origin. ValueError for every problem."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes."""
    values = _json(path, limit)
    if not isinstance(values, dict):
        raise _error(f"{path} holds a {type(values).__name__}: expected an object", AsStatus.ALLSPARK_PARAM_ERROR)
    return values


def read_json_list(path: Path, limit: int = MAX_CONFIG_BYTES) -> list[Any]:
    """The JSON array in a file of at most `limit` bytes."""
    values = _json(path, limit)
    if not isinstance(values, list):
        raise _error(f"{path} holds a {type(values).__name__}: expected an array", AsStatus.ALLSPARK_PARAM_ERROR)
    return values


def _json(path: Path, limit: int) -> Any:
    try:
        return parse_json(read_file(path, limit))
    except ValueError as error:
        raise _error(f"{path} is not valid JSON: {error}", AsStatus.ALLSPARK_PARAM_ERROR) from error
