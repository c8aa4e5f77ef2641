"""GTE (gte-base-en-v1.5, gte-multilingual-base, Snowflake's arctic-embed-m-v2.0; `NewModel`) and Nomic BERT
(nomic-embed-text): norms after attention and MLP as in BERT, a rotary embedding and a gated MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from allspark_server.models.architecture import Architecture, label_count, reject_other_values, translated
from allspark_server.models.bert import add_tables, separator_of
from allspark_server.models.blocks import begin, classify, dense, embed, gated, sliced_qkv
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Part, Tensor, Weight
from allspark_server.models.network import EncoderConfig, ModelConfig
from allspark_server.models.sentence_modules import read_modules


@dataclass(frozen=True)
class _Names:
    """What the tensors of a checkpoint are called. gate, up: the tensor of each, and whether it is the second half of
    one that holds both.
    """

    norm: str
    layer: str
    qkv: str
    out: str
    norms: tuple[str, str]
    gate: tuple[str, bool]
    up: tuple[str, bool]
    down: str


_GTE = _Names("embeddings.LayerNorm", "encoder.layer", "attention.qkv_proj", "attention.o_proj", ("attn_ln", "mlp_ln"),
              ("mlp.up_gate_proj", True), ("mlp.up_gate_proj", False), "mlp.down_proj")
_NOMIC = _Names("emb_ln", "encoder.layers", "attn.Wqkv", "attn.out_proj", ("norm1", "norm2"), ("mlp.fc12", False),
                ("mlp.fc11", False), "mlp.fc2")


def gte(config: ModelConfig) -> Graph:
    """Builds GTE's network: biases everywhere but in the first layer of the MLP."""
    return _network(config, _GTE, down_bias=True)


def nomic(config: ModelConfig) -> Graph:
    """Builds Nomic BERT's network."""
    return _network(config, _NOMIC, down_bias=config.mlp_bias)


def _network(config: ModelConfig, names: _Names, down_bias: bool) -> Graph:
    encoder, bias = config.encoder, config.attention_bias
    assert encoder is not None
    graph, x = begin(config, "embeddings.word_embeddings.weight")
    x = graph.layer_norm(add_tables(graph, x), names.norm, "rows")
    for layer in range(config.num_layers):
        prefix = f"{names.layer}.{layer}"
        qkv = graph.rope(sliced_qkv(graph, x, f"{prefix}.{names.qkv}", bias=bias))
        attended = graph.span_attention(qkv, layer)
        graph.add(x, graph.row_parallel_linear(attended, f"{prefix}.{names.out}", graph.q_heads, bias, out="branch"))
        x = graph.layer_norm(x, f"{prefix}.{names.norms[0]}", "attended_rows")
        inner = gated(graph, _gate_up(graph, x, prefix, names), encoder.activation, "activated")
        graph.add(x, graph.row_parallel_linear(inner, f"{prefix}.{names.down}", graph.intermediate, down_bias,
                                               out="branch"))
        x = graph.layer_norm(x, f"{prefix}.{names.norms[1]}", "rows")
    if not config.labels:
        return embed(graph, x)
    pooled = dense(graph, graph.pool_rows(x, encoder.pooling), "pooler.dense", config.hidden_size, "head",
                   activation="tanh")
    return classify(graph, pooled, "classifier")


def _gate_up(graph: Graph, x: Tensor, prefix: str, names: _Names) -> Tensor:
    """The packed projection [gate | up]."""
    split = graph.intermediate

    def part(name: str, second: bool) -> Part:
        both = names.gate[0] == names.up[0]
        return Part(f"{prefix}.{name}.weight", split.width, split, split.width * second, 2 * split.width * both)

    weight = Weight(f"{prefix}.gate+up.weight", (part(*names.gate), part(*names.up)), graph.config.hidden_size)
    return graph.linear(x, graph.weight(weight), None, out="gate_up")


