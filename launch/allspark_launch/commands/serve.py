"""`allspark serve`: a group in the foreground."""
from __future__ import annotations

import argparse
import logging
import sys
import textwrap

from ..group.background import PROGRESS_MARK
from ..group.plan import GroupPlan, agents_of, plan_group
from ..group.serving import supervise
from ..options import RELOADABLE, GroupOptions, ModelOptions, ServeOptions, add_flags, group_options, options_of
from . import AddCommand

logger = logging.getLogger(__name__)

EPILOG = """\
The mpirun line is printed first; --dry-run prints only that. The group is supervised: when a rank dies or hangs, the
whole group is ended and started again with the models that were installed, including those that clients installed.

Each start of this command sets up the models of the flags and the configuration file as they are now: changed ones
are loaded again, removed ones are dropped, and those that clients had stopped or released are back. Models that
clients installed are kept in the state file. If one of them cannot be restored, the group serves the others, and its
health is NOT_SERVING until the model is installed or released. If a model of the configuration cannot be loaded, the
command ends.

With --hosts, an agent on each other host, started by ssh or srun, places ranks there and supervises them. allspark and
the models must have the same paths on all hosts. A host is lost if nothing is heard from it for 4 s. Its processes end
by themselves within 5 s; after 6 s the group starts again on the other hosts, with as many ranks as before if requests
wait to continue. Traffic between hosts is not encrypted and uses any port: give it a network of its own.

exit status: 0 after a requested stop; 78 if the group has not served yet, and every further start would fail until the
configuration, or a file that it names, is changed; 1 if the group could not be kept running.

Access: file permissions guard a Unix socket. A TCP address needs TLS, with a token or a client's certificate; on
127.0.0.1 a token is enough. A token file has a line 'ROLE TOKEN' for each token. Roles: read (information), generate
(also requests), admin (everything). A file with one token alone gives it the role admin.

examples:
  allspark serve --model ~/Qwen2.5-7B-Instruct --numa-nodes 0,1
  allspark serve --model ~/Qwen2.5-7B-Instruct --address 0.0.0.0:50051 --token-file tokens \\
      --tls-cert cert.pem --tls-key key.pem
  allspark serve --model ~/Qwen2.5-72B-Instruct --hosts node1,node2
  allspark serve --config group.toml

keys of the configuration file (TOML or JSON): models is a list of directories, or of tables of AsModelConfig's fields;
the others are named as the flags are:
"""


def add_command(command: AddCommand) -> None:
    """Adds `serve` to the parser."""
    p = command("serve", serve, "run a group in the foreground, until SIGTERM or Ctrl-C", epilog=EPILOG + _keys())
    for declared in (ServeOptions, GroupOptions, ModelOptions):
        add_flags(p, declared)


def _keys() -> str:
    """The keys of the configuration file, and which of them SIGHUP changes."""
    lines = textwrap.fill(", ".join(declared.name for declared in options_of(GroupOptions)), 118, initial_indent="  ",
                          subsequent_indent="  ")
    return (f"{lines}\nSIGHUP reads the file again: {' and '.join(RELOADABLE)} take effect at once, the other keys at "
            "the next start.\nToken files are read again whenever they change.")


def serve(parsed: argparse.Namespace) -> int:
    """Runs the command."""
    group = group_options(parsed)
    if parsed.dry_run:
        with agents_of(group) as agents:
            plan = plan_group(group, agents=agents)
        print(plan.line)
        for warning in plan.placement.warnings:
            logger.warning("%s", warning)
        return 0

    def show(plan: GroupPlan) -> None:
        print(plan.line, flush=True)
        for line in plan.describe():
            logger.info("%s", line)

    progress = print_progress if parsed.progress_lines else show_progress if sys.stderr.isatty() else None
    supervise(group, ready_file=parsed.ready_file or "", report_file=parsed.report_file or "",
              parent_pid=parsed.parent_pid, show=show, on_progress=progress,
              reread=(lambda: group_options(parsed)) if parsed.config else None)
    return 0


def show_progress(name: str, part: float) -> None:
    """Shows a bar on the terminal until the model is loaded."""
    bar = "#" * round(30 * part)
    sys.stderr.write("\r\033[K" if part >= 1 else f"\rloading {name} [{bar:<30}] {100 * part:3.0f} %")
    sys.stderr.flush()


def print_progress(name: str, part: float) -> None:
    """Reports the progress to the process that started this one; see background_group."""
    sys.stdout.buffer.write(PROGRESS_MARK + f"{part:.4f} {name}\n".encode())
    sys.stdout.flush()
