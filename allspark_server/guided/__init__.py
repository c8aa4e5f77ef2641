"""Guided output: what a request's `response_format` allows becomes a mask over the vocabulary for each token.

`Guide` is a model's: it compiles a format (checked first in a process that may be killed, checker.py) to a `Grammar`,
which gives each sequence a `Matcher`. Nothing here knows requests, steps or devices.
"""

from .grammar import Grammar, Guide, Matcher, MatcherError

__all__ = ["Grammar", "Guide", "Matcher", "MatcherError"]
