"""The description of a network, independent of the file that it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from allspark_server.models.fields import (
    MAX_EOS_IDS,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_PATCHES,
    MAX_POSITIONS,
    MAX_SIZE,
)

PLAIN_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
ROPE_TYPES = (*PLAIN_ROPE_TYPES, "longrope", "proportional")


def _in_graph(default: Any) -> Any:
    """A field that only model files read; the graph's ops and weights contain it. An .asgraph does not store it, and
    the model's hash does not cover it a second time.
    """
    return field(default=default, repr=False)


def stored_fields(kind: type) -> list[str]:
    """The names of the fields of a description that an .asgraph stores."""
    return [f.name for f in fields(kind) if f.repr]


@dataclass(frozen=True)
class RopeConfig:
    """A rotary embedding and its scaling.

    original_max: the context length, in positions, beyond which the scaling applies. dim: rotated features of a head, 0
    for all. growth: how a dynamic base grows, see the table of ops.
    sections: how many pairs turn with the time, the height and the width of a position (M-RoPE, arXiv 2409.12191);
    empty if all turn with its number. interleaved: these pairs take turns. short_factors, long_factors: LongRoPE's
    factors, one for each pair of features. part: the part of a head's pairs that a proportional embedding rotates, with
    the frequencies that they have in an embedding of all pairs.
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
    dim: int = _in_graph(0)
    growth: str = _in_graph("linear")
    sections: tuple[int, ...] = _in_graph(())
    interleaved: bool = _in_graph(False)
    short_factors: tuple[float, ...] = _in_graph(())
    long_factors: tuple[float, ...] = _in_graph(())
    part: float = _in_graph(1.0)


@dataclass(frozen=True)
class ExpertConfig:
    """The experts of a layer: `count` experts, of which the router chooses `per_token` for each token.

    normalized: the weights of a token's experts are scaled to a sum of 1. shared_size: intermediate size of the expert
    that computes every token, 0 for none. dense_layers: layers without experts. stacked: a tensor of the checkpoint
    holds all experts of a layer, as in transformers 5; otherwise each expert has its own tensors. scores, scale,
    groups, top_groups: attributes of the router in the table of ops. corrected: the router has a
    correction of its scores; read where this is a choice. by_token: layers whose experts depend on the token alone.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()
    stacked: bool = False
    corrected: bool = _in_graph(True)
    scores: str = _in_graph("softmax")
    scale: float = _in_graph(1.0)
    groups: int = _in_graph(1)
    top_groups: int = _in_graph(1)
    group_scores: str = _in_graph("two_largest")
    by_token: tuple[int, ...] = _in_graph(())


@dataclass(frozen=True)
class DeltaConfig:
    """Layers with the gated delta rule in place of attention (arXiv 2412.06464), by their numbers.

    key_heads, value_heads: each key head serves as many value heads. key_dim, value_dim: features of a head. taps: rows
    of the convolution before it. lower_bound: of the logarithms of decays, 0 if there is none (gated_delta in the table
    of ops).
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    lower_bound: float = 0.0

    @property
    def group(self) -> int:
        """The number of value heads of a key head."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True)
class ConvConfig:
    """Layers with a short convolution in place of attention, by their numbers. taps: rows of the convolution. bias: the
    layer's matrices and the convolution have biases.
    """

    layers: tuple[int, ...]
    taps: int
    bias: bool


@dataclass(frozen=True)
class IndexerConfig:
    """The indexer of sparse attention (DeepSeek-V3.2): a row attends to the `selected` positions with the best scores.

    heads, dim: heads of its queries and their features, of which the first are rotated; pairs of rotated features are
    (2 i, 2 i + 1) if interleaved. shared: layers that use the selection of the layer before them. pool: positions are
    selected by so many at a time, whose keys are compressed to one, with those behind the last of these pools; 0: one
    by one.
    """

    heads: int
    dim: int
    selected: int
    interleaved: bool
    shared: tuple[int, ...] = ()
    pool: int = 0


@dataclass(frozen=True)
class MambaConfig:
    """Layers with Mamba2's selective state space in place of attention (arXiv 2405.21060), by their numbers.

    heads, head_dim: of x. groups, state_dim: of B and C; each group serves as many heads. taps: rows of the convolution
    before it. conv_bias, bias: the convolution, and the matrices, have biases. least_step, most_step: limits of dt;
    None if there are none. norm: what the norm after it normalizes, "products" with the activated gate, or "values",
    which are gated then; "" if there is no norm. factors: of the projections to gate, x, B, C and dt; empty if all
    are 1.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    conv_bias: bool = True
    bias: bool = False
    least_step: float | None = None
    most_step: float | None = None
    norm: str = "products"
    factors: tuple[float, ...] = ()

    @property
    def inner(self) -> int:
        """The features of all heads."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class LayerFactors:
    """Factors of the parts of a layer (Falcon-H1): of what attention and the state space take and return, of keys, of
    the MLP's gate, and of what the MLP returns.
    """

    attention_in: float
    attention_out: float
    state_in: float
    state_out: float
    key: float
    gate: float
    down: float


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention (arXiv 2405.04434): keys and values are projections of one latent vector a token.

    latent_dim: features of the latent. nope_dim, rope_dim, value_dim: features of a head's key without and with rotary
    embedding (all heads share the latter), and of its value. query_dim: features of the queries' latent, 0 if they
    have none. interleaved: pairs of rotated features are (2 i, 2 i + 1). indexer: None if rows see all positions.
    rotated: there is a rotary embedding; otherwise the features of rope_dim, which may be 0, stay as they are. eps: of
    the latents' norms.
    """

    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_dim: int = 0
    interleaved: bool = True
    indexer: IndexerConfig | None = None
    rotated: bool = True
    eps: float = 1e-6


