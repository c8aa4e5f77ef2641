"""Checkpoints in the shape of Qwen3.6-35B-A3B (Qwen3.5-35B-A3B) with random weights, for benchmarks: fewer layers, a
smaller vocabulary, in bfloat16 or in FP8 blocks, or as a GGUF file for llama.cpp.

All tensors are cut from one array of noise, each from a place of its own, so writing is as fast as the disk. Values are
on the grid of e4m3: bfloat16 and FP8 have the same values. Embeddings outweigh what layers add to them. So a token's
experts depend on the token, and different tokens choose experts independently, as trained routers nearly do; with
other dummy weights rows share experts, and decoding looks faster than it is.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from allspark_server.weights.safetensors import write_safetensors

NOISE = 1 << 23                 # values, in float32 32 MB
STEP = 1 << 12                  # tensors begin at multiples of so many values
SMALL = 2.0 ** -11              # of noise with a standard deviation of 32: 0.016
BLOCK = 128                     # rows and columns that share a scale in FP8
GGUF_TYPES = {"F32": 0, "Q4_0": 2, "Q8_0": 8}
GGUF_BLOCK = {"F32": (1, 4), "Q4_0": (32, 18), "Q8_0": (32, 34)}    # values, bytes
Tensors = dict[str, tuple[str, tuple[int, ...]]]    # by name: what it is (see Noise.values), and its shape


@dataclass(frozen=True)
class Shape:
    """The model's sizes. vocab: of the whole model 248,320, which is 6,208 for each of its 40 layers."""

    layers: int
    vocab: int = 0
    hidden: int = 2048
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    key_heads: int = 16
    value_heads: int = 32
    state_dim: int = 128
    taps: int = 4
    experts: int = 256
    top: int = 8
    inner: int = 512
    interval: int = 4           # every so many layers one has full attention

    @property
    def tokens(self) -> int:
        """Tokens of the vocabulary; by default as many as keep the head's part of the whole model's bytes."""
        return self.vocab or 6208 * self.layers

    @property
    def keys(self) -> int:
        """Features of the keys of a layer with the gated delta rule."""
        return self.key_heads * self.state_dim

    @property
    def values(self) -> int:
        """Features of its values."""
        return self.value_heads * self.state_dim

    def attends(self, layer: int) -> bool:
        """Whether a layer has full attention."""
        return layer % self.interval == self.interval - 1

    def config(self) -> dict:
        """config.json, without the way in which weights are stored."""
        return {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
                "hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "vocab_size": self.tokens,
                "num_experts": self.experts, "num_experts_per_tok": self.top, "moe_intermediate_size": self.inner,
                "shared_expert_intermediate_size": self.inner, "linear_num_key_heads": self.key_heads,
                "linear_num_value_heads": self.value_heads, "linear_key_head_dim": self.state_dim,
                "linear_value_head_dim": self.state_dim, "linear_conv_kernel_dim": self.taps,
                "full_attention_interval": self.interval, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
                "hidden_act": "silu", "eos_token_id": self.tokens - 1, "tie_word_embeddings": False,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
                "torch_dtype": "bfloat16"}


