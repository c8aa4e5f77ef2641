"""Copies of a checkpoint in the formats that other programs store, each value rounded to the nearest one of the format.

No calibration: what the programs that write such checkpoints do beyond rounding (GPTQ's corrections, AWQ's scales of
inputs) makes them more accurate than these copies. Layouts as in `tests/support/quantized_checkpoints.py`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.quantized_checkpoints import (
    FLOAT8,
    FP4,
    MODULE,
    awq,
    compressed,
    e4m3_values,
    float4,
    float8_blocks,
    gptq,
    nf4,
    pack_awq,
    pack_pairs,
    pack_words,
    write_safetensors,
)

Tensors = dict  # of a module, by suffix
GROUP = 64
_LARGEST = {"e4m3": 448.0, "fp4": 6.0}


def _e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest e4m3 values, as bytes."""
    return torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of the table for each value."""
    order = np.argsort(table, kind="stable")
    borders = (table[order][1:] + table[order][:-1]) / 2
    return order[np.searchsorted(borders, values)].astype(np.uint8)


def _grouped(w: np.ndarray, group: int) -> np.ndarray:
    """[rows, groups, group]."""
    if w.shape[1] % group:
        raise ValueError(f"{w.shape[1]} columns are no multiple of groups of {group}")
    return w.reshape(len(w), -1, group)


def fp8_rows(w: np.ndarray) -> Tensors:
    """e4m3 with a scale a row."""
    scales = np.abs(w).max(1, keepdims=True) / np.float32(_LARGEST["e4m3"])
    return {MODULE: (FLOAT8, _e4m3(w / scales)), ".weight_scale": scales}


def fp8_blocks(w: np.ndarray) -> Tensors:
    """e4m3 with a scale for each 128 x 128 block."""
    blocks = [-(-n // 128) for n in w.shape]
    padded = np.zeros((blocks[0] * 128, blocks[1] * 128), np.float32)
    padded[:w.shape[0], :w.shape[1]] = w
    tiles = padded.reshape(blocks[0], 128, blocks[1], 128)
    scales = np.abs(tiles).max((1, 3)) / np.float32(_LARGEST["e4m3"])
    quants = _e4m3((tiles / scales[:, None, :, None]).reshape(padded.shape))
    return {MODULE: (FLOAT8, quants[:w.shape[0], :w.shape[1]]), ".weight_scale_inv": scales}


def mxfp4(w: np.ndarray) -> Tensors:
    """4-bit floats in groups of 32 with powers of two as scales (OCP Microscaling Formats 1.0, 6.3)."""
    groups = _grouped(w, 32)
    largest = np.maximum(np.abs(groups).max(2), np.float32(2.0**-120))
    stored = (np.floor(np.log2(largest)) - 2 + 127).astype(np.uint8)
    quants = _nearest(groups / np.ldexp(np.float32(1), stored.astype(int) - 127)[:, :, None], FP4)
    return _fp4(quants.reshape(w.shape)) | {".weight_scale": stored}


def nvfp4(w: np.ndarray) -> Tensors:
    """4-bit floats in groups of 16 with e4m3 scales and a float32 scale of the matrix."""
    groups = _grouped(w, 16)
    largest = np.abs(groups).max(2)
    overall = np.float32(_LARGEST["e4m3"] * _LARGEST["fp4"]) / largest.max()
    stored = np.maximum(_e4m3(largest / np.float32(_LARGEST["fp4"]) * overall), 1).astype(np.uint8)
    quants = _nearest(groups / (e4m3_values()[stored] / overall)[:, :, None], FP4)
    return _fp4(quants.reshape(w.shape)) | {".weight_scale": (FLOAT8, stored),
                                            ".weight_global_scale": np.array([overall], np.float32)}


def _fp4(quants: np.ndarray) -> Tensors:
    return {".weight_packed": pack_pairs(quants), ".weight_shape": np.array(quants.shape, np.int64)}


def nf4_blocks(w: np.ndarray) -> Tensors:
    """NormalFloat4 (QLoRA, appendix E) in blocks of 64 with float32 scales."""
    from allspark_server.weights.schemes.bitsandbytes import _NF4

    largest = np.abs(_grouped(w, 64)).max(2)
    quants = _nearest(_grouped(w, 64) / largest[:, :, None], _NF4).reshape(-1)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(w.shape)}
    return {MODULE: (quants[0::2] << 4 | quants[1::2]).reshape(-1, 1), ".weight.quant_map": _NF4,
            ".weight.absmax": largest.reshape(-1),
            ".weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8)}


def gptq_symmetric(w: np.ndarray) -> Tensors:
    """Integers from -8 to 7 in groups of 64, in GPTQ's layout."""
    groups = _grouped(w, GROUP)
    scales = (np.abs(groups).max(2) / 7).astype(np.float16)
    quants = np.clip(np.rint(groups / scales.astype(np.float32)[:, :, None]), -8, 7).astype(np.int8) + 8
    words = pack_words(np.full(scales.T.shape, 8, np.uint8), 4).view(np.uint32) - np.uint32(0x11111111)
    return {".qweight": np.ascontiguousarray(pack_words(quants.reshape(w.shape).astype(np.uint8), 4).T),
            ".qzeros": words.view(np.int32), ".scales": np.ascontiguousarray(scales.T),
            ".g_idx": (np.arange(w.shape[1]) // GROUP).astype(np.int32)}


def awq_points(w: np.ndarray) -> Tensors:
    """Integers from 0 to 15 with zero points in groups of 64, in AWQ's layout."""
    groups = _grouped(w, GROUP)
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    scales = ((high - low) / 15).astype(np.float16)
    points = np.clip(np.rint(-low / scales.astype(np.float32)), 0, 15).astype(np.uint8)
    quants = np.clip(np.rint(groups / scales.astype(np.float32)[:, :, None]) + points[:, :, None], 0, 15)
    return {".qweight": pack_awq(quants.reshape(w.shape).astype(np.uint8).T), ".qzeros": pack_awq(points.T),
            ".scales": np.ascontiguousarray(scales.T)}


#: name -> (a matrix' tensors, quantization_config)
STORED: dict[str, tuple[Callable[[np.ndarray], Tensors], dict]] = {
    "fp8-rows": (fp8_rows, compressed("float-quantized", 8, "channel")[1]),
    "fp8-blocks": (fp8_blocks, float8_blocks(128, 128)[1]),
    "mxfp4": (mxfp4, float4("mxfp4-pack-quantized", 32)[1]),
    "nvfp4": (nvfp4, float4("nvfp4-pack-quantized", 16)[1]),
    "nf4": (nf4_blocks, nf4(64, False)[1]),
    "gptq-4": (gptq_symmetric, gptq(4, GROUP, symmetric=True)[1]),
    "awq-4": (awq_points, awq(GROUP)[1]),
}


def write_stored(source: Path, target: Path, name: str) -> Path:
    """Writes a copy of `source`, a folder with one model.safetensors, with all matrices of its layers in a format."""
    make, config = STORED[name]
    shutil.copytree(source, target)
    tensors: dict = {}
    with safe_open(source / "model.safetensors", "pt") as file:
        for key in file.keys():
            values = file.get_tensor(key)
            if values.ndim == 2 and ".layers." in key:
                made = make(values.float().numpy())
                tensors |= {key.removesuffix(MODULE) + suffix: value for suffix, value in made.items()}
            else:
                tensors[key] = ("BF16", values.bfloat16().view(torch.uint16).numpy())
    write_safetensors(target / "model.safetensors", tensors)
    fields = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return target
