"""Tiny GGUF files and their twins: Hugging Face checkpoints of the same network with the recovered weights."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from support.checkpoints import write_checkpoint
from support.gemma4 import VOCAB
from support.tiny_configs import Spec, _rope, _sizes

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11,
           "Q4_K": 12,
           "Q5_K": 13, "Q6_K": 14, "BF16": 30}
# Values and bytes of a block, and the offsets of its float16 fields.
BLOCKS = {"Q4_0": (32, 18, [0]), "Q4_1": (32, 20, [0, 2]), "Q5_0": (32, 22, [0]), "Q5_1": (32, 24, [0, 2]),
          "Q8_0": (32, 34, [0]), "Q2_K": (256, 84, [80, 82]), "Q3_K": (256, 110, [108]), "Q4_K": (256, 144, [0, 2]),
          "Q5_K": (256, 176, [0, 2]), "Q6_K": (256, 210, [208])}
SPECS = {
    "llama": Spec("llama", _sizes(256, 4, 2, 768, layers=2, head_dim=128, tie_word_embeddings=True)),
    "qwen2": Spec("qwen2", _sizes(96, 6, 2, 352, layers=2, tie_word_embeddings=False) | _rope("default", 1e6)),
    "qwen3": Spec("qwen3", _sizes(256, 6, 2, 512, layers=2, head_dim=128, tie_word_embeddings=False)
                  | _rope("default", 1e6)),
    "qwen3moe": Spec("qwen3_moe", _sizes(96, 6, 2, 160, layers=2, head_dim=32, moe_intermediate_size=160,
                                         num_experts=5, num_experts_per_tok=2, norm_topk_prob=True,
                                         tie_word_embeddings=False) | _rope("default", 1e6)),
}
K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "": "Q4_K"}


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, np.ndarray]]) -> Path:
    """Writes a GGUF file.

    `metadata` maps names to ints (stored as uint32), floats (float32), lists of strings, or arrays; `tensors` to (type,
    array), where an array of a quantized type holds raw blocks [..., bytes per row].
    """
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def typed(value: Any) -> bytes:
        if isinstance(value, bool):
            return struct.pack("<IB", 7, value)
        if isinstance(value, int):
            return struct.pack("<II", 4, value)
        if isinstance(value, float):
            return struct.pack("<If", 6, value)
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value, np.ndarray):
            return struct.pack("<IIQ", 9, {"int32": 5, "float32": 6}[str(value.dtype)], len(value)) + value.tobytes()
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + typed(value) for key, value in metadata.items())
    data, offset = [], 0
    for name, (kind, array) in tensors.items():
        sizes = list(array.shape)
        if kind in BLOCKS:
            values, size, _ = BLOCKS[kind]
            sizes[-1] = sizes[-1] // size * values
        head += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *reversed(sizes), NUMBERS[kind], offset)
        raw = np.ascontiguousarray(array).tobytes()
        data.append(raw + bytes(-len(raw) % 32))
        offset += len(data[-1])
    path.write_bytes(head + bytes(-len(head) % 32) + b"".join(data))
    return path


def random_blocks(kind: str, n: int, k: int, rng) -> np.ndarray:
    """Raw rows of a type. Their values have a standard deviation of about 1 / sqrt(k)."""
    values, size, halves = BLOCKS[kind]
    raw = rng.integers(0, 256, (n, k // values, size), dtype=np.uint8)
    most = {"Q4_0": 5, "Q4_1": 8, "Q5_0": 10, "Q5_1": 16, "Q8_0": 75, "Q2_K": 16, "Q3_K": 40, "Q4_K": 300, "Q5_K": 600,
            "Q6_K": 1200}[kind]
    for i, at in enumerate(halves):
        scale = rng.uniform(0.5, 1, (n, k // values)) * 1.2 / k ** 0.5 / most
        scale *= -7 if i and kind.endswith("_1") else 8 if i else 1
        raw[:, :, at:at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(n, -1)


def recover(kind: str, raw: np.ndarray) -> np.ndarray:
    """The values of raw blocks as float32 [n, k], computed block by block as ggml's C code does."""
    _values, size, _ = BLOCKS[kind]
    blocks = raw.reshape(-1, size)
    return np.concatenate([_block(kind, block) for block in blocks]).reshape(len(raw), -1).astype(np.float32)


