"""From options to a running group: placement, command line, supervisor; and a group in the background for commands
that need one for a moment.
"""
from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import allspark_server
from allspark_server import access
from allspark_server.runtime.binding import GROUP_GPUS

from ..machine.gpus import ORDER
from ..machine.placement import Placement, place, place_on_gpus
from ..machine.topology import Topology, format_list, read_topology
from ..options import GroupOptions
from ..output import unblocked
from .agents import Agents
from .folders import private_folder, remove_stale, short_parent, trusted
from .hosts import find_hosts, share_ranks
from .http_server import HttpServer
from .mpi import Installation, clean_environment, find_mpi, group_command, mpi_environment, shell_line
from .notify import Notifier
from .supervisor import Start, Supervisor

logger = logging.getLogger(__name__)

PROGRESS_MARK = b"@progress "     # starts the lines by which a group in the background tells how far a load is
#: options of a group that runs which `allspark serve` takes over when it is told to reload; others need a restart
RELOADABLE = ("drain_limit", "log_level")
ASSETS = Path(allspark_server.__file__).resolve().parent / "assets"


@dataclass
class GroupPlan:
    """Everything that starting a group needs."""

    placement: Placement
    mpi: Installation
    words: list[str]
    environment: dict[str, str]     # additions to the environment

    @property
    def line(self) -> str:
        return shell_line(self.environment, self.words)

    def describe(self) -> list[str]:
        """One line for each rank: where it runs."""
        return [f"rank {r.rank}: {f'host {r.host}, ' if r.host else ''}{f'GPU {r.gpu}, ' if r.gpu is not None else ''}"
                f"NUMA node {r.node}, CPUs {format_list(r.cpus)}"
                + (f", memory of node {', '.join(map(str, r.memory_nodes))}" if r.memory_nodes else "")
                for r in self.placement.ranks]


def shipped_model() -> Path:
    """The directory of the model that ships with the package."""
    found = sorted(p.parent for p in ASSETS.glob("*/config.json"))
    if not found:
        raise ValueError(f"no model ships with this installation ({ASSETS} has none); name one with --model DIR")
    return found[0]


def _nodes_from(offset: str, ranks: int, nodes: list[int]) -> list[int]:
    """The NUMA nodes of $AS_NUMA_OFFSET, with one for each of so many ranks; of 0, all that follow."""
    if not offset.isdigit() or int(offset) not in nodes:
        raise ValueError(f"AS_NUMA_OFFSET is {offset!r}; it must be the first NUMA node that is used, of {nodes}")
    following = [node for node in nodes if node >= int(offset)]
    if ranks > len(following):
        raise ValueError(f"AS_NUMA_NUM={ranks} ranks from AS_NUMA_OFFSET={offset} on need as many NUMA nodes; there are "
                         f"{following}")
    return following[:ranks] if ranks else following


def _place_on_hosts(options: GroupOptions, topology: Topology, ranks: int, bind_memory: bool,
                    agents: Agents) -> Placement:
    """Ranks on this host and on the others that are there, each placed by its agent."""
    if options.gpus:
        raise ValueError("gpus: a group of GPUs on several hosts is not available yet")
    others = agents.connect()
    counts = share_ranks([sum(len(n.cores) for n in topology.nodes), *(a.hello["cores"] for a in others)],
                         [agents.own.ranks or len(options.numa_nodes or topology.default_nodes),
                          *(a.host.ranks or len(options.numa_nodes or ()) or a.hello["nodes"] for a in others)], ranks)
    how = {"nodes": options.numa_nodes, "cpus_per_rank": options.cpus_per_rank, "use_siblings": options.use_siblings,
           "memory_nodes": options.memory_nodes}
    result = place(topology, counts[0], **how)
    if not bind_memory:
        result.ranks = [replace(rank, memory_node=None) for rank in result.ranks]
    for agent, count in zip(others, counts[1:]):
        if count:
            found = agents.place(agent, ranks=count, first=len(result.ranks), strict=options.strict, **how)
            result.ranks += found.ranks
            result.warnings += found.warnings
            result.oversubscribed |= found.oversubscribed
    return result


@contextlib.contextmanager
def agents_of(options: GroupOptions) -> Iterator[Agents | None]:
    """The agents of the other hosts that the options name, for the length of a with block."""
    agents = Agents(find_hosts(options.hosts, options.remote_shell)) if options.hosts else None
    try:
        yield agents
    finally:
        if agents is not None:
            agents.close()


