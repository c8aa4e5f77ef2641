"""Decides what each step computes. Knows token ids, spans and slots; no tensors, no threads, no text.

`Scheduler.plan()` gives the next step, `Scheduler.complete()` takes its sampled tokens.
"""

from .scheduler import Limits, Outcome, Scheduler, Step
from .sequence import FinishReason, Sequence, State, StopRules

__all__ = ["FinishReason", "Limits", "Outcome", "Scheduler", "Sequence", "State", "Step", "StopRules"]
