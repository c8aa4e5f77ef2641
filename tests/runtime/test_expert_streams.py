"""What ranks of experts tell a GPU of their matrices, so that it can compute them: where these are, and that they are
the same. Nothing here needs a GPU: ranks of experts are those of a group with one.
"""
from __future__ import annotations

import mmap
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from allspark_client import AllSparkError, AsModelConfig
from allspark_server import _native
from allspark_server.models.roles import expert_ops
from allspark_server.runtime import expert_streams
from allspark_server.runtime.roles import role_of
from allspark_server.runtime.runner import ModelRunner

checkpoints = pytest.importorskip("support.checkpoints")    # needs torch and transformers
from support import quantized_checkpoints
from support.checkpoints import checkpoint
from support.driver import shared_memories
from support.mxfp4_checkpoint import mxfp4_pair
from support.waiting import wait_for

FORMS = {"int8": {"weight_dtype": "int8"}, "w8a8": {"weight_dtype": "w8a8"},
         "int4": {"weight_dtype": "int4", "weight_group_size": 32},
         "w4a8": {"weight_dtype": "w4a8", "weight_group_size": 32}}


@contextmanager
def ranks_of_experts(directory, count: int, **fields):
    """Loaded runners of all ranks of experts of a group with a GPU."""
    config = AsModelConfig(model_name="m", model_path=str(directory), num_threads=2, engine_max_length=128,
                           compute_unit="CUDA:0+CPU:" + ",".join(["0"] * count),
                           **{"expert_streaming_rows": 64, **fields})
    memories = shared_memories(1 + count)
    runners = [ModelRunner(config, rank=rank, world=1 + count, shared_memory=memories[rank])
               for rank in range(1, 1 + count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda runner: runner.load(), runners))
    try:
        yield runners
    finally:
        for runner in runners:
            runner.close()


def addresses_of(runners) -> list[bytes]:
    return [bytes.fromhex(runner.address.split(" ")[1]) for runner in runners]


def matrices_of(runner):
    """Of each layer and product: the ids of its matrix and of its bias, or None."""
    ids = runner.opened[0]._ids
    for layer, ops in enumerate(expert_ops(runner.opened[0].whole)):
        for down, op in enumerate((ops[0], ops[2])):
            yield layer, bool(down), ids[op.weights[0]], op.weights[1:]


def check_panels(panels, runners) -> None:
    for rank, runner in enumerate(runners):
        for layer, down, handle, bias in matrices_of(runner):
            own, found = runner._executor.panels(handle), panels.panels(rank, layer, down)
            assert own.rows == found.rows
            for expert in range(len(own)):
                np.testing.assert_array_equal(own.bytes(expert), found.bytes(expert))
            assert (panels.bias(rank, layer, down) is not None) == bool(bias)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_the_matrices_are_found(form, count):
    with ranks_of_experts(checkpoint("qwen3-moe"), count, **FORMS[form]) as runners:
        panels = _native.ExpertPanels(addresses_of(runners))
        assert (panels.ranks, panels.layers) == (count, len(expert_ops(runners[0].opened[0].whole)))
        check_panels(panels, runners)
        for rank in range(count):
            seconds = panels.seconds(rank)
            assert list(seconds) == [4, 16, 64, 256] and all(value > 0 for value in seconds.values())


@pytest.mark.parametrize("name", ["mxfp4", "gptq"])
def test_other_formats(name, tmp_path):
    """MXFP4 with biases, of which only one rank adds down's; integers with zero points."""
    if name == "mxfp4":
        directory, _ = mxfp4_pair(tmp_path)
    else:
        directory, _ = quantized_checkpoints.write_pair(tmp_path, quantized_checkpoints.GLM,
                                                        *quantized_checkpoints.gptq(4, 32), seed=5)
    with ranks_of_experts(directory, 2) as runners:
        panels = _native.ExpertPanels(addresses_of(runners))
        check_panels(panels, runners)
        if name == "mxfp4":
            assert np.any(panels.bias(0, 0, True)) and not np.any(panels.bias(1, 0, True))
            assert np.any(panels.bias(1, 0, False))