def plan_group(options: GroupOptions, inner: str = "", keep: int = 0, agents: Agents | None = None) -> GroupPlan:
    """Placement and command line. ValueError or MpiNotFound says what cannot be met. `inner`: a Unix socket that is
    served, too, for the supervisor's programs. `keep`: there must be so many ranks, several on a node if need be:
    others could not continue the requests of a group that was lost; where there is no way to place them, there are as many as
    the options say. agents: of the other hosts that the options name.
    """
    from allspark_client.environment import check_environment
    from allspark_server.runtime.binding import memory_policy_allowed
    check_environment()
    if keep:
        try:
            return plan_group(replace(options, ranks=keep), inner, agents=agents)
        except ValueError as error:
            logger.error("the lost group's requests will end: its %d ranks cannot be placed again: %s", keep, error)
    ranks = options.ranks
    if options.gpus:
        if ranks not in (0, len(options.gpus)):
            raise ValueError(f"ranks={ranks} and gpus={options.gpus}: there is one rank for each GPU")
        ranks = len(options.gpus)
    if not ranks and options.numa_nodes is None and os.environ.get("AS_NUMA_NUM"):
        text = os.environ["AS_NUMA_NUM"]
        if not text.isdigit() or int(text) < 1:
            raise ValueError(f"AS_NUMA_NUM is {text!r}; it must be the number of ranks, at least 1")
        ranks = int(text)
    numa_nodes, topology = options.numa_nodes, read_topology()
    if not options.ranks and numa_nodes is None and os.environ.get("AS_NUMA_OFFSET", "0") != "0":
        numa_nodes = _nodes_from(os.environ["AS_NUMA_OFFSET"], ranks, [node.id for node in topology.nodes if node.cpus])
    bind_memory = memory_policy_allowed()
    if agents is not None:
        placement = _place_on_hosts(replace(options, numa_nodes=numa_nodes), topology, ranks, bind_memory, agents)
    elif options.gpus and numa_nodes is None:
        from allspark_server.runtime.device import SHARED_GPUS
        placement = place_on_gpus(topology, options.gpus, options.cpus_per_rank, options.use_siblings,
                                  os.environ.get(SHARED_GPUS) == "1")
    else:
        placement = place(topology, ranks, numa_nodes, options.cpus_per_rank, options.use_siblings,
                          options.memory_nodes)
    if not bind_memory and options.strict:
        raise ValueError("strict: this system does not let processes choose their memory policy; a container needs "
                         "SYS_NICE for it (docker run --cap-add SYS_NICE)")
    if not bind_memory and options.memory_nodes:
        raise ValueError("memory_nodes: this system does not let processes choose their memory policy; a container "
                         "needs SYS_NICE for it (docker run --cap-add SYS_NICE)")
    if not bind_memory:
        placement.warnings.append("this system does not let processes choose their memory policy (a container needs "
                                  "SYS_NICE for it); memory is placed by first touch")
    mpi = find_mpi()
    words = []
    for address in options.addresses():
        words += ["--address", address]
    if inner:
        words += ["--inner-address", inner]
    for model in options.models:
        if options.gpus:
            table = {"model_name": Path(model).stem, "model_path": model} if isinstance(model, str) else model
            model = {"compute_unit": f"CUDA:{','.join(map(str, options.gpus))}", **table}
        words += ["--model", model if isinstance(model, str) else json.dumps(model)]
    for root in options.model_root:
        words += ["--model-root", root]
    if options.insecure:
        words.append("--insecure")
    for name in ("token_file", "tls_cert", "tls_key", "tls_ca", "tls_role", "socket_mode", "socket_group",
                 "max_message_mib", "max_requests", "max_tenant_requests", "state_file", "drain_limit"):
        if getattr(options, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if options.log_requests:
        words.append("--log-requests")
    everywhere = ["--log-level", options.log_level] if options.log_level != "info" else []
    everywhere += ["--log-format", options.log_format] if options.log_format != "text" else []
    everywhere += ["--strict"] if options.strict else []
    several_hosts = len({rank.host for rank in placement.ranks}) > 1
    command = group_command(mpi, placement, sys.executable, words, bind_memory=bind_memory or several_hosts,
                            rank_words=everywhere)
    environment = mpi_environment(mpi, several_hosts)
    if options.gpus:
        # Numbers are those of `allspark topology`; ranks, which are pinned beside these GPUs, use no others.
        environment |= ORDER | {GROUP_GPUS: ",".join(map(str, options.gpus))}
    return GroupPlan(placement, mpi, command, environment)


def supervise(options: GroupOptions, *, ready_file: str = "", parent_pid: int = 0, show=None,
              on_progress: Callable[[str, float], None] | None = None,
              reread: Callable[[], GroupOptions] | None = None) -> None:
    """Run a group in the foreground until SIGTERM, SIGINT or the parent's end. Raises GroupFailed.

    show(GroupPlan): called before anything starts. on_progress(model name, part of it that is loaded). reread(): the
    options as they are now, for SIGHUP, which without it stops the group.
    """
    if options.token_file:      # what is wrong is told before anything starts
        access.read_tokens(options.token_file)
    access.ModelRoots(options.model_root)
    notifier = Notifier.from_environment(os.environ)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(unblocked())
        if parent_pid:      # a parent that was killed leaves its own folder behind
            for parent in dict.fromkeys((short_parent(), tempfile.gettempdir(), "/tmp")):
                stack.callback(remove_stale, parent)
        runtime_dir = stack.enter_context(private_folder(short_parent()))
        options = replace(options, state_file=options.state_file or str(runtime_dir / "state.json"))
        inner = f"unix:{runtime_dir}/inner"     # for its own programs, whatever clients are offered
        shared_memory = None
        if trusted("/dev/shm"):
            # MPI's shared memory in a folder of ours, so that what a killed rank leaves behind is found and removed.
            shared_memory = stack.enter_context(private_folder("/dev/shm"))
        server = None
        if options.http:
            counters = runtime_dir / "http"
            counters.mkdir()
            server = HttpServer(options.http_options(inner), counters)
            stack.callback(server.close)
        agents = stack.enter_context(agents_of(options))
        first: list[GroupPlan] = [plan_group(options, inner, agents=agents)]
        if show is not None:
            show(first[0])

        def start(owed: int) -> Start:
            # Anew for each life: CPUs, nodes and limits may have changed.
            plan = first.pop() if first else plan_group(options, inner, owed, agents)
            for warning in plan.placement.warnings:
                logger.warning("%s", warning)
            environment = {**clean_environment(str(runtime_dir)), **plan.environment,
                           "ALLSPARK_PLACEMENT": "\n".join(plan.describe())}
            if shared_memory is not None:
                environment["ALLSPARK_SHARED_MEMORY"] = str(shared_memory)
            return Start(plan.words, environment, len(plan.placement.ranks))

        def reload() -> None:
            nonlocal options
            fresh = reread()
            fresh = replace(fresh, state_file=fresh.state_file or options.state_file)
            if fresh.token_file == options.token_file and fresh.token_file:
                access.read_tokens(fresh.token_file)
            taken = {name: getattr(fresh, name) for name in RELOADABLE}
            left = [name for name, value in asdict(fresh).items()
                    if name not in RELOADABLE and value != getattr(options, name)]
            if left:
                logger.warning("what has changed here needs a restart: %s", ", ".join(left))
            options = replace(options, **taken)
            supervisor.drain_limit = options.drain_limit
            (runtime_dir / "reload.json").write_text(json.dumps(taken))
            logger.info("the configuration was read again")

        supervisor = Supervisor(start, runtime_dir, shared_memory=shared_memory,
                                ready_file=Path(ready_file) if ready_file else None, parent_pid=parent_pid,
                                on_output=output.write, on_progress=on_progress, on_reload=reload, notifier=notifier,
                                drain_limit=options.drain_limit, agents=agents)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:       # nohup means to go on
                signal.signal(number, lambda n, _: supervisor.request_stop(signal.Signals(n).name))
        if reread is not None and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, lambda *_: supervisor.request_reload())
        if server is not None:
            server.start()
        supervisor.run()


