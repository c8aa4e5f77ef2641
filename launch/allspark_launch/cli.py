"""The `allspark` command: its parser, and its exit status."""
from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

from allspark_server import logs

from . import bench
from .commands import Handler, batch, convert, doctor, fastchat_worker, http, pool, run, serve, top, topology
from .group.mpi import MpiNotFound
from .group.supervisor import GroupFailed
from .tables import Table

EXIT_ERROR = 1
#: of services: every further start would fail alike (EX_CONFIG of sysexits.h; the systemd units know it)
EXIT_CONFIG = 78
SERVICES = ("serve", "http")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parsed = build_parser().parse_args(arguments)
    logs.set_up("allspark", os.environ.get("ALLSPARK_LOG", "INFO"), _log_format(parsed))
    from allspark_client.errors import AllSparkError
    try:
        return parsed.handler(parsed) or 0
    except (ValueError, TypeError, OSError, MpiNotFound, GroupFailed, AllSparkError, RuntimeError) as error:
        print(f"allspark {parsed.command}: {error}", file=sys.stderr)
        repeats = (error.misconfigured if isinstance(error, GroupFailed) else
                   isinstance(error, (ValueError, TypeError, MpiNotFound, FileNotFoundError, PermissionError)))
        return EXIT_CONFIG if parsed.command in SERVICES and repeats else EXIT_ERROR
    except KeyboardInterrupt:
        return 130


def _log_format(parsed: argparse.Namespace) -> str:
    """The format of a service's own log. Errors in its configuration file are reported later."""
    given = getattr(parsed, "log_format", None)
    if given or parsed.command not in SERVICES or not parsed.config:
        return given or "text"
    with contextlib.suppress(OSError, ValueError):
        return str(Table.read(parsed.config).values.get("log_format", "text"))
    return "text"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="allspark",
        description="LLM inference with one pinned server process per NUMA node, behind a thin gRPC client.",
        epilog="Every command explains itself: allspark COMMAND --help. Start with: allspark run \"Tell me a story.\"")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, handler: Handler | None, summary: str, /, **details: Any) -> argparse.ArgumentParser:
        p = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".",
                                formatter_class=argparse.RawDescriptionHelpFormatter, **details)
        p.set_defaults(handler=handler)
        return p

    for module in (run, serve, convert, topology, doctor, pool, top, bench, http, batch, fastchat_worker):
        module.add_command(command)
    return parser
