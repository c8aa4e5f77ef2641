"""How much memory a rank may allocate, and its errors when that is not enough."""

from __future__ import annotations

import contextlib
import logging
import resource
import subprocess
import sys

import pytest

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.runtime import device, memory, model_checks
from allspark_server.runtime.runner import ModelRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.checkpoints import checkpoint

MIB = 1 << 20
NAME = "llama-linear"


def make(**fields) -> ModelRunner:
    return ModelRunner(AsModelConfig(model_name="m", model_path=str(checkpoint(NAME)), num_threads=1, **fields))


def with_available(monkeypatch, size: int) -> None:
    monkeypatch.setattr(device, "available_memory", lambda world: size)


# -- sizes -------------------------------------------------------------------------------------------------------------
def test_cache_holds_every_request_at_full_length():
    one = make(engine_max_length=100, engine_max_batch=5, cache_span_size=16)
    spans = one.load()
    info = one.allocate_cache(spans)
    assert spans == info.num_spans == 5 * 7
    assert info.cache_bytes <= spans * one._span_bytes
    assert info.weight_bytes >= one._model.weight_bytes(one._device)
    one.close()


def test_cache_is_a_share_of_what_is_free(monkeypatch, caplog):
    probe = make()
    probe.load()
    step, cpus = (probe._sizes.rows, probe._sizes.outputs), probe._device
    fixed, span = probe._model.weight_bytes(cpus) + cpus.activation_bytes(probe._model, *step), probe._span_bytes
    probe.close()
    with_available(monkeypatch, fixed + 200 * span)
    assert make().load() == 120
    assert "not every one of engine_max_batch=32 requests can have engine_max_length=2048" in caplog.text
    with_available(monkeypatch, fixed + 75 * span)  # one request of full length needs 64 spans
    assert make().load() == 64
    with_available(monkeypatch, fixed + 70 * span)
    with pytest.raises(AllSparkError, match="the cache of one request of engine_max_length=2048 tokens") as caught:
        make().load()
    assert caught.value.status == AsStatus.ALLSPARK_MEMORY_ERROR


