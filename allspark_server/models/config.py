"""config.json of a Hugging Face checkpoint, as written by transformers 4 and 5, into a `ModelConfig`.

Nothing is guessed: a field that the architecture needs and the file lacks is an error naming both, as is a feature that
the model files do not have (a sliding window where none is served, another activation, quantized weights).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.weights.files import read_json

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
# No network is near these; what is computed from them fits 32 bits, and building the op list takes a moment.
MAX_LAYERS, MAX_HEAD_DIM, MAX_SIZE, MAX_POSITIONS = 10_000, 1 << 13, 1 << 24, 1 << 30
MAX_EOS_IDS = 1000
MAX_EXPERTS = 1 << 14
MAX_NUMBER = 1e30


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding fields; `original_max` is the context length the scaling starts from (positions)."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True)
class ExpertConfig:
    """Layers with experts: `count` of them, of which each token goes to per_token; shared_size: the intermediate size
    of an expert that all tokens go to, 0 where there is none.

    normalized: the weights of a token's experts add up to 1. stacked: the checkpoint's tensors hold all experts of a
    layer, as transformers 5 has them; otherwise each expert has its own.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()
    stacked: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """What a model file needs to know, independent of the file format it was read from."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    rope: RopeConfig = RopeConfig()
    experts: ExpertConfig | None = None
    # What only the model files read; a graph's ops say it (an .asgraph does not store these).
    windows: tuple[int, ...] = ()    # of each layer, 0: it attends to all positions; empty: all layers do
    unrotated: tuple[int, ...] = ()  # layers without rotary embedding

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def checked(self) -> ModelConfig:
        """Itself; ValueError naming the field when no network can be so."""
        def within(name: str, value: float, most: float) -> None:
            if not 0 < value <= most:
                raise ValueError(f"{name} is {value!r}: it must be positive and at most {most}")

        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "vocab_size"):
            within(name, getattr(self, name), MAX_SIZE)
        within("head_dim", self.head_dim, MAX_HEAD_DIM)
        within("num_layers", self.num_layers, MAX_LAYERS)
        within("max_position_embeddings", self.max_position_embeddings, MAX_POSITIONS)
        within("rms_norm_eps", self.rms_norm_eps, 1)
        within("num_heads * head_dim", self.num_heads * self.head_dim, MAX_SIZE)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}: it must divide num_heads ({self.num_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: the rotary embedding needs an even number")
        if self.rope.type not in ROPE_TYPES:
            raise ValueError(f"rope.type is {self.rope.type!r}: known types are {', '.join(ROPE_TYPES)}")
        if self.rope.type != "default":
            within("rope.original_max", self.rope.original_max, MAX_POSITIONS)
        if self.experts is not None:
            within("experts.count", self.experts.count, MAX_EXPERTS)
            within("experts.per_token", self.experts.per_token, self.experts.count)
            within("experts.intermediate_size", self.experts.intermediate_size, MAX_SIZE)
            within("experts.shared_size + 1", self.experts.shared_size + 1, MAX_SIZE)
        if len(self.eos_token_ids) > MAX_EOS_IDS or not all(0 <= i < 1 << 31 for i in self.eos_token_ids):
            raise ValueError(f"eos_token_ids must be at most {MAX_EOS_IDS} ids of 0 to 2^31 - 1")
        return self


class Fields:
    """Typed access to a JSON object; errors name the field and the file."""

    def __init__(self, values: dict[str, Any], path: Path, prefix: str = ""):
        self.values, self.path, self.prefix = values, path, prefix

    def error(self, name: str, problem: str) -> AllSparkError:
        return AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"field {self.prefix + name!r} of {self.path} {problem}")

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """The field as `kind`; `default` when it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return default
        right = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not right or (isinstance(value, bool) and kind is not bool):
            raise self.error(name, f"is {value!r}: expected {kind.__name__}")
        if kind in (int, float) and not abs(value) <= MAX_NUMBER:  # JSON has 1e400, NaN and integers of any length
            raise self.error(name, f"is {value!r}: expected a number of at most {MAX_NUMBER:g}")
        return kind(value)

    def need(self, name: str, kind: type) -> Any:
        value = self.get(name, kind)
        if value is None:
            raise self.error(name, f"is missing: expected {kind.__name__}")
        return value

    def need_positive(self, name: str, kind: type = int, most: float = MAX_SIZE) -> Any:
        value = self.need(name, kind)
        if not 0 < value <= most:
            raise self.error(name, f"is {value!r}: it must be positive and at most {most}")
        return value


