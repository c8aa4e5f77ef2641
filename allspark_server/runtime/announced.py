"""What a rank announces before it loads a model: how many bytes it will take, and for what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Announced:
    """Bytes that a rank will take beside its cache, by their use.

    weights: all but routed experts; experts: its part of these. With a draft model or head, that one's too.
    states: recurrent states of all sequences. tower: weights and memory of the vision tower. messages: what a mixed
    group's ranks exchange; images: of the image cache. These two and host_cache are in the host's memory, even if the
    rank computes on a GPU. span_bytes: of one span of the cache. in_host_memory: the rank computes in the host's
    memory. streaming: of experts that a GPU copies from the memory of other ranks (runtime/expert_streams.py).
    """

    weights: int
    experts: int
    activations: int
    states: int
    tower: int
    messages: int
    images: int
    host_cache: int
    span_bytes: int
    in_host_memory: bool
    streaming: int = 0

    @property
    def on_host(self) -> int:
        """Bytes of the host's memory, whatever device computes."""
        return self.messages + self.images + self.host_cache

    @property
    def fixed(self) -> int:
        """Bytes of the memory that the rank computes in, without the cache."""
        own = self.weights + self.experts + self.activations + self.states + self.tower + self.streaming
        return own + self.on_host if self.in_host_memory else own
