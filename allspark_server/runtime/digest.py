"""A digest of the results that this build computes on this machine, from small models run on fixed inputs.

Two machines with the same digest compute the same bits: the digest covers every kernel, every op of the op table with
every attribute, and every field of the sampler's parameters (tests/runtime/test_digest.py checks that). Inputs are
derived from integers, so they are equal on every machine.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from allspark_client.config import UNQUANTIZED
from allspark_server.runtime.digest_programs.attention import latent, several_heads
from allspark_server.runtime.digest_programs.compressed import GROUPS, compressed
from allspark_server.runtime.digest_programs.decoders import decoder, variant
from allspark_server.runtime.digest_programs.encoders import encoder
from allspark_server.runtime.digest_programs.images import MERGE, image_of, patches_of, seeing, tower
from allspark_server.runtime.digest_programs.parts import LONG, SPAN, VOCAB
from allspark_server.runtime.digest_programs.recurrent import recurrent, state_space
from allspark_server.runtime.native import cuda_library, native_library
from allspark_server.runtime.plan import SAMPLE, Flag, NewSlot, StepPlan, WorkItem
from allspark_server.runtime.sampler_digest import SAMPLINGS, fixed_values, more_samplings, sample, sampled

WEIGHTS = (("float32", 0), ("bfloat16", 0), ("int8", 0), ("int4", 32), ("w8a8", 0), ("w4a8", 32))
# Formats of quantized checkpoints that other tools write: type, group size, layout of scales.
FOREIGN: tuple[tuple[str, int, dict[str, Any]], ...] = (
           ("int4", 32, {"scales": "float16", "zeros": "points"}),
           ("w8a8", 0, {"scales": "float32", "zeros": "none"}),
           ("int4", 32, {"scales": "float16", "zeros": "offsets", "super_group": 256, "scale_bits": 8, "center": 0}),
           ("int8", 16, {"scales": "float16", "zeros": "none", "super_group": 256, "scale_bits": 8, "center": 32}),
           ("e4m3", 64, {"scales": "float32", "zeros": "none"}), ("nf4", 64, {"scales": "float32", "zeros": "none"}))
# Of experts in mixed groups, which no other matrices have.
EXACT: tuple[tuple[str, int, dict[str, Any]], ...] = (
         ("e2m1a16", 32, {"scales": "bfloat16", "zeros": "none"}),
         ("e2m1a16", 16, {"scales": "float32", "zeros": "none"}))
CACHES = ("float32", "bfloat16", "int8", "uint4")


def run_encoder(executor: Any, lengths: tuple[int, ...] = (3, 63, 290)) -> str:
    """Digest of an embedding of each of the texts of a step."""
    new, work, spans = [], [], 0
    for slot, length in enumerate(lengths):
        text = [(7 * i + 13 * slot + 3) % VOCAB for i in range(length)]
        new.append(NewSlot(slot, text, SAMPLINGS[0].encode()))
        work.append(WorkItem(slot, length, int(Flag.HIDDEN), outputs=1,
                             spans=list(range(spans, spans + length // SPAN + 1))))
        spans += length // SPAN + 1
    hidden = executor.step(StepPlan(new=new, work=work).encode(), False).hidden
    return hashlib.sha256(np.ascontiguousarray(hidden).tobytes()).hexdigest()[:16]


def run_tower(executor: Any) -> str:
    """Digest of the rows of images that a step computes."""
    counts, sections = patches_of(((2, 2), (6, 10), (18, 16)))
    new, work, spans = [], [], 0
    for slot, count in enumerate(counts):
        new.append(NewSlot(slot, [0] * count, SAMPLINGS[0].encode()))
        work.append(WorkItem(slot, count, int(Flag.HIDDEN), outputs=count // MERGE,
                             spans=list(range(spans, spans + count // SPAN + 1))))
        spans += count // SPAN + 1
    hidden = executor.step(StepPlan(new=new, work=work, sections=sections).encode(), False).hidden
    return hashlib.sha256(np.ascontiguousarray(hidden).tobytes()).hexdigest()[:16]


def run_seeing(executor: Any, together: bool) -> str:
    """Digest of what follows prompts with images. together: rows of an image see each other."""
    images = (*image_of(1, 5, (6, 9), together), *image_of(2, 0, (17, 12), together))
    return run(executor, (3, 100, 290), sections=images)


def run(executor: Any, lengths: tuple[int, ...], adapter: int = -1, groups: int = 1, probes: int = 0,
        sections: Sequence[tuple[int, Any]] = ()) -> str:
    """Digest of logits and sampled tokens: a step with prompts of these lengths, then a step of single tokens.

    groups: of the cache. probes: rows of each prompt with log probabilities and hidden states. sections: of the first
    step's plan.
    """
    digest = hashlib.sha256()
    flags, arrays = SAMPLE, ["logits", "tokens", "logprobs", "top_ids", "top_logprobs"]
    if probes:
        flags, arrays = flags | Flag.HIDDEN | Flag.PROMPT, [*arrays, "hidden", "prompt_logprobs"]
    spans, new, work = 0, [], []
    for slot, length in enumerate(lengths):
        needed = length // SPAN + 1
        prompt = [(7 * i + 13 * slot + 3) % VOCAB for i in range(length)]
        sampling = dataclasses.replace(SAMPLINGS[slot], prompt_len=length) if probes else SAMPLINGS[slot]
        new.append(NewSlot(slot, prompt, sampling.encode()))
        tables = [list(range(spans + i * needed, spans + (i + 1) * needed)) for i in range(groups)]
        work.append(WorkItem(slot, length, flags, spans=tables[0], other_spans=tables[1:], adapter=adapter,
                             outputs=min(length, probes) or -1))
        spans += groups * needed
    plan = StepPlan(new=new, work=work, sections=[*sections], groups=groups)
    for _ in range(2):
        result = executor.step(plan.encode(), True)
        for name in arrays:
            if (array := getattr(result, name)) is not None:
                digest.update(np.ascontiguousarray(array).tobytes())
        work = [WorkItem(slot, 1, flags, other_spans=[[]] * (groups - 1), adapter=adapter)
                for slot in range(len(lengths))]
        plan = StepPlan(work=work, groups=groups)
    return digest.hexdigest()[:16]


def _foreign(dtype: str, group: int, layout: dict[str, Any]) -> str:
    """Digest of GEMMs of a matrix whose scales have this layout."""
    n, k, e = 70, 576, native_library().Executor(num_threads=1)
    bits, nested = 4 if dtype in ("int4", "nf4", "e2m1a16") else 8, layout.get("super_group", 0)
    identity, groups = e.add_matrix(n, k, dtype, group, **layout), k // (group or k)

    def integers(columns: int, seed: int, most: int) -> np.ndarray:
        return (np.abs(fixed_values((n, columns), seed)) * np.float32(most)).astype(np.uint8)

    scales = fixed_values((n, groups), 2)
    scales = (scales.view(np.uint32) >> 16).astype(np.uint16) if layout["scales"] == "bfloat16" else \
        scales.astype(layout["scales"])
    zeros = integers(groups, 3, 15) if layout["zeros"] == "points" else None
    above = None
    if nested:
        scales, above = integers(groups, 2, 63).view(np.int8), fixed_values((n, -(-k // nested)), 4).astype(np.float16)
        zeros, above = scales if layout["zeros"] == "offsets" else None, above.view(np.uint16)
    e.fill_quantized(identity, integers(k * bits // 8, 1, 63 if layout.get("center") else 120), scales, zeros, bits, k,
                     group, super_group=nested, super_scales=above,
                     super_offsets=above if nested and zeros is not None else None)
    digest = hashlib.sha256()
    for rows in (1, 3, 40):
        digest.update(e.multiply(identity, fixed_values((rows, k), 5), n).tobytes())
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=1)
def result_digests() -> dict[str, str]:
    """Digests by case: each weight format, the sampler, then each cache type with a long prompt."""
    found = {f"weights {weights}": run(decoder(weights, group, "float32"), (3, 37, 1, 290))
             for weights, group in WEIGHTS}
    found["vocabulary"] = sample()
    found |= {f"cache {cache}": run(decoder("bfloat16", 0, cache), (LONG,)) for cache in CACHES}
    return found


@functools.lru_cache(maxsize=1)
def expert_digests() -> dict[str, str]:
    """Digests of models with experts, by weight format."""
    return {f"experts {weights}": run(decoder(weights, group, "float32", experts=True), (3, 37, 1))
            for weights, group in WEIGHTS}


@functools.lru_cache(maxsize=1)
def exact_digests() -> dict[str, str]:
    """Digests of what a rank of experts in a mixed group computes: the exact recipe, and layers of experts."""
    def empty() -> Any:
        executor = native_library().Executor(num_threads=1)
        executor.use_exact_activations()
        return executor

    found = {f"exact {i}": _foreign(*form) for i, form in enumerate(EXACT)}
    found |= {f"exact experts {weights}": run(decoder(weights, group, "float32", experts=True, empty=empty), (3, 37, 1))
              for weights, group in WEIGHTS}
    return {**found, "exact variant": run_variant(variant("float32", 0, empty)), **expert_digests()}


@functools.lru_cache(maxsize=1)
def variant_digests() -> dict[str, str]:
    """Digests of what the other models and samplings do not use, by weight format."""
    found = {f"variant {weights}": run_variant(variant(weights, group)) for weights, group in WEIGHTS}
    found["variant long"] = run_variant(variant("float32", 0, long=True))
    return {**found, "samplings": sampled(more_samplings())}


@functools.lru_cache(maxsize=1)
def latent_digests() -> dict[str, str]:
    """Digests of latent attention, by weight format and type of the cache."""
    cases = [(*WEIGHTS[0], "float32"), (*WEIGHTS[1], "bfloat16"), (*WEIGHTS[0], "int8")]
    found = {f"latent {weights} {cache}": run(latent(weights, group, cache), (3, 63, 130), groups=2)
             for weights, group, cache in cases}
    indexed = {f"indexer {cache}": run(latent("float32", 0, cache, selected=40), (3, 63, 130), groups=2)
               for cache in ("float32", "bfloat16")}
    pools = {f"pools {cache}": run(latent("float32", 0, cache, selected=40, pool=5), (3, 63, 130), groups=3)
             for cache in CACHES[:3]}
    return found | indexed | pools


@functools.lru_cache(maxsize=1)
def compressed_digests() -> dict[str, str]:
    """Digests of attention over compressed positions and residual streams, by weight format and type of the cache."""
    return {f"compressed {weights} {cache}": run(compressed(weights, group, cache), (3, 63, 130), groups=len(GROUPS))
            for (weights, group), cache in zip((*WEIGHTS[:2], WEIGHTS[4]), (*CACHES[:2], CACHES[0]))}


@functools.lru_cache(maxsize=1)
def recurrent_digests() -> dict[str, str]:
    """Digests of layers with a state, by weight format."""
    models = {"recurrent": recurrent, "state space": state_space}
    found = {f"{name} {weights}": run(build(weights, group), (3, 63, 130))
             for name, build in models.items() for weights, group in WEIGHTS[:2]}
    return {**found, "bounded decays": run(recurrent("float32", 0, lower_bound=-5.0), (3, 63, 130))}


@functools.lru_cache(maxsize=1)
def heads_digests() -> dict[str, str]:
    """Digests of heads of several sizes, by weight format and type of the cache."""
    return {f"heads {weights} {cache}": run(several_heads(weights, group, cache), (3, 63, 130), groups=2)
            for (weights, group), cache in zip((*WEIGHTS[:2], *WEIGHTS[:2]), CACHES)}


@functools.lru_cache(maxsize=1)
def encoder_digests() -> dict[str, str]:
    """Digests of encoders, by weight format."""
    return {f"encoder {weights}": run_encoder(encoder(weights, group)) for weights, group in WEIGHTS[:2]}


def run_variant(executor: Any) -> str:
    """Digest of what a model of two cache groups outputs, hidden states and probabilities of prompts too."""
    return run(executor, (3, 130, 290), groups=2, probes=8)


@functools.lru_cache(maxsize=1)
def image_digests() -> dict[str, str]:
    """Digests of vision towers and of models with images in their prompts, by type of weights and cache."""
    found = {f"tower {dtype}": run_tower(tower(dtype, 0, dtype)) for dtype in ("float32", "bfloat16")}
    return found | {f"images {dtype} {interleaved}":
                    run_seeing(seeing(dtype, 0, dtype, interleaved), together=not interleaved)
                    for dtype in ("float32", "bfloat16") for interleaved in (False, True)}


@functools.lru_cache(maxsize=1)
def adapter_digests() -> dict[str, str]:
    """Digests of rows with an adapter, by its type, without experts and with experts."""
    return {f"adapters {dtype} {experts}":
            run(decoder(dtype, 0, "float32", experts=experts, adapted=True), (3, 37, 1), adapter=0)
            for dtype in ("float32", "bfloat16") for experts in (False, True)}


@functools.lru_cache(maxsize=8)
def gpu_digests(index: int) -> dict[str, str]:
    """Digests of a GPU, by weight format and cache type."""
    def empty() -> Any:
        return cuda_library().Executor(index, native_library().HostSampler(1))

    found = {f"weights {weights}": run(decoder(weights, 0, "float32", empty=empty), (3, 37, 1, 290))
             for weights in UNQUANTIZED}
    found["recurrent"] = run(recurrent("float32", 0, empty, (0,)), (3, 63, 130))
    found["recurrent of channels"] = run(recurrent("float32", 0, empty, (1,)), (3, 63, 130))
    found["bounded decays"] = run(recurrent("float32", 0, empty, (1,), lower_bound=-5.0), (3, 63, 130))
    found["state space"] = run(state_space("float32", 0, empty), (3, 63, 130))
    found["latent"] = run(latent("float32", 0, "float32", empty), (3, 63, 130), groups=2)
    found["latent mma"] = run(latent("bfloat16", 0, "bfloat16", empty, (64, 512)), (3, 63, 290), groups=2)
    found |= {f"indexer {cache}": run(latent("float32", 0, cache, empty, selected=40), (3, 63, 130), groups=2)
              for cache in UNQUANTIZED}
    wide = latent("bfloat16", 0, "bfloat16", empty, (64, 512), selected=200)
    found["indexer mma"] = run(wide, (3, 63, 290), groups=2)
    found |= {f"compressed {cache}": run(compressed("float32", 0, cache, empty), (3, 63, 130), groups=len(GROUPS))
              for cache in UNQUANTIZED}
    found["compressed mma"] = run(compressed("bfloat16", 0, "bfloat16", empty, 512, 4), (3, 63, 290),
                                  groups=len(GROUPS))
    found |= {f"cache {cache}": run(decoder("bfloat16", 0, cache, empty=empty), (LONG,)) for cache in UNQUANTIZED}
    found |= {f"heads {dtype} {large}": run(several_heads(dtype, 0, dtype, empty, large), (3, 63, 290), groups=2)
              for dtype, large in (("float32", 40), ("bfloat16", 128), ("bfloat16", 512))}
    found |= {f"tower {dtype}": run_tower(tower(dtype, 0, dtype, empty, positions=40)) for dtype in UNQUANTIZED}
    found |= {f"tower {function}": run_tower(tower("bfloat16", 0, "bfloat16", empty, function))
              for function in ("gelu", "gelu_tanh", "silu")}
    found |= {f"seeing {dtype} {interleaved}":
              run_seeing(seeing(dtype, 0, dtype, interleaved, empty), together=not interleaved)
              for dtype in UNQUANTIZED for interleaved in (False, True)}
    parts, norm = fixed_values((3, 5, 200), 1), fixed_values((200,), 3)
    for dtype in UNQUANTIZED:
        sums = empty().sum_ranks(parts, fixed_values((5, 200), 2), norm, dtype, True)
        found[f"sums over ranks {dtype}"] = hashlib.sha256(
            b"".join(np.ascontiguousarray(each).tobytes() for each in sums)).hexdigest()[:16]
    for weights, long in (*((weights, False) for weights in UNQUANTIZED), ("float32", True)):
        try:
            result = run_variant(variant(weights, 0, empty, long))
        except ValueError as error:     # experts of 16 bits on a GPU with little shared memory
            result = str(error)
        found[f"variant {long} {weights}"] = result
    return {**found, "vocabulary": sample(), "samplings": sampled(more_samplings()), "device": "CUDA"}


def results_digest(gpu: int | None = None, experts: bool = False) -> str:
    """One digest of all cases, of the CPU or (gpu: its index) of a GPU. experts: of a mixed group's rank of experts."""
    if experts:
        found = exact_digests()
    elif gpu is None:
        foreign = {f"foreign {i}": _foreign(*form) for i, form in enumerate(FOREIGN)}
        found = {**result_digests(), **expert_digests(), **adapter_digests(), **variant_digests(), **foreign,
                 **recurrent_digests(), **latent_digests(), **compressed_digests(), **heads_digests(),
                 **encoder_digests(), **image_digests()}
    else:
        found = gpu_digests(gpu)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:32]
