"""Real groups on tiny checkpoints, against transformers: mpirun, pinned ranks, shared memory, the service."""
import contextlib
import json
import os
import pwd
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from allspark_client import AllSparkError, AsModelConfig, ClientEngine
from allspark_launch.group.background import background_group
from allspark_launch.group.mpi import installations
from allspark_launch.group.processes import processes_of_session
from support.paths import ROOT
from support.tiny_configs import CONFIGS
from support.waiting import wait_for

checkpoints = pytest.importorskip("support.checkpoints")    # needs torch and transformers
from support.greedy import check_greedy_output

CONFIGURATION = "qwen2-gqa-tied"        # 14 query heads, 2 KV heads, 151 intermediate, 1031 words: divides by nothing
MPIS = {i.source: i for i in installations()[0]}


def children(pid: int) -> list[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return [int(c) for t in tasks for c in Path(f"/proc/{pid}/task/{t}/children").read_text().split()]
    except OSError:
        return []


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def ranks_of(supervisor: int) -> dict[int, int]:
    """Processes of the ranks below a supervisor, by their position in the CPU list; in rank order."""
    found = [p for mpirun in children(supervisor) for p in children(mpirun) if "allspark_server" in command_of(p)]
    leader = [p for p in found if "--address" in command_of(p)]
    return dict(enumerate(leader + sorted(set(found) - set(leader))))


def install(engine, name: str, path, **options) -> None:
    engine.install_model(AsModelConfig(model_name=name, model_path=str(path), **options))
    engine.start_model(name)


def greedy(engine, name: str, prompt: list[int], n: int) -> list[int]:
    config = {"do_sample": False, "max_new_tokens": n, "early_stopping": False}
    _, handle, queue = engine.start_request(name, {"input_ids": prompt}, config)
    ids = [i for elements in queue for i in elements.ids_from_generate]
    engine.release_request(name, handle)
    return ids


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids=lambda n: f"{n}ranks")
def group(request):
    """A group and a client of it, for each number of ranks in turn."""
    with background_group(["--ranks", str(request.param)], timeout=60) as started:
        with ClientEngine(started.addresses[0]) as engine:
            yield SimpleNamespace(engine=engine, size=request.param, supervisor=started.supervisor_pid)