def test_shared_memory_changes_no_matrix():
    form = FORMS["int4"]
    with (ranks_of_experts(checkpoint("qwen3-moe"), 1, **form) as (shared,),
          ranks_of_experts(checkpoint("qwen3-moe"), 1, expert_streaming_rows=0, **form) as (private,)):
        assert len(private.address.split(" ")) == 1
        for (_, _, one, _), (_, _, other, _) in zip(matrices_of(shared), matrices_of(private)):
            np.testing.assert_array_equal(shared._executor.panels(one).bytes(), private._executor.panels(other).bytes())


@pytest.mark.skipif(not _native.shares_huge_pages(), reason="the system gives shared memory no huge pages")
def test_shared_matrices_are_in_huge_pages():
    def huge() -> int:
        with open("/proc/self/smaps_rollup") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("ShmemPmdMapped"))

    before, executor = huge(), _native.Executor(num_threads=3)
    executor.share_matrices(64 << 20)
    for _ in range(2):
        executor.add_matrix(8 * 1024, 3000, "w8a8", experts=8)
    size = 2 * _native.matrix_bytes(8 * 1024, 3000, "w8a8", experts=8)
    assert size <= huge() - before < size + (4 << 20) and executor.small_bytes == 0


def test_another_process_maps_them():
    with ranks_of_experts(checkpoint("qwen3-moe"), 1, **FORMS["w4a8"]) as runners:
        _, _, handle, _ = next(matrices_of(runners[0]))
        words = ("import sys; from allspark_server import _native; "
                 "panels = _native.ExpertPanels([bytes.fromhex(sys.argv[1])]); "
                 "sys.stdout.buffer.write(panels.panels(0, 0, False).bytes().tobytes())")
        found = subprocess.run([sys.executable, "-c", words, addresses_of(runners)[0].hex()], check=True,
                               capture_output=True).stdout
        assert found == runners[0]._executor.panels(handle).bytes().tobytes()


@pytest.mark.parametrize("name, fields, reason", [
    ("qwen3-moe", {"weight_dtype": "bfloat16"}, "experts in bfloat16 have no exact recipe"),
    ("qwen3-moe", {"weight_dtype": "int8", "expert_streaming_rows": 0}, "expert_streaming_rows=0"),
    ("nemotron-h", {"weight_dtype": "int8"}, "relu_square")])
def test_what_only_cpus_compute(name, fields, reason):
    with ranks_of_experts(checkpoint(name), 1, **fields) as (runner,):
        assert len(runner.address.split(" ")) == 1
        model = runner.opened[0]
        assert reason in expert_streams.reason_against(model, runner.config, "CUDA:0+CPU:0")
        assert "no GPU" in expert_streams.reason_against(model, runner.config, "CPU:0+CPU:0")


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_return_entries_where_experts_are_hot(count):
    form = FORMS["int4"]
    with (ranks_of_experts(checkpoint("qwen3-moe"), count, hot_expert_memory=1 << 20, **form) as runners,
          ranks_of_experts(checkpoint("qwen3-moe"), count, **form) as others):
        check_panels(_native.ExpertPanels(addresses_of(runners)), runners)
        for own, other in zip(runners, others):
            kinds = [[op.type for op in runner.opened[0].graph.ops] for runner in (own, other)]
            assert kinds[0] == [kind for kind in kinds[1] if kind != "combine_experts"]
            assert own._exchange_sizes["sum_width"] == other._exchange_sizes["sum_width"] * own._exchange_sizes["top"]