def _routed(fields: Fields, *, intermediate: str, normalized: bool, shared: int = 0,
            dense: tuple[int, ...] = ()) -> ExpertConfig:
    name = "num_experts" if fields.get("num_experts", int) is not None else "num_local_experts"
    count = fields.need_positive(name, most=MAX_EXPERTS)
    return ExpertConfig(count, fields.need_positive("num_experts_per_tok", most=count),
                        fields.need_positive(intermediate), normalized, shared, dense)


def qwen3_experts(fields: Fields, layers: int, shared: int = 0) -> ExpertConfig:
    step, only = fields.get("decoder_sparse_step", int, 1), fields.get("mlp_only_layers", list, [])
    if step < 1:
        raise fields.error("decoder_sparse_step", f"is {step}: it must be positive")
    if not all(isinstance(layer, int) for layer in only):
        raise fields.error("mlp_only_layers", f"is {only!r}: expected numbers of layers")
    dense = tuple(layer for layer in range(layers) if layer in only or (layer + 1) % step)
    return _routed(fields, intermediate="moe_intermediate_size", normalized=fields.get("norm_topk_prob", bool, False),
                   shared=shared, dense=dense)


def qwen2_experts(fields: Fields, layers: int) -> ExpertConfig:
    return qwen3_experts(fields, layers, fields.need_positive("shared_expert_intermediate_size"))


def mixtral_experts(fields: Fields, layers: int) -> ExpertConfig:
    return _routed(fields, intermediate="intermediate_size", normalized=True)


@dataclass(frozen=True)
class Architecture:
    """How an architecture's config.json differs: defaults that transformers' config class has for absent fields."""

    model_type: str
    kv_heads_required: bool = True
    head_dim: int | None = None      # None: hidden_size // num_attention_heads
    has_bias_fields: bool = False    # attention_bias and mlp_bias are read
    windows: bool = False            # sliding_window and layer_types are served, others refused
    window: int | None = None        # sliding_window where it is absent
    rope_theta: float = RopeConfig.theta
    tied: bool = False               # tie_word_embeddings where it is absent
    experts: Callable[[Fields, int], ExpertConfig] | None = None  # reads them, of a model of so many layers


ARCHITECTURES = {
    "Qwen2ForCausalLM": Architecture("qwen2"),
    "Qwen3ForCausalLM": Architecture("qwen3", head_dim=128, has_bias_fields=True),
    "LlamaForCausalLM": Architecture("llama", kv_heads_required=False, has_bias_fields=True),
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe", experts=qwen2_experts),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", has_bias_fields=True, experts=qwen3_experts),
    "MixtralForCausalLM": Architecture("mixtral", rope_theta=1e6, experts=mixtral_experts),
    "MistralForCausalLM": Architecture("mistral", windows=True, window=4096),
    "MinistralForCausalLM": Architecture("ministral", windows=True, window=4096),
    "SmolLM3ForCausalLM": Architecture("smollm3", has_bias_fields=True, windows=True, rope_theta=2e6, tied=True),
}


def known_architectures() -> str:
    return ", ".join(ARCHITECTURES)


def read_config(directory: str | Path, rope_scaling: dict | None = None) -> ModelConfig:
    """Reads config.json (and the end-of-sequence ids of generation_config.json) of a checkpoint directory.
    `rope_scaling`: instead of what stands there; as there, {} for none."""
    directory = Path(directory)
    fields = Fields(read_json(directory / "config.json"), directory / "config.json")
    return config_of(fields, _eos_token_ids(fields, directory), rope_scaling)


