"""The supervisor, with ranks that only send heartbeats."""
import contextlib
import errno
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from allspark_launch.group.incarnation import Incarnation, Limits, Start
from allspark_launch.group.processes import processes_of_session
from allspark_launch.group.supervisor import GroupFailed, Supervisor
from support import waiting
from support.paths import ROOT

wait_for = functools.partial(waiting.wait_for, seconds=20.0)

FAKE_RANK = """
import os, signal, sys, time
from allspark_server.runtime.binding import die_with_parent
die_with_parent(signal.SIGKILL)
from allspark_server.runtime.worker import Heartbeat
rank, mode = int(sys.argv[1]), sys.argv[2]
heartbeat = Heartbeat(os.environ["ALLSPARK_SUPERVISOR"], rank)
heartbeat.start()
if mode == "crash":
    print(f"rank {rank} has a bad day", flush=True)
    os._exit(7)
if mode == "fatal":
    heartbeat.state("failed", error=f"rank {rank}: the port is in use", fatal=True)
    time.sleep(60)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN if mode == "stubborn" else lambda *_: os._exit(0))
if mode == "stuck":
    heartbeat.watch(type("RankModels", (), {"step_began": time.monotonic(), "shared_memory": None, "served": False,
                                             "numbers": {}}))
if mode == "slow":
    signal.signal(signal.SIGHUP, lambda *_: open(f"{sys.argv[0]}.reloaded", "w").close())
    time.sleep(0.5)
if rank == 0 and mode == "owing":
    heartbeat.add_details(lambda: {"requests": 1})
if rank == 0 and mode == "drained":
    open(f"{sys.argv[0]}.{os.getpid()}.drain", "w").write(os.environ["ALLSPARK_DRAIN"])
    heartbeat.add_details(lambda: {"requests": 0, "draining": True, "drain_left": float("inf")})
if rank == 0 and mode == "unhealthy":
    heartbeat.add_details(lambda began=time.monotonic(): {"healthy_seconds": time.monotonic() - began})
heartbeat.state("ready", **({"addresses": ["unix:/fake"]} if rank == 0 else {}))
if mode == "answers" and rank == 0:
    heartbeat.send(served=True)
open(f"{sys.argv[0]}.{os.getpid()}.sent", "w").close()
while True:
    print("x" * 1000 if mode == "flood" else "", flush=mode == "flood")
    time.sleep(0.001 if mode == "flood" else 60)
"""
# As mpirun: starts the ranks, ends all when one ends.
FAKE_MPIRUN = """
import os, signal, subprocess, sys
children = [subprocess.Popen([sys.executable, sys.argv[1], str(r), sys.argv[3]], preexec_fn=os.setpgrp)
            for r in range(int(sys.argv[2]))]
signal.signal(signal.SIGTERM, lambda *_: [c.terminate() for c in children])
if sys.argv[3] == "unnoticed":
    [c.wait() for c in children]
pid, status = os.wait()
for c in children:
    if c.pid != pid:
        c.kill()
sys.exit(os.waitstatus_to_exitcode(status) % 256)
"""
DRIVER = """
import logging, os, signal, sys
from pathlib import Path
from allspark_launch.group.incarnation import Limits, Start
from allspark_launch.group.supervisor import GroupFailed, Supervisor
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
folder, mode, parent = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
words = [sys.executable, str(folder / "mpirun.py"), str(folder / "rank.py"), "2", mode]
limits = Limits(heartbeat_timeout=2.5, health_timeout=2.5, step_timeout=2, stop_timeout=3, kill_timeout=1,
                first_backoff=0.1, tolerated_ends=3, max_failures=3)
s = Supervisor(lambda owed: Start(words, dict(os.environ), 2), folder, ready_file=folder / "ready", parent_pid=parent,
               limits=limits)
for n in (signal.SIGTERM, signal.SIGINT):
    signal.signal(n, lambda *_: s.request_stop("signal"))
try:
    s.run()
except GroupFailed as error:
    print("GAVE UP:", error)
    sys.exit(1)
"""


