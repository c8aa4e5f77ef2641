"""Configuration files of a pool, and the commands that read them."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


def toml() -> None:
    pytest.importorskip("tomllib") if sys.version_info >= (3, 11) else pytest.importorskip("tomli")


def words(tmp_path: Path, action: str, *more: str) -> list[str]:
    return ["pool", action, "--config", str(tmp_path / "pool.json"), "--unit-dir", str(tmp_path / "u"),
            "--config-dir", str(tmp_path / "c"), *more]


def write(tmp_path: Path, members: list[dict], **more) -> None:
    """Writes a pool file. Its members may share CPUs, because tests run on machines with few."""
    defaults = more.pop("defaults", {})
    if isinstance(defaults, dict):
        defaults = {"share_cpus": True, **defaults}
    (tmp_path / "pool.json").write_text(json.dumps({"user": "nobody", "member": members, "defaults": defaults, **more}))