def test_hot_experts_are_refused():
    with pytest.raises(AllSparkError, match="hot_expert_memory=5 is not possible: experts in bfloat16 have no exact"):
        with ranks_of_experts(checkpoint("qwen3-moe"), 1, weight_dtype="bfloat16", hot_expert_memory=5):
            pass
    for unit in ("CUDA:0", "CPU:0+CPU:0", "CPU:0"):
        config = AsModelConfig(model_name="m", model_path="m", compute_unit=unit, hot_expert_memory=5)
        with pytest.raises(AllSparkError, match="hot_expert_memory=5 is for mixed groups with a GPU"):
            role_of(config, 0, 1 + len(config.expert_nodes))


#: seconds that an expert of gpt-oss-120b (14 MB) takes with 4, 16, 64 and 256 rows on 14 cores, and bytes/s of copies
TIMES, EXPERT, COPIES = (2.5e-4, 6e-4, 2.2e-3, 8.6e-3), 14e6, 55e9


def rates(*ranks: tuple[int, int, float, float]) -> _native.ExpertRates:
    """Of ranks with experts [begin, end), of which each has a part of the bytes and takes so much of the time."""
    return _native.ExpertRates([(begin, end, EXPERT * size, [time * value for value in TIMES])
                                for begin, end, size, time in ranks], COPIES, 128, 4, 23040)


WHOLE = rates((0, 128, 1, 1))
EVEN = [1.0] * 128


def test_ranks_and_the_gpu_end_together():
    """Ranks compute as many experts as fit into the time in which the others are copied, with some reserve."""
    found = [len(WHOLE.least_used(rows, EVEN)[0]) for rows in (128, 256, 512, 1024, 2048, 4096)]
    assert found == sorted(found, reverse=True) and found[-1] > 0
    for own, time in ((found[0], 2.5e-4), (found[2], 6e-4), (found[4], 2.2e-3)):
        copied = (128 - own) * EXPERT / COPIES
        assert 0.3 * copied < own * time < 0.6 * copied     # the reserve
    assert WHOLE.least_used(1 << 20, EVEN)[0] == []     # it pays no longer
    # Two ranks with half of each expert and of the cores are as one; the slower one of an uneven pair limits.
    halves = rates((0, 128, 0.5, 1), (0, 128, 0.5, 1))
    assert [len(halves.least_used(rows, EVEN)[0]) for rows in (128, 2048)] == [found[0], found[4]]
    assert len(rates((0, 128, 0.5, 0.5), (0, 128, 0.5, 1.5)).least_used(2048, EVEN)[0]) < found[4]


