"""Falcon-H1: each layer has attention and Mamba2's state space beside each other, then a gated MLP; all of them have
factors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from allspark_server.models.architecture import Architecture, reject_other_values
from allspark_server.models.blocks import begin, finish, gated_mlp, output_projection, qkv_projection
from allspark_server.models.fields import MAX_LAYERS, MAX_NUMBER, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Tensor
from allspark_server.models.mamba import expanded_mamba, mamba_mixer
from allspark_server.models.network import LayerFactors, ModelConfig


def falcon_h1(config: ModelConfig) -> Graph:
    """Builds the network. Factors of a linear layer's input and output are applied where that takes the fewest ops."""
    assert config.mamba is not None and config.layer_factors is not None
    graph, x = begin(config)
    factors, bias = config.layer_factors, config.attention_bias

    def scaled(y: Tensor, factor: float) -> Tensor:
        return y if factor == 1 else graph.scale(y, factor)

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        h = scaled(graph.rms_norm(x, f"{prefix}.input_layernorm.weight"), factors.attention_in)
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.self_attn", bias=bias))
        attended = graph.span_attention(qkv, layer, scale=config.head_dim**-0.5 * factors.key)
        y = output_projection(graph, attended, f"{prefix}.self_attn", bias=bias)
        graph.add(x, scaled(y, factors.attention_out))
        h = scaled(h, factors.state_in / factors.attention_in)
        graph.add(x, scaled(mamba_mixer(graph, h, f"{prefix}.mamba", config.mamba), factors.state_out))
        h = scaled(graph.rms_norm(x, f"{prefix}.pre_ff_layernorm.weight"), factors.gate)
        y = gated_mlp(graph, h, f"{prefix}.feed_forward")  # its products are `gate` times too large
        graph.add(x, scaled(y, factors.down / factors.gate))
    return finish(graph, x, "model.final_layernorm.weight")


def _more(fields: Fields) -> dict[str, Any]:
    reject_other_values(fields, {"mlp_bias": False, "projectors_bias": False, "mamba_proj_bias": False})

    def factor(name: str) -> float:
        return fields.need_positive(name, float, MAX_NUMBER) if fields.values.get(name) is not None else 1.0

    def several(name: str, count: int) -> tuple[float, ...]:
        found = fields.get(name, list, [1.0] * count)
        numbers = [n for n in found if isinstance(n, int | float) and not isinstance(n, bool) and 0 < n <= MAX_NUMBER]
        if len(numbers) != count or len(found) != count:
            raise fields.error(name, f"is {found!r}: expected {count} positive numbers")
        return tuple(float(n) for n in numbers)

    size, layers = "mamba_d_ssm", tuple(range(fields.need_positive("num_hidden_layers", most=MAX_LAYERS)))
    inner = fields.need_positive(size) if fields.get(size, int) is not None else 0 if size in fields.values else 1024
    mamba = expanded_mamba(fields, layers, inner)
    norm = "" if not fields.get("mamba_rms_norm", bool, False) else (
        "values" if fields.get("mamba_norm_before_gate", bool, True) else "products")
    if norm == "values" and mamba.groups > 1:
        raise fields.error("mamba_norm_before_gate", f"is True: with mamba_n_groups={mamba.groups} only False is "
                                                     "served")
    columns, (gate, down) = several("ssm_multipliers", 5), several("mlp_multipliers", 2)
    layer_factors = LayerFactors(
        attention_in=factor("attention_in_multiplier"), attention_out=factor("attention_out_multiplier"),
        state_in=factor("ssm_in_multiplier"), state_out=factor("ssm_out_multiplier"), key=factor("key_multiplier"),
        gate=gate, down=down)
    return {"parallel": True, "embedding_scale": factor("embedding_multiplier"),
            "logit_scale": factor("lm_head_multiplier"), "layer_factors": layer_factors,
            "mamba": replace(mamba, norm=norm, factors=() if set(columns) == {1.0} else columns)}


ARCHITECTURES = {"FalconH1ForCausalLM": Architecture(falcon_h1, "falcon_h1", "Falcon-H1", kv_heads_required=False,
                                                     has_bias_fields=True, layer_types=False, more=_more)}
