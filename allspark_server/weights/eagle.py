"""Opens EAGLE-3 heads (models/eagle.py), as SafeAILab and SpecForge store them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.config import config_of
from allspark_server.models.eagle import COLUMNS, JOINS, PREFIX, EagleHead, eagle_graph
from allspark_server.models.fields import Fields
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig
from allspark_server.weights.checkpoint import OpenedModel
from allspark_server.weights.files import read_json
from allspark_server.weights.safetensors import StoredTensor
from allspark_server.weights.sources import Source, open_weights
from allspark_server.weights.views import Changed

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
NORMS = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")


class HeadBeside(Changed):
    """A model's tensors, and those of an EAGLE-3 head under PREFIX. columns: the tensor COLUMNS, None if the head has
    the model's vocabulary.
    """

    def __init__(self, model: Source, head: Source, stored: dict[str, str], columns: np.ndarray | None):
        super().__init__(model)
        self.head, self.stored, self.columns = head, stored, columns

    def names(self) -> Iterable[str]:
        """See `Source.names`."""
        return [*self.source.names(), *(PREFIX + name for name in self.stored), *JOINS, COLUMNS]

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        if name in JOINS:
            fc = self.head.get(self.stored["fc.weight"])
            size = fc.shape[1] // len(JOINS)
            first = JOINS.index(name) * size
            return dataclasses.replace(fc, name=name, shape=(fc.shape[0], size),
                                       data=np.ascontiguousarray(fc.values[:, first:first + size]))
        if name == COLUMNS and self.columns is not None:
            return StoredTensor(name, "F32", self.columns.shape, self.columns, Path(self.head.where()))
        if name.startswith(PREFIX):
            return self.head.get(self.stored[name.removeprefix(PREFIX)])
        return self.source.get(name)

    def form(self, name: str) -> None:
        """See `Source.form`. What the head shares with its model is loaded already; the head is not quantized."""


class _Directory:
    """An EAGLE-3 head's directory beside its model; names in errors are those that it stores."""

    def __init__(self, directory: str, model: OpenedModel):
        path = Path(directory)
        if not os.path.isdir(path):
            raise AllSparkError(AsStatus.ALLSPARK_IO_ERROR, f"draft_model={directory!r} is no directory: expected one "
                                                            "with an EAGLE-3 head")
        self.fields = Fields(read_json(path / "config.json"), path / "config.json")
        self.source, self.model = open_weights(path), model.graph.config
        # vLLM's collection writes layers.0, others midlayer; some add the prefix `model.`
        self.stored = {name.removeprefix("model.").replace("layers.0.", "midlayer.", 1): name
                       for name in self.source.names()}

    def error(self, problem: str) -> AllSparkError:
        return AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"the EAGLE-3 head in {self.source.where()} {problem}")

    def tensor(self, name: str) -> StoredTensor:
        if name not in self.stored:
            raise self.error(f"has no tensor {name!r}")
        return self.source.get(self.stored[name])

    def expect(self, name: str, *shape: int) -> None:
        tensor = self.tensor(name)
        if tensor.shape != shape:
            raise self.error(f"has tensor {tensor.name!r} of shape {list(tensor.shape)}: expected {list(shape)}")

    def config(self) -> ModelConfig:
        """The config of the head's layer."""
        fields, model = self.fields, self.model
        names = fields.get("architectures", list, [])
        if not names or names[0] not in ARCHITECTURES:
            raise fields.error("architectures", f"is {names}: an EAGLE-3 head has one of {', '.join(ARCHITECTURES)}")
        plain = {**fields.values, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
        config = config_of(Fields(plain, fields.path), ())
        for name, found, wanted in (("num_hidden_layers", config.num_layers, 1),
                                    ("hidden_size", config.hidden_size, model.hidden_size),
                                    ("target_hidden_size",
                                     fields.get("target_hidden_size", int, model.hidden_size), model.hidden_size),
                                    ("vocab_size", config.vocab_size, model.vocab_size)):
            if found != wanted:
                raise fields.error(name, f"is {found}: it must be {wanted}" + (
                    ", as the model's" if wanted != 1 else "; further layers are not served"))
        return dataclasses.replace(config, architecture="LlamaForCausalLMEagle3",
                                   embedding_scale=model.embedding_scale)

    def layers(self) -> tuple[int, int, int]:
        """The layers of the model before which the head takes the residual stream."""
        fields, count, name = self.fields, self.model.num_layers, "eagle_aux_hidden_state_layer_ids"
        own = fields.get("eagle_config", dict, {})
        if not own.get("use_aux_hidden_state", True):
            raise fields.error("eagle_config", "has use_aux_hidden_state=false: only heads that take the hidden states "
                                               "of three layers are served")
        # SpecForge and SGLang name the layers whose outputs are taken, vLLM those before which they are taken.
        ids = [layer + 1 if isinstance(layer, int) else -1 for layer in own[name]] if own.get(name) else (
            fields.get(name, list, [2, count // 2, count - 3]))
        if len(ids) != len(JOINS) or not all(type(layer) is int and 0 <= layer <= count for layer in ids):
            raise fields.error(name, f"means the hidden states before layers {ids}: expected {len(JOINS)} layers of "
                                     f"the model's {count}")
        return ids[0], ids[1], ids[2]

    def columns(self, drafted: int) -> np.ndarray | None:
        """The tensor COLUMNS, from the offset of each draft token's id in the model (`d2t`)."""
        vocabulary = self.model.vocab_size
        if "d2t" not in self.stored:
            if drafted != vocabulary:
                raise self.error(f"has no tensor 'd2t', but draft_vocab_size={drafted} of a vocabulary of {vocabulary}")
            return None
        self.expect("d2t", drafted)
        offsets = self.tensor("d2t")
        if offsets.dtype not in ("I64", "I32"):
            raise self.error(f"has tensor 'd2t' of type {offsets.dtype}: expected I64 or I32")
        tokens = np.arange(drafted) + offsets.values.astype(np.int64)
        wrong = np.flatnonzero((tokens < 0) | (tokens >= vocabulary))
        if len(wrong):
            raise self.error(f"maps token {wrong[0]} of its vocabulary to {tokens[wrong[0]]} by 'd2t': the model has "
                             f"{vocabulary} tokens")
        if len(np.unique(tokens)) != drafted:
            raise self.error("maps several tokens of its vocabulary to one of the model by 'd2t'")
        found = np.full(vocabulary, -1, np.float32)  # float32 holds ids of any vocabulary exactly
        found[tokens] = np.arange(drafted)
        return None if drafted == vocabulary and np.array_equal(tokens, np.arange(drafted)) else found


@dataclasses.dataclass(frozen=True)
class OpenedEagle:
    """A head beside its model. source: the tensors of both."""

    head: EagleHead
    graph: Graph
    source: Source


def open_eagle(directory: str, model: OpenedModel) -> OpenedEagle:
    """Opens the EAGLE-3 head in a directory for a model. AllSparkError names the field or tensor that is wrong."""
    found = _Directory(directory, model)
    config, layers = found.config(), found.layers()
    size, inner, keys = config.hidden_size, config.intermediate_size, config.num_kv_heads * config.head_dim
    drafted = found.fields.get("draft_vocab_size", int, config.vocab_size)
    if not 0 < drafted <= config.vocab_size:
        raise found.fields.error("draft_vocab_size", f"is {drafted}: expected 1 to {config.vocab_size}")
    queries = config.num_heads * config.head_dim
    shapes = {"fc": (size, 3 * size), "lm_head": (drafted, size), "midlayer.self_attn.q_proj": (queries, 2 * size),
              "midlayer.self_attn.k_proj": (keys, 2 * size), "midlayer.self_attn.v_proj": (keys, 2 * size),
              "midlayer.self_attn.o_proj": (size, queries), "midlayer.mlp.gate_proj": (inner, size),
              "midlayer.mlp.up_proj": (inner, size), "midlayer.mlp.down_proj": (size, inner),
              **dict.fromkeys(NORMS, (size,))}
    for name, shape in shapes.items():
        found.expect(f"{name}.weight", *shape)
    own = "embed_tokens.weight" in found.stored
    if own:
        found.expect("embed_tokens.weight", config.vocab_size, size)
    columns = found.columns(drafted)
    head = EagleHead(config, drafted, own, columns is not None, found.fields.get("norm_before_residual", bool, False),
                     layers)
    return OpenedEagle(head, eagle_graph(head), HeadBeside(model.source, found.source, found.stored, columns))