def test_world_and_binding(group):
    assert group.engine.get_rank_nums() == group.size
    ranks = ranks_of(group.supervisor)
    assert len(ranks) == group.size
    cores = sorted(os.sched_getaffinity(0))
    for pid in ranks.values():
        words = command_of(pid)
        own = {int(c) for c in words[words.index("--cpus") + 1].split(",")}
        assert own <= os.sched_getaffinity(pid) <= set(cores)
        shared = "--no-pin" in words        # with other groups that run on this machine
        assert ("--no-spin" in words) == (shared or group.size > len(cores))


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_is_what_transformers_says(group, name):
    """A short version of test_table over configurations and ranks."""
    install(group.engine, name, checkpoints.checkpoint(name), engine_max_length=512)
    try:
        for length in (1, 7, 150):
            prompt = checkpoints.prompt_of(length)
            check_greedy_output(greedy(group.engine, name, prompt, 24), checkpoints.checkpoint(name), prompt)
    finally:
        group.engine.release_model(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_table(group, name, capsys):
    """256 tokens, prompts of 1 to 700 tokens, all at once. Prints one line of the table."""
    install(group.engine, name, checkpoints.checkpoint(name), engine_max_length=1024, max_step_tokens=64)
    counts = []
    try:
        lengths = (1, 2, 33, 130, 700)
        found: dict[int, list[int]] = {}
        threads = [threading.Thread(target=lambda n=n: found.__setitem__(
            n, greedy(group.engine, name, checkpoints.prompt_of(n), 256))) for n in lengths]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        counts = [check_greedy_output(found[n], checkpoints.checkpoint(name), checkpoints.prompt_of(n))
                  for n in lengths]
    finally:
        group.engine.release_model(name)
    with capsys.disabled():
        print(f"\n{name:<24} {group.size} rank(s): equal tokens of 256 at prompt lengths {lengths}: {counts}")


def test_same_bits_twice(group):
    name, prompt = CONFIGURATION, checkpoints.prompt_of(40)
    install(group.engine, name, checkpoints.checkpoint(name))
    config = {"seed": 3, "max_new_tokens": 40, "logprobs": True, "early_stopping": False}

    def once():
        _, handle, queue = group.engine.start_request(name, {"input_ids": prompt}, config)
        elements = list(queue)
        group.engine.release_request(name, handle)
        return [i for e in elements for i in e.ids_from_generate], [p for e in elements for p in e.token_logprobs_list]

    try:
        assert once() == once()
    finally:
        group.engine.release_model(name)


def test_bad_checkpoint_leaves_the_group_alive(group, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises((AllSparkError, ValueError)):
        install(group.engine, "bad", tmp_path)
    install(group.engine, "good", checkpoints.checkpoint(CONFIGURATION))
    assert len(greedy(group.engine, "good", [5, 6, 7], 4)) == 4
    group.engine.release_model("good")


def cpu_seconds(pids) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def pair():
    """A new group of two ranks with a model, which the test may damage."""
    with background_group(["--ranks", "2", "--model", str(checkpoints.checkpoint(CONFIGURATION)),
                           "--model-name", "m"], timeout=60) as started:
        with ClientEngine(started.addresses[0]) as engine:
            yield SimpleNamespace(engine=engine, supervisor=started.supervisor_pid)


def test_an_idle_group_uses_no_cpu(pair):
    assert len(greedy(pair.engine, "m", [5, 6, 7], 4)) == 4
    pids = [pair.supervisor, *children(pair.supervisor), *ranks_of(pair.supervisor).values()]
    assert len(pids) == 4
    time.sleep(0.5)
    before = cpu_seconds(pids)
    time.sleep(10)
    assert cpu_seconds(pids) - before < 0.1     # 1 % of one CPU, all processes of the group together


@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "mpirun"])
def test_group_comes_back_with_its_models(pair, victim):
    install(pair.engine, "by-client", checkpoints.checkpoint(CONFIGURATION))
    expected = greedy(pair.engine, "by-client", [5, 6, 7], 8)
    before = ranks_of(pair.supervisor)
    os.kill(children(pair.supervisor)[0] if victim == "mpirun" else before[int(victim[-1])], signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{p}/cmdline").exists() and command_of(p)[0] for p in before.values()))
    wait_for(lambda: len(ranks_of(pair.supervisor)) == 2)
    assert greedy(pair.engine, "by-client", [5, 6, 7], 8) == expected
    assert greedy(pair.engine, "m", [5, 6, 7], 8) == expected


def test_nothing_outlives_a_killed_supervisor(pair):
    mpirun = children(pair.supervisor)[0]
    os.kill(pair.supervisor, signal.SIGKILL)
    wait_for(lambda: not processes_of_session(mpirun))


def test_nothing_outlives_a_killed_parent(tmp_path):
    code = ("import os, sys, time; from allspark_launch.group.background import background_group\n"
            "with background_group(['--ranks', '2']) as g:\n"
            "    print(g.supervisor_pid, flush=True); time.sleep(100)")
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    supervisor = int(parent.stdout.readline())
    mpirun = children(supervisor)[0]
    parent.kill()
    parent.communicate()
    wait_for(lambda: not processes_of_session(mpirun) and not command_of(supervisor)[1:])


def test_nothing_is_left_of_a_killed_client():
    """No processes, folders, sockets or shared memory of the group that it had started for itself."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        code = ("import time; from allspark_client import ClientEngine\n"
                "with ClientEngine() as e:\n    print(e.get_rank_nums(), flush=True); time.sleep(100)")
        environment = {k: v for k, v in os.environ.items() if k not in ("XDG_RUNTIME_DIR", "ALLSPARK_ADDRESS")}
        shared = set(Path("/dev/shm").iterdir())
        client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                                  env={**environment, "TMPDIR": folder, "AS_NUMA_NUM": "2"})
        assert client.stdout.readline() == "2\n"
        supervisor = children(client.pid)[0]
        mpirun = children(supervisor)[0]
        mine = [p for p in set(Path("/dev/shm").iterdir()) - shared if p.name.startswith("allspark-run-")]
        assert len(list(Path(folder).iterdir())) == 2 and mine
        client.kill()
        client.communicate()
        wait_for(lambda: not processes_of_session(mpirun) and not command_of(supervisor)[1:])
        assert list(Path(folder).iterdir()) == [] and not any(p.exists() for p in mine)


def test_a_rank_that_cannot_allocate(pair):
    """Only rank 1 is out of address space: loading fails with an error that names it, and the group continues."""
    rank1 = ranks_of(pair.supervisor)[1]
    size = int(Path(f"/proc/{rank1}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = resource.prlimit(rank1, resource.RLIMIT_AS, (size + (32 << 20), resource.RLIM_INFINITY))
    with pytest.raises(AllSparkError, match="rank 1") as error:
        install(pair.engine, "large", checkpoints.checkpoint(CONFIGURATION), cache_memory=300 << 20)
    assert error.value.status.name == "ALLSPARK_MEMORY_ERROR"
    resource.prlimit(rank1, resource.RLIMIT_AS, limits)
    assert len(greedy(pair.engine, "m", [5, 6, 7], 4)) == 4
    install(pair.engine, "large", checkpoints.checkpoint(CONFIGURATION), cache_memory=300 << 20)
    assert len(greedy(pair.engine, "large", [5, 6, 7], 4)) == 4


@pytest.mark.slow
def test_a_frozen_rank_is_replaced(pair):
    before = ranks_of(pair.supervisor)
    os.kill(before[1], signal.SIGSTOP)
    wait_for(lambda: len(set(ranks_of(pair.supervisor).values()) - set(before.values())) == 2)
    assert len(greedy(pair.engine, "m", [5, 6, 7], 4)) == 4


@pytest.mark.slow
def test_a_group_that_serves_between_kills_is_always_started_again(pair):
    """More kills, each soon after a start, than the number of incarnations that may serve nothing."""
    for _ in range(7):
        before = wait_for(lambda: len(ranks_of(pair.supervisor)) == 2 and ranks_of(pair.supervisor))
        assert len(greedy(pair.engine, "m", [5, 6, 7], 2)) == 2
        os.kill(before[1], signal.SIGKILL)
        wait_for(lambda: not any(any(command_of(p)) for p in before.values()))
    assert len(greedy(pair.engine, "m", [5, 6, 7], 2)) == 2


# ---- both MPI installations, by hand, and as a user ----------------------------------------------------------------

@pytest.mark.parametrize("source", MPIS)
@pytest.mark.parametrize("numactl", [True, False], ids=["numactl", "syscalls"])
def test_each_mpi_installation(source, numactl, monkeypatch, tmp_path):
    monkeypatch.setenv("ALLSPARK_MPIRUN", str(MPIS[source].mpirun))
    if not numactl:         # a PATH without it: the interpreter's folder only
        monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["--ranks", "2", "--model", str(checkpoints.checkpoint(CONFIGURATION)), "--model-name", "m"]
    with background_group(arguments, timeout=60) as started, ClientEngine(started.addresses[0]) as engine:
        words = command_of(children(started.supervisor_pid)[0])
        assert ("numactl" in words) == (numactl and shutil.which("numactl") is not None)
        assert Path(words[0]).resolve().parent == MPIS[source].mpirun.resolve().parent      # mpirun 5 becomes prterun
        for pid in ranks_of(started.supervisor_pid).values():
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert str(MPIS[source].library.resolve()) in maps
            assert maps.count("libmpi.so") == maps.count(str(MPIS[source].library.resolve()))      # and no other
        prompt = checkpoints.prompt_of(7)
        check_greedy_output(greedy(engine, "m", prompt, 24), checkpoints.checkpoint(CONFIGURATION), prompt)


def listening(pids: list[int]) -> list[str]:
    """Addresses, in the kernel's notation, of the TCP sockets on which these processes listen."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd))
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/net", file).read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


@pytest.mark.parametrize("source", MPIS)
def test_nothing_listens_beyond_the_loopback_interface(source, monkeypatch):
    monkeypatch.setenv("ALLSPARK_MPIRUN", str(MPIS[source].mpirun))
    with background_group(["--ranks", "2"], timeout=60) as started:
        ranks = list(ranks_of(started.supervisor_pid).values())
        own = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}      # 127.0.0.1, ::1
        assert set(listening([started.supervisor_pid, *children(started.supervisor_pid), *ranks])) <= own
        assert listening(ranks) == []                       # their listener is a Unix socket
        for pid in ranks:
            assert "_loopback" not in Path(f"/proc/{pid}/maps").read_text()


