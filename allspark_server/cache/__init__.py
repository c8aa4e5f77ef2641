"""The KV cache's bookkeeping: which span of the cache belongs to whom, and which spans hold a known prefix.

A span is `span_size` consecutive positions of one sequence, over all layers; here it is only a number. The memory
behind it belongs to the native executor. No tensors and no requests in this package.
"""

from .host_tier import Copies, HostTier
from .prefix_cache import PrefixCache
from .span_keys import SpanKeys, scope
from .span_pool import SpanPool

__all__ = ["Copies", "HostTier", "PrefixCache", "SpanKeys", "SpanPool", "scope"]
