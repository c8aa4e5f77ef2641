"""A hand-made model that looks tokens up in its context: after a token it predicts the token that followed the same
token earlier.

It is an induction head (Olsson et al., 2022). Tokens have codes, which are orthogonal rows of a Hadamard matrix. The
first layer attends to the previous position: all positions have the same key, and the query is this key rotated by one
step. The layer copies the code of the previous token into other features of each position. The second layer attends to
positions whose previous token is the current token, and outputs the token there. Fast-rotating feature pairs
distinguish positions. Codes use pairs that hardly rotate over the whole context; only scaled rotary embeddings have
enough of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from allspark_server.models import read_config
from allspark_server.models.rotary import rotary_of
from allspark_server.weights.safetensors import write_safetensors

LENGTH = 131_072
TOKENS, HIDDEN, HEAD_DIM, THETA = 16, 64, 64, 1e6
OWN, CONSTANT, BEFORE, LOOKED_UP = slice(0, 16), 16, slice(17, 33), slice(33, 49)  # width of the residual stream
POSITION_PAIRS = 20  # the fastest ones
CODE_PAIRS = 8  # the slowest ones
SHARPNESS, LOOKUP = 16.0, 2.5  # scale of attention scores: of each feature pair for positions, of each value for codes

SCALINGS = {
    "yarn": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "llama3": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 4096},
    "none": {"rope_type": "default"},
}  # fmt: skip


def codes() -> np.ndarray:
    """[tokens, 16] of 1 and -1; the rows are orthogonal."""
    rows = np.ones((1, 1))
    while len(rows) < TOKENS:
        rows = np.block([[rows, rows], [rows, -rows]])
    return rows


def induction_model(directory: Path, scaling: str, window: int = 0) -> Path:
    """Writes the checkpoint. `window` is the first layer's sliding window, for which 2 is enough; 0 means full
    attention.
    """
    rope = {**SCALINGS[scaling], "rope_theta": THETA}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": HEAD_DIM, "vocab_size": TOKENS, "rms_norm_eps": 1e-6, "max_position_embeddings": LENGTH,
        "rope_parameters": rope, "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if window:
        config |= {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "sliding_window": window,
                   "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    rotary = rotary_of(read_config(directory).rope, HEAD_DIM)
    tensors = _weights(np.asarray(rotary.inv_freq, float), rotary.attention_factor)
    write_safetensors(directory / "model.safetensors", [(name, "F32", a.shape) for name, a in tensors.items()], {},
                      [[np.ascontiguousarray(a, np.float32)] for a in tensors.values()])
    return directory


def _weights(frequencies: np.ndarray, attention_factor: float) -> dict[str, np.ndarray]:
    half, scale = HEAD_DIM // 2, HEAD_DIM**0.5 / attention_factor**2
    first = {name: np.zeros((HIDDEN, HIDDEN)) for name in "qkvo"}
    second = {name: np.zeros((HIDDEN, HIDDEN)) for name in "qkvo"}
    norm = (17 / HIDDEN) ** 0.5, (33 / HIDDEN) ** 0.5  # what the layers' RMS norms divide by
    for pair in range(POSITION_PAIRS):
        rotated = np.cos(frequencies[pair]), -np.sin(frequencies[pair])
        first["q"][pair, CONSTANT], first["q"][half + pair, CONSTANT] = np.array(rotated) * SHARPNESS * scale * norm[0]
        first["k"][pair, CONSTANT] = norm[0]
    for at in range(16):
        pair = half - CODE_PAIRS + at % CODE_PAIRS
        feature = pair + half * (at // CODE_PAIRS)
        second["q"][feature, at], second["k"][feature, BEFORE.start + at] = LOOKUP * scale * norm[1], norm[1]
        for layer, factor, target in ((first, norm[0], BEFORE), (second, norm[1], LOOKED_UP)):
            layer["v"][at, at], layer["o"][target.start + at, at] = factor, 1.0
    embedding, head = np.zeros((TOKENS, HIDDEN)), np.zeros((TOKENS, HIDDEN))
    embedding[:, OWN], embedding[:, CONSTANT], head[:, LOOKED_UP] = codes(), 1.0, codes()
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": np.ones(HIDDEN)}
    for number, layer in enumerate((first, second)):
        prefix = f"model.layers.{number}."
        tensors |= {f"{prefix}self_attn.{name}_proj.weight": layer[name] for name in "qkvo"}
        tensors |= {f"{prefix}mlp.{name}_proj.weight": np.zeros((32, HIDDEN)) for name in ("gate", "up")}
        tensors[f"{prefix}mlp.down_proj.weight"] = np.zeros((HIDDEN, 32))
        tensors |= {f"{prefix}{name}_layernorm.weight": np.ones(HIDDEN) for name in ("input", "post_attention")}
    return tensors


KEYS = {token: 8 + token for token in range(5)}  # tokens that the test looks up, and the tokens that follow them


def haystack(length: int, seed: int = 0) -> list[int]:
    """`length` tokens that contain each key, followed by its value, once, spread from the beginning to the end."""
    tokens = np.random.default_rng(seed).choice([5, 6, 7, 13, 14, 15], length).tolist()
    for number, (key, value) in enumerate(KEYS.items()):
        at = 1 + (length - 4) * number // (len(KEYS) - 1)
        tokens[at : at + 2] = key, value
    return tokens