def _translate_gte(fields: Fields) -> Fields:
    reject_other_values(fields, {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True,
                                 "logn_attention_scale": False, "logn_attention_clip1": False})
    rope = fields.inner("rope_scaling", {})
    values: dict[str, Any] = {}
    if (rope.get("type", str) or rope.get("rope_type", str)) == "ntk":
        # Fixed NTK scaling: the base times the factor, and all frequencies divided by factor^(2 / head_dim).
        if rope.get("mixed_b", float) is not None:
            raise rope.error("mixed_b", "is set: only NTK scaling without it is served")
        factor, theta = rope.need_positive("factor", float), fields.get("rope_theta", float, 10_000.0)
        head_dim = fields.need_positive("hidden_size") // fields.need_positive("num_attention_heads")
        values = {"rope_theta": theta * factor, "rope_scaling": {"type": "linear", "factor": factor ** (2 / head_dim)}}
    return translated(fields, rms_norm_eps=fields.get("layer_norm_eps", float, 1e-12), attention_bias=True,
                      hidden_act="gelu", _activation=_function(fields, "hidden_act", "gelu"),
                      _segments=fields.get("type_vocab_size", int, 1), **values)


def _translate_nomic(fields: Fields) -> Fields:
    """As the fields of others: the published checkpoints have GPT-2's names, transformers' own have BERT's."""
    reject_other_values(fields, {
        "prenorm": False, "causal": False, "parallel_block": False, "use_rms_norm": False, "scale_attn_weights": True,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None, "num_experts": 0, "mlp_fc1_bias": False})
    ours = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
            "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
            "layer_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base", "attention_bias": "qkv_proj_bias",
            "mlp_bias": "mlp_fc2_bias", "hidden_act": "activation_function"}
    own = {name: fields.values[other] for name, other in ours.items()
           if other in fields.values and name not in fields.values}
    known = translated(fields, **own)
    return translated(known, rms_norm_eps=known.get("layer_norm_eps", float, 1e-12), hidden_act="gelu",
                      _activation=_function(known, "hidden_act", "silu"),
                      _segments=fields.get("type_vocab_size", int, 2))


def _function(fields: Fields, name: str, default: str) -> str:
    functions = {"gelu": "gelu", "silu": "silu", "swiglu": "silu", "geglu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
                 "gelu_new": "gelu_tanh"}
    found = fields.get(name, str, default)
    if found not in functions:
        raise fields.error(name, f"is {found!r}: known are {', '.join(functions)}")
    return functions[found]


def _more(classifier: bool) -> Any:
    def more(fields: Fields) -> dict[str, Any]:
        modules, segments = read_modules(fields.path.parent), fields.values["_segments"]
        encoder = EncoderConfig(
            "cls" if classifier else modules.pooling or "mean", () if classifier else modules.dense,
            fields.values["_activation"], segments=segments, separator=separator_of(fields) if segments > 1 else 0,
            head="bert" if classifier else "")
        return {"encoder": encoder, "labels": label_count(fields) if classifier else 0}
    return more


def _architectures() -> dict[str, Architecture]:
    found: dict[str, Architecture] = {}
    for names, build, model_type, served, translate, theta in (
            (("New", "Gte"), gte, "new", "GTE (`NewModel`)", _translate_gte, 160_000.0),
            (("NomicBert",), nomic, "nomic_bert", "Nomic BERT", _translate_nomic, 1_000.0)):
        for name in names:
            for kind, classifier in (("Model", False), ("ForMaskedLM", False), ("ForSequenceClassification", True)):
                found[f"{name}{kind}"] = Architecture(
                    build, "gte" if name == "Gte" else model_type, f"{served}{', classifiers' if classifier else ''}",
                    kv_heads_required=False, has_bias_fields=True, activation=("gelu",), rope_theta=theta,
                    translate=translate, more=_more(classifier), unused=("pooler.", "cls.", "lm_head."),
                    stored_as="bare_encoder")
    return found


ARCHITECTURES = _architectures()
