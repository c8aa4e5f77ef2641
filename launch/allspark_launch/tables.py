"""TOML and JSON files of options, with places for errors: file, line and key."""
from __future__ import annotations

import contextlib
import importlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

#: the path of a value: names of tables and keys, and indices into arrays of tables
Where = tuple["str | int", ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")


@dataclass
class Table:
    """The content of a file, and the lines of its keys as far as they are known."""

    path: str
    values: dict
    lines: dict[Where, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str) -> Table:
        """Reads a file: TOML if its name ends in .toml, else JSON. Raises ValueError (syntax) and OSError."""
        text = Path(path).read_text(encoding="utf-8")
        toml = str(path).endswith(".toml")
        try:
            values = _toml().loads(text) if toml else json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a table of options, not {type(values).__name__}")
        return cls(str(path), values, _toml_lines(text) if toml else {})

    def at(self, *where: str | int) -> str:
        """File and line of a key, or of the table that should contain it, for the beginning of an error."""
        for length in range(len(where), 0, -1):
            if (line := self.lines.get(where[:length])) is not None:
                return f"{self.path}, line {line}"
        return self.path

    def location(self, *where: str | int) -> Location:
        """The location of one of its tables."""
        return Location(self, where)


@dataclass
class Location:
    """The place of a table in a file, for errors. `name`: its name for people, such as "member 'a'"."""

    table: Table
    where: Where = ()
    name: str = ""

    def at(self, *keys: str | int) -> str:
        """The beginning of an error about a key of the table."""
        place = self.table.at(*self.where, *keys)
        return f"{place}: {self.name}" if self.name else place

    def inside(self, *where: str | int, name: str = "") -> Location:
        """The location of a table in this one."""
        return Location(self.table, (*self.where, *where), name or self.name)


def _toml() -> ModuleType:
    for name in ("tomllib", "tomli"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ValueError("TOML needs Python 3.11, or pip install tomli; JSON works everywhere")


def _toml_lines(text: str) -> dict[Where, int]:
    """The line of each header and key of a valid TOML text. A string of several lines may contain what looks like a
    key; such an extra entry does no harm.
    """
    lines: dict[Where, int] = {}
    counts: dict[Where, int] = {}       # of arrays of tables
    here: Where = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            here = ()
            names = _split(header[2])
            for i, name in enumerate(names):
                here = (*here, name)
                if i == len(names) - 1 and header[1] == "[[":
                    counts[here] = counts.get(here, -1) + 1
                if here in counts:
                    here = (*here, counts[here])
            lines.setdefault(here, number)
        elif key := _KEY.match(line):
            where = here
            for name in _split(key[1]):
                where = (*where, name)
                lines.setdefault(where, number)
    return lines


def _split(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in re.findall(r"""[\w-]+|"[^"]*"|'[^']*'""", dotted)]
