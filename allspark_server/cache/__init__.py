"""The KV cache's bookkeeping: which span of the cache belongs to whom, and which spans hold a known prefix.

A span is `span_size` consecutive positions of one sequence, over the layers of a cache group; here it is only a number.
The memory behind it belongs to the native executor. No tensors and no requests in this package.
"""

from .host_cache import Copies, HostCache
from .prefix_cache import PrefixCache
from .span_groups import NO_SPAN, SpanGroups
from .span_keys import SpanKeys, in_group, scope
from .span_pool import SpanPool

__all__ = ["NO_SPAN", "Copies", "HostCache", "PrefixCache", "SpanGroups", "SpanKeys", "SpanPool", "in_group",
           "scope"]
