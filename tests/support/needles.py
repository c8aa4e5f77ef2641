"""A checkpoint made to find needles: its weights are set, not trained, so that its answers are known for any context.

A needle is a row of special tokens, [key, value, value, value]; the text around it is of other tokens. Asked for a
token of a needle, the model answers with the one after it. There are two kinds: those of one are found by the recurrent
state of a layer with the gated delta rule alone, those of the other by a layer with full attention alone. Each token is
a code in a few features of the residual stream:

    ONE          1
    OWN + i      the token is special token i; OWN + SPECIAL: it is none
    BEFORE + i   the same of the token before, which layer 0 writes: its convolution sees it, and its state forgets all
    ANSWER + i   special token i is the answer; the output matrix reads it

Layer 1 stores what follows a special token of the first kind under that token: decay 1, and rate β 0 for all other
tokens. Layer 2 has random weights but adds nothing. Layer 3 attends with a token of the second kind as query to the
position whose token before is that token, with a score of 72 where all others have 0.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from support import draft_heads
from support.checkpoints import write_checkpoint
from support.gemma4 import VOCAB
from support.tiny_configs import RECURRENT

KIND = 12                # special tokens of a kind
SPECIAL = 2 * KIND       # and of both: first those of the state, then those of attention
FIRST = 100              # id of the first special token
LENGTH = 4               # tokens of a needle
ONE, OWN, BEFORE, ANSWER, NOISE = 0, 1, 30, 60, 90
SIZE, HEAD, ROTATED, DIM = 128, 64, 16, 32     # hidden, of attention's head, of these rotated, of the state's head
SHARP = 3.0              # factor of normed queries and keys: a score is (SHARP sqrt(HEAD))^2 / sqrt(HEAD)


def _put(matrix: torch.Tensor, row: int, column: int, count: int = 1, value: float = 1.0) -> None:
    for i in range(count):
        matrix[row + i, column + i] = value


def _delta(t: dict[str, torch.Tensor], query: tuple[int, int], key: tuple[int, int], value: tuple[int, int],
           out: int) -> None:
    """Queries, keys and values: (first feature, count). All taps but those of the row itself are 0."""
    qkv = t["in_proj_qkv.weight"].zero_()
    for i, (feature, count) in enumerate((query, key, value)):
        _put(qkv, i * DIM, feature, count)
    t["conv1d.weight"].zero_()[:, 0, -1] = 1
    t["in_proj_z.weight"].zero_()[:, ONE] = 1
    t["norm.weight"].fill_(1)
    t["in_proj_a.weight"].zero_(), t["A_log"].zero_()
    _put(t["out_proj.weight"].zero_(), out, 0, value[1], 1 / 35)   # a normed one-hot times silu(z) is about that


def write(folder: Path, positions: int) -> Path:
    """Writes the checkpoint. positions: its max_position_embeddings."""
    spec = RECURRENT["qwen3-5"]
    fields = {**spec.fields, "hidden_size": SIZE, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HEAD,
              "intermediate_size": 32, "num_hidden_layers": 4, "max_position_embeddings": positions,
              "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": DIM,
              "linear_value_head_dim": DIM, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
              "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    fields["rope_parameters"] = {**fields["rope_parameters"], "partial_rotary_factor": ROTATED / HEAD,
                                 "mrope_section": [4, 2, 2]}
    write_checkpoint(folder, replace(spec, fields=fields))
    tensors = {name: tensor.float() for name, tensor in draft_heads.tensors_of(folder).items()}
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight") or name == "model.norm.weight":
            tensor.zero_()      # norms multiply by 1 + w
        elif name.endswith("mlp.down_proj.weight"):
            tensor.zero_()
    generator = torch.Generator().manual_seed(1)
    embedding, output = tensors["model.embed_tokens.weight"].zero_(), tensors["lm_head.weight"].zero_()
    embedding[:, ONE] = 1
    embedding[:, NOISE:] = 0.1 * torch.randn(VOCAB, SIZE - NOISE, generator=generator)
    embedding[:, OWN + SPECIAL] = 1
    embedding[FIRST:FIRST + SPECIAL, OWN + SPECIAL] = 0
    _put(embedding, FIRST, OWN, SPECIAL)
    _put(output, FIRST, ANSWER, SPECIAL, 10.0)

    layers = [{n.removeprefix(f"model.layers.{i}.{part}."): tensor for n, tensor in tensors.items()
               if n.startswith(f"model.layers.{i}.{part}.")}
              for i, part in enumerate(["linear_attn"] * 3 + ["self_attn"])]
    shift, memory, idle, attention = layers
    _delta(shift, (ONE, 1), (ONE, 1), (OWN, SPECIAL + 1), BEFORE)
    shift["conv1d.weight"][2 * DIM:, 0, -2:] = torch.tensor([1.0, 0.0])     # values of the row before
    shift["in_proj_b.weight"].zero_()[:, ONE] = 10
    shift["dt_bias"].fill_(30)      # a decay of e^-30

    _delta(memory, (OWN, KIND), (BEFORE, KIND), (OWN, KIND), ANSWER)
    memory["in_proj_b.weight"].zero_()[:, ONE] = -20
    memory["in_proj_b.weight"][:, BEFORE:BEFORE + KIND] = 40
    memory["dt_bias"].fill_(-40)    # a decay of 1 - 4e-18

    idle["out_proj.weight"].zero_()

    _put(attention["q_proj.weight"].zero_(), ROTATED, OWN + KIND, KIND)
    attention["q_proj.weight"][HEAD:, ONE] = 1      # the gate
    _put(attention["k_proj.weight"].zero_(), ROTATED, BEFORE + KIND, KIND)
    _put(attention["v_proj.weight"].zero_(), 0, OWN + KIND, KIND)
    _put(attention["o_proj.weight"].zero_(), ANSWER + KIND, 0, KIND, 1 / 6)
    for name in ("q_norm", "k_norm"):
        attention[f"{name}.weight"].fill_(SHARP - 1)
    draft_heads.save(tensors, folder)
    return folder


def context(length: int, depths: tuple[float, ...], seed: int = 0) -> tuple[list[int], list[list[int]]]:
    """A text of `length` tokens with two needles, one of each kind, at each of these depths (0: the beginning, 1: the
    end); and the needles.
    """
    others = np.setdiff1d(np.arange(3, VOCAB), np.arange(FIRST, FIRST + SPECIAL))
    text = np.random.default_rng(seed).choice(others, length)
    needles = []
    for i, depth in enumerate(depths):
        for kind in range(2):
            first = FIRST + kind * KIND + i * LENGTH
            needles.append(list(range(first, first + LENGTH)))
            start = round(depth * (length - 2 * LENGTH - 2)) + kind * (LENGTH + 1)
            text[start:start + LENGTH] = needles[-1]
    return text.tolist(), needles
