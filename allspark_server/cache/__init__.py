"""The KV cache's bookkeeping: which sequence each span of the cache belongs to, and which spans hold a known prefix.

A span is `span_size` consecutive positions of one sequence in all layers of a cache group. In this package it is only a
number: the native executor owns its memory. The package uses no tensors and knows no requests.
"""

from .host_cache import Copies, HostCache
from .prefix_cache import PrefixCache
from .span_groups import NO_SPAN, STATE_STEP, SpanGroups
from .span_keys import SpanKeys, in_group, of_state, scope
from .span_pool import SpanPool
from .states import StateCheckpoints, StateCopies

__all__ = ["NO_SPAN", "STATE_STEP", "Copies", "HostCache", "PrefixCache", "SpanGroups", "SpanKeys", "SpanPool",
           "StateCheckpoints", "StateCopies", "in_group", "of_state", "scope"]
