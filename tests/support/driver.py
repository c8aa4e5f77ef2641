"""Runs the ranks of a model without an engine: each rank is a thread of this process, and their shared memory is a
NumPy array.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from allspark_client.config import AsModelConfig
from allspark_server.runtime.plan import SAMPLE, Flag, NewSlot, SamplingParams, StepPlan, WorkItem
from allspark_server.runtime.runner import ModelRunner

PAGE = 4096

SHARED_MEMORY = []     # keeps the shared memory alive: ranks write heartbeats into it until they are closed


def shared_memories(world: int, first: int = 0) -> list:
    """The shared memory of each rank; None for a single rank. first: how many ranks divide a mixed group's model."""
    if world == 1:
        return [None]
    from allspark_server import _native
    size = -(-_native.SharedMemory.bytes_needed(world, first) // PAGE) * PAGE
    memory = np.zeros(size * world + PAGE, np.uint8)
    SHARED_MEMORY.append(memory)
    base = -(-memory.ctypes.data // PAGE) * PAGE
    addresses = [base + rank * size for rank in range(world)]
    return [_native.SharedMemory(rank, world, addresses, False, 60.0, first=first) for rank in range(world)]


def spans_of_groups(info, spans: list[int]) -> list[list[int]]:
    """The spans of all cache groups but the first that correspond to these spans of the first group."""
    part = info.num_spans // len(info.cache_windows)
    assert not spans or spans[-1] < part
    return [[span + group * part for span in spans] for group in range(1, len(info.cache_windows))]


def logits_of(results) -> np.ndarray:
    """The logits of the whole vocabulary, [outputs, vocab]. Ranks of experts in a mixed group have none."""
    parts = [result.logits for result in results]
    return np.concatenate([part for part in parts if part.size] or parts[:1], axis=1)


class Driver:
    """Computes one sequence at a time on `world` ranks. Keyword arguments are fields of AsModelConfig."""

    def __init__(self, directory, world: int = 1, **fields):
        self.config = AsModelConfig(model_name="test", model_path=str(directory), **{
            "engine_max_length": 1024, "engine_max_batch": 2, "num_threads": 2 if world == 1 else 1, **fields})
        self.pool = ThreadPoolExecutor(world)
        models = len(self.config.device_ids) if self.config.expert_nodes else 1
        self.runners = [ModelRunner(self.config, rank=rank, world=world, shared_memory=shared_memory)
                        for rank, shared_memory in enumerate(shared_memories(world, models if models > 1 else 0))]
        spans = min(self._each(lambda runner: runner.load()))
        digests, addresses = [each.digest for each in self.runners], [each.address for each in self.runners]
        self._each(lambda runner: runner.connect(addresses))
        self.infos = self._each(lambda runner: runner.allocate_cache(spans, digests))
        self.info = self.infos[0]

    def _each(self, work):
        return list(self.pool.map(work, self.runners))

    def step(self, plan: StepPlan):
        """Computes a plan in which at most one row samples; returns (token or None, logits [vocab] or None)."""
        data = plan.encode()
        results = self._each(lambda runner: runner.step(data, True))
        logits = logits_of(results)
        return (int(results[0].tokens[0]), logits[0]) if len(logits) else (None, None)

    def generate(self, prompt: list[int], n: int, chunk: int | None = None) -> tuple[list[int], list[np.ndarray]]:
        """Generates `n` greedy tokens; returns them and the logits [vocab] of each."""
        size = self.info.span_size
        chunk = min(chunk or self.info.max_step_tokens, self.info.max_step_tokens)
        new = [NewSlot(0, list(prompt), SamplingParams(do_sample=False, prompt_len=len(prompt)).encode())]
        tokens, logits, computed, spans, length = [], [], 0, 0, len(prompt)
        while len(tokens) < n:
            count = min(chunk, length - computed)
            needed = -(-(computed + count) // size)
            last = computed + count == length
            fresh = list(range(spans, needed))
            token, row = self.step(StepPlan(new=new, work=[
                WorkItem(0, count, SAMPLE if last else 0, spans=fresh, other_spans=spans_of_groups(self.info, fresh))]))
            new, spans, computed = [], needed, computed + count
            if last:
                tokens.append(token)
                logits.append(row)
                length += 1
        self.step(StepPlan(free=[0], groups=len(self.info.cache_windows)))
        return tokens, logits

    def outputs(self, texts: list[list[int]]) -> np.ndarray:
        """What an embedder or a classifier gives for each text: float32 [texts, values], all from one step."""
        new, work, spans = [], [], 0
        for slot, ids in enumerate(texts):
            needed = -(-len(ids) // self.info.span_size)
            new.append(NewSlot(slot, list(ids), SamplingParams(do_sample=False, prompt_len=len(ids)).encode()))
            work.append(WorkItem(slot, len(ids), int(Flag.HIDDEN), outputs=1, spans=list(range(spans, spans + needed))))
            spans += needed
        data = StepPlan(new=new, work=work).encode()
        hidden = self._each(lambda runner: runner.step(data, False))[0].hidden
        done = StepPlan(free=list(range(len(texts)))).encode()
        self._each(lambda runner: runner.step(done, False))
        return hidden

    def close(self) -> None:
        self._each(lambda runner: runner.close())
        self.pool.shutdown()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def together(driver, prompts, chunk):
    """Runs all prompts in the same steps, in chunks of `chunk` rows, each followed by three given tokens. Returns the
    logits after the last token of each sequence.
    """
    size, done = driver.info.span_size, [0] * len(prompts)
    found, spans = [[] for _ in prompts], 0
    new = [NewSlot(i, [*p, 5, 6, 7], SamplingParams(do_sample=False, prompt_len=len(p)).encode())
           for i, p in enumerate(prompts)]
    for ahead in range(4):
        while any(d < len(p) + ahead for d, p in zip(done, prompts)):
            work, sampling_slots = [], []
            for slot, p in enumerate(prompts):
                rows = min(chunk, len(p) + ahead - done[slot])
                if not rows:
                    continue
                fresh = -(-(done[slot] + rows) // size) - -(-done[slot] // size)
                last = done[slot] + rows == len(p) + ahead
                ids = list(range(spans, spans + fresh))
                work.append(WorkItem(slot, rows, SAMPLE if last and ahead == 3 else 0, spans=ids,
                                     other_spans=spans_of_groups(driver.info, ids)))
                spans, done[slot] = spans + fresh, done[slot] + rows
                sampling_slots += [slot] if last and ahead == 3 else []
            results = driver._each(lambda runner: runner.step(StepPlan(new=new, work=work).encode(), True))
            new = []
            logits = logits_of(results)
            for slot, row in zip(sampling_slots, logits):
                found[slot].append(row)
    done = StepPlan(free=list(range(len(prompts))), groups=len(driver.info.cache_windows)).encode()
    driver._each(lambda runner: runner.step(done, False))
    return [row[0] for row in found]
