"""One rank of a server group: `mpirun … numactl … python -m allspark_server --ranks N …`.

Rank 0 serves; the other ranks follow its plans. The launcher (`allspark serve`) writes the command line and supervises
the processes. The same line typed by hand works without supervision.
"""
from __future__ import annotations

import os
import signal

from .runtime.binding import bind_process, die_with_parent, raise_open_files

if os.environ.get("ALLSPARK_SUPERVISOR"):
    die_with_parent(signal.SIGKILL)  # before slow imports: a killed mpirun must not leave ranks behind

import argparse
import gc
import json
import logging
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import logs, tracing
from .access import Access, ModelRoots, Role, default_address, mode_of, pool_token
from .options import RankOptions, add_arguments, options_of
from .rpc.client_limits import ClientLimits
from .runtime import binding, memory
from .runtime.worker import EXIT_FAILED, Heartbeat, serve
from .signals import Signals

if TYPE_CHECKING:
    from allspark_client.config import AsModelConfig
    from allspark_client.types import TlsConfig

    from .rpc.service import Service
    from .runtime.group import Group

logger = logging.getLogger("allspark_server")

# How long a rank waits for another inside a step or a load before the group ends. The loads of ranks may differ by
# minutes if one node reads from a slow disk; dead and stopped ranks are noticed within seconds.
PEER_TIMEOUT_SECONDS = 900.0
# How long a group that was restarted only to end its requests waits for their clients.
RETURN_SECONDS = 15.0
_DRAIN_POLL_SECONDS = 0.05
#: files that rank 0 may open, if the system allows
_OPEN_FILES = 1 << 16


def parser() -> argparse.ArgumentParser:
    """The parser of a rank's command line."""
    p = argparse.ArgumentParser(prog="python -m allspark_server", description=__doc__.splitlines()[0],
                                epilog="--model also accepts the fields of an AsModelConfig as JSON.")
    p.add_argument("--ranks", type=int, default=0, help="how many ranks the group must have (checked)")
    p.add_argument("--cpus", default="", help="comma-separated CPUs, one for each compute thread")
    p.add_argument("--bind-cpus", default="", help="bind the process to these CPUs (where there is no numactl)")
    p.add_argument("--bind-memory", default="", metavar="LIST", help="bind its memory to these NUMA nodes")
    p.add_argument("--ranks-on-nodes", default="", metavar="NODE:N,...",
                   help="how many ranks share the memory of these nodes (default: ranks are spread over all nodes)")
    p.add_argument("--no-spin", action="store_true", help="ranks share cores: sleep at once in every wait")
    p.add_argument("--no-pin", action="store_true", help="do not pin the compute threads to --cpus, only count them")
    p.add_argument("--split-hosts", type=int, default=0, help=argparse.SUPPRESS)     # for tests: see mpi.join
    p.add_argument("--inner-address", default="", metavar="unix:PATH",
                   help="one more socket that rank 0 serves on, for health calls of its own")
    add_arguments(p, options_of(RankOptions), lambda declared: declared.effective_default)
    return p