@dataclass
class BackgroundGroup:
    """A group that another process supervises for us."""

    addresses: list[str]
    supervisor_pid: int


@contextlib.contextmanager
def background_group(arguments: list[str], timeout: float = 300.0, verbose: bool = False,
                     on_progress: Callable[[str, float], None] | None = None) -> Iterator[BackgroundGroup]:
    """`allspark serve` with these arguments on a private Unix socket, for the length of a with block.

    Raises RuntimeError with the group's last lines if it does not come up. verbose: pass on what it prints.
    on_progress(model name, part of it that is loaded): called from another thread.
    """
    with private_folder(short_parent()) as folder:
        ready = folder / "ready"
        # The folder is its guard; who starts it may name any path.
        words = [sys.executable, "-m", "allspark_launch", "serve", *arguments, "--address", f"unix:{folder}/socket",
                 "--model-root", "/", "--ready-file", str(ready), "--parent-pid", str(os.getpid())]
        if on_progress is not None:
            words.append("--progress-lines")
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        tail: list[bytes] = []

        def drain() -> None:
            for line in process.stdout:
                if line.startswith(PROGRESS_MARK):
                    if on_progress is not None:
                        part, _, name = line[len(PROGRESS_MARK):].decode().strip().partition(" ")
                        on_progress(name, float(part))
                    continue
                tail[:] = [*tail[-30:], line]
                if verbose:
                    sys.stderr.buffer.write(line)
                    sys.stderr.flush()

        reader = threading.Thread(target=drain, daemon=True)
        reader.start()
        try:
            deadline = time.monotonic() + timeout
            while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            state = json.loads(ready.read_text()) if ready.exists() else {}
            if "addresses" not in state:
                reader.join(1.0)
                reason = state.get("error") or b"".join(tail).decode(errors="replace") or f"not ready in {timeout:g} s"
                raise RuntimeError(f"the server group did not start: {reason.strip()}")
            yield BackgroundGroup(state["addresses"], process.pid)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reader.join(1.0)
