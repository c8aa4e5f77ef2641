"""Tables of measured figures, made from benchmarks/results/*.json; README has some of them between marks."""
from __future__ import annotations

import json
import re
import textwrap
from typing import Any

from .markdown import cell, table
from .paths import RESULTS, ROOT

#: what every file and every cell must have, and what a cell may have
HEAD = ("title", "machine", "date", "commit", "model", "unit", "better", "peer", "command", "remarks", "cells")
CELL = ("row", "column", "value")
OPTIONAL = ("ceiling", "peer", "peer_name", "better")
#: the unit of a file whose values are ratios
RATIO = "times the peer"
_MARK = re.compile(r"(<!-- figures: ([\w.-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def names() -> list[str]:
    """The names of all result files."""
    return sorted(path.stem for path in RESULTS.glob("*.json"))


def read(name: str) -> dict[str, Any]:
    """One result file. Raises ValueError if it lacks something or has something unknown."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    missing = set(HEAD) - set(result)
    unknown = set(result) - {*HEAD, "ceiling"}
    for at, one in enumerate(result.get("cells", ())):
        missing |= {f"cells[{at}].{key}" for key in CELL if key not in one}
        unknown |= {f"cells[{at}].{key}" for key in one if key not in (*CELL, *OPTIONAL)}
    if missing or unknown:
        raise ValueError(f"{name}.json lacks {sorted(missing)}, and has the unknown {sorted(unknown)}")
    return result


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _entry(one: dict[str, Any], better: str) -> str:
    """A figure, with the peer's and how many times better this engine is."""
    if one.get("peer") is None:
        return _number(one["value"]) if better != RATIO else f"**{one['value']:.2f}**"
    lower = one.get("better", better) == "lower"
    ratio = one["peer"] / one["value"] if lower else one["value"] / one["peer"]
    return f"{_number(one['value'])} : {_number(one['peer'])} = **{ratio:.2f}**"


def grid(name: str) -> str:
    """The table alone: a row for each `row`, a column for each `column`."""
    result = read(name)
    rows = list(dict.fromkeys(one["row"] for one in result["cells"]))
    columns = list(dict.fromkeys(one["column"] for one in result["cells"]))
    better = RATIO if result["unit"] == RATIO else result["better"]
    entries = {(one["row"], one["column"]): _entry(one, better) for one in result["cells"]}
    body = [(row, *(entries.get((row, column), "") for column in columns)) for row in rows]
    head = "" if "column says" in result["unit"] else result["unit"]
    return table((head, *columns), body).replace(r"\*\*", "**")


def caption(name: str) -> str:
    """Where, when and beside whom the figures of a table were measured."""
    result = read(name)
    what = "this engine's speed ÷ the peer's" if result["unit"] == RATIO else "this engine : peer = times better"
    beside = f" Entries are {what}; the peer is {result['peer']}." if result["peer"] else ""
    return f"{result['model']}. {result['machine']}. {result['date']}, commit {result['commit']}.{beside}"


def _roofline(name: str) -> str:
    result = read(name)
    found: dict[str, list[str]] = {}
    for one in result["cells"]:
        if one.get("ceiling") is not None:
            found.setdefault(one["row"], []).append(f"{one['column']} {one['ceiling']:g}")
    if not found:
        return ""
    rows = [(row, "; ".join(parts)) for row, parts in found.items()]
    return f"Part of the measured roofline ({result['ceiling']}):\n\n{table(('', 'Part'), rows)}"


def table_of(name: str) -> str:
    """Everything about one result file, for the page of figures."""
    result = read(name)
    parts = [f"## {result['title']}", caption(name), grid(name), _roofline(name),
             *(cell(remark) for remark in result["remarks"]),
             f"Command: `{result['command']}`. Data: `benchmarks/results/{name}.json`."]
    return "\n\n".join(part for part in parts if part)


def readme(text: str) -> str:
    """README's text with the tables between its marks made anew."""
    def fill(match: re.Match[str]) -> str:
        text = textwrap.fill(caption(match[2]), 118, break_on_hyphens=False)
        return f"{match[1]}{grid(match[2])}\n\n{text}\n{match[3]}"
    return _MARK.sub(fill, text)


def write_readme() -> None:
    """Writes README's tables."""
    path = ROOT / "README.md"
    path.write_text(readme(path.read_text()))