def numbers(text: str) -> list[int]:
    """CPUs of "0,2,4-7", in the order given: thread i is pinned to the i-th."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def model_config(text: str) -> AsModelConfig:
    """The AsModelConfig of one --model argument: a JSON object, or a directory named after its last part."""
    from allspark_client.config import AsModelConfig

    from .weights.hub import hub_name, is_hub_id, local_directory, with_local_paths
    if text.lstrip().startswith("{"):
        return with_local_paths(AsModelConfig.from_dict(json.loads(text)))
    if is_hub_id(text):
        return AsModelConfig(model_name=hub_name(text), model_path=local_directory(text))
    path = Path(text).expanduser().resolve()
    name = path.stem if path.suffix in (".asgraph", ".gguf") else path.name
    return AsModelConfig(model_name=name, model_path=str(path))


def is_misconfiguration(error: Exception) -> bool:
    """Whether every start would fail like this: not if memory or an address is in use."""
    from allspark_client.errors import AllSparkError, AsStatus
    if isinstance(error, AllSparkError):
        return error.status in (AsStatus.ALLSPARK_PARAM_ERROR, AsStatus.ALLSPARK_INVALID_CALL_ERROR)
    return isinstance(error, (ValueError, TypeError, FileNotFoundError, PermissionError))


class Rank:
    """This process: its arguments, its place in the group, and its heartbeat to the supervisor."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        # mpirun tells the rank's number before MPI does, so that early failures can name it.
        self.number = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMIX_RANK", "0")))
        self.expected = arguments.ranks or int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
        self.cpus = numbers(arguments.cpus) or None
        path = os.environ.get("ALLSPARK_SUPERVISOR")
        self.heartbeat = Heartbeat(path, self.number) if path else None
        self._signals: Signals | None = None    # of rank 0
        self._stops = 0     # signals that said to stop

    def run(self) -> None:
        """Joins the group and serves until it is stopped."""
        if self.heartbeat:
            self.heartbeat.start()
        a = self.arguments
        if a.bind_cpus or a.bind_memory:
            bind_process(numbers(a.bind_cpus) or sorted(os.sched_getaffinity(0)), numbers(a.bind_memory))
        memory.ranks_on_node = {int(node): int(count) for node, _, count in
                                (part.partition(":") for part in a.ranks_on_nodes.split(",") if part)}
        memory.strict = a.strict
        binding.pin_threads = not a.no_pin
        outside = sorted(set(self.cpus or []) - os.sched_getaffinity(0))
        if outside:
            raise ValueError(f"--cpus names {outside}, but this rank may only run on {sorted(os.sched_getaffinity(0))}")
        self._handle_signals()
        from . import _native
        from .runtime.level import levels
        isas = levels(a.isa, measures=self.number == 0)
        if self.expected == 1:
            from .runtime.group import Group
            _native.use_isa(isas[0])
            logger.info("one rank on CPUs %s", a.cpus or "any")
            self.lead(Group(self.cpus, self.fail))
            return
        from .runtime.group import SharedMemoryGroup
        from .runtime.mpi import join
        from .runtime.native import common_isa
        from .runtime.rank_models import RankModels
        first = int(os.environ.get(binding.MODEL_RANKS, "0"))
        world = join(self.expected, _native.SharedMemory.bytes_needed(self.expected, first), a.split_hosts)
        all_isas = world.allgather((socket.gethostname(), isas))
        isa = common_isa(all_isas)
        if any(isas[0] not in theirs for _, theirs in all_isas):
            logger.info("rank %d uses the instruction set %s, because not all ranks have %s", world.rank, isa, isas[0])
        _native.use_isa(isa)
        between, host, leads = {}, "", False
        if world.between is not None:
            host, leads = socket.gethostname(), world.rank in world.between.first
            between = {"hosts": _native.Hosts(world.rank, world.between.first, world.between.mpi),
                       "sockets": world.between.sockets}
        shared_memory = _native.SharedMemory(world.rank, world.size, world.addresses, not a.no_spin,
                                             PEER_TIMEOUT_SECONDS, first=first, **between)
        logger.info("rank %d of %d on CPUs %s", world.rank, world.size, a.cpus or "any")
        if world.rank == 0:
            self.lead(SharedMemoryGroup(shared_memory, world.size, self.cpus, self.fail, host))
        else:
            models = RankModels(world.rank, world.size, shared_memory, self.cpus, host, leads)
            if self.heartbeat:
                self.heartbeat.watch(models)
                self.heartbeat.state("ready")
            serve(models)
        if self.heartbeat:
            self.heartbeat.stop()
        shared_memory.close()
        world.finalize()

    def _handle_signals(self) -> None:
        """Rank 0 stops in order on a signal, and then ends the other ranks. Under a supervisor the signal is SIGUSR1,
        because SIGTERM comes from an mpirun that has lost a rank. Then clients must see the connection break, so that
        they resume elsewhere; an orderly stop would end their requests.
        """
        wanted = [signal.SIGTERM, signal.SIGINT]
        if self.heartbeat:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            wanted = [signal.SIGUSR1, signal.SIGHUP]
        if self.number == 0:
            self._signals = Signals(*wanted)
        else:
            for number in wanted:
                signal.signal(number, signal.SIG_IGN)

    def lead(self, group: Group) -> None:
        """Rank 0: runs engine and service until a signal."""
        from allspark_client.types import TlsConfig

        from .engine.engine import Engine
        from .engine.handover import Handover
        from .rpc.service import Service
        a = self.arguments
        raise_open_files(_OPEN_FILES)   # each connection of a client takes one
        tracing.set_up()
        access = Access(tls=self.tls(), tls_role=Role(a.tls_role), insecure=a.insecure, token_file=a.token_file or None)
        models = [model_config(text) for text in a.models]
        roots = ModelRoots(a.model_root, models)
        engine = Engine(group=group, state_file=a.state_file or None)
        if a.prefill_from:
            token, _ = pool_token(a.prefill_token_file)
            engine.handover = Handover(engine, a.prefill_from, a.prefill_tokens, a.prefill_timeout, token or None,
                                       TlsConfig(ca=a.prefill_tls_ca) if a.prefill_tls_ca else None)
        if self.heartbeat:
            self.heartbeat.watch(group.models, lambda: engine.busy_since)
        service = Service(engine, a.address or [default_address(access.guarded or access.insecure)], access=access,
                          roots=roots, socket_mode=mode_of(a.socket_mode, a.socket_group), socket_group=a.socket_group,
                          inner=a.inner_address, limits=ClientLimits(a.max_requests, a.max_tenant_requests),
                          max_message=a.max_message_mib << 20, share_prefixes=a.share_prefixes)
        engine.restore(models, again=int(os.environ.get("ALLSPARK_RESTARTS", "0")) > 0, check=roots.check_model)
        gc.collect()
        gc.freeze()  # collections between steps skip what is loaded
        service.drain_for(float(os.environ.get("ALLSPARK_DRAIN", "0")))  # as the lost group that this one replaces
        addresses = service.start()
        logger.info("serving on %s", ", ".join(addresses))
        if self.heartbeat:
            self.heartbeat.add_details(lambda: self._health(service))
            service.on_drain = self.heartbeat.send
            self.heartbeat.state("ready")
        while not self._heed_signals():
            continue
        self._drain(service)
        service.stop()
        engine.close()
        if self.heartbeat:
            self.heartbeat.state("stopping")  # with no work left
        group.close()

    def _heed_signals(self, timeout: float | None = None) -> int:
        """Waits for signals, at most `timeout` seconds, and reloads if one says so. Returns how many so far said to
        stop.
        """
        assert self._signals is not None
        found = self._signals.wait(timeout)
        if signal.SIGHUP in found:
            self._reload()
        self._stops += sum(number != signal.SIGHUP for number in found)
        return self._stops

    @staticmethod
    def _health(service: Service) -> dict[str, Any]:
        """What all of rank 0's heartbeats say of the service: a single one may be lost."""
        found: dict[str, Any] = {"requests": service.requests, "draining": service.draining,
                                 "drain_left": service.drain_left, "addresses": service.addresses}
        if service.healthy:
            found["healthy_seconds"] = time.monotonic() - service.healthy
        return found

    def _reload(self) -> None:
        """Takes the options that the supervisor has reloaded. Tokens are reloaded automatically."""
        path = Path(os.environ.get("ALLSPARK_SUPERVISOR", "/none")).with_name("reload.json")
        try:
            values = json.loads(path.read_text())
            vars(self.arguments).update(values)
            logger.info("the configuration was read again: %s", values)
            logging.getLogger().setLevel(self.arguments.log_level.upper())
        except (OSError, ValueError, KeyError) as error:
            logger.error("nothing was reloaded: %s", error)

    def _drain(self, service: Service) -> None:
        """Takes no new requests, and waits until the others have ended, the time is up, or another stop comes."""
        began, before = time.monotonic(), service.requests
        service.drain()
        if self.heartbeat:
            self.heartbeat.send()
        # Clients of a lost group come back for their unfinished requests.
        returned_by = began + RETURN_SECONDS if os.environ.get("ALLSPARK_OWES") else began
        limit = self.arguments.drain_limit
        if before and limit:
            logger.info("draining: %d requests have %s", before,
                        "as long as they take" if limit == float("inf") else f"{limit:g} s to end")
        # A reload may change the limit meanwhile.
        while (service.requests or time.monotonic() < returned_by) and \
                time.monotonic() < began + self.arguments.drain_limit and self._heed_signals(_DRAIN_POLL_SECONDS) < 2:
            continue
        ended = service.requests
        level = logging.WARNING if ended else logging.INFO
        logger.log(level, "stopping after %.1f s: %d requests have ended by themselves, %d are ended now",
                   time.monotonic() - began, max(0, before - ended), ended)

    def tls(self) -> TlsConfig | None:
        """The TlsConfig of the arguments; None without TLS."""
        from allspark_client.types import TlsConfig
        a = self.arguments
        if not (a.tls_cert or a.tls_key or a.tls_ca):
            return None
        if not (a.tls_cert and a.tls_key):
            raise ValueError("--tls-cert and --tls-key are needed together")
        return TlsConfig(ca=a.tls_ca or None, cert=a.tls_cert, key=a.tls_key)

    def fail(self, message: str, fatal: bool = False, misconfigured: bool = False) -> None:
        """Ends this process because the group cannot go on; never returns. It does not use sys.exit, because the end of
        MPI would wait for the other ranks.
        """
        logger.error("%s", message)
        if self.heartbeat:
            self.heartbeat.state("failed", error=message, fatal=fatal, misconfigured=misconfigured)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_FAILED)


def main() -> None:
    """Runs one rank."""
    arguments = parser().parse_args()
    rank = Rank(arguments)
    logs.set_up(f"rank {rank.number}", arguments.log_level, arguments.log_format, arguments.log_requests)
    try:
        rank.run()
    except Exception as error:  # the other ranks and the supervisor must know of any error
        logger.debug("rank %d failed", rank.number, exc_info=True)
        # Errors of a start (a bad checkpoint, a port in use, mixed MPIs) would only repeat.
        name = "" if isinstance(error, (RuntimeError, ValueError)) else f"{type(error).__name__}: "
        rank.fail(f"rank {rank.number}: {name}{error}", fatal=True, misconfigured=is_misconfiguration(error))


if __name__ == "__main__":
    main()
