"""Starts and supervises server groups.

`machine/` reads the machine's topology and places ranks, `group/` starts mpirun and supervises it, `pool/` manages
groups as systemd services, `bench/` measures, `commands/` holds the remaining subcommands of `allspark` (cli.py). What
a rank does once it runs is in `allspark_server/__main__.py`.
"""
from pathlib import Path


def resource_folder(name: str) -> Path:
    """The folder `systemd`, `monitoring` or `examples`: inside the installed package, or beside it in a source tree."""
    package = Path(__file__).resolve().parent
    return next(folder for folder in (package / name, package.parent / name) if folder.is_dir())
