"""BERT, RoBERTa and XLM-RoBERTa (bge, e5, gte, MiniLM and other embedders and rerankers): norms after attention and
MLP, a table of positions, biases everywhere.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from allspark_server.models.architecture import Architecture, label_count, reject_other_values, translated
from allspark_server.models.blocks import begin, classify, dense, embed, linear_of_parts
from allspark_server.models.fields import MAX_POSITIONS, MAX_SIZE, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Block, Part, Tensor, Weight
from allspark_server.models.network import EncoderConfig, ModelConfig
from allspark_server.models.sentence_modules import read_modules
from allspark_server.weights.files import read_json

FUNCTIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu",
             "tanh": "tanh"}


def bert(config: ModelConfig) -> Graph:
    """Builds the network."""
    encoder = config.encoder
    assert encoder is not None
    graph, x = begin(config, "embeddings.word_embeddings.weight", rotary=False)
    x = graph.layer_norm(add_tables(graph, x), "embeddings.LayerNorm", "rows")
    for layer in range(config.num_layers):
        prefix = f"encoder.layer.{layer}"
        graph.add(x, _attention(graph, x, f"{prefix}.attention", layer))
        x = graph.layer_norm(x, f"{prefix}.attention.output.LayerNorm", "attended_rows")
        graph.add(x, _mlp(graph, x, prefix, encoder.activation))
        x = graph.layer_norm(x, f"{prefix}.output.LayerNorm", "rows")
    if not config.labels:
        return embed(graph, x)
    names = {"bert": ("pooler.dense", "classifier"), "roberta": ("classifier.dense", "classifier.out_proj")}
    first, last = names[encoder.head]
    pooled = graph.pool_rows(x, encoder.pooling)
    return classify(graph, dense(graph, pooled, first, config.hidden_size, "head", activation="tanh"), last)


def add_tables(graph: Graph, x: Tensor) -> Tensor:
    """Adds to each row those of the tables of positions and of segments, if the encoder has them."""
    encoder, hidden = graph.config.encoder, graph.config.hidden_size
    assert encoder is not None
    rows, count = encoder.positions, encoder.segments
    segments = partial(_table, graph, "embeddings.token_type_embeddings.weight", stored=count, columns=hidden)
    if rows or count > 1:
        positions = _table(graph, "embeddings.position_embeddings.weight", rows, rows, hidden) if rows else (
            graph.weight(Weight("zeros", values=(0.0,) * hidden)))
        x = graph.op("position_embedding", x, weights=(positions, segments(2) if count > 1 else None),
                     positions=rows or 1, offset=encoder.offset, separator=encoder.separator)
    if count == 1:  # every row is beyond a table of one row
        x = graph.op("position_embedding", x, weights=(segments(1),), positions=1)
    return x


def _table(graph: Graph, name: str, rows: int, stored: int, columns: int) -> Weight:
    """The first rows of a table of the checkpoint, one after the other."""
    return graph.weight(Weight(name, (Part(name, rows * columns, of=stored * columns),)))


def _attention(graph: Graph, x: Tensor, prefix: str, layer: int) -> Tensor:
    splits = (graph.q_heads, graph.kv_heads, graph.kv_heads)
    parts = tuple(Part(f"{prefix}.self.{name}.weight", split.width, split)
                  for name, split in zip(("query", "key", "value"), splits))
    qkv = linear_of_parts(graph, x, f"{prefix}.self.query+key+value", parts,
                          tuple(Block(split.width, split) for split in splits), "qkv", bias=True)
    attended = graph.span_attention(qkv, layer)
    return graph.row_parallel_linear(attended, f"{prefix}.output.dense", graph.q_heads, True, out="branch")


def _mlp(graph: Graph, x: Tensor, prefix: str, activation: str) -> Tensor:
    weight, bias = graph.packed(f"{prefix}.intermediate", ("dense",), (graph.intermediate,), graph.config.hidden_size,
                                True)
    inner = graph.activate(graph.linear(x, weight, bias, out="inner"), activation)
    return graph.row_parallel_linear(inner, f"{prefix}.output.dense", graph.intermediate, True, out="branch")


def separator_of(fields: Fields) -> int:
    """The id of the tokenizer's sep_token; without a tokenizer an id that no text has."""
    directory = fields.path.parent
    named = directory / "tokenizer_config.json"
    token: Any = (read_json(named) if os.path.lexists(named) else {}).get("sep_token", "[SEP]")
    token = token.get("content") if isinstance(token, dict) else token
    ids: dict[str, Any] = {}
    if os.path.lexists(directory / "tokenizer.json"):
        values = read_json(directory / "tokenizer.json", limit=1 << 28)
        vocabulary = values.get("model", {}).get("vocab")
        ids = vocabulary if isinstance(vocabulary, dict) else {}
        ids |= {added.get("content"): added.get("id") for added in values.get("added_tokens") or []}
    found = ids.get(token)
    return found if isinstance(found, int) and 0 <= found < MAX_SIZE else MAX_SIZE


