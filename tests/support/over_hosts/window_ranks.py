"""A rank of test_hosts.py under mpirun. `window_ranks.py HOSTS` splits this host into HOSTS hosts and checks that a
window over them computes the same bits as a window on one host.
"""
import faulthandler
import sys
import threading

import numpy as np

from allspark_server import _native
from allspark_server.runtime.mpi import join

SIZES = [1, 897, 8193, 65_537, 700_001]


def parts_of(size: int, n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(n)
    return [(rng.normal(size=n) * 10.0 ** rng.integers(-3, 4, n)).astype(np.float32) for _ in range(size)]


def in_rank_order(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def check_sums(w) -> None:
    for threads in (1, 3):
        for n in SIZES:
            parts = parts_of(w.size, n)
            wanted = in_rank_order(parts)
            w.all_reduce(parts[w.rank], threads)
            assert parts[w.rank].tobytes() == wanted.tobytes(), f"all_reduce of {n} by {threads} threads"


def check_rows(w) -> None:
    for rows, width in ((1, 5), (3, 96), (7, 896), (64, 4096), (333, 40)):
        parts = [part.reshape(rows, width) for part in parts_of(w.size, rows * width)]
        wanted, before = in_rank_order(parts), parts[w.rank].copy()
        w.reduce_scatter_rows(parts[w.rank], 2)
        begin, end = w.rows_of(rows)
        assert parts[w.rank][begin:end].tobytes() == wanted[begin:end].tobytes()
        assert parts[w.rank][:begin].tobytes() == before[:begin].tobytes()
        found = np.zeros((rows, width * 4), np.uint8)
        found[begin:end] = wanted[begin:end].view(np.uint8)
        w.all_gather_rows(found, 2)
        assert found.tobytes() == wanted.tobytes(), f"rows {rows} x {width}"


def check_messages(w) -> None:
    for lengths in ([0] * w.size, [700_000 * (r + 1) for r in range(w.size)], [900_000] + [1] * (w.size - 1)):
        payloads = [bytes([65 + r]) * lengths[r] for r in range(w.size)]
        assert w.gather(payloads[w.rank]) == (payloads if w.rank == 0 else None)
    for length in (0, 1, 1000, 262_137, 3_000_000):
        said = bytes(range(251)) * (length // 251 + 1)
        assert w.broadcast(said[:length] if w.rank == 0 else b"") == said[:length]


def check_commands(w) -> None:
    sent = [(i % 7, bytes([i % 251]) * length) for i, length in enumerate([0, 1, 5000, 2_500_000, 3] * 4)]
    for kind, payload in sent:
        if w.rank == 0:
            w.publish(kind, payload)
        else:
            assert w.wait_command(20.0) == (kind, payload)
    assert (w.gather(b"") is None) == (w.rank != 0)


def check_abort(w) -> None:
    """An abort on any rank reaches all ranks."""
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
    if w.rank == w.size - 1:
        w.abort("rank gave up")
    ended = threading.Event()
    for _ in range(50):
        if w.aborted():
            break
        ended.wait(0.1)
    assert "rank gave up" in (w.aborted() or "nobody")


def main() -> None:
    faulthandler.dump_traceback_later(60, exit=True)
    world = join(0, _native.SharedMemory.bytes_needed(), split=int(sys.argv[1]))
    between = {}
    if world.between is not None:
        between = {"hosts": _native.Hosts(world.rank, world.between.first, world.between.mpi),
                   "sockets": world.between.sockets}
    assert (world.between is None) == (sys.argv[1] == "1")
    w = _native.SharedMemory(world.rank, world.size, world.addresses, False, 30.0, 0.2, **between)
    for check in (check_sums, check_rows, check_messages, check_commands, check_abort):
        check(w)
    w.close()
    world.finalize()
    if world.rank == 0:
        print("all checks passed")


if __name__ == "__main__":
    main()
