"""Toy programs (reference/toy.py) in the CUDA backend."""

from __future__ import annotations

import numpy as np

from allspark_server import _native
from reference.toy import Toy


def executor(threads: int = 2):
    from allspark_server import _cuda

    return _cuda.Executor(0, _native.HostSampler(threads))


def compiled(own: Toy, cache: str = "float32", masks: int = 0, graphs: bool = True, long: bool = False,
             outputs: int = 64, slots: int = 8, **more):
    """long: for contexts beyond a thousand; more: of allocate(). The toy's matrices become what the backend recovers
    of them: each time of what they were given, as what was recovered may be quantized to other values."""
    found, given = executor(), own.__dict__.setdefault("given", {})
    stacks = {op["weights"][0]: op["attributes"]["experts"] for op in own.program.ops if op["name"] == "expert_linear"}
    for handle, (n, k, form, group) in enumerate(own.program.weights):
        values, recovered = given.get(handle, (None, None))
        if own.weights[handle] is not recovered:
            values = np.asarray(own.weights[handle], np.float32)
        if not k:
            assert found.add_vector(values) == handle
            continue
        assert found.add_matrix(n, k, form, group, stacks.get(handle, 1)) == handle
        assert found.fill_matrix(handle, values, "F32") == np.count_nonzero(~np.isfinite(values))
        own.weights[handle] = found.read_rows(handle)
        given[handle] = values, own.weights[handle]
    for kind, window in own.cache_groups:
        found.add_cache_group(kind, window)
    for row_set in own.program.row_sets[2:]:
        found.add_row_set(*row_set)
    for width, rows, _ in own.program.tensors:
        found.add_tensor(width, rows)
    for op in own.program.ops:
        found.add_op(op["name"], op["inputs"], op["outputs"], op["weights"], op["attributes"])
    found.allocate(max_rows=2048 if long else 256, max_slots=slots, max_length=2048 if long else 128,
                   span_size=16, num_spans=max(256 if long else 64, 8 * slots), cache_dtype=cache, max_outputs=outputs,
                   masks=masks, graphs=graphs, **more)
    return found
