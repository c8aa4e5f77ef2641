"""What kernels cost on a GPU, in nanoseconds. They are measured when a process first uses such a GPU, and kept in a
file.

The choice among kernels follows them. Kernels of one choice give the same bits, so ranks and starts may differ in what
they have measured.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

from allspark_client.version import __version__
from allspark_server.runtime import measured
from allspark_server.runtime.native import DeviceLost

VARIABLE = "ALLSPARK_GPU_COSTS"
OFF = "off"
_DEFAULTS: dict[str, Any] = {}    # for Executor(): those of an H100

logger = logging.getLogger(__name__)
_known: dict[str, dict[str, Any]] = {}    # of this process' GPUs


def chip_costs(library: Any, index: int) -> dict[str, Any]:
    """The costs that Executor() takes for a GPU. They are those of an H100 if they cannot be measured, or if something
    else uses the GPU meanwhile; then a warning says so.
    """
    if os.environ.get(VARIABLE) == OFF:
        return _DEFAULTS
    key = key_of(library, index)
    name = json.dumps(key)
    if name not in _known:
        _known[name] = _found(library, index, key)
    return _known[name]


def key_of(library: Any, index: int) -> dict[str, Any]:
    """What costs belong to: a GPU, its driver, and this version's kernels."""
    limits = library.chip_limits(index)
    return {"version": library.COSTS_VERSION, "package": __version__, "driver": library.driver_version(),
            "pretended": os.environ.get("ALLSPARK_TEST_CAPABILITY", ""),
            **{field: limits[field] for field in ("name", "uuid", "capability", "sms", "clock", "memory")}}


def kept_costs(library: Any, index: int) -> tuple[Path, dict[str, Any] | None]:
    """The file of a GPU's costs, and what it holds; None if there are none for this version."""
    key = key_of(library, index)
    return _path(key), _read(library, index, key)


def _found(library: Any, index: int, key: dict[str, Any]) -> dict[str, Any]:
    with measured.locked(_path(key)):
        kept = _read(library, index, key)
        if kept is not None:
            return kept
        began = time.monotonic()
        try:
            costs, doubt = library.measure_costs(index)
        except DeviceLost:
            raise
        except RuntimeError as error:
            costs, doubt = {}, str(error)
        if doubt:
            logger.warning("GPU %d: what kernels cost cannot be measured (%s): they are chosen as for an H100", index,
                           doubt)
            return _DEFAULTS
        logger.info("GPU %d: measured what kernels cost in %.2f s: %s", index, time.monotonic() - began, costs)
        measured.write(_path(key), {"key": key, "costs": costs}, "the GPU's costs are measured at each start")
        return costs


def _path(key: dict[str, Any]) -> Path:
    name = "-".join(filter(None, (re.sub(r"\W+", "-", key["name"]), key["uuid"], key["pretended"])))
    return measured.folder(VARIABLE, "gpus") / f"{name}.json"


def _read(library: Any, index: int, key: dict[str, Any]) -> dict[str, Any] | None:
    """The costs in the file, if it belongs to the key."""
    path = _path(key)
    try:
        content = json.loads(path.read_bytes())
        if content["key"] != key:
            logger.info("%s is of another version, driver or GPU: its costs are measured anew", path)
            return None
        limits = library.chip_limits(index)
        bounds = {name: limits[name] for name in ("capability", "sms", "shared_bytes", "clock", "memory")}
        doubt = library.why_implausible(content["costs"], **bounds)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        doubt = str(error) or type(error).__name__
    if not doubt:
        return content["costs"]
    logger.warning("%s cannot be used (%s): the GPU's costs are measured anew", path, doubt)
    return None
