"""Maps a GGUF file to a model: its metadata to the fields of a config.json, and its tensors to the names that
checkpoints of transformers use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.config import Fields, ModelConfig, RopeConfig, config_of
from allspark_server.models.rotary import rotary_of
from allspark_server.weights.common_form import converted
from allspark_server.weights.formats import WeightFormat
from allspark_server.weights.gguf.file import GgufFile, GgufTensor
from allspark_server.weights.quantized import QuantizedRows, QuantizedTensor
from allspark_server.weights.safetensors import QUANTIZED_TYPES, StoredTensor
from allspark_server.weights.sources import Source

# general.architecture -> config.json's "architectures" without and with experts.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "MixtralForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM", None),
    "qwen3": ("Qwen3ForCausalLM", None),
    "qwen2moe": (None, "Qwen2MoeForCausalLM"),
    "qwen3moe": (None, "Qwen3MoeForCausalLM"),
    "smollm3": ("SmolLM3ForCausalLM", None),
}
ROPE_FACTORS = "rope_freqs.weight"
_FACTORS_TOLERANCE = 1e-5
_INTERLEAVED = ("llama", "smollm3")  # rotary pairs are adjacent rows of q and k, not rows of a head's two halves

_PLAIN = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight",
          "model.norm.weight": "output_norm.weight"}
_LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
          "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
          "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
          "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
          "block_sparse_moe.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
          "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
          "mlp.shared_expert.down_proj": "ffn_down_shexp"}
_EXPERT = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
           "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
_IN_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<module>[\w.]+)\.(?P<kind>weight|bias)")
_OF_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(?P<expert>\d+)\.(?P<name>\w+)")


def gguf_name(name: str) -> tuple[str, int | None]:
    """The name in a GGUF file of a tensor of transformers' checkpoints, and its expert's number or None.

    Raises KeyError if GGUF has no such tensor.
    """
    if name in _PLAIN:
        return _PLAIN[name], None
    found = _IN_LAYER.fullmatch(name)
    if not found:
        raise KeyError(name)
    module, block = found["module"], f"blk.{found['layer']}."
    expert = _OF_EXPERT.fullmatch(module)
    if expert:
        return f"{block}{_EXPERT[expert['name']]}.{found['kind']}", int(expert["expert"])
    return f"{block}{_LAYER[module]}.{found['kind']}", None


# -- config ------------------------------------------------------------------------------------------------------------
def model_config(files: Sequence[GgufFile]) -> ModelConfig:
    """The config of a model. Raises AllSparkError, which names the field, if the model is not supported."""
    return _Metadata(files).config()


class _Metadata(Fields):
    """A file's metadata. `own` reads a field of the architecture without its prefix."""

    def __init__(self, files: Sequence[GgufFile]):
        super().__init__(files[0].metadata, files[0].path)
        self.tensors = {name: file for file in files for name in file.names()}
        self.architecture = self.need("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise self.error("general.architecture", f"is {self.architecture!r}, which is not supported: known are "
                                                     f"{', '.join(ARCHITECTURES)}")

    def own(self, name: str, kind: type, default: Any = None) -> Any:
        """A field of the architecture. If it has a value for each layer, all values must be equal."""
        key = f"{self.architecture}.{name}"
        value = self.values.get(key)
        if isinstance(value, np.ndarray):
            if not value.size or (value != value[0]).any():
                raise self.error(key, "differs from layer to layer, which is not supported")
            value = value[0].item()
        return Fields({key: value}, self.path).get(key, kind, default)

    def own_needed(self, name: str, kind: type) -> Any:
        value = self.own(name, kind)
        if value is None:
            raise self.error(f"{self.architecture}.{name}", f"is missing: expected {kind.__name__}")
        return value

    def _has(self, name: str) -> bool:
        return name in self.tensors

    def config(self) -> ModelConfig:
        experts = self.own("expert_count", int, 0)
        name = ARCHITECTURES[self.architecture][1 if experts else 0]
        if name is None:
            raise self.error(f"{self.architecture}.expert_count", f"is {experts}, which this architecture cannot have")
        heads, hidden = self.own_needed("attention.head_count", int), self.own_needed("embedding_length", int)
        if not self._has("token_embd.weight"):
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{self.path} has no tensor 'token_embd.weight'")
        if heads < 1:
            raise self.error(f"{self.architecture}.attention.head_count", f"is {heads}: it must be positive")
        head_dim = self.own("attention.key_length", int, hidden // heads)
        if self.own("attention.value_length", int, head_dim) != head_dim:
            raise self.error(f"{self.architecture}.attention.value_length", f"is not attention.key_length ({head_dim})")
        rotated = self.own("rope.dimension_count", int, head_dim)
        if rotated != head_dim:
            raise self.error(f"{self.architecture}.rope.dimension_count", f"is {rotated}: expected "
                                                                          f"{head_dim}, a whole head")
        window = self.own("attention.sliding_window", int)
        if window and self.architecture != "smollm3":
            raise self.error(f"{self.architecture}.attention.sliding_window",
                             f"is {window}: sliding windows are not supported for this architecture")
        values: dict[str, Any] = {
            "architectures": [name],
            "hidden_size": hidden,
            "intermediate_size": self.own("feed_forward_length", int, 0) or self.own_needed(
                "expert_feed_forward_length", int),
            "num_hidden_layers": self.own_needed("block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": self.own("attention.head_count_kv", int, heads),
            "head_dim": head_dim,
            "vocab_size": self.tensors["token_embd.weight"].get("token_embd.weight").shape[0],
            "rms_norm_eps": _as_written(self.own_needed("attention.layer_norm_rms_epsilon", float)),
            "max_position_embeddings": self.own_needed("context_length", int),
            "tie_word_embeddings": not self._has("output.weight"),
            "attention_bias": self._has("blk.0.attn_q.bias"),
            "qkv_bias": self._has("blk.0.attn_q.bias"),
            "mlp_bias": self._has("blk.0.ffn_down.bias"),
            **self._rope(),
        }
        if experts:
            normalized = self.own("expert_weights_norm", bool, self.architecture != "qwen2moe")
            values |= {"num_experts": experts, "num_local_experts": experts, "norm_topk_prob": normalized,
                       "num_experts_per_tok": self.own_needed("expert_used_count", int)}
            if name != "MixtralForCausalLM":
                values["moe_intermediate_size"] = self.own_needed("expert_feed_forward_length", int)
                values["shared_expert_intermediate_size"] = self.own("expert_shared_feed_forward_length", int, 0)
        fields = Fields(values, self.path)
        config = config_of(fields, self._ends())
        return config_of(Fields({**values, **self._llama3(config)}, self.path), self._ends()) \
            if self._has(ROPE_FACTORS) else config

    def _ends(self) -> tuple[int, ...]:
        names = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = [self.get(f"tokenizer.ggml.{name}", int) for name in names]
        return tuple(dict.fromkeys(i for i in found if i is not None))

    def _rope(self) -> dict[str, Any]:
        values: dict[str, Any] = {"rope_theta": self.own("rope.freq_base", float, 10000.0)}
        kind = self.own("rope.scaling.type", str, "none")
        if kind == "none":
            return values
        if kind not in ("linear", "yarn"):
            raise self.error(f"{self.architecture}.rope.scaling.type",
                             f"is {kind!r}: known are 'none', 'linear', 'yarn'")
        scaling = {"rope_type": kind, "factor": self.own_needed("rope.scaling.factor", float)}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self.own_needed("rope.scaling.original_context_length", int)
        return {**values, "rope_scaling": scaling}

    def _llama3(self, config: ModelConfig) -> dict[str, Any]:
        """The rotary scaling whose factors a tensor holds. Only llama3's scaling is supported."""
        tensor = self.tensors[ROPE_FACTORS].get(ROPE_FACTORS)
        factors = tensor.data.view(np.float32).reshape(-1) if tensor.type.name == "F32" else np.empty(0)
        if len(factors) != config.head_dim // 2 or not np.isfinite(factors).all() or (factors < 1).any():
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"tensor {ROPE_FACTORS!r} in {tensor.file} has type "
                                f"{tensor.type.name} and shape {list(tensor.shape)}: expected F32, a factor of at "
                                f"least 1 for each of {config.head_dim // 2} frequencies")
        factor = float(np.max(factors))
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}
        values = {"rope_theta": config.rope.theta, "rope_scaling": scaling}
        if (factors == 1).all():
            return {"rope_theta": config.rope.theta}
        wanted = rotary_of(RopeConfig("llama3", config.rope.theta, factor, 8192, 1.0, 4.0), config.head_dim).inv_freq
        plain = rotary_of(RopeConfig(theta=config.rope.theta), config.head_dim).inv_freq
        if np.abs(np.asarray(plain) / np.asarray(wanted) / factors - 1).max() > _FACTORS_TOLERANCE:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"tensor {ROPE_FACTORS!r} in {tensor.file} holds factors that differ from "
                                f"llama3's scaling by {factor:g} from 8192 positions")
        return values


