"""Tiny checkpoints in other programs' quantization formats, written in NumPy from the published layouts. Each has a
twin: the same network with the recovered weights in float32.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy

from allspark_server.weights.asgraph import from_float32, to_float32
from support.checkpoints import write_checkpoint
from support.driver import Driver
from support.tiny_configs import Spec, _rope, _sizes

Made = tuple[dict[str, np.ndarray], np.ndarray]  # a module's tensors by suffix, and its recovered weights
MODULE = ".weight"
FLOAT8 = "F8_E4M3"

# The sizes are multiples of few numbers: the last block of 128 x 128 and the last group of 64 are partial. There are
# heads for five ranks.
SPEC = Spec("qwen2", _sizes(144, 6, 2, 352, layers=2, tie_word_embeddings=False) | _rope("default", 1e6))
BLOCKS = Spec("qwen2", _sizes(256, 6, 2, 512, layers=2, head_dim=64, tie_word_embeddings=False) | _rope("default", 1e6))


def pack_words(quants: np.ndarray, bits: int) -> np.ndarray:
    """Packs adjacent values along the last axis into int32 words, the first into the lowest bits."""
    per = 32 // bits
    quants = np.pad(quants, [(0, 0)] * (quants.ndim - 1) + [(0, -quants.shape[-1] % per)]).astype(np.uint32)
    quants = quants.reshape(*quants.shape[:-1], -1, per)
    return np.bitwise_or.reduce(quants << (np.arange(per, dtype=np.uint32) * np.uint32(bits)), axis=-1).view(np.int32)


def pack_awq(quants: np.ndarray) -> np.ndarray:
    """Packs 4-bit values [rows, columns] in AWQ's order of eight."""
    values = quants.reshape(len(quants), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
    return pack_words(values.reshape(len(values), -1), 4)


def pack_pairs(quants: np.ndarray) -> np.ndarray:
    """Packs adjacent 4-bit values into bytes, the first into the lower half."""
    return quants[:, 0::2] | quants[:, 1::2] << 4


def _scales(rng, shape, bits: int, columns: int, dtype=np.float16) -> np.ndarray:
    return (rng.uniform(0.5, 2, shape) * 2.2 / (1 << bits) / columns ** 0.5 * 2).astype(dtype)


def _quants(rng, shape, bits: int) -> np.ndarray:
    middle = 1 << (bits - 1)
    return np.clip(np.rint(rng.normal(middle, middle / 2.5, shape)), 0, 2 * middle - 1).astype(np.uint8)


def _points(rng, shape, bits: int) -> np.ndarray:
    middle = 1 << (bits - 1)
    return np.clip(np.rint(rng.normal(middle, middle / 4, shape)), 1, 2 * middle - 1).astype(np.uint8)


def gptq(bits: int, group: int, *, symmetric=False, order=False, version="gptq"):
    def make(n: int, k: int, rng, salt: int) -> Made:
        size = group if group > 0 else k
        groups = -(-k // size)
        quants, scales = _quants(rng, (n, k), bits), _scales(rng, (groups, n), bits, k)
        points = np.full((groups, n), 1 << (bits - 1), np.uint8) if symmetric else _points(rng, (groups, n), bits)
        index = np.arange(k) // size
        if order:  # columns sorted by activation: the same order in all layers that share an input
            index = index[np.argsort(np.random.default_rng(salt).permutation(k))]
        weights = scales.astype(np.float32)[index].T * (quants.astype(np.float32) - points.astype(np.float32)[index].T)
        less = {4: 0x11111111, 8: 0x01010101}[bits] if version == "gptq" else 0
        words = (pack_words(points, bits).view(np.uint32) - np.uint32(less)).view(np.int32)
        return {".qweight": np.ascontiguousarray(pack_words(quants, bits).T), ".qzeros": words, ".scales": scales,
                ".g_idx": index.astype(np.int32)}, weights

    return make, {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "sym": symmetric,
                  "checkpoint_format": version}


def awq(group: int):
    def make(n: int, k: int, rng, salt: int) -> Made:
        groups = -(-k // group)
        quants, points = _quants(rng, (n, k), 4), _points(rng, (groups, n), 4)
        scales, index = _scales(rng, (groups, n), 4, k), np.arange(k) // group
        weights = scales.astype(np.float32)[index].T * (quants.astype(np.float32) - points.astype(np.float32)[index].T)
        return {".qweight": pack_awq(quants.T), ".qzeros": pack_awq(points), ".scales": scales}, weights

    return make, {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


def compressed(form: str, bits: int, strategy: str, group: int | None = None, *, points=False, activations=None,
               order=False, block=None, ignore=(), scale_type="F16"):
    def make(n: int, k: int, rng, salt: int) -> Made:
        size = group or k
        groups = -(-k // size)
        index = np.arange(k) // size
        if form == "float-quantized":
            return _float8(n, k, rng, {"block": block, "channel": (1, k), "tensor": (n, k)}[strategy], strategy,
                           ".weight_scale")
        quants = _quants(rng, (n, k), bits)
        scales = _scales(rng, (n, groups), bits, k, np.float32)
        zeros = _points(rng, (n, groups), bits) if points else np.full((n, groups), 1 << (bits - 1), np.uint8)
        if scale_type == "BF16":
            halves = (scales.view(np.uint32) >> 16).astype(np.uint16)
            scales, tensors = (halves.astype(np.uint32) << 16).view(np.float32), {".weight_scale": ("BF16", halves)}
        else:
            scales = scales.astype(np.float16)
            tensors = {".weight_scale": scales}
        if form == "int-quantized":
            tensors[MODULE] = (quants ^ 0x80).view(np.int8)
            if points:
                tensors[".weight_zero_point"] = (zeros ^ 0x80).view(np.int8)
        else:
            tensors |= {".weight_packed": pack_words(quants, bits), ".weight_shape": np.array([n, k], np.int64)}
            if points:
                tensors[".weight_zero_point"] = np.ascontiguousarray(pack_words(zeros.T, bits).T)
            if order:
                index = index[np.argsort(np.random.default_rng(salt).permutation(k))]
                tensors[".weight_g_idx"] = index.astype(np.int32)
        weights = scales.astype(np.float32)[:, index] * (quants.astype(np.float32) - zeros.astype(np.float32)[:, index])
        return tensors, weights

    kind = "float" if form == "float-quantized" else "int"
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group, "symmetric": not points,
               "actorder": "group" if order else None, "block_structure": block}
    return make, {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights,
                                                "input_activations": activations}}, "ignore": ["lm_head", *ignore]}


def e4m3_values() -> np.ndarray:
    import torch

    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def _float8(n: int, k: int, rng, block, strategy: str, suffix: str) -> Made:
    values = e4m3_values()
    quants = rng.integers(0, 256, (n, k)).astype(np.uint8)
    quants = np.where((quants & 0x7F) == 0x7F, 0x38, quants).astype(np.uint8)
    shape = (-(-n // block[0]), -(-k // block[1]))
    scales = (rng.uniform(0.5, 2, shape) * 0.008 / k ** 0.5).astype(np.float32)
    each = np.repeat(np.repeat(scales, block[0], 0)[:n], block[1], 1)[:, :k]
    stored = scales.reshape(1) if strategy == "tensor" else scales
    return {MODULE: (FLOAT8, quants), suffix: stored}, each * values[quants]


def float8_blocks(rows: int, columns: int):
    def make(n: int, k: int, rng, salt: int) -> Made:
        return _float8(n, k, rng, (rows, columns), "block", ".weight_scale_inv")

    return make, {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                  "weight_block_size": [rows, columns]}


FP4 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def float4(form: str, group: int):
    def make(n: int, k: int, rng, salt: int) -> Made:
        quants, groups = rng.integers(0, 16, (n, k)).astype(np.uint8), -(-k // group)
        packed = pack_pairs(quants)
        if form.startswith("mx"):
            stored = rng.integers(118, 122, (n, groups)).astype(np.uint8)
            scales = np.ldexp(np.float32(1), stored.astype(int) - 127)
            tensors = {".weight_packed": packed, ".weight_scale": stored}
        else:
            stored = rng.integers(0x28, 0x48, (n, groups)).astype(np.uint8)
            overall = np.array([rng.uniform(300, 500)], np.float32)
            scales = e4m3_values()[stored] / overall[0]
            tensors = {".weight_packed": packed, ".weight_scale": (FLOAT8, stored), ".weight_global_scale": overall}
        tensors[".weight_shape"] = np.array([n, k], np.int64)
        return tensors, np.repeat(scales.astype(np.float32), group, 1)[:, :k] * FP4[quants]

    weights = {"num_bits": 4, "type": "float", "strategy": "group" if form.startswith("mx") else "tensor_group",
               "group_size": group, "symmetric": True}
    return make, {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": form}}}


def nf4(block: int, nested: bool):
    from allspark_server.weights.schemes.bitsandbytes import _NF4

    def make(n: int, k: int, rng, salt: int) -> Made:
        quants, count = rng.integers(0, 16, (n, k)).astype(np.uint8), n * k // block
        state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [n, k]}
        flat = quants.reshape(-1)
        tensors = {MODULE: (flat[0::2] << 4 | flat[1::2]).reshape(-1, 1), ".weight.quant_map": _NF4}
        if nested:
            table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            picked = rng.integers(0, 256, count).astype(np.uint8)
            above = rng.uniform(0.5, 1, -(-count // 256)).astype(np.float32) * np.float32(0.4 / k ** 0.5)
            offset = np.float32(1.7 / k ** 0.5)
            largest = table[picked] * above[np.arange(count) // 256] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
            tensors |= {".weight.absmax": picked, ".weight.nested_absmax": above, ".weight.nested_quant_map": table}
        else:
            largest = (rng.uniform(1, 2, count) * 1.5 / k ** 0.5).astype(np.float32)
            tensors[".weight.absmax"] = largest
        tensors[".weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return tensors, np.repeat(largest, block).reshape(n, k) * _NF4[quants]

    return make, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                  "bnb_4bit_use_double_quant": nested}


def llm_int8():
    def make(n: int, k: int, rng, salt: int) -> Made:
        values = (_quants(rng, (n, k), 8) ^ 0x80).view(np.int8)
        scales = (rng.uniform(1, 2, n) * 2.5 / k ** 0.5).astype(np.float32)
        return {MODULE: values, ".SCB": scales}, (scales / np.float32(127))[:, None] * values.astype(np.float32)

    return make, {"quant_method": "bitsandbytes", "load_in_8bit": True}


# Sizes with which a rank's slices begin at multiples of 8 within blocks.
GLM = Spec("glm4_moe", _sizes(160, 8, 4, 192, head_dim=32, moe_intermediate_size=256, n_routed_experts=8, n_group=2,
                              num_experts_per_tok=3, use_qk_norm=True, num_nextn_predict_layers=0))
MINIMAX = Spec("minimax_m2", _sizes(160, 8, 4, 256, 2, head_dim=32, num_local_experts=6, num_experts_per_tok=2,
                                    rotary_dim=16))
DEEPSEEK = Spec("deepseek_v3", _sizes(160, 7, 7, 192, 3, moe_intermediate_size=256, n_routed_experts=8, n_group=4,
                                      topk_group=2, num_experts_per_tok=3, first_k_dense_replace=1, n_shared_experts=1,
                                      q_lora_rank=136, kv_lora_rank=144, qk_nope_head_dim=24, v_head_dim=32, head_dim=8,
                                      qk_rope_head_dim=8, pad_token_id=0) | _rope("default", 1e4))
# What Kimi-K2-Thinking leaves in bfloat16: all but the routed experts.
KIMI_IGNORES = ("re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
                r"re:.*mlp\.gate\..*")
W8A8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
SCHEMES = {
    "gptq-4": (SPEC, gptq(4, 32)),
    "gptq-4-symmetric": (SPEC, gptq(4, 48, symmetric=True)),
    "gptq-4-order": (SPEC, gptq(4, 64, order=True, version="gptq_v2")),
    "gptq-4-rows": (SPEC, gptq(4, -1)),
    "gptq-8": (SPEC, gptq(8, 64)),
    "gptq-8-order": (SPEC, gptq(8, 48, symmetric=True, order=True)),
    "awq": (SPEC, awq(64)),
    "ct-w8a8": (SPEC, compressed("int-quantized", 8, "channel", activations=W8A8)),
    "ct-w8a16-points": (SPEC, compressed("int-quantized", 8, "group", 48, points=True)),
    "ct-packed-4": (SPEC, compressed("pack-quantized", 4, "group", 32)),
    "ct-packed-4-points": (SPEC, compressed("pack-quantized", 4, "group", 64, points=True)),
    "ct-packed-4-order": (SPEC, compressed("pack-quantized", 4, "group", 48, points=True, order=True)),
    "ct-packed-8": (SPEC, compressed("pack-quantized", 8, "channel")),
    "ct-float8-channel": (SPEC, compressed("float-quantized", 8, "channel")),
    "ct-float8-tensor": (SPEC, compressed("float-quantized", 8, "tensor")),
    "ct-float8-block": (SPEC, compressed("float-quantized", 8, "block", block=[64, 32])),
    "fp8": (SPEC, float8_blocks(128, 128)),
    "fp8-glm4-moe": (GLM, float8_blocks(128, 128)),
    "fp8-minimax-m2": (MINIMAX, float8_blocks(128, 128)),
    "fp8-deepseek-v3": (DEEPSEEK, float8_blocks(128, 128)),
    "ct-packed-4-kimi": (DEEPSEEK, compressed("pack-quantized", 4, "group", 32, ignore=KIMI_IGNORES,
                                              scale_type="BF16")),
    "ct-packed-4-latent": (DEEPSEEK, compressed("pack-quantized", 4, "group", 24)),
    "mxfp4": (SPEC, float4("mxfp4-pack-quantized", 32)),
    "nvfp4": (SPEC, float4("nvfp4-pack-quantized", 16)),
    "nf4": (BLOCKS, nf4(64, False)),
    "nf4-nested": (BLOCKS, nf4(64, True)),
    "llm-int8": (SPEC, llm_int8()),
}


def write_safetensors(path: Path, tensors: dict) -> None:
    """Writes arrays by name; (type, array) where NumPy lacks the type."""
    header, data, offset = {}, [], 0
    names = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8"}
    for name, value in tensors.items():
        kind, array = value if isinstance(value, tuple) else (names[str(value.dtype)], value)
        array = np.ascontiguousarray(array)
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
        data.append(array.tobytes())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the library does: tensors are aligned
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def write_pair(directory: Path, spec: Spec, make: Callable, config: dict, seed: int = 0) -> tuple[Path, Path]:
    """Writes a quantized checkpoint and its twin in float32."""
    twin = write_checkpoint(directory / "twin", spec, seed=seed)
    plain = safetensors.numpy.load_file(twin / "model.safetensors")
    quantized, rng = {}, np.random.default_rng(seed)
    ignored = [pattern.removeprefix("re:") for pattern in config.get("ignore", ()) if pattern.startswith("re:")]
    for name, values in list(plain.items()):
        if values.ndim != 2 or ".layers." not in name or any(re.match(pattern, name) for pattern in ignored):
            quantized[name] = values
            continue
        module = name.removesuffix(MODULE)
        inputs = {"q": "x", "k": "x", "v": "x", "gate": "y", "up": "y"}
        place = inputs.get(module.rsplit(".", 1)[1].removesuffix("_proj"), module)
        salt = sum(map(ord, module.rsplit(".", 2)[0] + place))
        tensors, plain[name] = make(*values.shape, rng, salt)
        if module.endswith(".kv_b_proj"):   # which is dequantized
            plain[name] = to_float32(from_float32(np.ascontiguousarray(plain[name], np.float32), "BF16"), "BF16")
        quantized |= {module + suffix: value for suffix, value in tensors.items()}
    plain = {name: np.ascontiguousarray(values, np.float32) for name, values in plain.items()}
    safetensors.numpy.save_file(plain, twin / "model.safetensors", {"format": "pt"})
    folder = directory / "quantized"
    folder.mkdir()
    values = json.loads((twin / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    write_safetensors(folder / "model.safetensors", quantized)
    return folder, twin


def scheme_pair(directory: Path, name: str) -> tuple[Path, Path]:
    spec, (make, config) = SCHEMES[name]
    return write_pair(directory, spec, make, config, seed=sum(map(ord, name)))


def recovered(path, world, **fields):
    """Each matrix of the model as its format recovers it, assembled from the ranks' slices; and the model's info."""
    whole = {}
    with Driver(path, world, **fields) as driver:
        for rank, runner in enumerate(driver.runners):
            for identity, weight in enumerate(runner._model.graph.weights.values()):
                if not weight.is_matrix:
                    continue
                n = sum(part.rows for part in weight.parts)
                into = whole.setdefault(weight.name, np.full((n, weight.columns), np.nan, np.float32))
                first, last = weight.column_range_of(rank, world)
                held, local, base = runner._executor.read_rows(identity), 0, 0
                for part in weight.parts:
                    begin, end = part.range_of(rank, world)
                    into[base + begin:base + end, first:last] = held[local:local + end - begin]
                    local, base = local + end - begin, base + part.rows
        info = driver.info
    assert all(not np.isnan(values).any() for values in whole.values())
    return whole, info


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
