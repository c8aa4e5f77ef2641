"""Copies of checkpoints with a changed config.json."""

from __future__ import annotations

import json


def edit_config(directory, **changes):
    values = json.loads((directory / "config.json").read_text())
    for name, value in changes.items():
        if value is ...:
            values.pop(name)
        else:
            values[name] = value
    (directory / "config.json").write_text(json.dumps(values))