# `allspark serve`, but for the ranks.
SERVE = """
import logging, sys
from pathlib import Path
from allspark_launch.group import serving
from allspark_launch.machine.placement import Placement
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
folder, mode = Path(sys.argv[1]), sys.argv[2]
words = [sys.executable, str(folder / "mpirun.py"), str(folder / "rank.py"), "2", mode]
serving.plan_group = lambda *_, **__: serving.GroupPlan(Placement([]), None, words, {})
"""
COMMAND = SERVE + """
import functools
from allspark_launch import cli
from allspark_launch.group.incarnation import Limits
plan, left = serving.plan_group, [None] * PLANS
def plan_group(*_, **__):
    if not left:
        raise FileNotFoundError("mpirun is being replaced")
    left.pop()
    return plan()
serving.plan_group = plan_group
serving.Supervisor = functools.partial(serving.Supervisor, limits=Limits(max_failures=2, first_backoff=0.1))
serving.GroupPlan.line = ""
sys.exit(cli.main(["serve", "--ready-file", str(folder / "ready")]))
"""
SERVE += "serving.supervise(serving.GroupOptions(), ready_file=str(folder / 'ready'))"


class Fake:
    """A supervisor process over two fake ranks."""

    def __init__(self, folder: Path, mode: str = "good", parent: int = 0, driver: str = DRIVER):
        for name, text in (("rank.py", FAKE_RANK), ("mpirun.py", FAKE_MPIRUN), ("driver.py", driver)):
            (folder / name).write_text(textwrap.dedent(text))
        self.folder = folder
        self.process = subprocess.Popen([sys.executable, str(folder / "driver.py"), str(folder), mode, str(parent)],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)

    def wait_ready(self) -> dict:
        wait_for(lambda: (self.folder / "ready").exists())
        wait_for(lambda: len(self.ranks()) == 2)
        # Both ranks have sent heartbeats: one that is stopped before its first counts as starting late, not as silent.
        wait_for(lambda: all((self.folder / f"rank.py.{pid}.sent").exists() for pid in self.ranks()))
        return json.loads((self.folder / "ready").read_text())

    def processes(self, script: str) -> list[int]:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
                if str(self.folder / script) in command_of(pid).split("\0")[1:2]]

    def ranks(self) -> list[int]:
        return self.processes("rank.py")

    def mpirun(self) -> list[int]:
        return self.processes("mpirun.py")

    def nothing_left(self) -> bool:
        return not self.ranks() and not self.mpirun()

    def finish(self) -> tuple[str, str]:
        output = self.process.communicate(timeout=30)
        wait_for(self.nothing_left)
        return output


def command_of(pid: int) -> str:
    """A process's command line; "" once it has ended, or is a zombie."""
    try:
        return Path("/proc", str(pid), "cmdline").read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def fake(tmp_path):
    started = []

    def start(*arguments, **keywords):
        started.append(Fake(tmp_path, *arguments, **keywords))
        return started[-1]

    yield start
    for f in started:
        f.process.kill()
        f.process.communicate()
        wait_for(f.nothing_left)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_supervisor_stops_on_a_signal(fake, number):
    f = fake()
    ready = f.wait_ready()
    assert ready == {"addresses": ["unix:/fake"], "pid": f.process.pid, "ranks": 2}
    started = time.monotonic()
    f.process.send_signal(number)
    f.finish()
    assert f.process.returncode == 0 and time.monotonic() - started < 3
    assert not (f.folder / "ready").exists()


def test_stop_is_bounded_when_ranks_do_not_listen(fake):
    f = fake("stubborn")
    f.wait_ready()
    started = time.monotonic()
    f.process.terminate()
    f.finish()
    assert f.process.returncode == 0 and time.monotonic() - started < 8


@pytest.mark.parametrize("victim", ["rank", "mpirun"])
def test_group_is_restarted_after_a_kill(fake, victim):
    f = fake()
    f.wait_ready()
    before = set(f.ranks())
    os.kill(f.ranks()[1] if victim == "rank" else f.mpirun()[0], signal.SIGKILL)
    wait_for(lambda: len(set(f.ranks()) - before) >= 2)  # under load a new one may be lost as well
    assert not before & set(f.ranks())
    f.process.terminate()
    _, log = f.finish()
    assert "starting it again" in log


def test_nothing_outlives_a_killed_supervisor(fake):
    f = fake()
    f.wait_ready()
    f.process.kill()
    f.finish()