def test_cache_memory_is_taken_as_given(monkeypatch, caplog):
    one = make(cache_memory=10 * MIB)
    assert one.load() == 10 * MIB // one._span_bytes
    with pytest.raises(AllSparkError, match=r"rank 0 of 1 needs .* for weights \(float32\) and activations and .* for "
                                            r"a cache of cache_memory=\d+ bytes, .* MiB are available"):
        make(cache_memory=1 << 50).load()
    with pytest.raises(AllSparkError, match="cache_memory=100 holds no span of 32 tokens: one takes"):
        make(cache_memory=100).load()
    make(cache_memory=MIB // 2).load()
    assert "fewer than engine_max_length=2048" in caplog.text


def test_weights_that_do_not_fit(monkeypatch):
    with_available(monkeypatch, MIB // 4)
    with pytest.raises(AllSparkError, match="model 'm' does not fit: .* 0.2 MiB are available") as caught:
        make().load()
    assert caught.value.status == AsStatus.ALLSPARK_MEMORY_ERROR


def test_allocation_that_the_system_refuses():
    """The process's address space is limited after the check; the native failure has its documented status."""
    code = f"""
import resource
from allspark_client.config import AsModelConfig
from allspark_server.runtime.runner import ModelRunner
one = ModelRunner(AsModelConfig(model_name="m", model_path={str(checkpoint(NAME))!r}, num_threads=1))
one.load()
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20), resource.RLIM_INFINITY))
try:
    one.allocate_cache(1 << 20)
except Exception as error:
    print(type(error).__name__, error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.startswith("AllSparkError ALLSPARK_MEMORY_ERROR: allocating the cache of model 'm'"), out


def test_step_rows():
    def rows(**fields) -> int:
        with contextlib.closing(make(**fields)) as one:
            one.open()
            return one._sizes.rows

    assert rows() == 256
    assert rows(engine_max_batch=400) == 800
    assert rows(engine_max_prefill_length=64, engine_max_batch=8) == 72
    assert rows(max_step_tokens=40) == 40


# -- what is available -------------------------------------------------------------------------------------------------
def write(root, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def test_cgroup_version_2(tmp_path):
    root = write(tmp_path, {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "5\n",
        "sys/fs/cgroup/a/memory.max": "1000\n", "sys/fs/cgroup/a/memory.current": "700\n",
        "sys/fs/cgroup/a/memory.stat": "anon 400\ninactive_file 60\nactive_file 40\n",
        "sys/fs/cgroup/a/b/memory.events": "max 7\noom 3\noom_kill 2\noom_group_kill 0\n",
        "sys/fs/cgroup/a/memory.events": "oom 9\noom_kill 9\n"})
    assert memory.cgroup_available(root) == 400
    assert memory.cgroup_limit(root) == 1000 and memory.out_of_memory_kills(root) == 2


def test_cgroup_version_1_in_a_container(tmp_path):
    root = write(tmp_path, {
        "proc/self/cgroup": "9:cpu:/x\n4:memory:/docker/123\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "900\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "800\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 20\n"})
    assert memory.cgroup_available(root) == 150
    assert memory.cgroup_limit(root) == 900 and memory.out_of_memory_kills(root) == 0
    write(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                     "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"})
    assert memory.cgroup_available(root) > 1 << 50
    assert memory.cgroup_limit(root) == 0 and memory.out_of_memory_kills(root) == 1


def test_ranks_share_nodes_and_limits(tmp_path, monkeypatch):
    meminfo = ("Node {0} MemTotal:  1000 kB\nNode {0} MemFree: {1} kB\n"
               "Node {0} Active(file): 10 kB\nNode {0} Inactive(file): 20 kB\n")
    monkeypatch.setattr(memory.reservations, "pending", lambda nodes: 0)
    root = write(tmp_path, {
        "proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 900 kB\n",
        "sys/devices/system/node/node0/meminfo": meminfo.format(0, 300),
        "sys/devices/system/node/node1/meminfo": meminfo.format(1, 500),
        "sys/devices/system/node/node2/meminfo": "Node 2 MemTotal: 0 kB\n"})
    assert memory.memory_nodes(root) == [0, 1]
    monkeypatch.setattr(memory, "bound_nodes", lambda: [])
    assert memory.available_memory(3, root) == 300 * 1024
    monkeypatch.setattr(memory, "bound_nodes", lambda: [1])
    assert memory.available_memory(2, root) == 530 * 1024
    assert memory.available_memory(3, root) == 265 * 1024  # two ranks may be on this node
    assert memory.available_memory(2, root, nodes=[0]) == 330 * 1024  # of a rank that is not there yet
    assert memory.available_memory(3, root, nodes=[]) == 300 * 1024
    monkeypatch.setattr(memory, "ranks_on_node", {1: 2})  # both of them are: the group does not use node 0
    assert memory.available_memory(2, root) == 265 * 1024


def test_memory_that_no_node_reports_is_shared_out(tmp_path, monkeypatch):
    """A virtual machine whose memory grows with its use: ranks that were bound to a node refused models that fit."""
    meminfo = "Node {0} MemTotal: 1000 kB\nNode {0} MemFree: {1} kB\n"
    monkeypatch.setattr(memory.reservations, "pending", lambda nodes: 0)
    root = write(tmp_path, {
        "proc/meminfo": "MemTotal: 10000 kB\nMemAvailable: 8700 kB\n",
        "sys/devices/system/node/node0/meminfo": meminfo.format(0, 300),
        "sys/devices/system/node/node1/meminfo": meminfo.format(1, 400)})
    assert memory.unplugged_memory(root) == 8000 * 1024
    for node, free in ((0, 4300), (1, 4400)):
        monkeypatch.setattr(memory, "bound_nodes", lambda node=node: [node])
        assert memory.available_memory(2, root) == free * 1024
    write(tmp_path, {"proc/meminfo": "MemTotal: 1500 kB\nMemAvailable: 900 kB\n"})     # a container's own view
    assert memory.unplugged_memory(root) == 0


def test_memory_without_cpus_is_counted_by_those_who_are_bound_to_it(tmp_path, monkeypatch):
    """Node 2 is CXL memory, node 1 has only CPUs."""
    monkeypatch.setattr(memory.reservations, "pending", lambda nodes: 0)
    meminfo = "Node {0} MemTotal: {1} kB\nNode {0} MemFree: {1} kB\n"
    folder = "sys/devices/system/node/node"
    root = write(tmp_path, {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8500 kB\n",
        f"{folder}0/meminfo": meminfo.format(0, 1000), f"{folder}0/cpulist": "0-3\n",
        f"{folder}1/meminfo": meminfo.format(1, 0), f"{folder}1/cpulist": "4-7\n",
        f"{folder}2/meminfo": meminfo.format(2, 8000), f"{folder}2/cpulist": "\n",
        "sys/devices/system/cpu/cpu0/node0/x": "", "sys/devices/system/cpu/cpu4/node1/x": ""})
    assert memory.memory_nodes(root) == [0, 2] and memory.rank_nodes(root) == [0]
    monkeypatch.setattr(memory, "bound_nodes", lambda: [])
    assert memory.available_memory(2, root) == 500 * 1024
    assert memory.own_nodes([0], root) == {0} == memory.own_nodes([4], root)
    monkeypatch.setattr(memory, "bound_nodes", lambda: [0])
    assert memory.available_memory(2, root) == 500 * 1024
    monkeypatch.setattr(memory, "bound_nodes", lambda: [0, 2])
    monkeypatch.setattr(memory, "ranks_on_node", {0: 1, 2: 2})
    assert memory.available_memory(2, root) == 5000 * 1024 and memory.own_nodes([0], root) == {0, 2}


@pytest.fixture
def reservations(tmp_path, monkeypatch):
    monkeypatch.setattr(memory.reservations, "folder", lambda: tmp_path / "reservations")
    return memory.reservations


GROUP = """
import sys
from pathlib import Path
from allspark_server.runtime import reservations
reservations.folder = lambda: Path(sys.argv[1])
with reservations.planning():
    free = 1000 * (1 << 20) - reservations.pending([0])
    one = reservations.Reservation("m", free * 6 // 10, [0])
print(free >> 20, flush=True)
kept = bytearray(b"x" * (int(sys.argv[2]) << 20))
print("touched", flush=True)
sys.stdin.read()
"""


def started_group(folder, touched=0) -> subprocess.Popen:
    """Another group, in a session of its own, that plans to take six tenths of the apparently free memory."""
    return subprocess.Popen([sys.executable, "-c", GROUP, str(folder), str(touched)], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_groups_that_start_together_do_not_plan_with_the_same_memory(reservations):
    groups = [started_group(reservations.folder()) for _ in range(3)]
    assert sorted((int(g.stdout.readline()) for g in groups), reverse=True) == [1000, 400, 160]
    assert [g.stdout.readline() for g in groups] == ["touched\n"] * 3
    assert 930 * MIB < reservations.pending([0]) <= 936 * MIB
    assert reservations.pending([1]) == 0 and reservations.pending([]) == reservations.pending([0, 1])
    groups[0].kill()
    for g in groups:
        g.communicate()
    assert reservations.pending([]) == 0  # also of the one that was killed
    assert [file.name for file in reservations.folder().iterdir()] == ["lock"]


def test_what_is_touched_is_not_reserved_any_more(reservations):
    group = started_group(reservations.folder(), touched=200)
    assert [group.stdout.readline() for _ in range(2)] == ["1000\n", "touched\n"]
    assert 380 * MIB < reservations.pending([0]) <= 400 * MIB
    group.communicate()


def test_own_models_count_once_they_are_planned(reservations):
    """Ranks that load one model share the free memory; their reservations for it must not count twice."""
    one = reservations.Reservation("m", 100 * MIB, [0])
    entry = next(f for f in reservations.folder().iterdir() if f.name != "lock")
    assert 90 * MIB < reservations.pending([0]) <= 100 * MIB
    held = dict(reservations.Reservation._held)
    reservations.Reservation._held.clear()  # as another rank of this group sees it, which plans for "m" just now
    assert reservations.pending([0]) == 0
    reservations.Reservation._held.update(held)
    one.release()
    one.release()
    assert not entry.exists() and reservations.pending([0]) == 0


def test_what_a_process_touches_counts_for_one_of_its_models(reservations):
    models = [reservations.Reservation(name, 100 * MIB, [0]) for name in ("m", "n")]
    touched = bytearray(b"x") * (60 * MIB)
    assert 130 * MIB < reservations.pending([0]) <= 142 * MIB
    del touched
    for model in models:
        model.release()


def test_a_folder_of_somebody_else_is_not_used(reservations):
    reservations.folder().mkdir()
    reservations.folder().chmod(0o777)
    with reservations.planning():
        one = reservations.Reservation("m", 100, [])
    assert reservations.pending([]) == 0 and list(reservations.folder().iterdir()) == []
    one.release()


def test_a_runner_reserves_what_it_plans(reservations):
    with_cache = make(cache_memory=64 * MIB)
    with_cache.load()
    assert 32 * MIB < reservations.pending([]) < 80 * MIB
    with_cache.close()
    assert reservations.pending([]) == 0


def test_this_machine():
    assert 0 < memory.available_memory() < 1 << 60
    assert memory.memory_nodes() and memory.physical_cores() >= 1
    assert memory.bound_nodes() == [] or set(memory.bound_nodes()) <= set(range(1024))
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, before[1]))
    try:
        assert memory.available_memory() < 1 << 40
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# -- placement ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("elsewhere, warned", ((0, False), (2 * MIB, False), (30 * MIB, True)))
def test_pages_on_other_nodes_bring_a_warning_with_a_number(monkeypatch, caplog, elsewhere, warned):
    monkeypatch.setattr(model_checks, "memory_nodes", lambda: [0, 1])
    monkeypatch.setattr(memory, "bound_nodes", lambda: [1])
    monkeypatch.setattr(model_checks, "pages_by_node", lambda: {0: elsewhere, 1: 70 * MIB})
    with caplog.at_level(logging.WARNING):
        placement = model_checks.placement_of([], 0)
    assert ("30.0 MiB (30 %) of rank 0's memory are on other NUMA nodes than its own (1)" in caplog.text) == warned
    assert placement["misplaced_bytes"] == elsewhere
