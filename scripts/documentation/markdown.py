"""Small helpers that write Markdown."""
from __future__ import annotations

from collections.abc import Iterable, Sequence


def cell(text: object) -> str:
    """Text for a table cell: one line, with pipes and angle brackets escaped outside code spans (within them Markdown
    takes them as they are).
    """
    one_line = " ".join(str(text).split())
    parts = one_line.split("`")
    for i in range(0, len(parts), 2):       # outside code spans
        parts[i] = parts[i].replace("<", "&lt;").replace(">", "&gt;").replace("*", r"\*")
        parts[i] = parts[i].replace("|", r"\|")
    return "`".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def fenced(text: str, language: str = "text") -> str:
    """A code block."""
    return f"```{language}\n{text.strip(chr(10))}\n```"


def code(text: object) -> str:
    """A code span; empty text stays empty."""
    return f"`{text}`" if str(text) else ""
