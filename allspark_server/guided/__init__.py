"""Guided output: what a request's `response_format` allows becomes a mask over the vocabulary for each token.

`Guide` is a model's: it compiles a format (checked first in a process that may be killed, checker.py) to a `Grammar`,
which gives each sequence a `Matcher`; `MaskWriter` is the thread that keeps these and writes the masks of each step.
Nothing here knows requests or devices.
"""

from .checker import schema_of
from .grammar import Grammar, Guide, Matcher, MatcherError
from .masks import Guidance, MaskWriter

__all__ = ["Grammar", "Guidance", "Guide", "MaskWriter", "Matcher", "MatcherError", "schema_of"]
