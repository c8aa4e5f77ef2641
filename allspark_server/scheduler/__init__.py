"""Decides what each step computes. Knows token ids, spans and slots; no tensors, no threads, no text.

`Scheduler.plan()` gives the next step, before the results of those that run; `Scheduler.complete()` takes what the
oldest one has drawn.
"""

from .prompt_outputs import PromptOutputRows, PromptOutputs
from .quarantine import QuarantineScheduler
from .scheduler import Scheduler
from .sequence import NO_ADAPTER, TOKEN_BYTES, FinishReason, Sequence, State, StopRules
from .step import Counters, Limits, Masked, Outcome, Step, StepResult
from .token_budget import TokenBudget

__all__ = [
    "NO_ADAPTER",
    "TOKEN_BYTES",
    "Counters",
    "FinishReason",
    "Limits",
    "Masked",
    "Outcome",
    "PromptOutputRows",
    "PromptOutputs",
    "QuarantineScheduler",
    "Scheduler",
    "Sequence",
    "State",
    "Step", "StepResult",
    "StopRules",
    "TokenBudget",
]