def test_ranks_compute_what_is_used_least():
    rng = np.random.default_rng(0)
    uses = (1 / (1 + rng.permutation(128))).astype(np.float32)
    chosen, _ = WHOLE.least_used(2048, uses)
    assert len(chosen) > 2 * len(WHOLE.least_used(2048, EVEN)[0])   # few rows choose these
    assert chosen == sorted(range(128), key=lambda e: uses[e])[:len(chosen)]
    # Those that the GPU has are not among them.
    present = [e in chosen[:20] for e in range(128)]
    assert not {e for e in range(128) if present[e]} & set(WHOLE.least_used(2048, uses, present)[0])
    # Of ranks with whole experts each computes its own, the slow one fewer.
    own, _ = rates((0, 64, 1, 1), (64, 128, 1, 4)).least_used(2048, EVEN)
    first, second = (sum(e // 64 == rank for e in own) for rank in (0, 1))
    assert first > second > 0
    with pytest.raises(ValueError, match="of 128 experts"):
        WHOLE.least_used(1, uses[:3])


@pytest.mark.parametrize("busier", [1.5, 3.0, 5.0])
def test_the_share_follows_the_times_of_ranks(busier):
    """Of ranks that take so many times as long as they were timed; it ends as it would if that had been known. A
    reserve of 2.2 is kept.
    """
    own, message, shares = rates((0, 128, 1, 1)), 2e-4 + 2048 * 23040 / 16e9, []
    for _ in range(12):
        chosen, (timed,) = own.least_used(2048, EVEN)
        shares.append(len(chosen))
        own.learn(0, 2048, busier * timed, timed)
    copied = (128 - shares[-1]) * EXPERT / COPIES
    known = max(busier, 2.2)
    assert copied - 2.5e-3 * known < message + known * timed <= copied
    assert (shares[-1] < shares[0]) == (busier > 2.2)
    # Steps of another size have a figure of their own; what cannot be is bounded, and a rank always gets a try.
    assert own.least_used(256, EVEN) == WHOLE.least_used(256, EVEN)
    for took in (1e9, float("nan"), 0.0, -1.0):
        own.learn(0, 2048, took, 1.0)
    assert own.least_used(2048, EVEN)[0]
    for _ in range(20):
        own.learn(0, 2048, 1e9, 1.0)
    assert len(own.least_used(2048, EVEN)[0]) >= 1
    with pytest.raises(IndexError):
        own.learn(1, 2048, 1.0, 1.0)


def test_rows_from_which_the_gpu_helps():
    alone, helped = WHOLE.first_rows(False), WHOLE.first_rows(True)
    assert 128 <= helped < alone < 256
    assert rates((0, 128, 1, 3)).first_rows(False) == 128     # fewer rows do not need all experts
    assert rates((0, 128, 1, 1e-9)).first_rows(True) == 10 ** 9


def test_memory_of_steps_that_both_compute(monkeypatch):
    """More ranks than one need room for the entries of all but the last."""
    with ranks_of_experts(checkpoint("qwen3-moe"), 1, **FORMS["int8"]) as (runner,):
        model, sizes = runner.opened[0], {}
        for by_ranks in (0, -1):
            monkeypatch.setattr(expert_streams, "BY_RANKS", by_ranks)
            sizes[by_ranks] = [expert_streams.stream_bytes(model, rows, ranks)
                               for rows in (64, 1 << 14) for ranks in (1, 2)]
        more = [own - other for own, other in zip(sizes[-1], sizes[0])]
        assert all(value > 0 for value in more)
        entries = 3 * 4 * 72    # bytes of a row's entries
        assert entries * 64 <= more[1] - more[0] < entries * 64 + (1 << 15)
        most = expert_streams.SPLIT_ROWS
        assert entries * most <= more[3] - more[2] < 2 * entries * most


def block_of(address: bytes) -> np.ndarray:
    """The memory of a rank's messages (native/comm/expert_exchange.h), of its address."""
    process, file = np.frombuffer(address[36:44], np.int32)
    with open(f"/proc/{process}/fd/{file}", "r+b") as memory:
        return np.frombuffer(mmap.mmap(memory.fileno(), 0), np.uint8)


def test_a_rank_returns_entries_if_a_message_asks_for_them():
    """As a GPU sends messages, of which it computes some experts' entries: -1 stands for these."""
    config = AsModelConfig(model_name="m", model_path=str(checkpoint("qwen3-moe")), num_threads=2,
                           engine_max_length=128, compute_unit="CUDA:0+CPU:0", expert_streaming_rows=64,
                           max_step_tokens=64, **FORMS["int4"])
    memories = shared_memories(2)
    runner = ModelRunner(config, rank=1, world=2, shared_memory=memories[1])
    runner.load()
    sizes = runner._exchange_sizes
    last: list[np.ndarray] = []     # what is returned for the last layer of each step
    rows, top, width, layers = 5, sizes["top"], sizes["sum_width"], len(expert_ops(runner.opened[0].whole))
    exchange = _native.ExpertExchange(memories[0], **sizes, by_gpu=True)
    own, theirs = exchange.address, bytes.fromhex(runner.address.split(" ")[0])
    exchange.connect([own, theirs])
    runner.connect([own.hex(), runner.address])
    runner.allocate_cache(1)
    sent, returned = block_of(own), block_of(theirs)
    header, answered = sent[:256].view(np.int32), returned[:4].view(np.uint32)
    values, results = sent[4096:].view(np.float32), returned[4096:].view(np.float32)
    choices, rng = sizes["rows"] * sizes["width"], np.random.default_rng(0)
    chosen = np.sort([rng.permutation(10)[:top] for _ in range(rows)]).astype(np.int32)
    shares = rng.random((rows, top), np.float32)

    def asked(entries: bool, chosen: np.ndarray, first: int = 0) -> np.ndarray:
        """What is returned for the first layer of a step; the others get the same message, the last one of two rows."""
        step = executor.submit(runner.step, b"", False)
        values[:choices] = x
        values[choices:choices + chosen.size].view(np.int32)[:] = chosen.ravel()
        at = choices + sizes["rows"] * top
        values[at:at + shares.size] = shares.ravel()
        found = []
        for layer in range(first, layers):
            count = rows if layer < layers - 1 else 2
            header[4:8] = layer, count, 2, entries
            header[0] += 1
            wait_for(lambda: answered[0] == header[0], 30)
            found.append(results[:count * width * (top if entries else 1)].reshape(count, -1, width).copy())
        header[16] += 1     # the step has ended
        step.result()
        last.append(found[-1])
        return found[0]

    x = rng.normal(size=choices).astype(np.float32)
    with ThreadPoolExecutor(1) as executor:
        sums, entries = asked(False, chosen)[:, 0], asked(True, chosen)
        summed = np.einsum("rew,re->rw", entries.astype(np.float64), shares)
        np.testing.assert_allclose(summed, sums, rtol=1e-4, atol=1e-6)
        part = np.where(rng.random(chosen.shape) < 0.5, chosen, -1).astype(np.int32)
        results[:] = 7
        again = asked(True, part)
        np.testing.assert_array_equal(again[part >= 0], entries[part >= 0])
        assert np.all(again[part < 0] == 7)     # they are not written
        np.testing.assert_array_equal(asked(False, chosen)[:, 0], sums)
        # A step whose other layers' experts the GPU has computed.
        np.testing.assert_array_equal(asked(False, chosen, layers - 1), last[0])
    # The rank counts the time of its answers, and that of those with entries apart.
    every, of_entries, count = returned[64:88].view(np.int64)
    assert every > of_entries > 0 and count == 2 * layers and every < 60e9
    runner.close()


def test_messages_have_room_for_entries(monkeypatch):
    """Of steps that both compute; announced before it is taken."""
    def room(**fields) -> tuple[dict, int]:
        fields = {"max_step_tokens": 64, **FORMS["int8"], **fields}
        with ranks_of_experts(checkpoint("qwen3-moe"), 1, **fields) as (runner,):
            sizes = runner._exchange_sizes
            return sizes, _native.ExpertExchange.bytes_needed(**sizes, holds_experts=True)

    sizes, bytes_of_entries = room()
    assert sizes["entry_rows"] == 64 and bytes_of_entries >= 64 * 3 * 4 * sizes["sum_width"]
    monkeypatch.setattr(expert_streams, "SPLIT_ROWS", 40)
    assert room()[0]["entry_rows"] == 40 and room()[1] < bytes_of_entries
    for fields in ({"expert_streaming_rows": 0}, {"weight_dtype": "bfloat16"}, {"hot_expert_memory": 1 << 20}):
        assert room(**fields)[0]["entry_rows"] == 0


def test_addresses_are_checked():
    with ranks_of_experts(checkpoint("qwen3-moe"), 1, **FORMS["int8"]) as runners:
        address = addresses_of(runners)[0]
        for wrong, words in (([], "no ranks of experts"), ([address[:-1]], "incomplete"),
                             ([b"x" + address[1:]], "another build")):
            with pytest.raises(ValueError, match=words):
                _native.ExpertPanels(wrong)
    with pytest.raises(ValueError, match="share_matrices"):
        _native.Executor().describe_experts()