def config_of(fields: Fields, eos_token_ids: tuple[int, ...], rope_scaling: dict | None = None) -> ModelConfig:
    """What the fields of a config.json say."""
    name, architecture = _architecture(fields)
    if rope_scaling is not None:
        fields = _rescaled(fields, rope_scaling, architecture.rope_theta)
    _refuse_unsupported(fields, architecture)
    hidden, heads = fields.need_positive("hidden_size"), fields.need_positive("num_attention_heads")
    if architecture.kv_heads_required:
        kv_heads = fields.need_positive("num_key_value_heads")
    else:
        kv_heads = fields.get("num_key_value_heads", int, heads)
    if kv_heads < 1 or heads % kv_heads:
        raise fields.error("num_key_value_heads", f"is {kv_heads}: it must divide num_attention_heads ({heads})")
    head_dim = fields.get("head_dim", int, architecture.head_dim)
    if head_dim is None:
        if hidden % heads:
            raise fields.error("hidden_size", f"is {hidden}: without a head_dim it must be a multiple of "
                                              f"num_attention_heads ({heads})")
        head_dim = hidden // heads
    if head_dim < 2 or head_dim % 2:
        raise fields.error("head_dim", f"is {head_dim}: the rotary embedding needs an even, positive number")
    max_positions = fields.need_positive("max_position_embeddings", most=MAX_POSITIONS)
    config = ModelConfig(
        architecture=name, hidden_size=hidden, intermediate_size=fields.need_positive("intermediate_size"),
        num_layers=fields.need_positive("num_hidden_layers", most=MAX_LAYERS), num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.need_positive("vocab_size"), rms_norm_eps=fields.need_positive("rms_norm_eps", float),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, architecture.tied),
        attention_bias=(fields.get("qkv_bias", bool, True) if name == "Qwen2MoeForCausalLM" else
                        architecture.has_bias_fields and fields.get("attention_bias", bool, False)),
        mlp_bias=architecture.has_bias_fields and fields.get("mlp_bias", bool, False),
        eos_token_ids=eos_token_ids, rope=_rope(fields, max_positions, architecture.rope_theta),
        experts=architecture.experts and architecture.experts(
            fields, fields.need_positive("num_hidden_layers", most=MAX_LAYERS)),
        **(_layer_kinds(fields, architecture) if architecture.windows else {}))
    try:
        return config.checked()
    except ValueError as error:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{fields.path} describes no network: {error}") from None


def _architecture(fields: Fields) -> tuple[str, Architecture]:
    names = fields.get("architectures", list, [])
    model_type = fields.get("model_type", str)
    if not names and model_type is None:
        raise fields.error("architectures", f"is missing: expected one of {known_architectures()}")
    for name, architecture in ARCHITECTURES.items():
        if names[:1] == [name] or (not names and model_type == architecture.model_type):
            return name, architecture
    found = names[0] if names else model_type
    raise fields.error("architectures", f"is {found!r}, which is not supported: known architectures are "
                                        f"{known_architectures()}")


