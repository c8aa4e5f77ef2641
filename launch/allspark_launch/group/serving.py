"""Runs a group in the foreground: its supervisor, its HTTP server, its agents on other hosts, its signals."""
from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from allspark_server import access
from allspark_server.runtime.hosts import SECRET_FILE, new_secret
from allspark_server.runtime.reservations import CpuReservation
from allspark_server.signals import Signals

from ..options import RELOADABLE, UNIT_KEY, GroupOptions
from ..output import unblocked, write_whole
from .folders import make_again, private_folder, remove_stale, short_parent, trusted
from .http_server import HttpServer
from .incarnation import Start
from .mpi import clean_environment
from .notify import Notifier
from .plan import GroupPlan, agents_of, plan_group
from .supervisor import Supervisor

logger = logging.getLogger(__name__)


def supervise(options: GroupOptions, *, ready_file: str = "", report_file: str = "", parent_pid: int = 0,
              show: Callable[[GroupPlan], None] | None = None,
              on_progress: Callable[[str, float], None] | None = None,
              reread: Callable[[], GroupOptions] | None = None) -> None:
    """Runs a group in the foreground until SIGTERM, SIGINT or the end of the parent. Raises GroupFailed.

    show: called with the plan before anything starts.
    on_progress: gets a model's name and the part of it that is loaded.
    report_file: gets the options that the group runs with, as JSON.
    reread: the options as they are now, for SIGHUP; without it SIGHUP stops the group.
    """
    if options.token_file:      # errors in it are reported before anything starts
        access.read_tokens(options.token_file)
    access.ModelRoots(options.model_root)
    notifier = Notifier.from_environment(os.environ)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(unblocked())
        if parent_pid:      # a parent that was killed leaves its folder behind
            for parent in dict.fromkeys((short_parent(), tempfile.gettempdir(), "/tmp")):
                stack.callback(remove_stale, parent)
        runtime_dir = stack.enter_context(private_folder(short_parent()))
        options = replace(options, state_file=options.state_file or str(runtime_dir / "state.json"))
        inner = f"unix:{runtime_dir}/inner"     # for its own programs, whichever addresses clients get
        shared_memory: Path | None = None
        server = None
        if options.http:
            counters = runtime_dir / "http"
            counters.mkdir()
            server = HttpServer(options.http_options(inner), counters)
            stack.callback(server.close)
        agents = stack.enter_context(agents_of(options))
        reserved = stack.enter_context(contextlib.closing(CpuReservation()))
        first: list[GroupPlan] = [plan_group(options, inner, agents=agents, reserved=reserved)]
        if show is not None:
            show(first[0])

        mpi = first[0].mpi

        def start(owed: int) -> Start:
            nonlocal shared_memory
            # Planned anew for each incarnation: CPUs, nodes and limits may have changed.
            plan = first.pop() if first else plan_group(options, inner, owed, agents, mpi, reserved)
            for warning in plan.placement.warnings:
                logger.warning("%s", warning)
            environment = {**clean_environment(str(runtime_dir)), **plan.environment,
                           "ALLSPARK_PLACEMENT": "\n".join(plan.describe())}
            # Folders are made anew if they were removed: logind does that when a user logs out (RemoveIPC).
            if not runtime_dir.is_dir():
                stack.callback(os.close, make_again(runtime_dir))
            if agents is not None:
                agents.secret = new_secret()
                write_whole(runtime_dir / SECRET_FILE, agents.secret, 0o600)
            if (shared_memory is None or not shared_memory.is_dir()) and trusted("/dev/shm"):
                # MPI's shared memory in a folder of ours: files that a killed rank leaves there are found and removed.
                shared_memory = stack.enter_context(private_folder("/dev/shm"))
            if shared_memory is not None:
                environment["ALLSPARK_SHARED_MEMORY"] = str(shared_memory)
            return Start(plan.words, environment, len(plan.placement.ranks), shared_memory)

        def reload() -> None:
            nonlocal options
            assert reread is not None
            fresh = reread()
            fresh = replace(fresh, state_file=fresh.state_file or options.state_file)
            if fresh.token_file == options.token_file and fresh.token_file:
                access.read_tokens(fresh.token_file)
            taken = {name: getattr(fresh, name) for name in RELOADABLE}
            # First what can fail, such as a full disk: then nothing has changed.
            write_whole(runtime_dir / "reload.json", json.dumps(taken))
            left = [name for name, value in asdict(fresh).items()
                    if name not in RELOADABLE and value != getattr(options, name)]
            if left:
                logger.warning("what has changed here needs a restart: %s", ", ".join(left))
            if server is not None and fresh.log_level != options.log_level:
                server.reload(replace(options, **taken).http_options(inner))
            options = replace(options, **taken)
            supervisor.drain_limit = options.drain_limit
            _report(report_file, options)
            logger.info("the configuration was read again")

        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:       # nohup ignores it
            numbers.append(signal.SIGHUP)
        signals = Signals(*numbers)
        stack.callback(signals.close)
        supervisor = Supervisor(start, runtime_dir, ready_file=Path(ready_file) if ready_file else None,
                                parent_pid=parent_pid, on_output=output.write, on_progress=on_progress, signals=signals,
                                on_reload=reload if reread is not None else None, notifier=notifier,
                                drain_limit=options.drain_limit, agents=agents)
        _report(report_file, options)
        if server is not None:
            server.start()
        supervisor.run()


def _report(file: str, options: GroupOptions) -> None:
    """Reports what the group runs with: to `allspark pool apply`, which compares it with what it should be."""
    if not file:
        return
    report = {"options": replace(options, state_file="").changed(), UNIT_KEY: os.environ.get(UNIT_KEY, "")}
    try:
        write_whole(Path(file), json.dumps(report, indent=1) + "\n", 0o644)
    except OSError as error:
        logger.error("the report %s cannot be written: %s", file, error.strerror)
