"""The supervisor's side of the agents on a group's other hosts; agent.py is the other side."""
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
from typing import IO, Any

from allspark_client.version import __version__
from allspark_server.runtime.binding import die_with_parent

from ..machine.placement import Placement, RankPlacement
from .agent import LEASE_SECONDS
from .hosts import Allocation, Host

logger = logging.getLogger(__name__)

LOST_SECONDS = 4.0          # of silence; an agent sends twice a second
OVER_SECONDS = LEASE_SECONDS + 1.0      # this long after its last message, a host runs no process of the group
START_SECONDS = 30.0        # until an agent's first message; its code may be on a slow shared file system
AGAIN_SECONDS = 2.0         # the same for an agent that was lost before; after it the group starts without that host
ANSWER_SECONDS = 10.0       # to a request for a placement
#: environment variables that ranks on other hosts get, too
_PASSED_ON = re.compile(r"^(ALLSPARK_(?!SUPERVISOR|SHARED_MEMORY|MPIRUN|RESTARTS|OWES|PLACEMENT)|AS_|HF_)")


class Agent:
    """One host, and the process (ssh or srun) that connects to its agent."""

    def __init__(self, host: Host):
        self.host = host
        self.process: subprocess.Popen | None = None
        self.hello: dict = {}
        self.heard = 0.0            # monotonic time of the last message
        self.stopped: set[int] = set()      # process ids of ranks that SIGSTOP has stopped
        self.ended = True           # no process of the group runs there
        self.survivors: list[int] = []      # processes that SIGKILL does not end there
        self.ending = False         # the agent was asked to end them
        self.given_up = False       # its lease is not renewed any more
        self.was_lost = False       # in the incarnation before, so it is not waited for
        self.errors: deque[str] = deque(maxlen=5)   # the last lines that the agent, ssh or srun wrote
        self._unread = b""

    @property
    def name(self) -> str:
        """The host's name."""
        return self.host.name

    @property
    def connected(self) -> bool:
        """Whether the agent has answered and the connection stands."""
        return self.process is not None and bool(self.hello)

    def why_lost(self) -> str:
        """Why the host is lost, or ""."""
        if self.process is None:
            return f"host {self.name} is lost: the connection to its agent has ended" + self.last_errors()
        silent = time.monotonic() - self.heard
        return f"host {self.name} is lost: silent for {silent:.1f} s" if silent > LOST_SECONDS else ""

    def last_errors(self) -> str:
        """What the agent, ssh or srun last wrote to standard error, in parentheses, or ""."""
        return f" ({'; '.join(self.errors)})" if self.errors else ""

    def start(self, shell: tuple[str, ...]) -> None:
        """Starts the agent by the words of a remote shell."""
        command = [sys.executable, "-m", "allspark_launch.group.agent"]
        self.errors.clear()
        self._unread, self.hello, self.ended, self.given_up, self.stopped = b"", {}, True, False, set()
        self.survivors = []
        self.process = subprocess.Popen([*shell, self.name, *command],     # no word needs quotes in a shell
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        start_new_session=True, preexec_fn=lambda: die_with_parent(9))
        for stream in self.streams():
            os.set_blocking(stream.fileno(), False)
        self.heard = time.monotonic()

    def streams(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        """Standard input, output and error of a running process."""
        process = self.process
        assert process is not None and process.stdin and process.stdout and process.stderr
        return process.stdin, process.stdout, process.stderr

    def send(self, **message: Any) -> None:
        """Sends a message. Does nothing if the connection has ended, which `why_lost` reports."""
        if self.process is None:
            return
        try:
            os.write(self.streams()[0].fileno(), json.dumps(message).encode() + b"\n")
        except OSError as error:        # also BlockingIOError: the agent has not read for a long time
            logger.debug("host %s: %s", self.name, error)

    def read(self) -> list[dict] | None:
        """New messages; None at the end of the stream."""
        try:
            data = os.read(self.streams()[1].fileno(), 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        messages = []
        for line in lines:
            try:
                messages.append(json.loads(line))
            except ValueError:
                self.errors.append(line.decode(errors="replace"))       # printed by a login script
        return messages

    def read_errors(self) -> bool:
        """Logs what was written to standard error; False at the end of the stream."""
        try:
            data = os.read(self.streams()[2].fileno(), 1 << 16)
        except BlockingIOError:
            return True
        for line in data.decode(errors="replace").splitlines():
            self.errors.append(line)
            logger.info("host %s: %s", self.name, line)
        return bool(data)

    def close(self) -> None:
        """Ends the connection; then the agent ends what runs on its host."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for stream in self.streams():
            stream.close()
        self.process = None


class Agents:
    """The agents of all other hosts of an allocation. `selector` is one descriptor for all of theirs."""

    def __init__(self, allocation: Allocation):
        self._shell = allocation.shell
        self.own = allocation.hosts[0]
        self.all = [Agent(host) for host in allocation.others]
        self.selector = selectors.EpollSelector()
        self._began = False
        self.secret = ""        # of the incarnation that is about to start: who has it may connect to its ranks

    def connect(self) -> list[Agent]:
        """Starts the agents that do not run; returns those that answer. Raises ValueError for an agent of another
        version, and at the first start RuntimeError for one that does not answer. At later starts such hosts are left
        out.
        """
        for agent in self.all:
            if agent.why_lost():
                self._close(agent)
                agent.start(self._shell)
                for stream, read in zip(agent.streams()[1:], (self._take, self._take_errors)):
                    self.selector.register(stream, selectors.EVENT_READ, (agent, read))
        deadline = time.monotonic() + (AGAIN_SECONDS if self._began else START_SECONDS)
        while time.monotonic() < deadline and (missing := [a for a in self.all if a.process and not a.hello]):
            if self._began and all(agent.was_lost for agent in missing):
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
                # Not a ValueError: the host may be booting, so a later start can succeed.
                raise RuntimeError(f"hosts: the agent on {agent.name} does not start by {' '.join(self._shell)}"
                                   f"{agent.last_errors() or f': no answer for {START_SECONDS:g} s'}; {sys.executable} "
                                   "with allspark must exist there, and ssh must not ask for a password")
            else:
                logger.warning("host %s does not answer; the group is started without it%s", agent.name,
                               agent.last_errors())
        self._began = True
        return [agent for agent in self.all if agent.connected]

    def poll(self, timeout: float = 0.0) -> list[tuple[Agent, dict]]:
        """New messages. Renews leases."""
        messages: list[tuple[Agent, dict]] = []
        for key, _ in self.selector.select(timeout):
            agent, read = key.data
            if agent.process is not None:
                messages += ((agent, message) for message in read(agent))
        return messages

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
            elif "survivors" in message:
                agent.survivors = message["survivors"]
            else:
                yield message

    def _take_errors(self, agent: Agent) -> Iterator[dict]:
        if not agent.read_errors():
            self.selector.unregister(agent.streams()[2])
        return iter(())

    def place(self, agent: Agent, **options: Any) -> Placement:
        """The placement of ranks on a host, by its agent. `options`: as of `place`, and `strict`. Raises ValueError."""
        agent.send(place=options)
        deadline = time.monotonic() + ANSWER_SECONDS
        while not (lost := agent.why_lost()) and time.monotonic() < deadline:
            for other, message in self.poll(0.2):
                if other is not agent or "placed" not in message:
                    continue
                placed = message["placed"]
                if "error" in placed:
                    raise ValueError(f"host {agent.name}: {placed['error']}")
                ranks = [RankPlacement(**{**r, "cpus": tuple(r["cpus"]), "bound_cpus": tuple(r["bound_cpus"]),
                                          "more_memory": tuple(r["more_memory"]),
                                          "host": agent.name}) for r in placed["ranks"]]
                warnings = [f"host {agent.name}: {warning}" for warning in placed["warnings"]]
                return Placement(ranks, placed["oversubscribed"], warnings)
        raise ValueError(lost or f"host {agent.name} does not answer where ranks can be placed")

    def launch(self, name: str, command: str) -> None:
        """Starts mpirun's daemon on a host."""
        environment = {k: v for k, v in os.environ.items() if _PASSED_ON.match(k)}
        for agent in self.all:
            if agent.name == name:
                agent.ended = agent.ending = False
                agent.send(launch={"command": command, "environment": environment, "secret": self.secret})
                return
        logger.error("mpirun wants to start a daemon on %s, which is not a host of the group", name)

    def kill(self) -> None:
        """Asks every host to end the group's processes."""
        for agent in self.all:
            if not agent.ended and not agent.ending:
                agent.ending, agent.given_up = True, bool(agent.why_lost())
                agent.send(end=True)

    def end(self, keep_alive: Callable[[], None]) -> None:
        """Ends the group's processes on all hosts. Returns once they certainly have ended: on a host that does not
        answer, once its lease has expired. keep_alive(): called several times a second. Raises RuntimeError if some do
        not end.
        """
        self.kill()
        while True:
            left = [a for a in self.all if not a.ended and time.monotonic() < a.heard + OVER_SECONDS]
            if not left:
                break
            for agent in left:
                if agent.survivors:
                    raise RuntimeError(f"processes {agent.survivors} of the group on host {agent.name} survive SIGKILL")
            self.poll(min(0.1, max(0.01, left[0].heard + OVER_SECONDS - time.monotonic())))
            keep_alive()
        for agent in self.all:
            if not agent.ended:
                agent.ended, agent.was_lost = True, agent.process is not None
                self._close(agent)

    def _close(self, agent: Agent) -> None:
        if agent.process is None:
            return
        for stream in agent.streams()[1:]:
            if stream in self.selector.get_map():
                self.selector.unregister(stream)
        agent.close()

    def close(self) -> None:
        """Ends the connections; then the agents end what runs on their hosts."""
        for agent in self.all:
            self._close(agent)
        self.selector.close()