def function_of(fields: Fields, name: str, default: str = "gelu") -> str:
    """The activation that a field names."""
    found = fields.get(name, str, default)
    if found not in FUNCTIONS:
        raise fields.error(name, f"is {found!r}: known are {', '.join(FUNCTIONS)}")
    return FUNCTIONS[found]


def _fields(offset: int) -> Any:
    """Reads what a config.json says besides sizes. offset: the row of the first token in the table of positions, or 1
    if that is one more than the padding's id.
    """
    def read(fields: Fields) -> Fields:
        reject_other_values(fields, {"position_embedding_type": "absolute", "is_decoder": False,
                                     "add_cross_attention": False})
        first = offset and fields.get("pad_token_id", int, 1) + 1
        rows = fields.need_positive("max_position_embeddings", most=MAX_POSITIONS)
        if not 0 <= first < rows:
            raise fields.error("pad_token_id", f"is {first - 1}: positions begin after it, and the table has {rows}")
        return translated(fields, rms_norm_eps=fields.get("layer_norm_eps", float, 1e-12), hidden_act="gelu",
                          max_position_embeddings=rows - first, _rows=rows, _first=first,
                          _activation=function_of(fields, "hidden_act"))
    return read


def _more(head: str) -> Any:
    """Reads the further fields of ModelConfig. head: the kind of classifier; "" for embedders."""
    def more(fields: Fields) -> dict[str, Any]:
        modules = read_modules(fields.path.parent)
        segments = fields.get("type_vocab_size", int, 2)
        encoder = EncoderConfig(
            "cls" if head else modules.pooling or "mean", () if head else modules.dense, fields.values["_activation"],
            fields.values["_rows"], fields.values["_first"], segments,
            separator_of(fields) if segments > 1 else 0, head)
        return {"encoder": encoder, "labels": label_count(fields) if head else 0}
    return more


def _architectures() -> dict[str, Architecture]:
    found: dict[str, Architecture] = {}
    for name, model_type, served, offset in (("Bert", "bert", "BERT", 0), ("Roberta", "roberta", "RoBERTa", 1),
                                             ("XLMRoberta", "xlm-roberta", "XLM-RoBERTa", 1)):
        head = "bert" if name == "Bert" else "roberta"
        for kind, of in (("Model", ""), ("ForMaskedLM", ""), ("ForSequenceClassification", head)):
            found[f"{name}{kind}"] = Architecture(
                bert, model_type, f"{served}{', classifiers' if of else ''}", kv_heads_required=False,
                activation=("gelu",), translate=_fields(offset), more=_more(of),
                unused=("pooler.", "cls.", "lm_head.", "embeddings.position_ids"), stored_as="bare_encoder")
    return found


ARCHITECTURES = _architectures()
