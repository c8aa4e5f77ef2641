"""A rank of a group of processes that sample: see cuda/test_cuda_rank_sampling.py. Its argument is a JSON object."""
from __future__ import annotations

import json
import mmap
import sys

import numpy as np

from allspark_server import _native
from support.gpu_sampling import SLOTS, Head, cases_of
from support.sampling_reference import Params

STEPS, FIELDS = 20, ("tokens", "logprobs", "status", "top_ids", "top_logprobs", "logits")


def memory_of(rank: int, world: int, path: str):
    """The shared memory of ranks, in a file that is empty at first."""
    size = -(-_native.SharedMemory.bytes_needed(world) // mmap.PAGESIZE) * mmap.PAGESIZE
    with open(path, "r+b") as file:
        file.truncate(size * world)
        mapped = np.frombuffer(mmap.mmap(file.fileno(), size * world), np.uint8)
    memory = _native.SharedMemory(rank, world, [mapped.ctypes.data + r * size for r in range(world)], False, 60.0)
    return memory, mapped


def many_biases(vocab: int, rng: np.random.Generator) -> list:
    """Cases with too many edits for one step: the host samples the remaining rows."""
    biases = [(int(i), 0.5) for i in rng.permutation(vocab)]
    return [(Params(logit_bias=biases, seed=i, top_p=0.9, logprobs=True), rng.integers(1, vocab, 20), None)
            for i in range(SLOTS)]


def cases_for(vocab: int, seed: int) -> tuple[np.random.Generator, list]:
    """What all ranks and the test know: the generator of the weights, and cases."""
    rng = np.random.default_rng(seed + 1)
    cases = cases_of(vocab, rng)
    cases[3] = (Params(top_p=0.5, logprobs=True), np.array([1, 2, 0]), None)  # logits that are not finite
    return np.random.default_rng(seed), cases


def main() -> None:
    asked = json.loads(sys.argv[1])
    rank, world, vocab = asked["rank"], asked["world"], asked["vocab"]
    memory, mapped = memory_of(rank, world, asked["memory"]) if world > 1 else (None, None)
    weights, cases = cases_for(vocab, asked["seed"])
    head = Head(vocab, weights, asked["spread"], asked["ties"], ranks=memory, gpu=asked["gpu"])
    steps = [head.draws(cases[first:first + SLOTS]) for first in range(0, len(cases), SLOTS)]
    if asked["biases"]:
        steps.append(head.draws(many_biases(vocab, np.random.default_rng(5))))
    found = {field: np.concatenate([getattr(step, field) for step in steps]) for field in FIELDS}
    for first in (0, SLOTS):
        for ahead in (False, True):
            tokens = head.continued(cases[first:first + SLOTS], STEPS, ahead)
            found[f"continued-{first}-{ahead}"] = np.array(tokens)
    np.savez(asked["out"], **found)
    del head
    if memory is not None:
        memory.close()
    del mapped


if __name__ == "__main__":
    main()
