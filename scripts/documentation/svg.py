"""A few shapes of SVG: boxes with text, arrows and captions. Colours are readable in print and on a dark page."""
from __future__ import annotations

from html import escape

FONT = "font-family='ui-sans-serif, system-ui, sans-serif'"
FILLS = {"plain": "#f4f6fb", "caller": "#e3eefd", "engine": "#e5f5e8", "native": "#fdf0dd", "exchange": "#fbe3e4",
         "memory": "#efe7fa", "head": "#ffffff"}


class Drawing:
    """Shapes, and the size that they need."""

    def __init__(self, title: str):
        self._title, self._shapes = title, []
        self._width = self._height = 0.0

    def _grow(self, x: float, y: float) -> None:
        self._width, self._height = max(self._width, x + 12), max(self._height, y + 12)

    def text(self, x: float, y: float, text: str, size: int = 12, bold: bool = False, anchor: str = "start",
             colour: str = "#1c2430") -> None:
        """One line; (x, y) is its baseline."""
        weight = " font-weight='600'" if bold else ""
        self._shapes.append(f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{colour}' text-anchor='{anchor}'"
                            f"{weight} {FONT}>{escape(text)}</text>")
        self._grow(x + (len(text) * size * 0.52 if anchor == "start" else 0), y)

    def box(self, x: float, y: float, width: float, height: float, lines: list[str], fill: str = "plain") -> None:
        """A box; the first line is bold, the others are small."""
        self._shapes.append(f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='5' "
                            f"fill='{FILLS[fill]}' stroke='#8794a8'/>")
        top = y + (height - 15 * len(lines)) / 2 + 12
        for i, line in enumerate(lines):
            size, colour = (12, "#1c2430") if i == 0 else (11, "#4a5667")
            self.text(x + 10, top + 15 * i, line, size, i == 0, colour=colour)
        self._grow(x + width, y + height)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, text: str = "") -> None:
        """A straight arrow, with a caption beside its middle."""
        self._shapes.append(f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='#5b6a80' "
                            "stroke-width='1.4' marker-end='url(#head)'/>")
        if text:
            self.text((x1 + x2) / 2 + 6, (y1 + y2) / 2 - 4, text, 11, colour="#4a5667")
        self._grow(max(x1, x2), max(y1, y2))

    def svg(self) -> str:
        """The file's text."""
        body = "\n".join(self._shapes)
        return (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self._width:g} {self._height:g}' "
                f"width='{self._width:g}' role='img'>\n<title>{escape(self._title)}</title>\n"
                "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
                "orient='auto'><path d='M0 0 L8 4 L0 8 z' fill='#5b6a80'/></marker></defs>\n"
                f"<rect width='100%' height='100%' fill='#ffffff'/>\n{body}\n</svg>\n")
