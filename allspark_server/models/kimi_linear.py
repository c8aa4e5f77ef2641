"""Kimi Linear: three of four layers have the gated delta rule with a decay for each channel (KDA, arXiv 2510.26692),
the others latent attention without rotary embedding. A few dense layers, then experts as in DeepSeek-V3.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture, reject_other_values
from allspark_server.models.blocks import begin, finish, latent_attention, mlp_or_experts
from allspark_server.models.deepseek import latent_heads, latent_sizes
from allspark_server.models.expert_fields import grouped_experts
from allspark_server.models.fields import MAX_HEAD_DIM, MAX_LAYERS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.network import DeltaConfig, ModelConfig
from allspark_server.weights.shard import Split

_FIELDS = {"model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
           "num_experts": "n_routed_experts", "num_expert_group": "n_group",
           "num_experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts"}
_SERVED = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "moe_layer_freq": 1,
           "num_nextn_predict_layers": 0, "rope_scaling": None, "rope_parameters": None}
_DELTA = {"num_heads": ("linear_num_heads", 1 << 16), "head_dim": ("linear_head_dim", MAX_HEAD_DIM),
          "short_conv_kernel_size": ("linear_conv_kernel_dim", 64)}  # transformers' name, and the largest value


def kimi_delta(graph: Graph, x: Tensor, prefix: str, delta: DeltaConfig) -> Tensor:
    """The gated delta rule with a decay for each channel, its convolution, gates and output projection (KDA)."""
    hidden, dim, heads = graph.config.hidden_size, delta.key_dim, Split(delta.key_heads)
    split = Split(delta.key_heads, dim)

    def low_rank(name: str, out: str) -> Tensor:
        rows = graph.linear(x, graph.matrix(f"{prefix}.{name}_a_proj.weight", dim, hidden), None, f"{out}_latent")
        return graph.linear(rows, graph.matrix(f"{prefix}.{name}_b_proj.weight", split.width, dim, row_split=split),
                            None, out)

    qkv = graph.linear(x, graph.packed(prefix, ("q_proj", "k_proj", "v_proj"), (split,) * 3, hidden, False)[0], None,
                       "qkv_of_state")
    mixed = graph.causal_conv(qkv, *(f"{prefix}.{name}_conv1d" for name in "qkv"), taps=delta.taps)
    rates = graph.linear(x, graph.matrix(f"{prefix}.b_proj.weight", delta.key_heads, hidden, row_split=heads), None,
                         "rates")
    gates = graph.concat(low_rank("f", "decays"), rates, out="state_gates")
    y = graph.gated_delta(mixed, gates, prefix, dim, dim, "remembered", delta.lower_bound)
    y = graph.gated_rms_norm(y, low_rank("g", "output_gate"), f"{prefix}.o_norm.weight", dim, gate="sigmoid")
    return graph.row_parallel_linear(y, f"{prefix}.o_proj", split, False, out="branch")


def kimi_linear(config: ModelConfig) -> Graph:
    """Builds the network."""
    assert config.delta is not None and config.latent is not None
    graph, x = begin(config, rotary=False)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        y = (kimi_delta(graph, h, f"{prefix}.self_attn", config.delta) if layer in config.delta.layers else
             latent_attention(graph, h, f"{prefix}.self_attn", layer, config.latent))
        h = graph.rms_norm(graph.add(x, y), f"{prefix}.post_attention_layernorm.weight")
        graph.add(x, mlp_or_experts(graph, h, f"{prefix}.mlp", layer, correction="gate.e_score_correction_bias"))
    return finish(graph, x)


def _fields(fields: Fields) -> Fields:
    """The same fields under the names that DeepSeek's have."""
    reject_other_values(fields, _SERVED)
    return latent_heads(Fields({_FIELDS.get(n, n): value for n, value in fields.values.items()}, fields.path))


def delta_sizes(fields: Fields, own: Fields, *known: str) -> tuple[int, int, int]:
    """Heads, their features and the convolution's rows: transformers' fields, or those of linear_attn_config (`own`),
    which may also have the fields `known`.
    """
    if unknown := sorted(set(own.values) - {*_DELTA, "kda_layers", "full_attn_layers", *known}):
        raise own.error(unknown[0], "is not known, so it is not served")
    heads, dim, taps = (own.need_positive(name, most=most) if name in own.values else
                        fields.need_positive(other, most=most) for name, (other, most) in _DELTA.items())
    return heads, dim, taps


def _more(fields: Fields) -> dict[str, Any]:
    """The layers of each kind: layer_types, or linear_attn_config, which counts them from 1."""
    count, own = fields.need_positive("num_hidden_layers", most=MAX_LAYERS), fields.inner("linear_attn_config", {})
    heads, dim, taps = delta_sizes(fields, own)
    delta, full = own.get("kda_layers", list, []), own.get("full_attn_layers", list, [])
    types = fields.get("layer_types", list)
    if types is not None:
        delta, full = ([i + 1 for i, kind in enumerate(types) if kind == f"{name}_attention"]
                       for name in ("linear", "full"))
    if not full or sorted(map(repr, delta + full)) != sorted(map(repr, range(1, count + 1))):
        where, name = (own, "kda_layers and full_attn_layers") if types is None else (fields, "layer_types")
        raise where.error(name, f"must give each of the {count} layers one kind, and at least one full attention")
    layers = tuple(sorted(layer - 1 for layer in delta))
    return {**latent_sizes(fields, rotated=False), "delta": DeltaConfig(layers, heads, heads, dim, dim, taps)}


ARCHITECTURES = {"KimiLinearForCausalLM": Architecture(
    kimi_linear, "kimi_linear", "Kimi Linear", kv_heads_required=False, has_bias_fields=True, layer_types=False,
    experts=grouped_experts, more=_more, translate=_fields, stored_as="block_sparse_moe")}
