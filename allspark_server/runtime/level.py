"""The level of a process on CPUs: the instruction set that its kernels are compiled for.

The native library orders the levels that a CPU has by a table. A server measures the best of them when it first runs on
such a CPU, and keeps the figures in a file. They override the table only where another level is clearly faster, because
levels give different bits: machines with equal CPUs should choose alike.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from allspark_client.version import __version__
from allspark_server.runtime import measured
from allspark_server.runtime.native import native_library, usable_isas

VARIABLE = "ALLSPARK_CPU_COSTS"
OFF = "off"
MARGIN = 1.15           # how many times as fast a level must be to come before the table's
SECONDS = 0.5           # for all levels together
_LEVELS = 3             # those that the table puts first are measured
_SHAPE = 1024, 1024     # outputs and inputs of the matrices: they stay in a core's L2 cache
_FORMATS = (("bfloat16", 0), ("w8a8", 0), ("int4", 64))
_ROWS = (8, 128)        # decode of a full batch, and a prompt

logger = logging.getLogger(__name__)


def levels(pinned: str = "", measures: bool = True) -> list[str]:
    """The levels that this process may use, best first. `pinned`: the only one, as $ALLSPARK_ISA is. `measures`: this
    rank decides about the order. Raises ValueError if this CPU does not have the pinned one.
    """
    if pinned:
        found = native_library().isas()
        if pinned not in found:
            raise ValueError(f"isa is {pinned!r}, which this CPU or this build does not have; it has "
                             f"{', '.join(found)}")
        return [pinned]
    found = usable_isas()
    by_table = not measures or len(found) < 2 or os.environ.get(VARIABLE) == OFF
    return found if by_table else in_order(found, _rates(found))


def in_order(found: Sequence[str], rates: dict[str, float]) -> list[str]:
    """The levels with the fastest one first, if it is faster than the table's first by the margin."""
    known = [isa for isa in found if isa in rates]
    if not known or known[0] != found[0]:
        return list(found)
    best = max(known, key=rates.__getitem__)
    if rates[best] < MARGIN * rates[found[0]]:
        return list(found)
    logger.info("instruction set %s: it is %.2f times as fast here as %s", best, rates[best] / rates[found[0]],
                found[0])
    return [best, *(isa for isa in found if isa != best)]


def kept_rates(found: Sequence[str]) -> tuple[Path, dict[str, float] | None]:
    """The file of this CPU's rates, and what it holds; None if there are none for this version."""
    key = _key(found)
    return _path(key), _read(key)


def measure(found: Sequence[str], seconds: float = SECONDS) -> dict[str, float]:
    """The rates of levels, in G operations/s of one thread: the geometric mean over formats and numbers of rows. No
    model may exist.
    """
    library, before = native_library(), native_library().isa()
    rng = np.random.default_rng(0)
    outputs, inputs = _SHAPE
    weights = rng.standard_normal(_SHAPE, dtype=np.float32)
    batches = [rng.standard_normal((rows, inputs), dtype=np.float32) for rows in _ROWS]
    share = seconds / (len(found) * len(_FORMATS) * len(_ROWS))
    rates = {}
    try:
        for isa in found:
            library.use_isa(isa)
            logs = []
            for dtype, group in _FORMATS:
                executor = library.Executor(num_threads=1)
                matrix = executor.add_matrix(outputs, inputs, dtype, group)
                executor.fill_matrix(matrix, weights, "F32")
                logs += [math.log(2e-9 * outputs * inputs * len(rows) / _best(executor, matrix, rows, share))
                         for rows in batches]
                del executor
            rates[isa] = math.exp(sum(logs) / len(logs))
    finally:
        gc.collect()
        library.use_isa(before)
    return rates


def _best(executor: Any, matrix: int, rows: np.ndarray, seconds: float) -> float:
    """The shortest time of a product, among those of so many seconds."""
    best, end = math.inf, time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        executor.multiply(matrix, rows, _SHAPE[0])
        now = time.perf_counter()
        best = min(best, now - began)
        if now >= end:
            return best


def _rates(found: list[str]) -> dict[str, float]:
    key = _key(found)
    with measured.locked(_path(key)):
        rates = _read(key)
        if rates is None:
            began = time.monotonic()
            rates = measure(found[:_LEVELS])
            logger.info("measured the instruction sets of this CPU in %.2f s: %s", time.monotonic() - began,
                        ", ".join(f"{isa} {rate:.0f} Gop/s" for isa, rate in rates.items()))
            measured.write(_path(key), {"key": key, "rates": rates},
                           "the CPU's instruction sets are measured at each start")
        return rates


def _key(found: Sequence[str]) -> dict[str, Any]:
    """What rates belong to: a CPU, and this version's kernels."""
    return {"package": __version__, "cpu": _cpu_name(), "isas": list(found)}


def _cpu_name() -> str:
    """Model and stepping, as Linux names them: virtual machines often hide the model's marketing name."""
    fields = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part",
              "CPU variant")
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return platform.machine()
    found = dict(re.findall(r"^([^\t:]+?)\s*:\s*(.*)$", first, re.MULTILINE))
    return " ".join(found[field] for field in fields if field in found) or platform.machine()


def _path(key: dict[str, Any]) -> Path:
    return measured.folder(VARIABLE, "cpus") / (re.sub(r"\W+", "-", key["cpu"]) + ".json")


def _read(key: dict[str, Any]) -> dict[str, float] | None:
    """The rates in the file, if it belongs to the key."""
    path = _path(key)
    try:
        content = json.loads(path.read_bytes())
        if content["key"] != key:
            return None
        rates = {str(isa): float(rate) for isa, rate in content["rates"].items()}
        if set(rates) == set(key["isas"][:_LEVELS]) and all(0 < rate < math.inf for rate in rates.values()):
            return rates
        doubt = "these are no rates of this CPU's instruction sets"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        doubt = str(error) or type(error).__name__
    logger.warning("%s cannot be used (%s): the instruction sets are measured anew", path, doubt)
    return None
