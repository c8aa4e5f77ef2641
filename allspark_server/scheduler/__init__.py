"""Decides what each step computes. It deals in token ids, spans and slots, not in tensors, threads or text.

`Scheduler.plan()` returns the next step before the results of running steps are known; `Scheduler.complete()` takes the
results of the oldest one.
"""

from .prediction import PredictedText, Prediction
from .prompt_images import PlacedImage, PromptImages
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
    "PlacedImage",
    "PredictedText",
    "Prediction",
    "PromptImages",
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
