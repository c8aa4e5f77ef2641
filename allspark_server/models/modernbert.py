"""ModernBERT (gte-modernbert, nomic's and other embedders and rerankers): norms before attention and MLP, rotary
embedding, a gated MLP, and windows in both directions on two of three layers.
"""

from __future__ import annotations

from typing import Any

from allspark_server.models.architecture import Architecture, label_count, translated
from allspark_server.models.bert import function_of
from allspark_server.models.blocks import LOCAL, begin, classify, dense, embed, gated, sliced_qkv
from allspark_server.models.fields import MAX_LAYERS, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import EncoderConfig, ModelConfig
from allspark_server.models.sentence_modules import read_modules


def modernbert(config: ModelConfig) -> Graph:
    """Builds the network."""
    encoder, bias = config.encoder, config.attention_bias
    assert encoder is not None
    norms: dict[str, Any] = {"bias": encoder.norm_bias}
    graph, x = begin(config, "embeddings.tok_embeddings.weight")
    x = graph.layer_norm(x, "embeddings.norm", "rows", **norms)
    for layer in range(config.num_layers):
        prefix, window = f"layers.{layer}", config.window(layer)
        h = graph.layer_norm(x, f"{prefix}.attn_norm", "normed", **norms) if layer else x
        qkv = graph.rope(sliced_qkv(graph, h, f"{prefix}.attn.Wqkv", bias=bias), **({"table": LOCAL} if window else {}))
        attended = graph.span_attention(qkv, layer, window=window)
        graph.add(x, graph.row_parallel_linear(attended, f"{prefix}.attn.Wo", graph.q_heads, bias, out="branch"))
        h = graph.layer_norm(x, f"{prefix}.mlp_norm", "normed", **norms)
        halves = (graph.intermediate, graph.intermediate)
        weight, added = graph.sliced(f"{prefix}.mlp.Wi", halves, config.hidden_size, config.mlp_bias)
        inner = gated(graph, graph.linear(h, weight, added, out="gate_up"), encoder.activation, "activated")
        graph.add(x, graph.row_parallel_linear(inner, f"{prefix}.mlp.Wo", graph.intermediate, config.mlp_bias,
                                               out="branch"))
    x = graph.layer_norm(x, "final_norm", "normed", **norms)
    if not config.labels:
        return embed(graph, x)
    head = dense(graph, graph.pool_rows(x, encoder.pooling), "head.dense", config.hidden_size, "head",
                 bias=encoder.head_bias, activation=encoder.head_activation)
    return classify(graph, graph.layer_norm(head, "head.norm", "head_normed", **norms), "classifier")


def _translate(fields: Fields) -> Fields:
    """As the fields of other families, in which a window is the number of positions that a row sees up to its own."""
    layers, every = fields.need_positive("num_hidden_layers", most=MAX_LAYERS), fields.get(
        "global_attn_every_n_layers", int, 3)
    if every < 1:
        raise fields.error("global_attn_every_n_layers", f"is {every}: it must be positive")
    types = fields.get("layer_types", list) or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(layers)]
    rope: Any = fields.get("rope_parameters", dict) or {}
    for kind, name, theta in (("full_attention", "global_rope_theta", 160_000.0),
                              ("sliding_attention", "local_rope_theta", 10_000.0)):
        own = rope.get(kind) if isinstance(rope.get(kind), dict) else {}
        rope = {**rope, kind: {"rope_type": "default", "rope_theta": fields.get(name, float, theta), **own}}
    activation = function_of(fields, "hidden_activation")
    if not activation.startswith("gelu"):
        raise fields.error("hidden_activation", f"is {activation!r}: only gelu and gelu_pytorch_tanh are served")
    return translated(fields, rms_norm_eps=fields.get("norm_eps", float, 1e-5), rope_parameters=rope,
                      layer_types=types, sliding_window=fields.get("local_attention", int, 128) // 2 + 1,
                      hidden_activation="gelu", hidden_act="gelu", _activation=activation,
                      max_position_embeddings=fields.get("max_position_embeddings", int, 8192))


def _more(classifier: bool) -> Any:
    def more(fields: Fields) -> dict[str, Any]:
        modules = read_modules(fields.path.parent)
        pooling = fields.get("classifier_pooling", str, "cls") if classifier else modules.pooling or "mean"
        if classifier and pooling not in ("cls", "mean"):
            raise fields.error("classifier_pooling", f"is {pooling!r}: expected cls or mean")
        encoder = EncoderConfig(
            pooling, () if classifier else modules.dense, fields.values["_activation"],
            head="modernbert" if classifier else "",
            head_activation=function_of(fields, "classifier_activation"),
            head_bias=fields.get("classifier_bias", bool, False), norm_bias=fields.get("norm_bias", bool, False))
        return {"encoder": encoder, "labels": label_count(fields) if classifier else 0}
    return more


_COMMON: dict[str, Any] = {"kv_heads_required": False, "has_bias_fields": True, "activation": ("gelu",),
                           "windows": True, "window": 65, "rope_theta": 160_000.0, "local_theta": 10_000.0,
                           "translate": _translate, "stored_as": "bare_encoder", "unused": ("head.", "decoder.")}
ARCHITECTURES = {
    "ModernBertModel": Architecture(modernbert, "modernbert", "ModernBERT", more=_more(False), **_COMMON),
    "ModernBertForMaskedLM": Architecture(modernbert, "modernbert", "ModernBERT", more=_more(False), **_COMMON),
    "ModernBertForSequenceClassification": Architecture(modernbert, "modernbert", "ModernBERT, classifiers",
                                                        more=_more(True), **_COMMON),
}
