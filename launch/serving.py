"""From options to a running group: placement, command line, supervisor; and a group in the background for commands
that need one for a moment."""
from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Callable, Iterator, Sequence

from allspark_client.config import AsModelConfig
from allspark_server import access

from .folders import private_folder, remove_stale, short_parent, trusted
from .http import HttpDoor, HttpOptions
from .mpi import Installation, clean_environment, find_mpi, group_command, mpi_environment, shell_line
from .output import unblocked
from .placement import Placement, place
from .supervisor import Supervisor
from .topology import format_list, read_topology

logger = logging.getLogger(__name__)

PROGRESS_MARK = b"@progress "     # starts the lines by which a group in the background tells how far a load is
ASSETS = Path(__file__).resolve().parent.parent / "allspark_server" / "assets"


def set_fields(items: list[str]) -> dict[str, object]:
    """What `--set FIELD=VALUE` flags say: values as JSON, or as the word they are, such as bfloat16. Raises
    ValueError."""
    fields: dict[str, object] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals:
            raise ValueError(f"--set {item!r} must be FIELD=VALUE")
        try:
            fields[key] = json.loads(text)
        except ValueError:
            fields[key] = text
    return fields


@dataclass
class GroupOptions:
    """What `allspark serve` can be told, by flags or by the keys of its config file."""
    models: list[dict | str] = field(default_factory=list)      # AsModelConfig keys, or a directory
    address: list[str] = field(default_factory=list)
    ranks: int = 0
    numa_nodes: list[int] | None = None
    gpus: list[int] | None = None       # one rank for each; models are theirs unless they say otherwise
    cpus_per_rank: int = 0
    use_siblings: bool = False
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_role: str = ""
    insecure: bool = False
    socket_mode: str = ""
    model_root: list[str] = field(default_factory=list)
    max_message_mib: int = 0
    state_file: str = ""
    log_level: str = "info"
    http: str = ""
    http_workers: int = 1

    @classmethod
    def from_file(cls, path: str) -> GroupOptions:
        """Options of a .toml or .json file; ValueError names a key that is unknown or of the wrong type."""
        return cls.from_table(read_table(path), path)

    @classmethod
    def from_table(cls, values: dict, where: str) -> GroupOptions:
        """Options by name; ValueError, which begins with `where`, names one that is unknown or of the wrong type."""
        known = {f.name: f for f in fields(cls)}
        for key, value in values.items():
            if key not in known:
                raise ValueError(f"{where}: unknown key {key!r}; known: {', '.join(known)}")
            if key in ("address", "model_root") and isinstance(value, str):
                values[key] = value = [value]
            kind = known[key].type.removesuffix(" | None")
            if not _is_a(value, kind):
                raise ValueError(f"{where}: {key} is {value!r}; it must be of type {kind}")
        for model in values.get("models", []):
            if isinstance(model, dict):
                try:
                    AsModelConfig.from_dict(model).validate()
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{where}: models: {error}") from None
        return cls(**values)

    def addresses(self) -> list[str]:
        """What to serve on. Raises ValueError for an address that would be open to whoever reaches it, and for what
        else is wrong about the doors."""
        if self.tls_role and self.tls_role not in (role.value for role in access.Role):
            raise ValueError(f"tls_role is {self.tls_role!r}; allowed: {', '.join(r.value for r in access.Role)}")
        if self.socket_mode:
            access.socket_mode(self.socket_mode)
        guarded = bool(self.token_file or self.tls_ca)
        found = self.address or [access.default_address(guarded or self.insecure)]
        for address in [*found, self.http] if self.http else found:
            access.check_door(address, token=bool(self.token_file), tls=bool(self.tls_cert),
                              client_ca=bool(self.tls_ca), insecure=self.insecure)
        return found

    def http_options(self, group: str) -> HttpOptions:
        """Of the HTTP door beside this group, which it reaches at the address `group`."""
        return HttpOptions(
            self.http, self.http_workers, self.token_file, self.tls_cert, self.tls_key, self.tls_ca, self.tls_role,
            self.insecure, self.socket_mode, self.max_message_mib, self.log_level, [group], self.token_file)


def _is_a(value: object, kind: str) -> bool:
    """Whether a value has a type such as "int" or "list[dict | str]". Text has no control characters: it ends up in
    command lines and units, where a line break would begin another setting."""
    if kind.startswith("list["):
        return isinstance(value, list) and all(any(_is_a(v, k) for k in kind[5:-1].split(" | ")) for v in value)
    if kind == "str":
        return isinstance(value, str) and value.isprintable()
    return type(value) is {"int": int, "bool": bool, "dict": dict}[kind]


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
        return [f"rank {r.rank}: NUMA node {r.node}, CPUs {format_list(r.cpus)}"
                + (f", memory of node {r.memory_node}" if r.memory_node is not None else "")
                for r in self.placement.ranks]


