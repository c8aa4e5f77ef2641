"""A random checkpoint with experts in MXFP4 as in gpt-oss', and its twin with recovered weights."""

from __future__ import annotations

import json

import numpy as np

from allspark_server.weights.checkpoint import open_model
from allspark_server.weights.safetensors import write_safetensors
from support.checkpoints import checkpoint

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def write(directory, tensors, config):
    """Writes tensors given as (type, array) by name."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", [(n, kind, a.shape) for n, (kind, a) in tensors.items()], {},
                      [[np.ascontiguousarray(a)] for _, a in tensors.values()])
    return directory


def mxfp4_tensors():
    """A checkpoint's tensors with random MXFP4 experts, as (type, array); and these experts' values, float64 [experts,
    inputs, outputs].
    """
    rng, values = np.random.default_rng(5), {}
    source = open_model(str(checkpoint("gpt-oss-blocks"))).source.source
    tensors = {n: ("F32", np.asarray(source.get(n).data)) for n in source.names()}
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name)[1].shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        scales = rng.integers(122, 126, blocks.shape[:3]).astype(np.uint8)
        scales[0, 0, 0] = 90
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = ("U8", blocks), ("U8", scales)
        quants = np.stack([blocks & 15, blocks >> 4], 4).reshape(*blocks.shape[:3], 32)
        each = E2M1[quants] * 2.0 ** (scales[..., None].astype(float) - 127)
        values[name] = each.reshape(experts, outputs, inputs).transpose(0, 2, 1)
    return tensors, values


def mxfp4_pair(root):
    """A checkpoint in gpt-oss' published form (with float32 instead of bfloat16), and its twin with recovered
    weights.
    """
    config = json.loads((checkpoint("gpt-oss-blocks") / "config.json").read_text())
    tensors, values = mxfp4_tensors()
    plain = {n: each for n, each in tensors.items() if not n.endswith(("_blocks", "_scales"))}
    twin = write(root / "twin", plain | {n: ("F32", x.astype(np.float32)) for n, x in values.items()}, config)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return write(root / "quantized", tensors, config | {"quantization_config": quantization}), twin
