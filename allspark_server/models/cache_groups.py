"""Cache groups: layers whose cache keeps the same positions of a sequence form a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_GROUPS = 24  # more would make the tables of spans large


@dataclass(frozen=True)
class CacheGroup:
    """What the cache keeps for a group of layers. kind: "full"; "sliding" (the last `window` positions); "latent" or
    "recurrent".
    """

    kind: str = "full"
    window: int = 0


def place_rows(rows: Mapping[tuple[int, str], tuple[int, float]]
               ) -> tuple[list[CacheGroup], dict[tuple[int, str], tuple[int, int]]]:
    """The cache groups of rows of several kinds, and for each its group and its index within the group.

    rows: for each layer and kind, the number of last positions that are kept, 0 for all, and what a position takes. A
    group has rows with one window. As all groups have the same room, it is the least that makes up to MAX_GROUPS.
    """
    sizes = [size for _, size in rows.values()]
    room = max(sum(size for window, size in rows.values() if not window), *sizes)
    while len((found := _filled(rows, room))[0]) > MAX_GROUPS:
        room *= 1.03
    return found


def _filled(rows: Mapping[tuple[int, str], tuple[int, float]], room: float
            ) -> tuple[list[CacheGroup], dict[tuple[int, str], tuple[int, int]]]:
    """The same with groups of that room: each row, the largest first, is in the first group where it fits."""
    groups, left, places = list[CacheGroup](), list[float](), dict[tuple[int, str], tuple[int, int]]()
    for key in sorted(rows, key=lambda key: (rows[key][0], -rows[key][1])):
        window, size = rows[key]
        wanted = CacheGroup("sliding", window) if window else CacheGroup()
        at = next((i for i, group in enumerate(groups) if group == wanted and size <= left[i]), len(groups))
        if at == len(groups):
            groups.append(wanted)
            left.append(room)
        places[key] = at, sum(group == at for group, _ in places.values())
        left[at] -= size
    return groups, places


def place_layers(windows: tuple[int, ...], layers: int, without: tuple[int, ...] = (), latent: bool = False,
                 sizes: tuple[int, int] = (1, 1)) -> tuple[list[CacheGroup], list[tuple[int, int]]]:
    """The cache groups of a model, and for each layer its group and its index within the group.

    windows: of each layer, 0 for none; empty if no layer has one. without: layers that keep no positions (their places
    mean nothing). sizes: what a position takes in a layer without a window, and in one with a window.
    All groups allocate spans from one pool, so every group has the same room: what all layers of a kind take, of the
    kind that takes less, unless that makes more than MAX_GROUPS groups. A group holds as many layers as fit; the last
    group of a kind may hold fewer. All windows are kept at the size of the largest. latent: the layers have latent
    attention, without windows.
    """
    kept = [layer for layer in range(layers) if layer not in without]
    if not any(windows):
        only = CacheGroup("latent" if latent else "full")
        return [only], [(0, sum(other < layer for other in kept)) for layer in range(layers)]
    sliding = [layer for layer in kept if windows[layer]]
    full = [layer for layer in kept if not windows[layer]]
    kinds = [(kind, size) for kind, size in zip((full, sliding), sizes) if kind]

    def count(room: int) -> int:
        return sum(-(-len(kind) // (room // size)) for kind, size in kinds)

    least = max(min(len(kind) * size for kind, size in kinds), *sizes)
    rooms = sorted({n * size for kind, size in kinds for n in range(1, len(kind) + 1)} | {least})
    room = next((room for room in rooms if room >= least and count(room) <= MAX_GROUPS), rooms[-1])
    groups, places = [], [(0, 0)] * layers
    for kind, size, group in ((full, sizes[0], CacheGroup()), (sliding, sizes[1], CacheGroup("sliding", max(windows)))):
        for at, layer in enumerate(kind):
            if at % (room // size) == 0:
                groups.append(group)
            places[layer] = len(groups) - 1, at % (room // size)
    return groups, places