class Noise:
    """One array of noise in every type."""

    @cached_property
    def e4m3(self) -> np.ndarray:
        """Its bytes as FP8, of values with a standard deviation of 32."""
        exponent, mantissa = np.divmod(np.arange(127), 8)
        table = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0 ** -6)
        drawn = np.random.default_rng(0).standard_normal(NOISE, np.float32) * 32
        codes = np.searchsorted((table[1:] + table[:-1]) / 2, np.abs(drawn)).astype(np.uint8)
        self._table = table.astype(np.float32)
        return codes | (drawn < 0).astype(np.uint8) << 7

    @cached_property
    def float32(self) -> np.ndarray:
        """Its values times SMALL."""
        codes = self.e4m3
        return self._table[codes & 127] * np.where(codes & 128, -SMALL, SMALL).astype(np.float32)

    @cached_property
    def bfloat16(self) -> np.ndarray:
        """The same, exactly."""
        return (self.float32.view(np.uint32) >> 16).astype(np.uint16)

    @cached_property
    def embedding(self) -> np.ndarray:
        """bfloat16 with a standard deviation of 1."""
        return ((self.float32 / np.float32(32 * SMALL)).view(np.uint32) >> 16).astype(np.uint16)

    @cached_property
    def q8_0(self) -> np.ndarray:
        """Blocks of llama.cpp."""
        x = self.float32.reshape(-1, 32)
        scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
        return self._blocks(scale, np.rint(x / scale).astype(np.int8).view(np.uint8))

    def blocks(self, form: str, factor: float = 1.0) -> np.ndarray:
        """"Q8_0" or "Q4_0", its values times a power of two."""
        found = self.q8_0 if form == "Q8_0" else self.q4_0
        if factor == 1.0:
            return found
        rows = found.reshape(-1, GGUF_BLOCK[form][1])
        return self._blocks(rows[:, :2].copy().view(np.float16) * np.float16(factor), rows[:, 2:])

    @cached_property
    def q4_0(self) -> np.ndarray:
        """Blocks of llama.cpp."""
        x = self.float32.reshape(-1, 32)
        scale = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1) / np.float32(-8)
        codes = np.clip(x / scale + np.float32(8.5), 0, 15).astype(np.uint8)
        return self._blocks(scale, codes[:, :16] | codes[:, 16:] << 4)

    @staticmethod
    def _blocks(scale: np.ndarray, codes: np.ndarray) -> np.ndarray:
        return np.concatenate([scale.astype(np.float16).view(np.uint8), codes], 1).reshape(-1)

    def pieces(self, values: np.ndarray, number: int, per_value: float, count: int) -> Iterator[np.ndarray]:
        """`count` values of an array that has `per_value` elements for each, for the tensor of this number."""
        at, left = int(number * 7919 * STEP % NOISE * per_value), int(count * per_value)
        while left:
            piece = values[at:at + left]
            yield piece
            left, at = left - len(piece), 0


