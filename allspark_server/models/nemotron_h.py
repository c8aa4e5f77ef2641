"""Nemotron-H: each layer is one of Mamba2's state space, attention without rotary embedding, an MLP or experts. MLPs
have no gate; their activation is max(x, 0)^2.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

from allspark_server.models.architecture import Architecture, reject_other_values, translated
from allspark_server.models.blocks import begin, finish, output_projection, plain_mlp, qkv_projection, routed_experts
from allspark_server.models.expert_fields import grouped_experts
from allspark_server.models.fields import MAX_LAYERS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.mamba import mamba_config, mamba_mixer
from allspark_server.models.network import ExpertConfig, ModelConfig
from allspark_server.weights.shard import Split

_EMBEDDING = "backbone.embeddings.weight"
_KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_ALIASES = {"linear_attention": "mamba", "full_attention": "attention"}


def _experts_of(graph: Graph, x: Tensor, prefix: str) -> Tensor:
    """Routed experts, which may compute a latent vector of the row instead of the row, and a shared one."""
    config, size, hidden = graph.config, graph.experts.shared_size, graph.config.hidden_size
    correction = "gate.e_score_correction_bias"
    if config.expert_latent:
        down = graph.matrix(f"{prefix}.fc1_latent_proj.weight", config.expert_latent, hidden)
        latent = routed_experts(graph, x, prefix, ("up_proj", "down_proj"), correction=correction,
                                source=graph.linear(x, down, None, out="expert_latent"), out="latent_sums")
        up = graph.matrix(f"{prefix}.fc2_latent_proj.weight", hidden, config.expert_latent)
        y = graph.linear(latent, up, None, out="branch")
    else:
        y = routed_experts(graph, x, prefix, ("up_proj", "down_proj"), correction=correction)
    unit = gcd(size, 32)
    shared = plain_mlp(graph, x, f"{prefix}.shared_experts", Split(size // unit, unit), bias=config.mlp_bias,
                       out="shared", between="shared_activated")
    return graph.all_reduce(graph.add(y, shared))


def nemotron_h(config: ModelConfig) -> Graph:
    """Builds the network."""
    graph, x = begin(config, _EMBEDDING, rotary=False)
    for layer in range(config.num_layers):
        h = graph.rms_norm(x, f"backbone.layers.{layer}.norm.weight")
        mixer = f"backbone.layers.{layer}.mixer"
        if config.mamba is not None and layer in config.mamba.layers:
            y = mamba_mixer(graph, h, mixer, config.mamba)
        elif layer not in config.mlp_layers:
            qkv = qkv_projection(graph, h, mixer, bias=config.attention_bias)
            y = output_projection(graph, graph.span_attention(qkv, layer), mixer, bias=config.attention_bias)
        elif config.experts is None or layer in config.experts.dense_layers:
            y = graph.all_reduce(plain_mlp(graph, h, mixer, graph.intermediate, bias=config.mlp_bias))
        else:
            y = _experts_of(graph, h, mixer)
        graph.add(x, y)
    return finish(graph, x, "backbone.norm_f.weight", embedding=_EMBEDDING)


def _kinds(fields: Fields) -> list[str]:
    """The kind of each layer, from a string or a list."""
    pattern = fields.get("hybrid_override_pattern", str)
    name = "layers_block_type" if "layers_block_type" in fields.values else "layer_types"
    if pattern is not None:
        name, found = "hybrid_override_pattern", [_KINDS.get(letter, letter) for letter in pattern]
    else:
        found = [_ALIASES.get(kind, kind) for kind in fields.need(name, list)]
    if not 0 < len(found) <= MAX_LAYERS or not set(found) <= set(_KINDS.values()) or "attention" not in found:
        raise fields.error(name, "must hold M, *, - or E (mamba, attention, mlp, moe) for each layer, and at least "
                                 "one attention")
    return found


def _fields(fields: Fields) -> Fields:
    """The same fields under the names that other families have."""
    reject_other_values(fields, {"mamba_hidden_act": "silu", "sliding_window": None, "num_nextn_predict_layers": 0})
    return translated(fields, num_hidden_layers=len(_kinds(fields)),
                      hidden_act=fields.get("mlp_hidden_act", str, "relu2"),
                      head_dim=fields.get("head_dim", int, fields.get("attention_head_dim", int, 128)),
                      rms_norm_eps=fields.get("layer_norm_epsilon", float, 1e-5))


_SIZES = {"heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "groups": "n_groups", "state_dim": "ssm_state_size",
          "taps": "conv_kernel", "conv_bias": "use_conv_bias", "bias": "use_bias", "limits": "time_step_limit"}


def _more(fields: Fields) -> dict[str, Any]:
    kinds = _kinds(fields)
    latent = fields.get("moe_latent_size", int, 0)
    if latent < 0:
        raise fields.error("moe_latent_size", f"is {latent}: it must not be negative")
    layers = {kind: tuple(i for i, other in enumerate(kinds) if other == kind) for kind in _KINDS.values()}
    mamba = mamba_config(fields, layers["mamba"], _SIZES, head_dim=64, groups=8, state_dim=128, taps=4)
    return {"mamba": mamba if layers["mamba"] else None, "mlp_layers": tuple(sorted(layers["mlp"] + layers["moe"])),
            "expert_latent": latent}


def _experts(fields: Fields, layers: int) -> ExpertConfig | None:
    dense = tuple(i for i, kind in enumerate(_kinds(fields)) if kind != "moe")
    if len(dense) == layers:
        return None
    reject_other_values(fields, {"n_shared_experts": 1})
    return replace(grouped_experts(fields, layers), dense_layers=dense,
                   shared_size=fields.need_positive("moe_shared_expert_intermediate_size"))


ARCHITECTURES = {"NemotronHForCausalLM": Architecture(nemotron_h, "nemotron_h", "Nemotron-H, Nemotron Nano 2 and 3",
                                                      kv_heads_required=False, has_bias_fields=True,
                                                      activation=("relu2",), partial_rotary=1.0, layer_types=False,
                                                      experts=_experts, more=_more, translate=_fields)}