def test_a_silent_rank_is_noticed(fake):
    f = fake()
    f.wait_ready()
    before = set(f.ranks())
    os.kill(max(before), signal.SIGSTOP)
    wait_for(lambda: len(set(f.ranks()) - before) >= 2)  # under load a new one may be lost as well
    f.process.terminate()
    _, log = f.finish()
    assert "has been silent for" in log


def test_a_rank_stuck_in_a_step_is_noticed(fake):
    f = fake("stuck")
    f.wait_ready()
    before = set(f.ranks())
    wait_for(lambda: len(set(f.ranks()) - before) >= 2)  # under load a new one may be lost as well
    f.process.terminate()
    _, log = f.finish()
    assert "has been in one step for" in log


def test_supervisor_gives_up_with_the_last_lines(fake):
    f = fake("crash")
    output, _ = f.finish()
    assert f.process.returncode == 1
    assert "ended 3 times in a row before it had served" in output and "has a bad day" in output
    assert "has a bad day" in json.loads((f.folder / "ready").read_text())["error"]


@pytest.mark.parametrize("mode", ["answers", pytest.param("good", marks=pytest.mark.slow)])
def test_only_incarnations_that_served_nothing_are_counted(fake, mode):
    """A group that is killed soon after each start, but served something in between, is restarted without limit, though
    with pauses.
    """
    f = fake(mode)
    for _ in range(5):
        f.wait_ready()
        before = set(f.ranks())
        os.kill(min(before), signal.SIGKILL)
        wait_for(lambda: not before & set(f.ranks()))
        wait_for(lambda: f.process.poll() is not None or len(f.ranks()) == 2)
        if f.process.poll() is not None:
            break
    if mode == "answers":
        f.wait_ready()
        f.process.terminate()
    output, log = f.finish()
    assert f.process.returncode == (0 if mode == "answers" else 1)
    assert ("ended 3 times in a row before it had served" in output) == (mode == "good")
    pauses = re.findall(r"starting it again in (\S+) s", log)
    # One that served is followed at once, unless that happens too often.
    assert pauses == (["0.0"] * 3 + ["0.1", "0.2"] if mode == "answers" else ["0.1", "0.2"])


def test_orphans_of_process_1_are_reaped():
    """A child subreaper inherits orphans just as process 1 does."""
    code = ("import ctypes, os, subprocess, time\nfrom allspark_launch.group.processes import reap_orphans\n"
            "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
            "subprocess.run(['sh', '-c', 'sleep 0.1 & sleep 0.1 &'])\ntime.sleep(0.5)\n"
            "states = lambda: [s for s in map(state, os.listdir('/proc')) if s]\n"
            "def state(pid):\n"
            "    try: fields = open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()\n"
            "    except OSError: return ''\n"
            "    return fields[0] if fields[1] == str(os.getpid()) else ''\n"
            "assert states() == ['Z', 'Z'], states()\nreap_orphans()\nassert states() == [], states()\n")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_an_error_of_the_start_is_not_repeated(fake):
    f = fake("fatal")
    started = time.monotonic()
    output, log = f.finish()
    assert f.process.returncode == 1 and time.monotonic() - started < 10
    assert "the port is in use" in output and "starting it again" not in log


def test_a_log_that_nobody_reads_does_not_stop_the_supervisor(fake):
    """Ranks print far more than pipes hold; both of the supervisor's outputs are pipes that nobody reads."""
    f = fake("flood", driver=SERVE)
    f.wait_ready()
    time.sleep(2)
    before = set(f.ranks())
    assert before and f.process.poll() is None
    os.kill(max(before), signal.SIGKILL)
    wait_for(lambda: len(set(f.ranks()) - before) == 2)
    f.process.terminate()
    f.process.wait(20)
    wait_for(f.nothing_left)
    assert f.process.returncode == 0