def vector(kind: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """The float32 values of a tensor that is not cut from noise, None for others."""
    means = {"zero": 0.0, "one": 1.0, "decay": -2.0}
    return np.full(shape, means[kind], np.float32) if kind in means else None


def tensors(shape: Shape, stacked: bool) -> Tensors:
    """The checkpoint's tensors. Kinds: "matrix" (may be FP8), "plain" (never is), "embedding", and those of `vector`.
    stacked: experts are two tensors, otherwise three of each expert.
    """
    h, e, inner = shape.hidden, shape.experts, shape.inner
    delta = {"in_proj_qkv.weight": ("matrix", (2 * shape.keys + shape.values, h)),
             "in_proj_z.weight": ("matrix", (shape.values, h)), "in_proj_a.weight": ("plain", (shape.value_heads, h)),
             "in_proj_b.weight": ("plain", (shape.value_heads, h)),
             "conv1d.weight": ("plain", (2 * shape.keys + shape.values, 1, shape.taps)),
             "A_log": ("decay", (shape.value_heads,)), "dt_bias": ("zero", (shape.value_heads,)),
             "norm.weight": ("one", (shape.state_dim,)), "out_proj.weight": ("matrix", (h, shape.values))}
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = {"q_proj.weight": ("matrix", (2 * q, h)), "k_proj.weight": ("matrix", (kv, h)),
                 "v_proj.weight": ("matrix", (kv, h)), "o_proj.weight": ("matrix", (h, q)),
                 "q_norm.weight": ("zero", (shape.head_dim,)), "k_norm.weight": ("zero", (shape.head_dim,))}
    expert = {"gate_proj.weight": ("matrix", (inner, h)), "up_proj.weight": ("matrix", (inner, h)),
              "down_proj.weight": ("matrix", (h, inner))}
    mlp = {"gate.weight": ("plain", (e, h)), "shared_expert_gate.weight": ("plain", (1, h)),
           **{f"shared_expert.{name}": value for name, value in expert.items()}}
    if stacked:
        mlp |= {"experts.gate_up_proj": ("matrix", (e, 2 * inner, h)), "experts.down_proj": ("matrix", (e, h, inner))}
    else:
        mlp |= {f"experts.{i}.{name}": value for i in range(e) for name, value in expert.items()}
    found: Tensors = {"model.embed_tokens.weight": ("embedding", (shape.tokens, h)),
                      "lm_head.weight": ("plain", (shape.tokens, h)), "model.norm.weight": ("zero", (h,))}
    for layer in range(shape.layers):
        full = shape.attends(layer)
        parts = {"input_layernorm.weight": ("zero", (h,)), "post_attention_layernorm.weight": ("zero", (h,)),
                 **{f"{'self_attn' if full else 'linear_attn'}.{name}": value
                    for name, value in (attention if full else delta).items()},
                 **{f"mlp.{name}": value for name, value in mlp.items()}}
        found |= {f"model.layers.{layer}.{name}": value for name, value in parts.items()}
    return found


def write_checkpoint(directory: Path, shape: Shape, fp8: bool = False) -> int:
    """Writes a directory in the layout of Hugging Face, with FP8 blocks or in bfloat16; returns the bytes of its
    tensors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config, noise = shape.config(), Noise()
    listed: list[tuple[str, str, tuple[int, ...]]] = []
    data: list[Iterator[np.ndarray]] = []
    kept = []
    for number, (name, (kind, size)) in enumerate(tensors(shape, not fp8).items()):
        count, values = int(np.prod(size)), vector(kind, size)
        if values is not None:
            listed.append((name, "BF16", size))
            data.append(iter([(values.view(np.uint32) >> 16).astype(np.uint16)]))
        elif fp8 and kind == "matrix":
            scales = tuple(-(-n // BLOCK) for n in size)
            listed += [(name, "F8_E4M3", size), (f"{name}_scale_inv", "F32", scales)]
            data += [noise.pieces(noise.e4m3, number, 1, count), iter([np.full(scales, SMALL, np.float32)])]
        else:
            kept += [name.removesuffix(".weight")] if len(size) == 2 else []
            listed.append((name, "BF16", size))
            data.append(noise.pieces(noise.embedding if kind == "embedding" else noise.bfloat16, number, 1, count))
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                                         "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": kept}
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", listed, {"format": "pt"}, data)
    return (directory / "model.safetensors").stat().st_size


def write_gguf(path: Path, shape: Shape, kind: str) -> None:
    """Writes the model for llama.cpp as "qwen35moe" without a vocabulary, matrices in kind "Q8_0" or "Q4_0". The
    values of a tensor are not those that the checkpoint has for it.
    """
    a, noise = "qwen35moe", Noise()
    metadata: dict[str, int | float | str | list[int]] = {
        "general.architecture": a, "general.name": "random", f"{a}.block_count": shape.layers,
        f"{a}.context_length": 262144, f"{a}.embedding_length": shape.hidden, f"{a}.feed_forward_length": shape.inner,
        f"{a}.attention.head_count": shape.heads, f"{a}.attention.head_count_kv": shape.kv_heads,
        f"{a}.attention.key_length": shape.head_dim, f"{a}.attention.value_length": shape.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-6, f"{a}.expert_count": shape.experts,
        f"{a}.expert_used_count": shape.top, f"{a}.expert_feed_forward_length": shape.inner,
        f"{a}.expert_shared_feed_forward_length": shape.inner, f"{a}.rope.dimension_count": shape.head_dim // 4,
        f"{a}.rope.dimension_sections": [11, 11, 10, 0], f"{a}.rope.freq_base": 1e7,
        f"{a}.ssm.conv_kernel": shape.taps, f"{a}.ssm.inner_size": shape.values, f"{a}.ssm.state_size": shape.state_dim,
        f"{a}.ssm.time_step_rank": shape.value_heads, f"{a}.ssm.group_count": shape.key_heads,
        f"{a}.full_attention_interval": shape.interval, "tokenizer.ggml.model": "no_vocab",
        f"{a}.vocab_size": shape.tokens}
    tensors_of = _gguf_tensors(shape, kind)

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def typed(value: int | float | str | list[int]) -> bytes:
        if isinstance(value, list):
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors_of), len(metadata))
    head += b"".join(text(key) + typed(value) for key, value in metadata.items())
    at = 0
    for name, (form, _, size) in tensors_of.items():
        values, width = GGUF_BLOCK[form]
        head += text(name) + struct.pack(f"<I{len(size)}QIQ", len(size), *reversed(size), GGUF_TYPES[form], at)
        at += -(-int(np.prod(size)) // values * width // 32) * 32
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % 32))
        for number, (form, what, size) in enumerate(tensors_of.values()):
            count, values = int(np.prod(size)), vector(what, size)
            if values is not None:
                file.write((-np.exp(values) if what == "decay" else values).tobytes())
            else:
                block, width = GGUF_BLOCK[form]
                factor = 1 / (32 * SMALL) if what == "embedding" else 1.0
                array = noise.float32 if form == "F32" else noise.blocks(form, factor)
                for piece in noise.pieces(array, number, 1 if form == "F32" else width / block, count):
                    file.write(piece.data)
            file.write(bytes(-file.tell() % 32))


def _gguf_tensors(shape: Shape, kind: str) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """By llama.cpp's names: the type, what the values are, and the shape."""
    h, e, inner = shape.hidden, shape.experts, shape.inner
    mixed, heads = 2 * shape.keys + shape.values, shape.value_heads
    found = {"token_embd.weight": (kind, "embedding", (shape.tokens, h)), "output_norm.weight": ("F32", "one", (h,)),
             "output.weight": (kind, "matrix", (shape.tokens, h))}
    delta = {"attn_qkv.weight": (kind, "matrix", (mixed, h)), "attn_gate.weight": (kind, "matrix", (shape.values, h)),
             "ssm_conv1d.weight": ("F32", "plain", (mixed, shape.taps)), "ssm_dt.bias": ("F32", "zero", (heads,)),
             "ssm_a": ("F32", "decay", (heads,)), "ssm_beta.weight": (kind, "matrix", (heads, h)),
             "ssm_alpha.weight": (kind, "matrix", (heads, h)), "ssm_norm.weight": ("F32", "one", (shape.state_dim,)),
             "ssm_out.weight": (kind, "matrix", (h, shape.values))}
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = {"attn_q.weight": (kind, "matrix", (2 * q, h)), "attn_k.weight": (kind, "matrix", (kv, h)),
                 "attn_v.weight": (kind, "matrix", (kv, h)), "attn_output.weight": (kind, "matrix", (h, q)),
                 "attn_q_norm.weight": ("F32", "one", (shape.head_dim,)),
                 "attn_k_norm.weight": ("F32", "one", (shape.head_dim,))}
    rest = {"attn_norm.weight": ("F32", "one", (h,)), "post_attention_norm.weight": ("F32", "one", (h,)),
            "ffn_gate_inp.weight": ("F32", "plain", (e, h)), "ffn_gate_exps.weight": (kind, "matrix", (e, inner, h)),
            "ffn_up_exps.weight": (kind, "matrix", (e, inner, h)),
            "ffn_down_exps.weight": (kind, "matrix", (e, h, inner)),
            "ffn_gate_inp_shexp.weight": ("F32", "plain", (h,)), "ffn_gate_shexp.weight": (kind, "matrix", (inner, h)),
            "ffn_up_shexp.weight": (kind, "matrix", (inner, h)), "ffn_down_shexp.weight": (kind, "matrix", (h, inner))}
    for layer in range(shape.layers):
        parts = (attention if shape.attends(layer) else delta) | rest
        found |= {f"blk.{layer}.{name}": value for name, value in parts.items()}
    return found
