"""DashInfer's environment variables that have no effect here. Values that would enable something are rejected."""
from __future__ import annotations

import os

from .errors import not_available

_OFF = ("", "0", "0.0", "off", "false", "no")
#: by variable: the values that enable nothing, and what to use instead
_WITHOUT_EFFECT: dict[str, tuple[tuple[str, ...], str]] = {
    "CPU_CACHE_RATIO": (_OFF, "set cache_memory in AsModelConfig"),
    "AS_PROFILE": (_OFF, "get_op_profiling_info needs no switch"),
    "ALLSPARK_TIME_LOG": (_OFF, "see get_op_profiling_info, and RequestStatInfo of a result queue"),
    "ALLSPARK_DISABLE_WARMUP": (("", "1"), "there is no warm-up: leave it unset, or set it to 1"),
}


def check_environment() -> None:
    """Raise ALLSPARK_INVALID_CALL_ERROR if a variable would enable something that this project does not have."""
    for name, (neutral, instead) in _WITHOUT_EFFECT.items():
        value = os.environ.get(name, "")
        if value.strip().lower() not in neutral:
            raise not_available(f"the environment's {name}={value} ({instead})")
