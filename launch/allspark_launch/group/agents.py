"""The agents on a group's other hosts, as the supervisor deals with them; see agent.py."""
from __future__ import annotations

import json
import logging
import os
import re
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

from allspark_client.version import __version__
from allspark_server.runtime.binding import die_with_parent

from ..machine.placement import Placement, RankPlacement
from .agent import LEASE_SECONDS
from .hosts import Allocation, Host

logger = logging.getLogger(__name__)

LOST_SECONDS = 4.0          # of silence: an agent speaks twice a second
OVER_SECONDS = LEASE_SECONDS + 1.0      # after its last word a host has none of the group's processes
START_SECONDS = 30.0        # until an agent greets, at first; it may have to be read from a shared file system
AGAIN_SECONDS = 2.0         # of one that was lost before: the group goes on without it
ANSWER_SECONDS = 10.0
_PASSED_ON = re.compile(r"^(ALLSPARK_(?!SUPERVISOR|SHARED_MEMORY|MPIRUN|RESTARTS|OWES|PLACEMENT)|AS_|HF_)")


class Agent:
    """One host and the process (ssh, srun) at whose other end its agent is."""

    def __init__(self, host: Host):
        self.host = host
        self.process: subprocess.Popen | None = None
        self.hello: dict = {}
        self.heard = 0.0            # the last message, on the monotonic clock
        self.stopped: set[int] = set()
        self.ended = True           # nothing of the group runs there,
        self.ending = False         # or it was told to see to that
        self.given_up = False       # it is granted no lease any more
        self.was_lost = False       # it was lost in the incarnation before: nobody waits for it
        self.errors: deque[str] = deque(maxlen=5)   # what it, and who connects to it, last wrote
        self._unread = b""

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def connected(self) -> bool:
        return self.process is not None and bool(self.hello)

    def why_lost(self) -> str:
        """"" while it is there."""
        if self.process is None:
            return f"host {self.name} is lost: the connection to its agent has ended" + self.last_words()
        silent = time.monotonic() - self.heard
        return f"host {self.name} is lost: silent for {silent:.1f} s" if silent > LOST_SECONDS else ""

    def last_words(self) -> str:
        return f" ({'; '.join(self.errors)})" if self.errors else ""

    def start(self, shell: tuple[str, ...]) -> None:
        command = [sys.executable, "-m", "allspark_launch.group.agent"]
        self.errors.clear()
        self._unread, self.hello, self.ended, self.given_up, self.stopped = b"", {}, True, False, set()
        self.process = subprocess.Popen([*shell, self.name, *command],     # no word of it means a thing to a shell
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        start_new_session=True, preexec_fn=lambda: die_with_parent(9))
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            os.set_blocking(stream.fileno(), False)
        self.heard = time.monotonic()

    def send(self, **message) -> None:
        """Nothing happens if it is gone; that is told otherwise."""
        if self.process is None:
            return
        try:
            os.write(self.process.stdin.fileno(), json.dumps(message).encode() + b"\n")
        except OSError as error:        # BlockingIOError as well: it has taken nothing for long
            logger.debug("host %s: %s", self.name, error)

    def read(self) -> list[dict] | None:
        """Messages; None at the end."""
        try:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                self.errors.append(line.decode(errors="replace"))       # what a login script has printed
        return found

    def read_errors(self) -> bool:
        """Passes on what was written to standard error; False at its end."""
        try:
            data = os.read(self.process.stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        for line in data.decode(errors="replace").splitlines():
            self.errors.append(line)
            logger.info("host %s: %s", self.name, line)
        return bool(data)

    def close(self) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()
        self.process = None


class Agents:
    """All of them. Their descriptors are in `selector`, which is one descriptor itself. `allocation`: whose hosts."""

    def __init__(self, allocation: Allocation):
        self._shell = allocation.shell
        self.own = allocation.hosts[0]
        self.all = [Agent(host) for host in allocation.others]
        self.selector = selectors.EpollSelector()
        self._began = False

    def connect(self) -> list[Agent]:
        """Those that are there; starts the others. Raises RuntimeError if one does not come at the first time,
        ValueError if it is another version's; later those that were lost are left out.
        """
        for agent in self.all:
            if agent.why_lost():
                self._close(agent)
                agent.start(self._shell)
                for stream, read in ((agent.process.stdout, self._take), (agent.process.stderr, self._take_errors)):
                    self.selector.register(stream, selectors.EVENT_READ, (agent, read))
        deadline = time.monotonic() + (AGAIN_SECONDS if self._began else START_SECONDS)
        while time.monotonic() < deadline and (waited := [a for a in self.all if a.process and not a.hello]):
            if self._began and all(agent.was_lost for agent in waited):
                break
            self.poll(0.1)
            if not self._began and any(agent.process is None for agent in self.all):
                break
        for agent in self.all:
            if agent.connected:
                agent.was_lost = False
                if agent.hello["version"] != __version__:
                    raise ValueError(f"hosts: {agent.name} has allspark {agent.hello['version']}, and this host "
                                     f"{__version__}; they must be the same")
            elif not self._began:
                # It may be a host that is not up yet: starting again later can help.
                raise RuntimeError(f"hosts: the agent on {agent.name} does not start by {' '.join(self._shell)}"
                                   f"{agent.last_words() or f': no answer for {START_SECONDS:g} s'}; {sys.executable} "
                                   "with allspark must be there, and no password be asked for")
            else:
                logger.warning("host %s is not there; the group is started without it%s", agent.name,
                               agent.last_words())
        self._began = True
        return [agent for agent in self.all if agent.connected]

    def poll(self, timeout: float = 0.0) -> list[tuple[Agent, dict]]:
        """What has been said since; leases are answered here."""
        found: list[tuple[Agent, dict]] = []
        for key, _ in self.selector.select(timeout):
            agent, read = key.data
            if agent.process is not None:
                found += ((agent, message) for message in read(agent))
        return found

    def _take(self, agent: Agent) -> Iterator[dict]:
        messages = agent.read()
        if messages is None:
            self._close(agent)
            return
        for message in messages:
            agent.heard = time.monotonic()
            if "hello" in message:
                agent.hello = message["hello"]
            elif "alive" in message:
                agent.stopped = set(message["stopped"])
                if not agent.given_up:
                    agent.send(lease=message["alive"])
            elif "ended" in message:
                agent.ended = True
            else:
                yield message

    def _take_errors(self, agent: Agent) -> Iterator[dict]:
        if not agent.read_errors():
            self.selector.unregister(agent.process.stderr)
        return iter(())

    def place(self, agent: Agent, **options) -> Placement:
        """The placement of ranks on a host, by its agent. Raises ValueError."""
        agent.send(place=options)
        deadline = time.monotonic() + ANSWER_SECONDS
        while not (lost := agent.why_lost()) and time.monotonic() < deadline:
            for other, message in self.poll(0.2):
                if other is not agent or "placed" not in message:
                    continue
                found = message["placed"]
                if "error" in found:
                    raise ValueError(f"host {agent.name}: {found['error']}")
                ranks = [RankPlacement(**{**r, "cpus": tuple(r["cpus"]), "bound_cpus": tuple(r["bound_cpus"]),
                                          "more_memory": tuple(r["more_memory"]),
                                          "host": agent.name}) for r in found["ranks"]]
                warnings = [f"host {agent.name}: {warning}" for warning in found["warnings"]]
                return Placement(ranks, found["oversubscribed"], warnings)
        raise ValueError(lost or f"host {agent.name} does not say where ranks can be placed")

    def launch(self, name: str, command: str) -> None:
        """Has a host run mpirun's daemon."""
        environment = {k: v for k, v in os.environ.items() if _PASSED_ON.match(k)}
        for agent in self.all:
            if agent.name == name:
                agent.ended = agent.ending = False
                agent.send(launch={"command": command, "environment": environment})
                return
        logger.error("mpirun wants to start a daemon on %s, which is none of the group's hosts", name)

    def kill(self) -> None:
        """Have every host end what runs there."""
        for agent in self.all:
            if not agent.ended and not agent.ending:
                agent.ending, agent.given_up = True, bool(agent.why_lost())
                agent.send(end=True)

    def end(self, keep_alive: Callable[[], None]) -> None:
        """Ends what runs on all hosts, and returns when it surely has: for a host that does not answer, once its lease
        is over. keep_alive(): called several times a second.
        """
        self.kill()
        while True:
            left = [a for a in self.all if not a.ended and time.monotonic() < a.heard + OVER_SECONDS]
            if not left:
                break
            self.poll(min(0.1, max(0.01, left[0].heard + OVER_SECONDS - time.monotonic())))
            keep_alive()
        for agent in self.all:
            if not agent.ended:
                agent.ended, agent.was_lost = True, agent.process is not None
                self._close(agent)

    def _close(self, agent: Agent) -> None:
        if agent.process is None:
            return
        for stream in (agent.process.stdout, agent.process.stderr):
            if stream in self.selector.get_map():
                self.selector.unregister(stream)
        agent.close()

    def close(self) -> None:
        """They end what runs on their hosts."""
        for agent in self.all:
            self._close(agent)
        self.selector.close()