def test_output_that_is_not_read_in_time_is_dropped_and_counted():
    from allspark_launch.output import MOST_PENDING, Outlet
    read_end, write_end = os.pipe()
    outlet = Outlet(write_end)
    outlet.write(b"first\n")
    assert os.read(read_end, 100) == b"first\n"
    for _ in range(3 * MOST_PENDING // 1000):
        outlet.write(b"x" * 999 + b"\n")
    assert not outlet.finish()                              # within a second, although nobody reads
    received, dropped = b"", 0
    while received.count(b"x" * 999) * 1000 + dropped < 3 * MOST_PENDING // 1000 * 1000:
        received += os.read(read_end, 1 << 20)
        dropped = sum(map(int, re.findall(rb"\[(\d+) bytes of output were dropped", received)))
    assert dropped > MOST_PENDING
    os.close(read_end)
    os.close(write_end)


def test_supervisor_ends_with_its_parent(fake):
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    f = fake(parent=parent.pid)
    f.wait_ready()
    parent.kill()
    parent.wait()
    f.finish()
    assert f.process.returncode == 0


def test_supervisor_in_process_reports_a_missing_mpirun(tmp_path):
    supervisor = Supervisor(lambda owed: Start(["/nowhere/mpirun"], {}, 1), tmp_path, limits=Limits(max_failures=1))
    with pytest.raises((GroupFailed, OSError), match="/nowhere/mpirun"):
        supervisor.run()
    assert processes_of_session(2 ** 22 + 1) == []


def test_a_killed_rank_is_noticed_within_a_second(fake):
    """Even if mpirun does not notice it."""
    f = fake("unnoticed")
    f.wait_ready()
    ranks, mpirun = f.ranks(), f.mpirun()
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    wait_for(lambda: not set(mpirun) & set(f.mpirun()))
    assert time.monotonic() - began < 1.5, "noticed, and all of it ended"
    wait_for(lambda: len(f.ranks()) == 2)
    assert not set(ranks) & set(f.ranks())


def test_a_stopped_rank_is_noticed_within_five_seconds(fake):
    """A rank that is only silent has longer, because it may be busy."""
    f = fake(driver=DRIVER.replace("heartbeat_timeout=2.5", "heartbeat_timeout=30"))
    f.wait_ready()
    victim = f.ranks()[1]
    os.kill(victim, signal.SIGSTOP)
    began = time.monotonic()
    wait_for(lambda: victim not in f.ranks())
    assert 2.5 < time.monotonic() - began < 5.5


def test_a_group_that_answers_no_health_call_is_ended(fake):
    f = fake("unhealthy")
    f.wait_ready()
    before = f.ranks()
    wait_for(lambda: f.ranks() and not set(before) & set(f.ranks()))
    f.process.terminate()
    assert "rank 0 has not answered a health call for" in f.finish()[1]


def test_a_drained_group_that_is_lost_comes_back_draining(fake):
    f = fake("drained")
    f.wait_ready()
    before = set(f.ranks())
    os.kill(min(before), signal.SIGKILL)
    wait_for(lambda: len(list(f.folder.glob("*.drain"))) >= 2)
    f.process.terminate()
    f.finish()
    assert {file.read_text() for file in f.folder.glob("*.drain")} == {"0.0", "inf"}


@contextlib.contextmanager
def supervising(folder: Path, mode: str = "good", start=None, **limits):
    """A supervisor over two fake ranks in a thread. Yields it, an event that is set once it serves or gives up, and a
    list that gets what it raises. start(words): plans an incarnation that runs these words.
    """
    for name, text in (("rank.py", FAKE_RANK), ("mpirun.py", FAKE_MPIRUN)):
        (folder / name).write_text(text)
    words = [sys.executable, str(folder / "mpirun.py"), str(folder / "rank.py"), "2", mode]
    raised, ready = [], threading.Event()

    def run() -> None:
        try:
            supervisor.run()
        except (GroupFailed, OSError) as error:
            raised.append(error)
            ready.set()

    start = start or (lambda words: Start(words, dict(os.environ), 2))
    supervisor = Supervisor(lambda owed: start(words), folder,
                            limits=Limits(**{"first_backoff": 0.1, "stop_timeout": 2, "kill_timeout": 1, **limits}),
                            on_ready=lambda _: ready.set())
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield supervisor, ready, raised
    finally:
        if thread.is_alive():
            supervisor.request_stop("the test ends")
        thread.join(30)
        assert not thread.is_alive()


def ranks_of(folder: Path) -> list[int]:
    pids = [int(file.name.split(".")[2]) for file in folder.glob("*.sent")]
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize("plans, status", [(1, 1), pytest.param(0, 78, marks=pytest.mark.slow)])
def test_the_exit_status_before_and_after_the_group_has_served(fake, plans, status):
    """The service manager does not start a misconfigured service again, so only a first start may end as one."""
    f = fake(driver=COMMAND.replace("PLANS", str(plans)))
    if plans:
        f.wait_ready()
        os.kill(f.ranks()[0], signal.SIGKILL)
    _, log = f.finish()
    assert f.process.returncode == status and "mpirun is being replaced" in log


def test_a_fork_that_fails_is_tried_again(tmp_path, monkeypatch):
    begin, failed = Incarnation.begin, []

    def failing(*arguments):
        if len(failed) < 2:
            failed.append(1)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return begin(*arguments)

    monkeypatch.setattr(Incarnation, "begin", failing)
    with supervising(tmp_path) as (supervisor, ready, raised):
        assert ready.wait(20) and not raised
    assert len(failed) == 2 == supervisor.restarts


@pytest.mark.slow
def test_removed_folders_are_made_anew(fake):
    """The login manager removes what a user has in /dev/shm and in its runtime folder when the user logs out."""
    f = fake(driver=SERVE)
    f.wait_ready()
    variables = Path(f"/proc/{f.ranks()[0]}/environ").read_text().split("\0")
    found = dict(variable.partition("=")[::2] for variable in variables)
    for folder in (Path(found["ALLSPARK_SHARED_MEMORY"]), Path(found["ALLSPARK_SUPERVISOR"]).parent):
        shutil.rmtree(folder)
    before = set(f.ranks())
    os.kill(min(before), signal.SIGKILL)
    wait_for(lambda: f.process.poll() is not None or len(set(f.ranks()) - before) == 2)
    f.wait_ready()
    f.process.terminate()
    _, log = f.finish()
    assert f.process.returncode == 0 and log.count("serving on unix:/fake") == 2, log


def test_a_reload_during_a_start_reaches_rank_0(tmp_path):
    with supervising(tmp_path, "slow") as (supervisor, ready, _):
        time.sleep(0.1)
        supervisor.request_reload()
        assert ready.wait(20)
        wait_for((tmp_path / "rank.py.reloaded").exists)


@pytest.mark.parametrize("frees", [pytest.param(True, marks=pytest.mark.slow), False])
def test_ranks_that_survive_sigkill_are_waited_for_while_memory_is_freed(tmp_path, monkeypatch, frees):
    """Stands for a rank in a call of a driver that does not end, or one whose terabyte takes a minute to be freed."""
    kill, began, free = Incarnation.kill_session, [], [1 << 30]
    last = psutil.virtual_memory()

    def kill_session(self) -> list[int]:
        began.append(time.monotonic())
        if frees and time.monotonic() - began[0] > 1.0:
            return kill(self)
        return [*kill(self), 2**22 - 1]

    def memory():
        free[0] += (8 << 20) * frees        # at each look, 50 a second
        return last._replace(available=free[0])

    monkeypatch.setattr(Incarnation, "kill_session", kill_session)
    monkeypatch.setattr(psutil, "virtual_memory", memory)
    with supervising(tmp_path, survival=0.6) as (_, ready, raised):
        assert ready.wait(20)
    if frees:
        assert not raised and began[-1] - began[0] > 1.0
    else:
        assert "survive SIGKILL" in str(raised[0]) and not raised[0].misconfigured


def test_an_incarnation_that_owed_requests_is_followed_by_one_of_as_many_ranks(tmp_path):
    """Even if the machine now suggests another number; the plan says why the last incarnation was lost."""
    for name, text in (("rank.py", FAKE_RANK), ("mpirun.py", FAKE_MPIRUN)):
        (tmp_path / name).write_text(text)
    owed, ready = [], threading.Event()

    def start(ranks: int) -> Start:
        owed.append(ranks)
        words = [sys.executable, str(tmp_path / "mpirun.py"), str(tmp_path / "rank.py"), "2", "owing"]
        return Start(words, dict(os.environ), 2)

    supervisor = Supervisor(start, tmp_path, limits=Limits(first_backoff=0.1), on_ready=lambda _: ready.set())
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    try:
        assert ready.wait(20)
        wait_for(lambda: len(list(tmp_path.glob("*.sent"))) == 2)
        time.sleep(0.2)     # the heartbeat with its requests
        os.kill(int(next(tmp_path.glob("*.sent")).name.split(".")[2]), signal.SIGKILL)
        wait_for(lambda: len(owed) == 2)
    finally:
        supervisor.request_stop("the test ends")
        supervisor.request_stop("at once")
        thread.join(30)
    assert owed == [0, 2] and not thread.is_alive()