@dataclass(frozen=True)
class CompressedConfig:
    """Attention over the last positions and compressed ones (DeepSeek-V4), with one head whose keys are its values.

    window: the last positions that a row sees. rates: for each layer, how many positions a compressed entry is of; 0:
    the layer has no entries. overlapping: layers whose entries are of twice as many positions, and of which an indexer
    selects some. query_dim: features of the queries' latent. rope_dim: the last features of a head, which are rotated.
    groups, group_dim: the output's heads are projected in so many groups, to so many features each. indexer: None if no
    layer has one.
    """

    window: int
    rates: tuple[int, ...]
    overlapping: tuple[int, ...]
    query_dim: int
    rope_dim: int
    groups: int
    group_dim: int
    indexer: IndexerConfig | None = None


@dataclass(frozen=True)
class StreamConfig:
    """Hyper-connections over several residual streams: see stream_weights in the table of ops."""

    count: int
    iterations: int
    eps: float


@dataclass(frozen=True)
class FullHeads:
    """The heads of layers without a window, where they are not those of the layers with one (Gemma 4).

    keys_as_values: values are keys, before these are normed and rotated.
    """

    kv_heads: int
    head_dim: int
    keys_as_values: bool = False


@dataclass(frozen=True)
class LayerEmbeddings:
    """A table with an embedding of each token for every layer (Gemma 4's small models). dim: features of a layer.
    scale: factor of the table's values. padding: the id whose embeddings rows of images have.
    """

    vocab_size: int
    dim: int
    scale: float
    padding: int = 0


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer after pooling, as sentence-transformers has it. name: of its folder and tensors. activation: a
    function of the op `activate`, "" for none.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool
    activation: str = ""


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder: rows attend in both directions, and a text gives one row.

    pooling: "cls", "mean" or "last". dense: layers after pooling. activation: that of the MLP, for the op `activate`.
    positions, offset: rows of the table of positions, and the row of the first token; 0 rows: a rotary embedding.
    segments: rows of the table of segments. separator: the id that ends the first of two segments. head: the
    classifier, "" for embedders; its values are those of the family's file. head_activation: the classifier's.
    head_bias, norm_bias: the classifier's dense layer, and layer norms, have biases.
    """

    pooling: str
    dense: tuple[DenseLayer, ...] = ()
    activation: str = "gelu"
    positions: int = 0
    offset: int = 0
    segments: int = 0
    separator: int = 0
    head: str = ""
    head_activation: str = "tanh"
    head_bias: bool = True
    norm_bias: bool = True


@dataclass(frozen=True)
class VisionConfig:
    """What a vision tower has besides layers.

    patch: values of a patch. merge: adjacent rows that make an output. outputs: values of an output of the last layer.
    side: rows of the square table of positions, or of each of two tables for width and height, of which the checkpoint
    has `rows`; 0 for none. taps: layers whose rows become outputs, too, beside those
    of the last one (DeepStack). activation: of the MLP, for the op `activate`; "" for a gated MLP with SiLU. norm:
    "layer" or "rms". window: side of a window of attention in patches, 0 for none; whole: layers without windows.
    patch_bias, projector_bias: the embedding of patches, and the layers after the last one, have biases. merger_eps: of
    the norm before rows are merged, where it is its own. tokens: outputs of each image, 0 if that depends on its size;
    most: outputs of the largest one then, 0 if that is not limited. clipped: inputs and outputs of the layers' products
    have limits. standardized: merged rows have a shift and a factor for each value.
    leading: rows before the patches, whose outputs are not taken: a class token's.
    together: in prompts, rows of an image see each other. family: the function of models/vision.py that builds it.
    """

    patch: int
    merge: int
    outputs: int
    side: int = _in_graph(0)
    taps: tuple[int, ...] = ()
    activation: str = _in_graph("")
    norm: str = _in_graph("layer")
    window: int = 0
    whole: tuple[int, ...] = _in_graph(())
    patch_bias: bool = _in_graph(False)
    projector_bias: bool = _in_graph(True)
    merger_eps: float = _in_graph(1e-6)
    tokens: int = 0
    most: int = 0
    leading: int = 0
    rows: int = _in_graph(0)
    clipped: bool = _in_graph(False)
    standardized: bool = _in_graph(False)
    together: bool = False
    family: str = _in_graph("qwen")

    @property
    def width(self) -> int:
        """Values of an output, those of taps included."""
        return self.outputs * (1 + len(self.taps))

    def check(self) -> None:
        """ValueError names a field that no tower can have."""
        for name in ("patch", "merge", "outputs"):
            if not 0 < getattr(self, name) <= MAX_SIZE:
                raise ValueError(f"vision.{name} is {getattr(self, name)}: it must be positive and at most {MAX_SIZE}")
        for name in ("window", "tokens", "most", "leading"):
            if not 0 <= getattr(self, name) <= MAX_PATCHES:
                raise ValueError(f"vision.{name} is {getattr(self, name)}: it must be 0 to {MAX_PATCHES}")
        if len(self.taps) > MAX_LAYERS:
            raise ValueError(f"vision.taps has {len(self.taps)} layers: at most {MAX_LAYERS} are possible")


@dataclass(frozen=True)
class ModelConfig:
    """The description of a network from which a model file builds the graph.

    windows: sliding window of each layer, 0 for full attention; empty if no layer has one.
    unrotated: layers without rotary embedding.
    local_rope: rotary embedding of layers with a window; None if it is that of the other layers.
    query_scale: factor of attention's scores, 0 for head_dim ** -0.5.
    score_cap, logit_cap: x becomes cap * tanh(x / cap); 0 for none.
    alibi: linear biases of scores (ALiBi) instead of rotary embedding.
    logn: queries beyond this position are scaled by the logarithm of their position (LogN); 0 for none.
    unit_head: the rows of the head are normalized.
    output_bias: attention's output projection has a bias; read where this is a choice of its own.
    head_norms: query and key heads are normalized; read where this is a choice.
    residual_scale, logit_scale: factors of what a layer adds to the residual stream, and of the logits.
    delta, conv, mamba: layers with the gated delta rule, with short convolutions, and with selective state spaces,
    which have a state and, unless parallel is set, no attention; None if there are none.
    parallel: layers with a state have attention beside it.
    layer_factors: factors of the parts of every layer; read where this is a choice.
    mlp_layers: layers that are nothing but an MLP or experts.
    expert_latent: features of the latent vector of a row that routed experts compute; 0 if they compute the row itself.
    latent: sizes of latent attention, which all layers have; None if none has.
    compressed: sizes of attention over compressed positions, which all layers have; None if none has.
    streams: residual streams; None if there is one.
    encoder: what encoders have besides layers; None for models that generate.
    labels: the outputs of a classifier, 0 for other models. compared: of a reranker, the ids of the tokens whose logits
    are its output.
    vision: of a vision tower, what it has besides layers. tower: of a model that sees, its vision tower.
    swiglu: alpha and limit of the experts' clamped activation (clamped_silu_mul in the table of ops); None for
    silu(gate) * up. swiglu_limit: of limited_silu_mul, in all experts; 0 if there is no limit.
    full_heads: heads of layers without a window; None if they are those of the other layers.
    kv_sources: for each layer, the layer whose keys and values it reads; empty if each has its own.
    wide_layers: layers whose MLP has twice the intermediate size.
    layer_embeddings: embeddings for every layer; None if there are none.
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
    windows: tuple[int, ...] = _in_graph(())
    unrotated: tuple[int, ...] = _in_graph(())
    local_rope: RopeConfig | None = _in_graph(None)
    embedding_scale: float = _in_graph(1.0)
    query_scale: float = _in_graph(0.0)
    score_cap: float = _in_graph(0.0)
    logit_cap: float = _in_graph(0.0)
    alibi: bool = _in_graph(False)
    logn: int = _in_graph(0)
    unit_head: bool = _in_graph(False)
    swiglu: tuple[float, float] | None = _in_graph(None)
    swiglu_limit: float = _in_graph(0.0)
    output_bias: bool = _in_graph(False)
    head_norms: bool = _in_graph(False)
    residual_scale: float = _in_graph(1.0)
    logit_scale: float = _in_graph(1.0)
    delta: DeltaConfig | None = _in_graph(None)
    conv: ConvConfig | None = _in_graph(None)
    mamba: MambaConfig | None = _in_graph(None)
    parallel: bool = _in_graph(False)
    layer_factors: LayerFactors | None = _in_graph(None)
    mlp_layers: tuple[int, ...] = _in_graph(())
    expert_latent: int = _in_graph(0)
    latent: LatentConfig | None = _in_graph(None)
    compressed: CompressedConfig | None = _in_graph(None)
    streams: StreamConfig | None = _in_graph(None)
    encoder: EncoderConfig | None = _in_graph(None)
    labels: int = _in_graph(0)
    compared: tuple[int, ...] = _in_graph(())
    vision: VisionConfig | None = _in_graph(None)
    tower: ModelConfig | None = _in_graph(None)
    full_heads: FullHeads | None = _in_graph(None)
    kv_sources: tuple[int, ...] = _in_graph(())
    wide_layers: tuple[int, ...] = _in_graph(())
    layer_embeddings: LayerEmbeddings | None = _in_graph(None)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that have a state."""
        return tuple(layer for kind in (self.delta, self.conv, self.mamba) if kind for layer in kind.layers)

    @property
    def spanless_layers(self) -> tuple[int, ...]:
        """The layers whose cache keeps no positions."""
        return (*(() if self.parallel else self.state_layers), *self.mlp_layers, *self.reading_layers)

    @property
    def reading_layers(self) -> tuple[int, ...]:
        """The layers that read another layer's keys and values."""
        return tuple(layer for layer, source in enumerate(self.kv_sources) if source != layer)

    def heads(self, layer: int) -> tuple[int, int]:
        """The number of the layer's KV heads, and the features of a head."""
        if self.full_heads is not None and not self.window(layer):
            return self.full_heads.kv_heads, self.full_heads.head_dim
        return self.num_kv_heads, self.head_dim

    def window(self, layer: int) -> int:
        """The layer's sliding window in positions; 0 for full attention."""
        return self.windows[layer] if self.windows else 0

    @property
    def rotary_dim(self) -> int:
        """The number of rotated features of a head."""
        return self.rope.dim or self.head_dim

    def checked(self) -> ModelConfig:
        """Returns the description itself. ValueError names a field that no network can have."""
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
        if self.vision is not None:
            self.vision.check()
        if len(self.eos_token_ids) > MAX_EOS_IDS or not all(0 <= i < 1 << 31 for i in self.eos_token_ids):
            raise ValueError(f"eos_token_ids must be at most {MAX_EOS_IDS} ids of 0 to 2^31 - 1")
        return self
