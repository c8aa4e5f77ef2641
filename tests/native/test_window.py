"""The shared memory between ranks: here every rank is a thread with a SharedMemory of its own over one mapping."""
import itertools
import mmap
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from allspark_server import _native
from support.programs import run_program

MAPPED = []  # stays: windows beat in it until they are closed


class Ranks:
    """`size` windows over one anonymous shared mapping, as MPI.Win.Allocate_shared would give them to processes."""

    def __init__(self, size, timeout=20.0, spin=False, heartbeat_seconds=1.0, first=0):
        step = (_native.SharedMemory.bytes_needed(size, first) + 4095) // 4096 * 4096
        self.memory = mmap.mmap(-1, step * size)
        self.view = np.frombuffer(self.memory, np.uint8)
        MAPPED.append(self.view)
        base = self.view.ctypes.data
        addresses = [base + r * step for r in range(size)]
        self.windows = [_native.SharedMemory(r, size, addresses, spin, timeout, heartbeat_seconds, first=first)
                        for r in range(size)]

    def run(self, function, timeout=30):
        """Calls function(shared_memory) for every rank at once. Returns results in rank order, or raises an error."""
        results, errors = [None] * len(self.windows), []

        def call(rank):
            try:
                results[rank] = function(self.windows[rank])
            except RuntimeError as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(r,)) for r in range(len(self.windows))]
        for t in threads:
            t.start()
        for t in threads:
            t.join(timeout)
        assert not any(t.is_alive() for t in threads), "a rank hangs"
        if errors:
            raise errors[0]
        return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gather_keeps_rank_order_and_any_length(size):
    ranks = Ranks(size)
    for lengths in (
        [0] * size,
        [5 + r for r in range(size)],
        [700_000 * (r + 1) for r in range(size)],
        [900_000] + [1] * (size - 1),
    ):
        payloads = [bytes([65 + r]) * lengths[r] for r in range(size)]
        results = ranks.run(lambda w: w.gather(payloads[w.rank]))
        assert results[0] == payloads and all(r is None for r in results[1:])


def in_rank_order(parts):
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


SIZES = [1, 2, 3, 7, 16, 63, 897, 8192, 8193, 65_537, 300_001, 1_500_000]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_all_reduce_adds_in_rank_order(size, threads):
    """Small messages go at once, large ones scattered and gathered: the same bits."""
    ranks, rng = Ranks(size), np.random.default_rng(size)
    for n in SIZES + SIZES[::-1]:
        parts = [(rng.normal(size=n) * 10.0 ** rng.integers(-3, 4, n)).astype(np.float32) for _ in range(size)]
        wanted = in_rank_order(parts)
        ranks.run(lambda w: w.all_reduce(parts[w.rank], threads))
        for part in parts:
            assert np.array_equal(part.view(np.uint32), wanted.view(np.uint32)), n


