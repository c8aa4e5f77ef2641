"""A small program in the CUDA backend whose output is logits of a vocabulary of any size."""
from __future__ import annotations

import numpy as np

from allspark_server.runtime.plan import SAMPLE, NewSlot, StepPlan, WorkItem
from support.gpu_toys import executor
from support.sampling_reference import Params

DIM, SLOTS, LONGEST, SPAN = 16, 8, 128, 16


class Head:
    """A program that computes logits of any vocabulary: an embedding, attention, and a matrix. With `ties`
    many ids have equal logits.
    """

    def __init__(self, vocab: int, rng: np.random.Generator, spread: float, ties: bool, masks: int = SLOTS,
                 cache: str = "float32"):
        self.vocab = vocab
        self.e = e = executor()
        qkv, out, last = e.add_tensor(3 * DIM), e.add_tensor(DIM), e.add_tensor(DIM, 1)
        logits = e.add_tensor(vocab, 1)
        table, head = e.add_matrix(vocab, 3 * DIM, "float32"), e.add_matrix(vocab, DIM, "float32")
        rows = rng.normal(size=(vocab, 3 * DIM)).astype(np.float32)
        weights = (rng.normal(size=(vocab, DIM)) * spread).astype(np.float32)
        if ties:
            weights = weights[rng.integers(0, 20, vocab)]
        rows[0] = np.nan  # id 0 gives logits that are not finite
        assert e.fill_matrix(table, rows, "F32") == 3 * DIM and e.fill_matrix(head, weights, "F32") == 0
        e.add_op("embedding", [], [qkv], [table], {"vocab_begin": 0})
        e.add_op("span_attention", [qkv], [out], [], {"layer": 0, "q_heads": 1, "kv_heads": 1, "head_dim": DIM,
                                                      "group": 1, "scale": 0.25})
        e.add_op("select_rows", [out], [last], [], {})
        e.add_op("linear", [last], [logits], [head], {})
        e.add_op("sample", [logits], [], [], {"vocab_begin": 0, "vocab_size": vocab})
        e.allocate(SLOTS * LONGEST, SLOTS, LONGEST, SPAN, SLOTS * LONGEST // SPAN, cache, SLOTS * LONGEST, masks)

    def draws(self, cases: list[tuple[Params, np.ndarray, np.ndarray | None]], flags: int = SAMPLE, outputs: int = 1):
        """Computes a step with one new sequence for each case (parameters, history, mask); returns its samples and
        logits.
        """
        new, work, masks = [], [], self.e.masks
        for slot, (params, history, mask) in enumerate(cases):
            new.append(NewSlot(slot, [int(i) for i in history], params.block().tobytes(), 0))
            spans = [slot * (LONGEST // SPAN) + i for i in range(-(-len(history) // SPAN))]
            work.append(WorkItem(slot, len(history), flags, spans=spans, outputs=outputs,
                                 mask=0 if mask is None else slot + 1))
            if mask is not None:
                masks.clear(slot)
                masks.bits[slot, :len(mask)] = mask
                masks.publish(slot)
        found = self.e.step(StepPlan(new=new, work=work).encode(), True)
        self.e.step(StepPlan(free=list(range(len(cases)))).encode())
        return found
