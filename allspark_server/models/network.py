"""What a network is made of: a model's description, independent of the file it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from allspark_server.models.fields import MAX_EOS_IDS, MAX_EXPERTS, MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, MAX_SIZE

PLAIN_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
ROPE_TYPES = (*PLAIN_ROPE_TYPES, "longrope")


def _said_by_ops(default: Any) -> Any:
    """A field that only the model files read: a graph's ops and weights say the same. An .asgraph does not store it,
    and a model's hash does not have it beside them.
    """
    return field(default=default, repr=False)


def stored_fields(kind: type) -> list[str]:
    """Names of a description's fields that an .asgraph stores."""
    return [f.name for f in fields(kind) if f.repr]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding fields; `original_max` is the context length the scaling starts from (positions).

    dim: rotated features of a head, 0 for all. growth: of a dynamic base, see the table of ops. short_factors,
    long_factors: LongRoPE's, a number for each pair.
    """

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
    dim: int = _said_by_ops(0)
    growth: str = _said_by_ops("linear")
    short_factors: tuple[float, ...] = _said_by_ops(())
    long_factors: tuple[float, ...] = _said_by_ops(())


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
    """What a model file needs to know.

    windows: of each layer, 0 where it attends to all positions; empty: all layers do. local_rope: the rotary embedding
    of layers with a window, None where it is that of the others. unrotated: layers without one. query_scale: of
    attention's scores, 0 for head_dim ** -0.5. score_cap, logit_cap: x becomes cap * tanh(x / cap), 0 for none. alibi:
    scores fall with distance instead of rotary embedding. logn: queries beyond that position grow with its logarithm, 0
    for none. unit_head: the head's rows are normalized. swiglu: alpha and limit of experts' clamped product (see
    clamped_silu_mul in the table of ops), None for silu(gate) * up.
    """

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
    windows: tuple[int, ...] = _said_by_ops(())
    unrotated: tuple[int, ...] = _said_by_ops(())
    local_rope: RopeConfig | None = _said_by_ops(None)
    embedding_scale: float = _said_by_ops(1.0)
    query_scale: float = _said_by_ops(0.0)
    score_cap: float = _said_by_ops(0.0)
    logit_cap: float = _said_by_ops(0.0)
    alibi: bool = _said_by_ops(False)
    logn: int = _said_by_ops(0)
    unit_head: bool = _said_by_ops(False)
    swiglu: tuple[float, float] | None = _said_by_ops(None)

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    @property
    def rotary_dim(self) -> int:
        """Rotated features of a head."""
        return self.rope.dim or self.head_dim

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
