"""Cache groups: layers whose cache keeps the same positions of a sequence form a group."""

from __future__ import annotations

from dataclasses import dataclass

MAX_GROUPS = 16  # roughly; more would make the tables of spans large


@dataclass(frozen=True)
class CacheGroup:
    """What the cache keeps for a group of layers. kind: "full"; "sliding" (the last `window` positions); "latent" or
    "recurrent".
    """

    kind: str = "full"
    window: int = 0


def place_layers(windows: tuple[int, ...], layers: int,
                 without: tuple[int, ...] = (), latent: bool = False) -> tuple[list[CacheGroup], list[tuple[int, int]]]:
    """The cache groups of a model, and for each layer its group and its index within the group.

    windows: of each layer, 0 for none; empty if no layer has one. without: layers that keep no positions (their places
    mean nothing). All groups allocate spans from one pool, so every
    group has room for the same number of layers: the smaller one of the number of layers with a window and of those
    without, unless that makes more than MAX_GROUPS groups. The last group of a kind may hold fewer. All windows are
    kept at the size of the largest. latent: the layers have latent attention, without windows.
    """
    kept = [layer for layer in range(layers) if layer not in without]
    if not any(windows):
        only = CacheGroup("latent" if latent else "full")
        return [only], [(0, sum(other < layer for other in kept)) for layer in range(layers)]
    sliding = [layer for layer in kept if windows[layer]]
    full = [layer for layer in kept if not windows[layer]]
    size = max(min(len(kind) for kind in (full, sliding) if kind), -(-layers // MAX_GROUPS))
    groups, places = [], [(0, 0)] * layers
    for kind, group in ((full, CacheGroup()), (sliding, CacheGroup("sliding", max(windows)))):
        for at, layer in enumerate(kind):
            if at % size == 0:
                groups.append(group)
            places[layer] = len(groups) - 1, at % size
    return groups, places
