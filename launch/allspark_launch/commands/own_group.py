"""Starts a group for one command: `allspark run`, `allspark batch`, `allspark fastchat-worker`."""
from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ..group.background import background_group, shipped_model
from ..options import PLACEMENT, ModelOptions, add_flags, model_config
from .serve import show_progress

#: tokens of one short conversation, and of each image in it
_CONVERSATION, _IMAGE = 2048, 4096


def add_group_flags(p: argparse.ArgumentParser) -> None:
    """Adds the flags that own_group reads, apart from --model and --verbose."""
    add_flags(p, PLACEMENT)
    add_flags(p, ModelOptions)


@contextlib.contextmanager
def own_group(parsed: argparse.Namespace) -> Iterator[str]:
    """A group that runs the model of the flags, for the length of a with block; yields its address."""
    model = model_config(parsed, parsed.model or str(shipped_model()))
    if parsed.max_length is None:       # do not reserve more than one short conversation needs
        wanted = _CONVERSATION + _IMAGE * len(getattr(parsed, "image", []))
        model.setdefault("engine_max_length", _positions(Path(model["model_path"]), wanted))
    arguments = ["--model", model["model_path"], "--model-name", model["model_name"]]
    for key, value in model.items():
        if key not in ("model_path", "model_name"):
            arguments += ["--set", f"{key}={json.dumps(value)}"]
    for declared in PLACEMENT:
        arguments += declared.words(getattr(parsed, declared.name))
    progress = show_progress if sys.stderr.isatty() else None
    with background_group(arguments, verbose=parsed.verbose, on_progress=progress) as group:
        yield group.addresses[0]


def _positions(path: Path, most: int) -> int:
    """The context length of a checkpoint, at most `most`."""
    try:
        config = json.loads((path / "config.json").read_text())
        positions = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return most         # an error in the checkpoint is reported when it is loaded
    return min(positions, most) if isinstance(positions, int) and positions > 0 else most
