"""Which layers share a cache group: those that keep the same positions of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

MOST_GROUPS = 16  # about


@dataclass(frozen=True)
class CacheGroup:
    """What the cache keeps of the layers that name it: kind is full, sliding (the last `window` positions), latent or
    recurrent.
    """

    kind: str = "full"
    window: int = 0


def place_layers(windows: tuple[int, ...], layers: int) -> tuple[list[CacheGroup], list[tuple[int, int]]]:
    """The cache groups of a model whose layers have these windows (0 for none; empty: none has one), and of each layer
    its group and its number there.

    Groups share spans, so all have room for as many layers: as there are with a window or without, whichever are fewer
    (or the tables would be too many). The last of a kind may have fewer. Windows of several sizes are kept as the
    largest is.
    """
    if not any(windows):
        return [CacheGroup()], [(0, layer) for layer in range(layers)]
    sliding = [layer for layer, window in enumerate(windows) if window]
    full = [layer for layer, window in enumerate(windows) if not window]
    size = max(min(len(kind) for kind in (full, sliding) if kind), -(-layers // MOST_GROUPS))
    groups, places = [], [(0, 0)] * layers
    for kind, group in ((full, CacheGroup()), (sliding, CacheGroup("sliding", max(windows)))):
        for at, layer in enumerate(kind):
            if at % size == 0:
                groups.append(group)
            places[layer] = len(groups) - 1, at % size
    return groups, places