def _layer_kinds(fields: Fields, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Windows of the layers, and which are without rotary embedding."""
    count = fields.need_positive("num_hidden_layers", most=MAX_LAYERS)
    smollm3 = architecture.model_type == "smollm3"
    rotated = [1] * count
    if smollm3:
        interval = fields.get("no_rope_layer_interval", int, 4)
        if interval < 1:
            raise fields.error("no_rope_layer_interval", f"is {interval}: it must be positive")
        rotated = fields.get("no_rope_layers", list, [int((i + 1) % interval != 0) for i in range(count)])
        if len(rotated) < count or any(flag not in (0, 1) for flag in rotated):
            raise fields.error("no_rope_layers", f"must hold 0 or 1 for each of {count} layers")
    width = fields.get("sliding_window", int) if "sliding_window" in fields.values else architecture.window
    if width is not None and not 0 < width <= MAX_POSITIONS:
        raise fields.error("sliding_window", f"is {width}: it must be positive and at most {MAX_POSITIONS}")
    types = fields.get("layer_types", list) if architecture.model_type != "mistral" else None
    if types is None and smollm3:
        slides = fields.get("use_sliding_window", bool, False)
        types = ["sliding_attention" if slides and width and not flag else "full_attention" for flag in rotated]
    types = types or ["sliding_attention" if width else "full_attention"] * count
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown or len(types) != count:
        raise fields.error("layer_types", f"holds {len(types)} layers{' of ' + ', '.join(unknown) if unknown else ''}: "
                                          f"expected {count} of full_attention or sliding_attention")
    if width is None and "sliding_attention" in types:
        raise fields.error("sliding_window", "is missing: layer_types holds sliding_attention")
    windows = tuple(width if kind == "sliding_attention" else 0 for kind in types)
    return {"windows": windows if any(windows) else (),
            "unrotated": tuple(i for i in range(count) if not rotated[i])}


def _refuse_unsupported(fields: Fields, architecture: Architecture) -> None:
    activation = fields.get("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", f"is {activation!r}: only 'silu' is supported")
    if architecture.windows:
        return
    layers = fields.need_positive("num_hidden_layers", most=MAX_LAYERS)
    types = fields.get("layer_types", list, [])
    sliding = sorted({str(kind) for kind in types} - {"full_attention"})
    if sliding:
        raise fields.error("layer_types", f"holds {', '.join(sliding)}: only full_attention is supported, "
                                          "a sliding window is not available yet")
    # Of these the window has every layer, or layers that config.json does not name.
    always = architecture.model_type == "mixtral"
    if architecture.experts and fields.get("use_sliding_window", bool, always) and fields.get("sliding_window", int):
        raise fields.error("sliding_window", f"is {fields.values['sliding_window']}: a sliding window is not available "
                                             "yet")
    uses_window = fields.get("use_sliding_window", bool, False) and fields.get("sliding_window", int) is not None
    if not types and uses_window and fields.get("max_window_layers", int, layers) < layers:
        width, first = fields.values["sliding_window"], fields.values["max_window_layers"]
        raise fields.error("use_sliding_window", f"is true with sliding_window={width} from layer {first}: a sliding "
                                                 "window is not available yet")


def _rope(fields: Fields, max_positions: int, default_theta: float) -> RopeConfig:
    """Rotary fields: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4)."""
    name = "rope_scaling" if fields.get("rope_scaling", dict) else "rope_parameters"
    values = fields.get(name, dict, {})
    if isinstance(values.get("full_attention"), dict):  # transformers 5 may nest by layer type
        name, values = f"{name}.full_attention", values["full_attention"]
    rope = Fields(values, fields.path, f"{name}.")
    kind = rope.get("rope_type", str) or rope.get("type", str, "default")
    if kind not in ROPE_TYPES:
        raise rope.error("rope_type", f"is {kind!r}: known types are {', '.join(ROPE_TYPES)}")
    partial = rope.get("partial_rotary_factor", float, fields.get("partial_rotary_factor", float, 1.0))
    if partial != 1.0:
        raise rope.error("partial_rotary_factor", f"is {partial}: only 1.0 is supported")
    theta = rope.get("rope_theta", float, fields.get("rope_theta", float, default_theta))
    if not theta > 0:
        raise rope.error("rope_theta", f"is {theta}: it must be positive")
    if kind == "default":
        return RopeConfig(theta=theta)
    original = max_positions
    if kind in ("llama3", "yarn"):
        original = fields.get("original_max_position_embeddings", int,
                              rope.get("original_max_position_embeddings", int, max_positions))
        if original < 1:
            raise rope.error("original_max_position_embeddings", f"is {original}: it must be positive")
    if kind == "yarn" and rope.get("factor", float) is None:
        factor = max_positions / original
    else:
        factor = rope.need_positive("factor", float)
    attention_factor = rope.get("attention_factor", float)
    llama3 = kind == "llama3"
    return RopeConfig(
        type=kind, theta=theta, factor=factor, original_max=original,
        low_freq_factor=rope.need_positive("low_freq_factor", float) if llama3 else 0.0,
        high_freq_factor=rope.need_positive("high_freq_factor", float) if llama3 else 0.0,
        attention_factor=attention_factor, beta_fast=rope.get("beta_fast", float) or RopeConfig.beta_fast,
        beta_slow=rope.get("beta_slow", float) or RopeConfig.beta_slow, mscale=rope.get("mscale", float, 0.0),
        mscale_all_dim=rope.get("mscale_all_dim", float, 0.0), truncate=rope.get("truncate", bool, True))


def _rescaled(fields: Fields, rope_scaling: dict, default_theta: float) -> Fields:
    """Another rotary scaling of the same frequencies; the context grows to what it is for."""
    found = _rope(fields, fields.need_positive("max_position_embeddings", most=MAX_POSITIONS), default_theta)
    values = {**fields.values, "rope_scaling": {"rope_theta": found.theta, **rope_scaling}, "rope_parameters": {}}
    values.pop("original_max_position_embeddings", None)
    fields = Fields(values, fields.path)
    if rope_scaling.get("type", rope_scaling.get("rope_type")) == "yarn":
        rope = _rope(fields, values["max_position_embeddings"], default_theta)
        values["max_position_embeddings"] = max(values["max_position_embeddings"],
                                                round(rope.original_max * rope.factor))
    return fields


def _eos_token_ids(fields: Fields, directory: Path) -> tuple[int, ...]:
    """generation_config.json's ids when it has some, otherwise config.json's: as transformers' generate does."""
    for path in (directory / "generation_config.json", fields.path):
        values = read_json(path) if os.path.lexists(path) else {}
        found = values.get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"field 'eos_token_id' of {path} is {found!r}: expected token ids")
        if ids:
            return tuple(ids)
    return ()
