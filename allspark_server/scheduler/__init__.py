"""Decides what each step computes. Knows token ids, spans and slots; no tensors, no threads, no text.

`Scheduler.plan()` gives the next step, before the results of those that run; `Scheduler.complete()` takes what the
oldest one has drawn.
"""

from .isolation import IsolatingScheduler
from .probe import Probe, Probed
from .scheduler import Scheduler
from .sequence import NO_ADAPTER, TOKEN_BYTES, FinishReason, Sequence, State, StopRules
from .step import Counters, Limits, Masked, Outcome, Step

__all__ = [
    "NO_ADAPTER", "TOKEN_BYTES", "Counters", "FinishReason", "IsolatingScheduler", "Limits", "Masked", "Outcome",
    "Probe", "Probed", "Scheduler", "Sequence", "State", "Step", "StopRules",
]
