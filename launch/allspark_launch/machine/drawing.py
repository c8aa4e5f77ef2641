"""`allspark topology --plot`: the machine and where its ranks are, as an SVG picture."""
from __future__ import annotations

from html import escape
from pathlib import Path

from .placement import Placement
from .topology import Node, Topology, format_list

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d")
_UNUSED, _ABSENT = "#d9d9d9", "#f4f4f4"
_CORE, _GAP, _MARGIN, _LINE = 34, 6, 20, 18     # pixels
_COLUMNS = 8                                    # cores in a row


class _Picture:
    """Shapes and texts in pixels, from the upper left corner."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self.width = self.height = 0.0

    def box(self, x: float, y: float, width: float, height: float, fill: str, title: str = "") -> None:
        """A rectangle. `title` is shown when the pointer is over it."""
        inner = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" '
                           f'stroke="#555">{inner}</rect>')
        self.width, self.height = max(self.width, x + width), max(self.height, y + height)

    def text(self, x: float, y: float, text: str, size: int = 12, anchor: str = "start", bold: bool = False) -> None:
        """A line of text on the base line y."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight}>'
                           f"{escape(text)}</text>")
        self.height = max(self.height, y + size / 2)
        if anchor == "start":
            self.width = max(self.width, x + 0.62 * size * len(text))

    def svg(self) -> str:
        """The file's text."""
        width, height = self.width + _MARGIN, self.height + _MARGIN
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
                f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">\n<rect width="100%" height="100%" '
                'fill="white"/>\n' + "\n".join(self._parts) + "\n</svg>\n")


def draw(machine: Topology, placement: Placement) -> str:
    """The text of an SVG file: nodes with cores, caches, memory and GPUs, ranks' threads in colours, distances."""
    picture = _Picture()
    rank_of = {cpu: rank.rank for rank in placement.ranks for cpu in rank.cpus}
    x, bottom = float(_MARGIN), 0.0
    for node in machine.nodes:
        width, height = _node(picture, machine, node, placement, rank_of, x)
        x, bottom = x + width + _MARGIN, max(bottom, height)
    _distances(picture, machine, bottom + 2 * _MARGIN)
    return picture.svg()


def save(path: str, machine: Topology, placement: Placement) -> None:
    """Writes the picture. Raises ValueError unless the file's name ends in .svg."""
    if not path.endswith(".svg"):
        raise ValueError(f"--plot {path}: the picture is an SVG file; its name must end in .svg")
    Path(path).write_text(draw(machine, placement), encoding="utf-8")


def _node(picture: _Picture, machine: Topology, node: Node, placement: Placement, rank_of: dict[int, int],
          x: float) -> tuple[float, float]:
    """Draws a node at x; returns its width and its lower edge."""
    cores = node.cores or []
    width: float = max(min(len(cores), _COLUMNS), 6) * (_CORE + _GAP) + _GAP
    top = float(_MARGIN)
    lines = [f"memory {node.memory_total / 2**30:.1f} GiB, {node.memory_free / 2**30:.1f} free" if node.has_memory
             else "no memory", *(f"L{c.level} {c.size // 1024:,} KiB for CPUs {format_list(c.cpus)}"
                                 for c in machine.caches_of(node))]
    lines += [f"GPU {gpu.index if gpu.index >= 0 else '-'} {gpu.model} {gpu.address}".replace("  ", " ")
              for gpu in machine.gpus if gpu.node == node.id]
    lines += [f"rank {rank.rank}: {len(rank.cpus)} threads"
              + (f", memory of node {rank.memory_node}" if rank.memory_node not in (None, node.id) else "")
              for rank in placement.ranks if rank.node == node.id]
    rows = -(-len(cores) // _COLUMNS)
    height = 2 * _LINE + rows * (_CORE + _GAP) + len(lines) * _LINE
    width = max(width, 2 * _GAP + 0.62 * 11 * max(map(len, lines)))
    picture.box(x, top, width, height, _ABSENT if not cores else "#ffffff")
    picture.text(x + _GAP, top + _LINE, f"node {node.id}", 14, bold=True)
    for i, core in enumerate(cores):
        ranks = sorted({rank_of[cpu] for cpu in core.cpus if cpu in rank_of})
        left = x + _GAP + i % _COLUMNS * (_CORE + _GAP)
        upper = top + 1.5 * _LINE + i // _COLUMNS * (_CORE + _GAP)
        fill = _COLOURS[ranks[0] % len(_COLOURS)] if ranks else _UNUSED
        picture.box(left, upper, _CORE, _CORE, fill, f"core {core.core_id} of package {core.package}, CPUs "
                    f"{format_list(core.cpus)}" + (f", rank {', '.join(map(str, ranks))}" if ranks else ", no thread"))
        picture.text(left + _CORE / 2, upper + _CORE / 2 + 4, str(core.cpus[0]), 11, "middle")
    for i, line in enumerate(lines):
        picture.text(x + _GAP, top + 2 * _LINE + rows * (_CORE + _GAP) + (i + 0.4) * _LINE, line, 11)
    return width, top + height


def _distances(picture: _Picture, machine: Topology, y: float) -> None:
    picture.text(_MARGIN, y, "distances between nodes (10: the node's own memory)", 12, bold=True)
    ids = [node.id for node in machine.nodes]
    longest = max((d for node in machine.nodes for d in node.distances.values()), default=10)
    for row, node in enumerate(machine.nodes):
        picture.text(_MARGIN, y + 34 + row * 26, str(node.id), 12)
        for column, other in enumerate(ids):
            distance = node.distances.get(other, 0)
            shade = 255 - int(140 * (distance - 10) / max(1, longest - 10)) if distance else 244
            left = _MARGIN + 30 + column * 40
            picture.box(left, y + 16 + row * 26, 36, 24, f"rgb({shade},{shade},255)")
            picture.text(left + 18, y + 33 + row * 26, str(distance) if distance else "-", 11, "middle")
