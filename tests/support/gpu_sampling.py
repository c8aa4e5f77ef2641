"""A small program in the CUDA backend whose output is logits of a vocabulary of any size."""
from __future__ import annotations

import numpy as np

from allspark_server import _native
from allspark_server.runtime.plan import SAMPLE, NewSlot, StepPlan, WorkItem
from support.gpu_toys import executor
from support.sampling_reference import PROCESSORS, SETTINGS, Params, bitmask, random_case

DIM, SLOTS, LONGEST, SPAN = 16, 8, 128, 16


Case = tuple[Params, np.ndarray, "np.ndarray | None"]  # parameters, history, mask


def cases_of(vocab: int, rng: np.random.Generator) -> list[Case]:
    """Every processor with every filter, in random order."""
    cases: list[Case] = []
    for name in [*PROCESSORS, None]:
        for how, fields in SETTINGS.items():
            params, history = random_case(rng, name, vocab, 60) if name else (Params(), rng.integers(1, vocab, 60))
            history = np.maximum(history, 1)
            for field, value in fields.items():
                setattr(params, field, value)
            params.do_sample, params.sample_index = how != "greedy", int(rng.integers(4))
            params.seed, params.logprobs = int(rng.integers(2**62)), bool(rng.integers(2))
            params.top_logprobs = int(rng.integers(21)) if rng.integers(2) else 0
            mask = bitmask(rng.random(vocab) < rng.choice([0.0, 0.01, 0.6])) if rng.integers(4) == 0 else None
            cases.append((params, history, mask))
    rng.shuffle(cases)  # type: ignore[arg-type]
    return cases


class Head:
    """A program that computes logits of any vocabulary: an embedding, attention, and a matrix. With `ties`
    many ids have equal logits.

    ranks: the shared memory of one of several ranks, each of which has a part of the vocabulary, and the index of its
    GPU; None if there is one rank. The logits are the same for any number of ranks.
    """

    def __init__(self, vocab: int, rng: np.random.Generator, spread: float, ties: bool, masks: int = SLOTS,
                 cache: str = "float32", ranks=None, gpu: int = 0):
        self.vocab = vocab
        self.rank, world = (ranks.rank, ranks.size) if ranks else (0, 1)
        chunk = _native.chunk_of(vocab)
        begin, end = (min(vocab, -(-vocab // chunk) * r // world * chunk) for r in (self.rank, self.rank + 1))
        self.e = e = executor(ranks=ranks, gpu=gpu)
        qkv, out, last = e.add_tensor(3 * DIM), e.add_tensor(DIM), e.add_tensor(DIM, 1)
        logits = e.add_tensor(end - begin, 1)
        table, head = e.add_matrix(end - begin, 3 * DIM, "float32"), e.add_matrix(end - begin, DIM, "float32")
        rows = rng.normal(size=(vocab, 3 * DIM)).astype(np.float32)
        weights = (rng.normal(size=(vocab, DIM)) * spread).astype(np.float32)
        if ties:
            weights = weights[rng.integers(0, 20, vocab)]
        rows[0] = np.nan  # id 0 gives logits that are not finite
        assert e.fill_matrix(table, rows[begin:end], "F32") == (0 if begin else 3 * DIM)
        assert e.fill_matrix(head, weights[begin:end], "F32") == 0
        e.add_op("embedding", [], [qkv], [table], {"vocab_begin": begin})
        if ranks:
            e.add_op("all_reduce", [qkv], [qkv], [], {})
        e.add_op("span_attention", [qkv], [out], [], {"layer": 0, "q_heads": 1, "kv_heads": 1, "head_dim": DIM,
                                                      "group": 1, "scale": 0.25})
        e.add_op("select_rows", [out], [last], [], {})
        e.add_op("linear", [last], [logits], [head], {})
        e.add_op("sample", [logits], [], [], {"vocab_begin": begin, "vocab_size": vocab})
        if ranks:
            own = e.share(SLOTS * LONGEST)
            addresses = ranks.broadcast(b"".join(ranks.gather(own) or []))
            e.connect([addresses[r * len(own):(r + 1) * len(own)] for r in range(world)])
        e.allocate(SLOTS * LONGEST, SLOTS, LONGEST, SPAN, SLOTS * LONGEST // SPAN, cache, SLOTS * LONGEST, masks)

    def start(self, cases: list[Case], flags: int = SAMPLE, outputs: int = 1, more: int = 0) -> StepPlan:
        """The plan of a step with one new sequence for each case. more: positions that follow later."""
        new, work, masks = [], [], self.e.masks
        for slot, (params, history, mask) in enumerate(cases):
            new.append(NewSlot(slot, [int(i) for i in history], params.block().tobytes(), 0))
            spans = [slot * (LONGEST // SPAN) + i for i in range(-(-(len(history) + more) // SPAN))]
            work.append(WorkItem(slot, len(history), flags, spans=spans, outputs=outputs,
                                 mask=0 if mask is None else slot + 1))
            if mask is not None and self.rank == 0:  # the other ranks get their masks from rank 0
                masks.clear([slot])
                masks.bits[slot, :len(mask)] = mask
                masks.publish([slot])
        return StepPlan(new=new, work=work)

    def draws(self, cases: list[Case], flags: int = SAMPLE, outputs: int = 1):
        """Computes a step with one new sequence for each case; returns its samples and logits."""
        found = self.e.step(self.start(cases, flags, outputs).encode(), True)
        self.e.step(StepPlan(free=list(range(len(cases)))).encode())
        return found

    def continued(self, cases: list[Case], steps: int, ahead: bool) -> list[list[int]]:
        """The tokens of each of these steps, which continue the cases. ahead: queue each step before the one before it
        has ended.
        """
        stepper = _native.Stepper()
        plans = [self.start(cases, more=steps)]
        plans += [StepPlan(work=[WorkItem(slot, 1, SAMPLE, mask=0 if case[2] is None else slot + 1)
                                 for slot, case in enumerate(cases)]) for _ in range(steps - 1)]
        plans += [StepPlan(free=list(range(len(cases))))]
        found = []
        for number, plan in enumerate(plans):
            stepper.submit(self.e, plan.encode())
            if number or not ahead:
                found.append(stepper.collect())
        if ahead:
            found.append(stepper.collect())
        return [[int(token) for token in step.tokens] for step in found[:steps]]