def read_table(path: str) -> dict:
    """A TOML or JSON file as a dict. ValueError says where it is wrong."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        if not path.endswith(".toml"):
            table = json.loads(text)
        else:
            try:
                import tomllib
            except ModuleNotFoundError:
                try:
                    import tomli as tomllib
                except ModuleNotFoundError:
                    raise ValueError("TOML needs Python 3.11, or pip install tomli; JSON works everywhere") from None
            table = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path} must hold a table of options, not {type(table).__name__}")
    return table


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


def plan_group(options: GroupOptions, more_addresses: Sequence[str] = ()) -> GroupPlan:
    """Placement and command line. ValueError or MpiNotFound says what cannot be met. `more_addresses`: Unix sockets
    that are served, too."""
    from allspark_client.environment import check_environment
    from allspark_server.runtime.binding import memory_policy_allowed
    check_environment()
    ranks = options.ranks
    if options.gpus:
        if len(options.gpus) > 1:
            raise ValueError(f"gpus={options.gpus}: a group of several GPUs is not available yet; start one for each")
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
    placement = place(topology, ranks, numa_nodes, options.cpus_per_rank, options.use_siblings)
    bind_memory = memory_policy_allowed()
    if not bind_memory:
        placement.warnings.append("this system does not let processes choose their memory policy (a container needs "
                                  "SYS_NICE for it); memory is placed by first touch")
    mpi = find_mpi()
    words = []
    for address in [*options.addresses(), *more_addresses]:
        words += ["--address", address]
    for model in options.models:
        if options.gpus:
            table = {"model_name": Path(model).stem, "model_path": model} if isinstance(model, str) else model
            model = {"compute_unit": f"CUDA:{','.join(map(str, options.gpus))}", **table}
        words += ["--model", model if isinstance(model, str) else json.dumps(model)]
    for root in options.model_root:
        words += ["--model-root", root]
    if options.insecure:
        words.append("--insecure")
    for name in ("token_file", "tls_cert", "tls_key", "tls_ca", "tls_role", "socket_mode", "max_message_mib",
                 "state_file"):
        if getattr(options, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    everywhere = ["--log-level", options.log_level] if options.log_level != "info" else []
    command = group_command(mpi, placement, sys.executable, words, bind_memory=bind_memory, rank_words=everywhere)
    return GroupPlan(placement, mpi, command, mpi_environment(mpi))


def supervise(options: GroupOptions, *, ready_file: str = "", parent_pid: int = 0, show=None,
              on_progress: Callable[[str, float], None] | None = None) -> None:
    """Run a group in the foreground until SIGTERM, SIGINT or the parent's end. Raises GroupFailed.

    show(GroupPlan): called before anything starts. on_progress(model name, part of it that is loaded).
    """
    if options.token_file:      # what is wrong is told before anything starts
        access.read_tokens(options.token_file)
    access.ModelRoots(options.model_root)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(unblocked())
        if parent_pid:      # a parent that was killed leaves its own folder behind
            for parent in dict.fromkeys((short_parent(), tempfile.gettempdir(), "/tmp")):
                stack.callback(remove_stale, parent)
        runtime_dir = stack.enter_context(private_folder(short_parent()))
        if not options.state_file:
            options.state_file = str(runtime_dir / "state.json")
        door, inner = None, []
        if options.http:
            inner = [f"unix:{runtime_dir}/door"]    # its own, whatever clients are offered
            counters = runtime_dir / "http"
            counters.mkdir()
            door = HttpDoor(options.http_options(*inner), counters)
            stack.callback(door.close)
        plan = plan_group(options, inner)
        if show is not None:
            show(plan)
        for warning in plan.placement.warnings:
            logger.warning("%s", warning)
        environment = {**clean_environment(), **plan.environment, "ALLSPARK_PLACEMENT": "\n".join(plan.describe())}
        shared_memory = None
        if trusted("/dev/shm"):
            # MPI's shared memory in a folder of ours, so that what a killed rank leaves behind is found and removed.
            shared_memory = stack.enter_context(private_folder("/dev/shm"))
            environment.update({f"OMPI_MCA_{component}_backing_directory": str(shared_memory)
                                for component in ("osc_sm", "btl_sm", "btl_vader")})
        notify = environment.pop("NOTIFY_SOCKET", "")
        supervisor = Supervisor(plan.words, environment, len(plan.placement.ranks), runtime_dir,
                                shared_memory=shared_memory, ready_file=Path(ready_file) if ready_file else None,
                                parent_pid=parent_pid, on_output=output.write, on_ready=lambda _: tell_systemd(notify),
                                on_progress=on_progress)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:       # nohup means to go on
                signal.signal(number, lambda n, _: supervisor.request_stop(signal.Signals(n).name))
        if door is not None:
            door.start()
        supervisor.run()


def tell_systemd(path: str) -> None:
    """Type=notify services count as started once they say so. path: $NOTIFY_SOCKET, "" without systemd."""
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.sendto(b"READY=1", "\0" + path[1:] if path.startswith("@") else path)


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
