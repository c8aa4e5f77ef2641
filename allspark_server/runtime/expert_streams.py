"""Experts of a mixed group that the model's GPU computes itself in steps with many rows: it copies them from the memory
of the ranks of experts (native/cuda/expert_stream.h). What that takes, and whether a group can do it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.graph import Op
from allspark_server.models.roles import expert_ops
from allspark_server.runtime.native import DeviceLost, native_library
from allspark_server.runtime.rank_model import RankModel
from allspark_server.runtime.roles import Role
from allspark_server.weights.loader import column_slice

logger = logging.getLogger(__name__)

#: bytes that are copied at a time, and how many of these parts the GPU's memory holds
PART, PARTS = 64 << 20, 4
#: experts of a layer that ranks of experts compute while the GPU copies and computes the others; -1: chosen from
#: speeds, measured when the model is loaded and in each shared step, and uses. In steps of up to SPLIT_ROWS rows:
#: messages need room for entries
BY_RANKS, SPLIT_ROWS = -1, 2048
#: what may come between the two products of an expert
GATES = {"silu_mul", "gelu_tanh_mul", "gelu_mul", "clamped_silu_mul"}
WITH_BYTES = ("w8a8", "w4a8")    # formats whose activations have 8 bits, not 16


def reason_against(model: RankModel, config: AsModelConfig, unit: str) -> str:
    """Why the GPU of a mixed group cannot compute experts of this model, or need not; "" if it does.

    unit: the group's compute_unit. Ranks of one host give the same answer.
    """
    if not unit.startswith("CUDA:"):
        return "the model's rank has no GPU"
    if not config.expert_streaming_rows and not config.hot_expert_memory:
        return "expert_streaming_rows=0"
    for ops in expert_ops(model.whole):
        kinds = [op.type for op in ops]
        if len(kinds) != 4 or kinds[1] not in GATES:
            return f"its experts have the ops {', '.join(kinds)}"
        for op in ops[0], ops[2]:
            form = model.expert_formats[op.weights[0]]
            if not form.exact:
                return f"experts in {form} have no exact recipe"
    if config.expert_streaming_rows < 0 and not config.hot_expert_memory and not native_library().shares_huge_pages():
        return ("the system gives shared memory no huge pages, without which decoding is slower (set "
                "expert_streaming_rows, or write 'advise' to /sys/kernel/mm/transparent_hugepage/shmem_enabled)")
    return ""


def rank_bytes(model: RankModel, config: AsModelConfig, unit: str, role: Role, rows: int, ranks: int) -> int | None:
    """What a rank of a mixed group takes of the GPU's memory: stream_bytes() on the model's first rank, 0 on those of
    experts; None if the GPU computes no experts. AllSparkError if hot_expert_memory asks for what is not possible.
    """
    if not role.exchanges:
        return None
    if reason := reason_against(model, config, unit):
        if config.hot_expert_memory:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"hot_expert_memory={config.hot_expert_memory} is not possible: {reason}")
        if role.experts and unit.startswith("CUDA:"):
            logger.info("rank %d: experts of long prompts are computed by CPUs: %s", 1 + role.rank, reason)
        return None
    return 0 if role.experts else stream_bytes(model, rows, ranks)


def entry_rows(role: Role, streaming: int | None) -> int:
    """Rows of the largest message that asks ranks of experts for entries; streaming: what rank_bytes() says."""
    return SPLIT_ROWS if BY_RANKS and role.either and streaming is not None else 0


def stream_bytes(model: RankModel, rows: int, ranks: int) -> int:
    """Bytes of the GPU's memory for steps of up to `rows` rows, with so many ranks of experts, on the model's rank."""
    fixed = scratch = largest = stack = routing = split = 0
    split_rows = min(rows, SPLIT_ROWS) if BY_RANKS else 0

    def routing_bytes(entries: int, experts: int) -> int:   # of native/cuda/kernels/moe/experts.cu, or a little more
        return 14 * entries + (16 + 4 * (entries // 2048 + 1)) * experts + (8 << 10) if entries else 0

    for ops in expert_ops(model.whole):
        for rank in range(ranks):
            sizes = [_sizes(model, op, rank, ranks) for op in (ops[0], ops[2])]
            (n, first_bytes, first_row), (width, second_bytes, second_row) = sizes
            begin, end = model.whole.weights[ops[0].weights[0]].experts_of(rank, ranks)
            top = model.whole.row_sets[model.whole.tensors[ops[0].outputs[0]].rows].times
            entries = rows * top
            scratch = max(scratch, rows * first_row + entries * (2 * n + second_row + 4 * width) + (8 << 10))
            routing = max(routing, routing_bytes(entries, end))
            split = max(split, ranks * routing_bytes(split_rows * top, end)
                        + (ranks - 1) * split_rows * top * 4 * width)
            largest = max(largest, first_bytes, second_bytes)
            stack = max(stack, (end - begin) * max(first_bytes, second_bytes))
            fixed += sum(_vector_bytes(model, op, rank, ranks) for op in (ops[0], ops[2]))
            fixed += 4 * end if split_rows else 0       # counts of uses
    return fixed + scratch + routing + split + PARTS * (min(max(largest, PART), max(stack, 1 << 16)) + 256)


def stream(executor: Any, addresses: Sequence[str], rows: int, top: int, size: int, config: AsModelConfig) -> None:
    """Has the GPU of the model's rank compute the experts of steps with many rows, or logs why it does not; and those
    that are chosen most. AllSparkError if it cannot compute the latter.

    addresses: of all ranks of experts. rows, top: of the largest step, and experts of a row. size: bytes of the GPU's
    memory for the former. Raises DeviceLost.
    """
    try:
        panels = native_library().ExpertPanels([bytes.fromhex(address) for address in addresses])
        found = executor.stream_experts(panels, rows, top, size, config.expert_streaming_rows,
                                        config.hot_expert_memory, BY_RANKS, SPLIT_ROWS)
    except DeviceLost:
        raise
    except (RuntimeError, ValueError) as error:
        if config.hot_expert_memory:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"hot_expert_memory={config.hot_expert_memory}: {error}") from error
        logger.warning("the GPU does not compute experts of long prompts: %s. Ranks of experts compute them", error)
        return
    logger.info("the GPU computes experts of steps with at least %d rows, which it copies at %.1f GB/s; %d MiB of the "
                "ranks' memory were pinned in %.1f s", found["first_rows"], found["bandwidth"] / 1e9,
                panels.bytes >> 20, found["pinning_seconds"])
    if BY_RANKS:
        logger.info("ranks of experts compute those that are used least meanwhile, in steps of up to %d rows",
                    min(rows, SPLIT_ROWS))
    if found["hot_experts"]:
        logger.info("the GPU has room for %d hot experts", found["hot_experts"])


def expert_counts(role: Role, exchange: Any, executor: Any, on_gpu: bool) -> dict[str, float]:
    """In a mixed group, of a rank of experts: how many messages with rows it has computed its routed experts for, and
    how many rows they had. Of the model's first rank on a GPU: the seconds from its messages to their answers, how many
    rows, over all layers, it has computed the experts of, how many of the experts that other rows have chosen were hot,
    and how many these were. exchange, executor: native, or None.
    """
    if exchange is not None and role.experts:
        return {"expert_messages": exchange.messages, "expert_rows": exchange.messages_rows}
    if exchange is None or executor is None or not on_gpu:
        return {}
    hits, uses = executor.expert_uses
    return {"expert_wait_seconds": executor.expert_times[1], "expert_streamed_rows": executor.streamed_rows,
            "expert_hits": hits, "expert_uses": uses}


def _sizes(model: RankModel, op: Op, rank: int, ranks: int) -> tuple[int, int, int]:
    """Of a rank's slice of an expert's matrix: its rows, its bytes, and the bytes of a row of activations."""
    weight = model.whole.weights[op.weights[0]]
    form = model.expert_formats[weight.name]
    begin, end = weight.experts_of(rank, ranks)
    part = column_slice(model.source, weight, form, rank, ranks)
    n = weight.rows_of(rank, ranks) // (end - begin)
    size = native_library().matrix_bytes(n, part.inputs, gathered=part.gathered, **part.native())
    columns = part.gathered or part.inputs
    group = min(part.native()["group_size"] or columns, columns)
    groups = -(-columns // group)
    values = (groups * -(-group // 32) * 32 + 64) * (1 if form.dtype in WITH_BYTES else 2)
    return n, size, values + 4 + 4 * groups


def _vector_bytes(model: RankModel, op: Op, rank: int, ranks: int) -> int:
    """Bytes of an op's bias and of the order of its columns, on the GPU."""
    def sizes() -> Iterator[int]:
        for name in op.weights[1:]:
            yield 4 * model.whole.weights[name].elements_of(rank, ranks)
        weight = model.whole.weights[op.weights[0]]
        yield 4 * column_slice(model.source, weight, model.expert_formats[weight.name], rank, ranks).gathered
    return sum(-(-size // 256) * 256 for size in sizes() if size)
