"""EAGLE-3 heads, which transformers does not load, with a reference of the head in float64."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.checkpoints import reference_model

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Head:
    """A head beside its model. path: of the model; head: of the head. layers: before which the model's residual stream
    is taken. tokens: the model's ids of the head's vocabulary. tensors: of the head, in float64.
    """

    path: Path
    head: Path
    layers: tuple[int, ...]
    tokens: torch.Tensor
    config: dict[str, Any]
    tensors: Tensors = field(repr=False)

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> tuple[list[int], float]:
        """The greedy drafts that follow `tokens`, of which the model has computed all but the last, and the smallest
        gap between the two best logits, in their standard deviations.
        """
        model = reference_model(self.path, torch.float64)
        streams = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        joined = torch.cat([streams[layer][0] for layer in self.layers], -1) @ self.tensors["fc.weight"].T
        table = self.tensors.get("embed_tokens.weight", model.model.embed_tokens.weight)
        rows, ids, found, gap = joined, list(tokens[1:]), [], 9e9
        for _ in range(count):
            stream = self._layer(table[ids], rows)
            logits = self._normed(stream[-1], "norm") @ self.tensors["lm_head.weight"].T
            best = torch.topk(logits, 2).values
            gap = min(gap, float((best[0] - best[1]) / logits.std()))
            found.append(int(self.tokens[logits.argmax()]))
            rows, ids = torch.cat([rows, stream[-1:]]), [*ids, found[-1]]
        return found, gap

    def _layer(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The residual stream after the head's layer."""
        config, w = self.config, lambda name: self.tensors[f"midlayer.{name}.weight"]
        count, size = len(states), config["head_dim"]
        normed = self._normed(states, "midlayer.hidden_norm")
        both = torch.cat([self._normed(embeddings, "midlayer.input_layernorm"), normed], -1)
        q, k, v = (self._heads(both @ w(f"self_attn.{n}_proj").T) for n in "qkv")
        angles = torch.arange(count)[:, None] * config["rope_theta"] ** (-torch.arange(0, size, 2).double() / size)
        q, k = (self._rotated(x, angles) for x in (q, k))
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * size ** -0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1)).flatten(1)
        stream = (normed if config.get("norm_before_residual") else states) + attended @ w("self_attn.o_proj").T
        h = self._normed(stream, "midlayer.post_attention_layernorm")
        gated = torch.nn.functional.silu(h @ w("mlp.gate_proj").T) * (h @ w("mlp.up_proj").T)
        return stream + gated @ w("mlp.down_proj").T

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), -1, self.config["head_dim"])

    @staticmethod
    def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(mean + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]


def write(folder: Path, path: Path, *, drafted: int = 0, embedding: bool = False, layers: tuple[int, ...] = (),
          change: Any = None, stored: Any = None, **fields: Any) -> Head:
    """Writes a random head of the model in `path` into a folder.

    drafted: tokens of its vocabulary; 0: the model's. embedding: whether it has one of its own. layers: before which
    the residual stream is taken; () for the default. change: called with the tensors; stored: with the tensors and the
    fields of config.json, as they are written. fields: of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads((path / "config.json").read_text())
    vocabulary, size = model["vocab_size"], model["hidden_size"]
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
              "hidden_size": size, "intermediate_size": 88, "num_attention_heads": 6, "num_key_value_heads": 2,
              "head_dim": 20, "vocab_size": vocabulary, "draft_vocab_size": drafted or vocabulary, "rope_theta": 1e4,
              "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", **fields}
    if layers:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]}
    generator = torch.Generator().manual_seed(5)
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    inner, out = config["intermediate_size"], config["draft_vocab_size"]
    shapes = {"fc": (size, 3 * size), "lm_head": (out, size)}
    shapes |= {f"midlayer.self_attn.{n}_proj": (rows, 2 * size) for n, rows in zip("qkv", (queries, keys, keys))}
    shapes |= {"midlayer.self_attn.o_proj": (size, queries), "midlayer.mlp.gate_proj": (inner, size),
               "midlayer.mlp.up_proj": (inner, size), "midlayer.mlp.down_proj": (size, inner)}
    if embedding:
        shapes["embed_tokens"] = (vocabulary, size)
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
               for name, shape in shapes.items()}
    for name in ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm"):
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    tokens = torch.arange(vocabulary)
    if drafted:
        tokens = torch.randperm(vocabulary, generator=generator)[:out].sort().values
    if change:
        change(tensors, tokens)
    written = dict(tensors)
    if drafted:
        written["d2t"] = tokens - torch.arange(out)
        written["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, tokens, True)
    if stored:
        stored(written, config)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in written.items()}, folder / "model.safetensors")
    count = model["num_hidden_layers"]
    return Head(path, folder, layers or (2, count // 2, count - 3), tokens, config,
                {name: t.double() for name, t in tensors.items()})