def _block(kind: str, b: np.ndarray) -> np.ndarray:
    def half(at: int) -> np.float32:
        return np.float32(b[at:at + 2].view(np.float16)[0])

    def halves(q: np.ndarray) -> list[int]:
        return [int(x) & 15 for x in q] + [int(x) >> 4 for x in q]

    if kind == "Q8_0":
        return half(0) * b[2:].view(np.int8).astype(np.float32)
    if kind in ("Q4_0", "Q4_1"):
        q = np.array(halves(b[2 if kind == "Q4_0" else 4:]), np.float32)
        return half(0) * (q - 8) if kind == "Q4_0" else half(0) * q + half(2)
    if kind in ("Q5_0", "Q5_1"):
        at = 2 if kind == "Q5_0" else 4
        bits = int(b[at:at + 4].view(np.uint32)[0])
        q = np.array([x | (bits >> i & 1) << 4 for i, x in enumerate(halves(b[at + 4:]))], np.float32)
        return half(0) * (q - 16) if kind == "Q5_0" else half(0) * q + half(2)
    i, b = np.arange(256), b.astype(np.uint8)
    f = np.float32
    if kind in ("Q4_K", "Q5_K"):
        s, j = b[4:16].astype(int), i // 32
        later = np.minimum(j + 4, 11)
        scale = np.where(j < 4, s[j] & 63, s[later] & 15 | s[j - 4] >> 6 << 4)
        least = np.where(j < 4, s[np.minimum(j + 4, 7)] & 63, s[later] >> 4 | s[j] >> 6 << 4)
        q = b[(16 if kind == "Q4_K" else 48) + j // 2 * 32 + i % 32] >> (4 * (j % 2)).astype(np.uint8) & 15
        if kind == "Q5_K":
            q = q | (b[16 + i % 32] >> j.astype(np.uint8) & 1) << 4
        return half(0) * scale.astype(f) * q.astype(f) - half(2) * least.astype(f)
    if kind == "Q6_K":
        part, at = i // 128, i % 128
        low = b[64 * part + at % 64].astype(int) >> 4 * (at // 64) & 15
        high = b[128 + 32 * part + at % 32].astype(int) >> 2 * (at // 32) & 3
        return half(208) * b[192 + i // 16].view(np.int8).astype(f) * ((low | high << 4) - 32).astype(f)
    low = b[(16 if kind == "Q2_K" else 32) + i // 128 * 32 + i % 32].astype(int) >> i % 128 // 32 * 2 & 3
    if kind == "Q2_K":
        both = b[i // 16]
        return half(80) * (both & 15).astype(f) * low.astype(f) - half(82) * (both >> 4).astype(f)
    q, j = low - np.where(b[i % 32].astype(int) >> i // 32 & 1, 0, 4), i // 16
    scale = (b[96 + j % 8].astype(int) >> 4 * (j // 8) & 15
             | (b[104 + j % 4].astype(int) >> 2 * (j // 4) & 3) << 4) - 32
    return half(108) * scale.astype(f) * q.astype(f)


def tokens_of(size: int = VOCAB) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer with a few merges."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "Ġ the", "o w", "q u", "qu i"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + alphabet + [m.replace(" ", "") for m in merges]
    types = [3] * 3 + [1] * (len(tokens) - 3)
    tokens += [f"[PAD{i}]" for i in range(size - len(tokens))]
    types += [5] * (size - len(types))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(types, np.int32), "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": template}


def metadata_of(arch: str, spec: Spec) -> dict[str, Any]:
    f = spec.fields
    head_dim = f.get("head_dim") or f["hidden_size"] // f["num_attention_heads"]
    theta = f.get("rope_parameters", {}).get("rope_theta", 1e4)
    own = {"block_count": f["num_hidden_layers"], "context_length": f["max_position_embeddings"],
           "embedding_length": f["hidden_size"], "feed_forward_length": f["intermediate_size"],
           "attention.head_count": f["num_attention_heads"], "attention.head_count_kv": f["num_key_value_heads"],
           "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": head_dim,
           "attention.value_length": head_dim, "rope.freq_base": float(theta), "rope.dimension_count": head_dim}
    if arch == "qwen3moe":
        own |= {"expert_count": f["num_experts"], "expert_used_count": f["num_experts_per_tok"],
                "expert_feed_forward_length": f["moe_intermediate_size"]}
    return {"general.architecture": arch, "general.name": "tiny", **{f"{arch}.{k}": v for k, v in own.items()},
            **tokens_of()}


_NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
          "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
          "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
          "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
          "mlp.experts.down_proj": "ffn_down_exps", "input_layernorm": "attn_norm",
          "post_attention_layernorm": "ffn_norm"}


def gguf_name(name: str) -> str:
    for ours, theirs in (("model.embed_tokens", "token_embd"), ("lm_head", "output"), ("model.norm", "output_norm")):
        if name.startswith(ours + "."):
            return theirs + name[len(ours):]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_NAMES[module]}.{kind}"


def _interleaved(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of a projection in llama.cpp's order, which interleaves the two halves of each head."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_pair(directory: Path, arch: str, kinds: dict[str, str] | str, seed: int = 0) -> tuple[Path, Path]:
    """Writes a GGUF file and its twin. `kinds` is the type of all matrices, or types by the beginning of a tensor's
    name after the layer.
    """
    kinds = {"": kinds} if isinstance(kinds, str) else kinds
    spec = SPECS[arch]
    twin = write_checkpoint(directory / "twin", spec, seed=seed)
    plain = safetensors.numpy.load_file(twin / "model.safetensors")
    rng, tensors = np.random.default_rng(seed), {}
    head_dim = spec.fields.get("head_dim") or spec.fields["hidden_size"] // spec.fields["num_attention_heads"]
    stacked: dict[str, dict[int, np.ndarray]] = {}
    kind = "F32"

    def stored(values: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """A matrix as the file stores it, and its recovered values."""
        if kind in BLOCKS:
            raw = random_blocks(kind, *values.shape, rng)
            return raw, recover(kind, raw)
        if kind == "F16":
            return values.astype(np.float16), values.astype(np.float16).astype(np.float32)
        if kind == "BF16":
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            return bits, (bits.astype(np.uint32) << 16).view(np.float32)
        return values, values

    for name, values in sorted(plain.items()):
        parts = name.split(".")
        if "experts" in parts:
            expert = int(parts.pop(parts.index("experts") + 1))
            theirs = gguf_name(".".join(parts))
            part = theirs.rpartition("blk.")[2].partition(".")[2]
            kind = next(k for prefix, k in kinds.items() if part.startswith(prefix))
            raw, plain[name] = stored(values, kind)
            stacked.setdefault(theirs, {})[expert] = raw
            tensors[theirs] = (kind, raw)  # keeps the place
            continue
        theirs = gguf_name(name)
        short = theirs.split(".", 2)[2] if theirs.startswith("blk.") else theirs
        matrix = values.ndim == 2 and "gate_inp" not in theirs
        kind = next(k for prefix, k in kinds.items() if short.startswith(prefix)) if matrix else "F32"
        raw, recovered = stored(values, kind)
        plain[name] = np.ascontiguousarray(recovered, np.float32)
        if arch == "llama" and any(part in short for part in ("attn_q.", "attn_k.")):
            raw = _interleaved(raw, head_dim)
        tensors[theirs] = (kind, raw)
    for name, experts in stacked.items():
        tensors[name] = (tensors[name][0], np.stack([experts[i] for i in range(len(experts))]))
    safetensors.numpy.save_file(plain, twin / "model.safetensors", {"format": "pt"})
    return write_gguf(directory / "model.gguf", metadata_of(arch, spec), tensors), twin


FILES = {
    "q4_k_m": ("llama", K_M), "q8_0": ("qwen2", "Q8_0"), "q4_0": ("qwen2", "Q4_0"), "q4_1": ("qwen2", "Q4_1"),
    "q5_0": ("qwen2", "Q5_0"), "q5_1": ("qwen2", "Q5_1"), "q2_k": ("llama", "Q2_K"), "q3_k": ("llama", "Q3_K"),
    "q4_k": ("qwen3", "Q4_K"), "q5_k": ("llama", {"attn_v": "Q5_K", "": "Q4_K"}), "q6_k": ("qwen3", "Q6_K"),
    "mixed": ("qwen2", {"attn_v": "Q8_0", "attn_k": "Q5_1", "": "Q4_0"}), "f16": ("llama", "F16"),
    "bf16": ("qwen2", "BF16"), "f32": ("qwen2", "F32"), "experts": ("qwen3moe", {"ffn_down": "Q8_0", "": "Q4_0"}),
}