SHAPES = [(1, 1), (1, 13), (2, 64), (3, 7), (4, 896), (5, 1), (7, 513), (64, 101), (257, 896), (1000, 1537)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_rows_are_summed_where_they_belong_and_gathered(size, threads):
    """Fewer rows than ranks: some ranks have none."""
    ranks, rng = Ranks(size), np.random.default_rng(size)
    for rows, width in SHAPES + SHAPES[::-1]:
        parts = [rng.normal(size=(rows, width)).astype(np.float32) for _ in range(size)]
        kept, wanted = [part.copy() for part in parts], in_rank_order(parts)
        ranks.run(lambda w: w.reduce_scatter_rows(parts[w.rank], threads))
        owned = [w.rows_of(rows) for w in ranks.windows]
        assert owned[0][0] == 0 and owned[-1][1] == rows and all(a[1] == b[0] for a, b in itertools.pairwise(owned))
        for part, old, (begin, end) in zip(parts, kept, owned):
            assert np.array_equal(part[begin:end].view(np.uint32), wanted[begin:end].view(np.uint32))
            assert np.array_equal(part[:begin], old[:begin]) and np.array_equal(part[end:], old[end:])
        parts = [part.view(np.uint8) for part in parts]
        ranks.run(lambda w: w.all_gather_rows(parts[w.rank], threads))
        for part in parts:
            assert np.array_equal(part, wanted.view(np.uint8))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_rows_of_any_number_of_bytes_are_gathered(size):
    ranks, rng = Ranks(size), np.random.default_rng(size)
    for rows, width in [(1, 1), (2, 3), (9, 5), (33, 129), (17, 70_001)]:
        wanted = rng.integers(0, 256, (rows, width), dtype=np.uint8)
        parts = [np.zeros_like(wanted) for _ in range(size)]
        for part, shared_memory in zip(parts, ranks.windows):
            own = slice(*shared_memory.rows_of(rows))
            part[own] = wanted[own]
        ranks.run(lambda w: w.all_gather_rows(parts[w.rank], 2))
        assert all(np.array_equal(part, wanted) for part in parts)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_broadcast_of_any_length_reaches_all(size):
    ranks = Ranks(size)
    edge = (256 << 10) - 8  # of what one piece holds
    messages = [b"", b"x", bytes(range(256)), b"a" * edge, b"b" * (edge + 1), bytes(1_000_000), b"end"] + [b"y"] * 20
    for got in ranks.run(lambda w: [w.broadcast(m if w.rank == 0 else b"other") for m in messages]):
        assert got == messages


def test_collectives_of_all_kinds_follow_one_another():
    ranks = Ranks(3)

    def run(shared_memory):
        seen = []
        for i in range(50):
            x = np.full((5, 7), shared_memory.rank + i, np.float32)
            shared_memory.all_reduce(x, 2)
            shared_memory.reduce_scatter_rows(x, 2)
            own = x.view(np.uint8)
            shared_memory.all_gather_rows(own, 2)
            token = shared_memory.broadcast(str(i).encode())
            everyone = shared_memory.gather(bytes([shared_memory.rank]))
            seen.append((set(x.ravel().tolist()), token, everyone))
        return seen

    for rank, seen in enumerate(ranks.run(run)):
        for i, (values, token, everyone) in enumerate(seen):
            assert values == {3.0 * (3 * i + 3)} and token == str(i).encode()
            assert everyone == ([b"\0", b"\1", b"\2"] if rank == 0 else None)


def test_the_first_ranks_sum_by_themselves():
    """The last rank takes part only in the collectives of all ranks."""
    ranks = Ranks(4, first=3)

    def run(shared_memory):
        x = np.full(5000, shared_memory.rank + 1, np.float32)
        if shared_memory.rank < 3:
            first = shared_memory.first_ranks(3)
            assert first.size == 3 and shared_memory.first_ranks(3) is first
            first.all_reduce(x, 2)
            assert first.broadcast(b"of rank 0" if not first.rank else b"") == b"of rank 0"
            with pytest.raises(ValueError, match="the first 2 of 4 ranks on one host; there is memory for the first 3"):
                shared_memory.first_ranks(2)
        else:
            with pytest.raises(ValueError, match="rank 3 asks for the first 3 of 4 ranks"):
                shared_memory.first_ranks(3)
        shared_memory.gather(b"a")
        return x[0]

    assert ranks.run(run) == [6, 6, 6, 4]


@pytest.mark.parametrize("by_first", [True, False])
def test_an_abort_ends_the_waits_of_the_first_ranks_and_of_all(by_first):
    ranks = Ranks(4, first=3)
    (ranks.windows[1].first_ranks(3) if by_first else ranks.windows[3]).abort("a rank is lost")
    with pytest.raises(RuntimeError, match="a rank is lost"):
        ranks.windows[2].gather(b"a")
    with pytest.raises(RuntimeError, match="a rank is lost"):
        ranks.windows[0].first_ranks(3).all_reduce(np.zeros(3, np.float32))


def test_memory_for_the_first_ranks_only_where_it_is_asked_for():
    assert _native.SharedMemory.bytes_needed(4, 3) == 2 * _native.SharedMemory.bytes_needed(4)
    with pytest.raises(ValueError, match="there is memory for the first 0"):
        Ranks(2).windows[0].first_ranks(1)
    with pytest.raises(ValueError, match="the first 3 of 2 ranks"):
        Ranks(2, first=3)


@pytest.mark.parametrize("call", [lambda w: w.all_reduce(np.zeros(10, np.float32)), lambda w: w.broadcast(),
                                  lambda w: w.all_reduce(np.zeros(500_000, np.float32), 2)])
def test_collectives_name_a_missing_rank(call):
    ranks = Ranks(3, timeout=0.3)
    with pytest.raises(RuntimeError, match="waited 0 s for rank 0"):
        call(ranks.windows[2])


def test_commands_of_any_length_arrive_in_order():
    ranks = Ranks(3)
    payloads = [b"", b"x" * 10, bytes(3_000_000), b"y" * (1 << 20), b"end"]

    def run(shared_memory):
        if shared_memory.rank == 0:
            for kind, payload in enumerate(payloads):
                shared_memory.publish(kind, payload)
            return None
        return [shared_memory.wait_command(10) for _ in payloads]

    for got in ranks.run(run)[1:]:
        assert got == list(enumerate(payloads))


def test_waiting_for_a_command_times_out_and_costs_no_cpu():
    ranks = Ranks(2)
    cpu, start = time.process_time(), time.monotonic()
    assert ranks.windows[1].wait_command(1.0) is None
    assert 0.9 < time.monotonic() - start < 3 and time.process_time() - cpu < 0.1


def test_an_abort_ends_every_wait_with_its_message():
    ranks = Ranks(3)

    def run(shared_memory):
        if shared_memory.rank == 2:
            time.sleep(0.2)
            shared_memory.abort("rank 2 cannot go on")
            return None
        return shared_memory.gather(b"x") if shared_memory.rank == 0 else shared_memory.wait_command(20)

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 2 cannot go on"):
        ranks.run(run)
    assert time.monotonic() - start < 5 and ranks.windows[0].aborted() == "rank 2 cannot go on"


def test_a_missing_rank_is_named_after_the_time_limit():
    ranks = Ranks(2, timeout=0.5)
    with pytest.raises(RuntimeError, match="waited 0 s for rank 1 in gather"):
        ranks.windows[0].gather(b"x")


SILENT = dict(timeout=60.0, heartbeat_seconds=0.02)


@pytest.mark.parametrize("wait", [lambda w: w.gather(b"x"), lambda w: [w.publish(1, b""), w.publish(2, b"")]])
def test_a_silent_rank_is_noticed_long_before_the_time_limit(wait):
    ranks = Ranks(2, **SILENT)
    ranks.windows[1].close()    # sends no more heartbeats, like a process that ended or is stopped
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 waited for rank 1 in .* silent"):
        wait(ranks.windows[0])
    assert time.monotonic() - start < 10 and "silent" in ranks.windows[1].aborted()


def test_a_rank_that_waits_for_commands_notices_that_rank_0_is_silent():
    ranks = Ranks(2, **SILENT)
    assert ranks.windows[1].wait_command(1.0) is None   # 50 heartbeats: idle is not silent
    ranks.windows[0].close()
    with pytest.raises(RuntimeError, match="rank 1 waited for rank 0 .* silent"):
        ranks.windows[1].wait_command(30)


def test_a_rank_is_not_silent_because_two_threads_look_at_once(tmp_path):
    run_program(tmp_path, "silence", words=("300",))


def test_a_link_that_cannot_start_is_an_error():
    """The limit on open files is reached. In a process of its own, which must not end by a signal."""
    code = '''
import mmap, resource, socket
import numpy as np
from allspark_server import _native
step = (_native.SharedMemory.bytes_needed(2) + 4095) // 4096 * 4096
view = np.frombuffer(mmap.mmap(-1, step * 2), np.uint8)
hosts = _native.Hosts(0, [0, 1, 2], [1] * 5)    # MPI's functions are not called
near, far = socket.socketpair()
resource.setrlimit(resource.RLIMIT_NOFILE, (far.fileno() + 1, far.fileno() + 1))
try:
    _native.SharedMemory(0, 2, [view.ctypes.data, view.ctypes.data + step], False, 5.0, 0.2, hosts, [near.fileno()])
except RuntimeError as error:
    print(error)
'''
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "link: the limit on open files is reached\n"), done.stderr


def test_a_rank_that_is_late_but_alive_is_waited_for():
    ranks = Ranks(2, **SILENT)

    def run(shared_memory):
        time.sleep(shared_memory.rank * 1.5)   # 75 heartbeats
        return shared_memory.gather(b"x")

    assert ranks.run(run)[0] == [b"x", b"x"]


def test_one_of_two_threads_that_abort_at_once_is_heard_whole():
    for _ in range(100):
        ranks = Ranks(1)
        messages = [letter * 1000 for letter in "ab"]
        start, seen = threading.Barrier(3), []

        def abort(message):
            start.wait()
            ranks.windows[0].abort(message)

        threads = [threading.Thread(target=abort, args=(m,)) for m in messages]
        for t in threads:
            t.start()
        start.wait()
        while not seen or seen[-1] is None:
            seen.append(ranks.windows[0].aborted())
        for t in threads:
            t.join()
        assert {seen[-1], ranks.windows[0].aborted()} in ({m} for m in messages)


def test_an_abort_s_message_is_cut_between_characters():
    ranks = Ranks(1)
    ranks.windows[0].abort("x" + 1000 * "\u00e9")
    assert ranks.windows[0].aborted() == "x" + 509 * "\u00e9"
