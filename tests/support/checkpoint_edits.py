"""Copies of checkpoints with a changed config.json or another header."""

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


def move_to_odd_addresses(path):
    """Makes the header of a safetensors file longer, so that its tensors begin at an odd address."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    spaces = b" " * (1 + length % 2)
    path.write_bytes((length + len(spaces)).to_bytes(8, "little") + data[8:8 + length] + spaces + data[8 + length:])