def by_hand(mpirun, *words: str, **environment: str) -> subprocess.Popen:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return subprocess.Popen([mpirun, *root, "--bind-to", "none", "--oversubscribe", "-np", "2", sys.executable, "-m",
                             "allspark_server", *words], env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


@pytest.mark.parametrize("source", MPIS)
def test_mpirun_by_hand(source, tmp_path):
    """The command line of the documentation, without launcher or environment."""
    process = by_hand(MPIS[source].mpirun, "--ranks", "2", "--address", f"unix:{tmp_path}/s", "--cpus", "0")
    try:
        wait_for((tmp_path / "s").exists)
        with ClientEngine(f"unix:{tmp_path}/s") as engine:
            assert engine.get_rank_nums() == 2
    finally:
        process.terminate()
        process.communicate(timeout=20)
    wait_for(lambda: not processes_of_session(process.pid))


@pytest.mark.skipif(len(MPIS) < 2, reason="needs two MPI installations")
@pytest.mark.parametrize("source", MPIS)
def test_mixed_installations_are_refused(source):
    other = next(m for s, m in MPIS.items() if s != source)
    process = by_hand(MPIS[source].mpirun, "--ranks", "2", MPI4PY_LIBMPI=str(other.library))
    output, _ = process.communicate(timeout=30)
    assert process.returncode != 0 and "two MPI installations are mixed" in output


def test_a_rank_without_mpirun_says_so():
    done = subprocess.run([sys.executable, "-m", "allspark_server", "--ranks", "2"], capture_output=True, text=True,
                          timeout=30)
    assert done.returncode != 0 and "no mpirun started this process" in done.stderr


@pytest.fixture
def foreign_python():
    """(interpreter, environment) with which the user nobody can run this project: this run's, or, if that lies in a
    private home, the system's of the same version with this one's packages.
    """
    import numpy
    packages = Path(numpy.__file__).parent.parent
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "allspark_launch").symlink_to(ROOT / "launch" / "allspark_launch")
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent",
                       "PYTHONPATH": f"{folder}:{ROOT}:{packages}"}
        for python in (sys.executable, f"/usr/bin/python3.{sys.version_info[1]}"):
            try:
                subprocess.run([python, "-c", "import numpy, allspark_server._native, allspark_launch"], cwd="/",
                               env=environment, user="nobody", group="nogroup", extra_groups=[], check=True,
                               capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                continue
            yield python, environment
            return
        pytest.skip("user nobody can read no Python of this version, or not the packages")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("source", MPIS)
@pytest.mark.parametrize("home", ["/nonexistent", None])
def test_as_another_user(source, home, foreign_python):
    """Without a home directory, and with nothing writable but /tmp."""
    python, environment = foreign_python
    if home is None:
        del environment["HOME"]
    code = ("from allspark_launch.group.background import background_group\nfrom allspark_client import ClientEngine\n"
            "with background_group(['--ranks', '2'], timeout=60) as g, ClientEngine(g.addresses[0]) as e:\n"
            "    print('ranks', e.get_rank_nums())")
    environment["ALLSPARK_MPIRUN"] = str(MPIS[source].mpirun)
    done = subprocess.run([python, "-c", code], env=environment, cwd="/", capture_output=True, text=True,
                          timeout=90, user="nobody", group="nogroup", extra_groups=[])
    assert done.stdout.strip() == "ranks 2", done.stderr
    nobody = pwd.getpwnam("nobody").pw_uid
    assert not [p for p in map(int, filter(str.isdigit, os.listdir("/proc")))
                if "allspark_server" in command_of(p) and os.stat(f"/proc/{p}").st_uid == nobody]


def test_a_port_in_use_is_reported(tmp_path):
    with background_group(["--ranks", "1"]) as started:
        with pytest.raises(RuntimeError, match="did not start.*(in use|already)"):
            with background_group(["--ranks", "1", "--address", started.addresses[0]]):
                pass


def served_by(tmp_path, **config) -> tuple[int, str]:
    """Runs `allspark serve` with one rank and this configuration until it ends; returns its exit status and last
    output.
    """
    (tmp_path / "group.json").write_text(json.dumps({"ranks": 1, **config}))
    done = subprocess.run([sys.executable, "-m", "allspark_launch", "serve", "--config", str(tmp_path / "group.json")],
                          capture_output=True, text=True, timeout=90)
    return done.returncode, done.stderr


def test_exit_status_tells_whether_to_start_again(tmp_path):
    """78 means: not before the named error is corrected."""
    status, error = served_by(tmp_path, address=f"unix:{tmp_path}/s", models=["/nowhere/model"])
    assert status == 78 and "model 'model' of the configuration cannot be loaded" in error
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, error = served_by(tmp_path, address=f"127.0.0.1:{taken.getsockname()[1]}", insecure=True)
    assert status == 1 and "in use" in error


def test_an_edited_configuration_counts(tmp_path):
    """The state file keeps models that clients installed, not earlier contents of the configuration."""
    def models(*entries: dict, install: str = "") -> dict[str, int]:
        path = str(checkpoints.checkpoint(CONFIGURATION))
        (tmp_path / "group.json").write_text(json.dumps({"models": [{"model_path": path, **e} for e in entries]}))
        arguments = ["--ranks", "1", "--config", str(tmp_path / "group.json"), "--state-file", str(tmp_path / "state")]
        with background_group(arguments, timeout=60) as started, ClientEngine(started.addresses[0]) as engine:
            if install:
                globals()["install"](engine, install, path)
            return {m.name: engine.get_model_info(m.name).span_size for m in engine.list_models()}

    first = models({"model_name": "edited"}, {"model_name": "removed"}, install="by-client")
    assert first == {"edited": 32, "removed": 32, "by-client": 32}
    assert models({"model_name": "edited", "cache_span_size": 64}) == {"edited": 64, "by-client": 32}


def test_a_world_of_another_size_is_refused(monkeypatch):
    from allspark_server.runtime.mpi import MpiError, join
    world = SimpleNamespace(size=1, rank=0)
    mpi = SimpleNamespace(COMM_WORLD=world, THREAD_FUNNELED=1, THREAD_MULTIPLE=3, Init_thread=lambda level: level)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(rc=SimpleNamespace(), MPI=mpi))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(MpiError, match="sees an MPI world of 1, but 2 ranks were started"):
        join(2, 4096)


def test_an_mpi_that_threads_may_not_call_cannot_span_hosts(monkeypatch):
    from allspark_server.runtime.mpi import MpiError, join
    world = SimpleNamespace(size=2, rank=0)
    mpi = SimpleNamespace(COMM_WORLD=world, THREAD_FUNNELED=1, THREAD_MULTIPLE=3, Init_thread=lambda level: 1)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(rc=SimpleNamespace(), MPI=mpi))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    with pytest.raises(MpiError, match="does not support calls from several threads"):
        join(2, 4096)


def test_a_window_larger_than_shared_memory_is_reported(monkeypatch):
    from allspark_server.runtime.mpi import MpiError, join
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(MpiError, match="docker run --shm-size"):
        join(2, 1 << 50)