def _as_written(value: float) -> float:
    """The shortest decimal of this float32, which is what the converter read from a config.json."""
    return float(str(np.float32(value)))


# -- tensors -----------------------------------------------------------------------------------------------------------
class GgufSource(Source):
    """A `Source` of a model's tensors, with the names of transformers' checkpoints."""

    def __init__(self, files: Sequence[GgufFile], config: ModelConfig):
        self.location = files[0].path
        self.tensors = {name: file for file in files for name in file.names()}
        self.layers = config.num_layers
        interleaved = files[0].metadata.get("general.architecture") in _INTERLEAVED
        self.head_dim = config.head_dim if interleaved else 0

    def names(self) -> Iterable[str]:
        """Those of GGUF's that have another name here; experts' are one tensor."""
        known = {name: name for name in self.tensors} | {ours: name for name, ours in _PLAIN.items()}
        for layer in range(self.layers):
            known |= {f"blk.{layer}.{ours}.{kind}": f"model.layers.{layer}.{name}.{kind}"
                      for name, ours in _LAYER.items() for kind in ("weight", "bias")}
        used = {f"blk.{layer}.{name}.weight" for layer in range(self.layers) for name in _EXPERT.values()}
        return {known[name] for name in self.tensors if name not in used and name != ROPE_FACTORS}

    def _found(self, name: str) -> tuple[GgufTensor, slice, np.ndarray | None]:
        """The tensor that contains `name`, its rows there, and their order if llama.cpp has interleaved heads' rows."""
        ours, expert = gguf_name(name)
        tensor = self.tensors[ours].get(ours)
        if expert is not None:
            if len(tensor.shape) != 3 or expert >= tensor.shape[0]:
                raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"tensor {ours!r} in {tensor.file} has shape "
                                    f"{list(tensor.shape)}: expected that of at least {expert + 1} experts' matrices")
            return tensor, slice(expert * tensor.shape[1], (expert + 1) * tensor.shape[1]), None
        rows = slice(0, len(tensor.data))
        if (self.head_dim and ".attn_q." in ours) or (self.head_dim and ".attn_k." in ours):
            length = tensor.shape[0]
            if length % self.head_dim:
                raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"tensor {ours!r} in {tensor.file} has {length} "
                                                                   f"rows: expected heads of {self.head_dim}")
            pairs = np.arange(length).reshape(-1, self.head_dim // 2, 2)
            return tensor, rows, np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)
        return tensor, rows, None

    def get(self, name: str) -> StoredTensor:
        """See `Source.get`."""
        tensor, rows, order = self._found(name)
        if not tensor.type.plain:
            return StoredTensor(name, tensor.type.name, tensor.shape, None, tensor.file)
        data = tensor.data[rows].view(QUANTIZED_TYPES[tensor.type.plain])
        shape = tensor.shape
        if rows.stop - rows.start != len(tensor.data):  # one expert's rows
            shape = shape[1:]
        data = data.reshape(shape)
        if order is not None:
            data = data[order]
        if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
            data = data.reshape(1, -1)
        return StoredTensor(name, tensor.type.plain, data.shape, data, tensor.file)

    def form(self, name: str) -> WeightFormat | None:
        """See `Source.form`."""
        try:
            tensor = self._found(name)[0]
        except KeyError:
            return None
        return tensor.type.form

    def quantized(self, name: str, form: WeightFormat, shape: tuple[int, int],
                  expert: int | None = None) -> QuantizedTensor:
        """See `Source.quantized`."""
        tensor, some, order = self._found(name)
        kind, height, own_form = tensor.type, some.stop - some.start, tensor.type.form
        if own_form is None or expert is not None:
            raise KeyError(name)
        if (height, tensor.shape[-1]) != shape:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"tensor {gguf_name(name)[0]!r} in {tensor.file} has rows and columns "
                                f" {[height, tensor.shape[-1]]}: expected {list(shape)}")

        def rows(begin: int, end: int) -> QuantizedRows:
            taken = tensor.data[order[begin:end]] if order is not None else tensor.data[some][begin:end]
            if kind.rows is None:
                return QuantizedRows(taken, packing=kind.name)
            found = kind.rows(taken.reshape(end - begin, -1, kind.bytes))
            floats = [found.scales, found.zeros] if not own_form.layout.super_group else \
                [found.super_scales, found.super_offsets]
            own.check_finite(*floats)
            return found

        own = QuantizedTensor(tensor.name, tensor.file, rows, mapped=kind.rows is None and order is None)
        return converted(own, own_form, form, shape[1])
