"""Constrained decoding: the output that a request's `response_format` allows becomes a token mask for each step.

A model's `Guide` compiles a response_format to a `Grammar`, after a trial in a process that may be killed (checker.py).
The grammar gives each sequence a `Matcher`. A `ReasoningBudget` ends long reasoning in the same way. `MaskWriter`
advances both and writes the masks of each step in a thread. Nothing here depends on requests or devices.
"""

from .checker import schema_of
from .grammar import CACHED_GRAMMARS, Grammar, Guidance, Guide, Matcher, MatcherError
from .masks import MaskWriter
from .reasoning import ReasoningBudget, ReasoningTokens

__all__ = ["CACHED_GRAMMARS", "Grammar", "Guidance", "Guide", "MaskWriter", "Matcher", "MatcherError",
           "ReasoningBudget", "ReasoningTokens", "schema_of"]
