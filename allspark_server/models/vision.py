"""Vision towers: programs of their own, whose rows are the patches of an image and whose outputs are the embedding rows
that a model takes in its place.

Rows attend in both directions, within their image or within segments of it. `merge` adjacent rows make an output. The
order of an image's rows is that of its processor (allspark_server/images).
"""

from __future__ import annotations

import math
from typing import Any

from allspark_server.models.blocks import (
    dense,
    gated_mlp,
    linear_of_parts,
    of_each_head,
    output_projection,
    qkv_projection,
    sliced_qkv,
)
from allspark_server.models.fields import MAX_HEAD_DIM, MAX_LAYERS, MAX_PATCHES, MAX_SIZE, Fields
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Block, Part, Tensor, Weight, in_groups
from allspark_server.models.network import EncoderConfig, ModelConfig, RopeConfig, VisionConfig
from allspark_server.models.rotary import Rotary, rotary_of
from allspark_server.weights.shard import Split


def build_tower(config: ModelConfig) -> Graph:
    """The op list of a tower."""
    assert config.vision is not None
    return BUILDERS[config.vision.family](config)


# -- Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 ---------------------------------------------------------------------------
def _qwen(config: ModelConfig) -> Graph:
    """Qwen's towers: layer or RMS norms, packed projections with biases, a rotary embedding of height and width, and
    mergers of 2 x 2 patches.
    """
    vision = config.vision
    assert vision is not None
    graph = Graph(config)
    frequencies = rotary_of(RopeConfig(), config.head_dim // 2).inv_freq   # of half a head, for both
    _rotary_of_places(graph, [*frequencies, *frequencies])
    x = _embed_patches(graph, "patch_embed.proj", vision.patch_bias)
    if vision.side:
        _add_positions(graph, x, "pos_embed.weight", vision)
    merged: list[Tensor] = []
    for layer in range(config.num_layers):
        prefix = f"blocks.{layer}"
        h = _norm(graph, x, f"{prefix}.norm1", vision)
        qkv = graph.rope(sliced_qkv(graph, h, f"{prefix}.attn.qkv", bias=True))
        segments: dict[str, Any] = {"segments": 1} if vision.window and layer not in vision.whole else {}
        attended = graph.span_attention(qkv, layer, **segments)
        graph.add(x, output_projection(graph, attended, f"{prefix}.attn", "proj", bias=True))
        h = _norm(graph, x, f"{prefix}.norm2", vision)
        graph.add(x, _mlp(graph, h, f"{prefix}.mlp", vision))
        if layer in vision.taps:
            merged.append(_merger(graph, x, f"deepstack_merger_list.{vision.taps.index(layer)}", vision, after=True))
    outputs = _merger(graph, x, "merger", vision)
    for more in merged:
        outputs = graph.op("concat", outputs, more, out=f"outputs_of_{more.name}", blocks=outputs.blocks + more.blocks)
    graph.hidden_states(outputs)
    return graph


def _rotary_of_places(graph: Graph, frequencies: list[float]) -> None:
    """A rotary embedding whose first half of the pairs turns with the height, and the second with the width."""
    pairs = len(frequencies)
    rotary = Rotary(2 * pairs, graph.config.rope.theta, frequencies)  # type: ignore[arg-type]
    graph.rotary_table(rotary, temporal=0, height=pairs // 2, width=pairs // 2)


def _embed_patches(graph: Graph, name: str, bias: bool) -> Tensor:
    vision = graph.config.vision
    assert vision is not None
    return dense(graph, graph.given_rows(vision.patch), name, graph.config.hidden_size, "x", bias=bias)


def _add_positions(graph: Graph, x: Tensor, name: str, vision: VisionConfig) -> None:
    """Adds the table of positions."""
    table = graph.vector(name, vision.side ** 2 * graph.config.hidden_size)
    graph.op("grid_embedding", x, weights=(table,), side=vision.side)


def _norm(graph: Graph, x: Tensor, name: str, vision: VisionConfig, out: str = "normed") -> Tensor:
    if vision.norm == "layer":
        return graph.layer_norm(x, name, out)
    return graph.rms_norm(x, f"{name}.weight", out)


def _mlp(graph: Graph, x: Tensor, prefix: str, vision: VisionConfig) -> Tensor:
    if not vision.activation:
        return gated_mlp(graph, x, prefix, bias=True)
    first, last = ("linear_fc1", "linear_fc2") if vision.side else ("fc1", "fc2")
    return _two_layers(graph, x, f"{prefix}.{first}", f"{prefix}.{last}", graph.intermediate, vision.activation,
                       graph.config.hidden_size, "branch")


def _two_layers(graph: Graph, x: Tensor, first: str, last: str, inner: Split, activation: str, outputs: int,
                out: str, *, bias: bool = True) -> Tensor:
    """last(activation(first(x))), the inner features divided among ranks."""
    weight, added = graph.sliced(first, (inner,), sum(block.width for block in x.blocks), bias)
    hidden = graph.activate(graph.linear(x, weight, added, out=f"{out}_inner"), activation)
    return graph.row_parallel_linear(hidden, last, inner, bias, out, outputs)


def _merger(graph: Graph, x: Tensor, prefix: str, vision: VisionConfig, after: bool = False) -> Tensor:
    """The outputs of `merge` adjacent rows each. after: the norm is of what is merged, not of each row."""
    width = graph.config.hidden_size * vision.merge
    first, last, norm = ("linear_fc1", "linear_fc2", "norm") if vision.side else ("mlp.0", "mlp.2", "ln_q")
    if not after:
        x = _norm(graph, x, f"{prefix}.{norm}", vision)
    merged = graph.op("merge_rows", x, out="merged", blocks=(Block(width),), count=vision.merge, how="concat")
    if after:
        merged = graph.layer_norm(merged, f"{prefix}.{norm}", "merged_normed")
    return _two_layers(graph, merged, f"{prefix}.{first}", f"{prefix}.{last}", in_groups(width), "gelu",
                       vision.outputs, f"{prefix}.rows" if after else "outputs")


# -- Pixtral, Mistral 3 ------------------------------------------------------------------------------------------------
def _pixtral(config: ModelConfig) -> Graph:
    """Pixtral's tower: RMS norms, no biases, gated MLPs, and a rotary embedding in which height and width take turns
    with the frequencies of a head. Mistral 3 merges patches; a projector of two layers ends it.
    """
    vision = config.vision
    assert vision is not None
    graph = Graph(config)
    frequencies = rotary_of(RopeConfig(theta=config.rope.theta), config.head_dim).inv_freq
    _rotary_of_places(graph, [*frequencies[::2], *frequencies[1::2]])
    x = _norm(graph, _embed_patches(graph, "patch_conv", False), "ln_pre", vision, out="rows")
    for layer in range(config.num_layers):
        prefix = f"transformer.layers.{layer}"
        h = _norm(graph, x, f"{prefix}.attention_norm", vision)
        qkv = graph.rope(qkv_projection(graph, h, f"{prefix}.attention", bias=False))
        graph.add(x, output_projection(graph, graph.span_attention(qkv, layer), f"{prefix}.attention"))
        h = _norm(graph, x, f"{prefix}.ffn_norm", vision)
        graph.add(x, gated_mlp(graph, h, f"{prefix}.feed_forward", activation=vision.activation or "silu"))
    if vision.merge > 1:
        x = graph.rms_norm(x, "projector.norm.weight", eps=vision.merger_eps)
    width = config.hidden_size * vision.merge
    merged = graph.op("merge_rows", x, out="merged", blocks=(Block(width),), count=vision.merge, how="interleave")
    if vision.merge > 1:
        merged = dense(graph, merged, "projector.patch_merger.merging_layer", config.hidden_size, "merged_rows",
                       bias=False)
    return _projected(graph, merged, vision)


def _projected(graph: Graph, merged: Tensor, vision: VisionConfig) -> Graph:
    """Ends a tower with LLaVA's projector of two layers."""
    graph.hidden_states(_two_layers(graph, merged, "projector.linear_1", "projector.linear_2",
                                    in_groups(vision.outputs), "gelu", vision.outputs, "outputs",
                                    bias=vision.projector_bias))
    return graph


# -- Gemma 3 -----------------------------------------------------------------------------------------------------------
def _siglip(config: ModelConfig) -> Graph:
    """Gemma 3's tower: SigLIP with a table of positions, whose rows are averaged, normed and projected."""
    vision = config.vision
    assert vision is not None
    graph = Graph(config)
    x = _embed_patches(graph, "embeddings.patch_embedding", True)
    _add_positions(graph, x, "embeddings.position_embedding.weight", vision)
    for layer in range(config.num_layers):
        _siglip_layer(graph, x, f"encoder.layers.{layer}", layer, "gelu_tanh")
    x = graph.layer_norm(x, "post_layernorm", "normed")
    merged = graph.op("merge_rows", x, out="merged", count=vision.merge, how="mean")
    normed = graph.rms_norm(merged, "projector.mm_soft_emb_norm.weight", "merged_normed", eps=vision.merger_eps,
                            unit_offset=1)
    weight = graph.matrix("projector.mm_input_projection_weight", vision.outputs, config.hidden_size)
    graph.hidden_states(graph.linear(normed, weight, None, out="outputs"))
    return graph


def _siglip_layer(graph: Graph, x: Tensor, prefix: str, layer: int, activation: str) -> None:
    """A layer of SigLIP, or of CLIP."""
    h = graph.layer_norm(x, f"{prefix}.layer_norm1", "normed")
    qkv = qkv_projection(graph, h, f"{prefix}.self_attn", bias=True)
    graph.add(x, output_projection(graph, graph.span_attention(qkv, layer), f"{prefix}.self_attn", "out_proj",
                                   bias=True))
    h = graph.layer_norm(x, f"{prefix}.layer_norm2", "normed")
    graph.add(x, _two_layers(graph, h, f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2", graph.intermediate, activation,
                             graph.config.hidden_size, "branch"))


# -- Gemma 4 -----------------------------------------------------------------------------------------------------------
def _gemma4(config: ModelConfig) -> Graph:
    """Gemma 4's tower: norms before and after attention and MLP and of each head, tables of positions for width and
    height, and a rotary embedding of the width in a head's first half and of the height in the second. Rows are
    averaged, normed and projected.
    """
    vision = config.vision
    assert vision is not None
    graph = Graph(config)
    frequencies = rotary_of(RopeConfig(theta=config.rope.theta), config.head_dim // 2).inv_freq
    _rotary_of_places(graph, [*frequencies, *frequencies])
    x = _embed_patches(graph, "patch_embedder.input_proj", False)
    name, width = "patch_embedder.position_embedding_table", config.hidden_size
    parts = tuple(Part(name, vision.side * width, None, axis * vision.rows * width, 2 * vision.rows * width)
                  for axis in (0, 1))
    graph.op("grid_embedding", x, weights=(graph.weight(Weight(name, parts)),), side=vision.side, axes=1)
    for layer in range(config.num_layers):
        prefix = f"encoder.layers.{layer}"
        y = _gemma4_attention(graph, x, prefix, layer)
        graph.add(x, graph.rms_norm(y, f"{prefix}.post_attention_layernorm.weight", "branch_normed"))
        y = _gemma4_mlp(graph, x, prefix)
        graph.add(x, graph.rms_norm(y, f"{prefix}.post_feedforward_layernorm.weight", "branch_normed"))
    merged = graph.scale(graph.op("merge_rows", x, out="merged", count=vision.merge, how="mean"), width ** 0.5)
    if vision.standardized:
        graph.op("standardize", merged, weights=(graph.vector("std_bias", width), graph.vector("std_scale", width)))
    normed = graph.rms_norm(merged, "", "merged_normed")
    graph.hidden_states(dense(graph, normed, "embed_vision.embedding_projection", vision.outputs, "outputs",
                              bias=False))
    return graph


def _gemma4_attention(graph: Graph, x: Tensor, prefix: str, layer: int) -> Tensor:
    """Attention with its norm and its output projection.

    A head's features are pairs (i, i + dim / 4) of its first half, then of its second one. Queries and keys have them
    in another order, so that pairs are (i, i + dim / 2) of the whole head, those of the height first.
    """
    config, heads, dim = graph.config, graph.config.num_heads, graph.config.head_dim
    order, quarter, own = (2, 0, 3, 1), dim // 4, f"{prefix}.self_attn"

    def parts(name: str) -> tuple[Part, ...]:
        tensor = f"{own}.{name}.linear.weight"
        if name == "v_proj":
            return of_each_head(tensor, heads, (dim,), 0)
        of_quarter = [of_each_head(tensor, heads, (quarter,) * 4, index) for index in order]
        return tuple(part for of_head in zip(*of_quarter) for part in of_head)

    def project(*names: str, out: str) -> Tensor:
        # Normed again for each projection with limits, since these apply in place.
        h = graph.rms_norm(x, f"{prefix}.input_layernorm.weight")
        joined = tuple(part for name in names for part in parts(name))
        blocks = tuple(Block(heads * dim, graph.q_heads) for _ in names)
        if len(names) > 1:
            return linear_of_parts(graph, h, f"{own}.{'+'.join(names)}.linear", joined, blocks, out)
        _limited(graph, h, f"{own}.{names[0]}", "input")
        return _limited(graph, linear_of_parts(graph, h, f"{own}.{names[0]}.linear", joined, blocks, out),
                     f"{own}.{names[0]}", "output")

    names = ("q_proj", "k_proj", "v_proj")
    if graph.config.vision and graph.config.vision.clipped:
        qkv = graph.concat(*(project(name, out=name) for name in names), out="qkv")
    else:
        qkv = project(*names, out="qkv")
    for block, name in enumerate(("q_norm", "k_norm")):
        weight = graph.weight(Weight(f"{own}.{name}.weight", tuple(
            Part(f"{own}.{name}.weight", quarter, None, index * quarter, dim) for index in order)))
        graph.op("head_norm", qkv, weights=(weight,), block=block, head_dim=dim, eps=config.rms_norm_eps)
    graph.head_norm(qkv, 2)
    attended = graph.span_attention(graph.rope(qkv), layer, scale=1.0)
    return _clipped_output(graph, attended, f"{own}.o_proj", graph.q_heads)


def _gemma4_mlp(graph: Graph, x: Tensor, prefix: str) -> Tensor:
    """The MLP with its norm."""
    own, hidden = f"{prefix}.mlp", graph.config.hidden_size
    halves = []
    if graph.config.vision and graph.config.vision.clipped:
        for name in ("gate_proj", "up_proj"):
            h = graph.rms_norm(x, f"{prefix}.pre_feedforward_layernorm.weight")
            _limited(graph, h, f"{own}.{name}", "input")
            weight = graph.matrix(f"{own}.{name}.linear.weight", graph.config.intermediate_size, hidden,
                                  row_split=graph.intermediate)
            halves.append(_limited(graph, graph.linear(h, weight, None, out=name), f"{own}.{name}", "output"))
        activated = graph.multiply(graph.activate(halves[0], "gelu_tanh"), halves[1])
    else:
        h = graph.rms_norm(x, f"{prefix}.pre_feedforward_layernorm.weight")
        weight, _ = graph.packed(own, ("gate_proj.linear", "up_proj.linear"), (graph.intermediate,) * 2, hidden, False)
        activated = graph.gelu_tanh_mul(graph.linear(h, weight, None, out="gate_up"))
    return _clipped_output(graph, activated, f"{own}.down_proj", graph.intermediate)


def _limited(graph: Graph, x: Tensor, name: str, end: str) -> Tensor:
    """Clamps the input or output of the linear layer `name`, in place, if its checkpoint has limits."""
    clipped = graph.config.vision is not None and graph.config.vision.clipped
    return graph.clamp(x, f"{name}.{end}_min", f"{name}.{end}_max") if clipped else x


def _clipped_output(graph: Graph, x: Tensor, name: str, split: Split) -> Tensor:
    y = graph.row_parallel_linear(_limited(graph, x, name, "input"), f"{name}.linear", split, False, "branch")
    return _limited(graph, y, name, "output")


# -- LLaVA -------------------------------------------------------------------------------------------------------------
def _llava(config: ModelConfig) -> Graph:
    """LLaVA's tower: CLIP or SigLIP up to a chosen layer, and a projector of two layers. CLIP has a class token before
    the patches. Its row is given as zeros, to which its embedding is added.
    """
    vision = config.vision
    assert vision is not None
    graph = Graph(config)
    x = _embed_patches(graph, "embeddings.patch_embedding", vision.patch_bias)
    if vision.leading:
        count, width = vision.leading + vision.side ** 2, config.hidden_size
        tables = (graph.vector("embeddings.position_embedding.weight", count * width),
                  graph.vector("embeddings.class_embedding", 2 * width))
        # The second table has the class token's embedding, which an image's first row gets, and zeros for other rows.
        graph.op("position_embedding", x, weights=tables, positions=count, separator=0)
        x = graph.layer_norm(x, "pre_layrnorm", "rows")
    else:
        _add_positions(graph, x, "embeddings.position_embedding.weight", vision)
    for layer in range(config.num_layers):
        _siglip_layer(graph, x, f"encoder.layers.{layer}", layer, vision.activation)
    return _projected(graph, graph.op("merge_rows", x, out="merged", count=1, how="concat"), vision)


BUILDERS = {"llava": _llava, "qwen": _qwen, "pixtral": _pixtral, "siglip": _siglip, "gemma4": _gemma4}


def _size(fields: Fields, name: str, default: int, most: int = MAX_SIZE) -> int:
    value = fields.get(name, int, default)
    if not 0 < value <= most:
        raise fields.error(name, f"is {value!r}: it must be positive and at most {most}")
    return value


def _even_heads(own: Fields, hidden: int, heads: int) -> tuple[int, int]:
    """The features and the heads of a layer; the defaults are given."""
    hidden, heads = _size(own, "hidden_size", hidden), _size(own, "num_attention_heads", heads)
    if hidden % heads or hidden // heads % 2:
        raise own.error("num_attention_heads", f"is {heads}: they must divide {hidden} features into even parts")
    return hidden, heads


def _check_projector(fields: Fields) -> None:
    if fields.get("projector_hidden_act", str, "gelu") != "gelu":
        raise fields.error("projector_hidden_act", "is not 'gelu', which alone is served")


def tower_config(architecture: str, vision: VisionConfig, *, hidden: int, intermediate: int, layers: int, heads: int,
                 eps: float, head_dim: int = 0, theta: float = 10_000.0) -> ModelConfig:
    """The description of a tower's layers."""
    return ModelConfig(
        architecture=f"{architecture} (vision tower)", hidden_size=hidden, intermediate_size=intermediate,
        num_layers=layers, num_heads=heads, num_kv_heads=heads, head_dim=head_dim or hidden // heads, vocab_size=1,
        rms_norm_eps=eps, max_position_embeddings=MAX_PATCHES, rope=RopeConfig(theta=theta),
        encoder=EncoderConfig("mean"), vision=vision).checked()


def qwen_tower(fields: Fields, architecture: str, kind: str) -> ModelConfig:
    """The tower of a Qwen checkpoint by its vision_config. kind: "qwen2", "qwen2.5" or "qwen3" (also Qwen3.5)."""
    own = fields.inner("vision_config")
    layers = _size(own, "depth", {"qwen3": 27}.get(kind, 32), MAX_LAYERS)
    heads = _size(own, "num_heads", 16)
    hidden = _size(own, "embed_dim", 1280) if kind == "qwen2" else _size(own, "hidden_size",
                                                                         1152 if kind == "qwen3" else 3584)
    if hidden % heads or hidden // heads % 4 or hidden // heads > MAX_HEAD_DIM:
        raise own.error("num_heads", f"is {heads}: heads of {hidden} features must divide them into multiples of 4")
    size = _size(own, "patch_size", 16 if kind == "qwen3" else 14, 1024)
    channels = own.get("in_channels", int, own.get("in_chans", int, 3))
    if channels != 3:
        raise own.error("in_channels", f"is {channels}: only images of 3 channels are served")
    patch = channels * _size(own, "temporal_patch_size", 2, 64) * size * size
    merge = _size(own, "spatial_merge_size", 2, 16) ** 2
    activation = own.get("hidden_act", str, {"qwen2": "quick_gelu", "qwen2.5": "silu"}.get(kind, "gelu_pytorch_tanh"))
    served = {"qwen2": {"quick_gelu": "quick_gelu"}, "qwen2.5": {"silu": ""},
              "qwen3": {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}}[kind]
    if activation not in served:
        raise own.error("hidden_act", f"is {activation!r}: served is {' or '.join(served)}")
    common: dict[str, Any] = {"patch": patch, "merge": merge, "activation": served[activation]}
    if kind == "qwen2":
        vision = VisionConfig(outputs=_size(own, "hidden_size", 3584), **common)
        intermediate = int(hidden * own.get("mlp_ratio", float, 4.0))
    elif kind == "qwen2.5":
        whole = tuple(own.get("fullatt_block_indexes", list, [7, 15, 23, 31]))
        vision = VisionConfig(outputs=_size(own, "out_hidden_size", 3584), norm="rms", whole=whole,
                              window=_size(own, "window_size", 112) // size, **common)
        intermediate = _size(own, "intermediate_size", 3420)
    else:
        count = _size(own, "num_position_embeddings", 2304)
        side = int(count ** 0.5 + 0.5)
        if side * side != count:
            raise own.error("num_position_embeddings", f"is {count}: expected the square of a number")
        taps = tuple(own.get("deepstack_visual_indexes", list, []))
        if any(not isinstance(tap, int) or not 0 <= tap < layers for tap in taps):
            raise own.error("deepstack_visual_indexes", f"is {list(taps)}: expected layers of 0 to {layers - 1}")
        vision = VisionConfig(outputs=_size(own, "out_hidden_size", 3584), side=side, taps=taps, patch_bias=True,
                              **common)
        intermediate = _size(own, "intermediate_size", 4304)
    return tower_config(architecture, vision, hidden=hidden, intermediate=intermediate, layers=layers, heads=heads,
                        eps=1e-6)


def pixtral_tower(fields: Fields, architecture: str) -> ModelConfig:
    """The tower of a Pixtral or Mistral 3 checkpoint by its vision_config and the fields beside it."""
    own = fields.inner("vision_config")
    text = fields.inner("text_config")
    if own.get("model_type", str, "pixtral") != "pixtral":
        raise own.error("model_type", f"is {own.values['model_type']!r}: only 'pixtral' is served")
    if fields.get("vision_feature_layer", int, -1) != -1:
        raise fields.error("vision_feature_layer", f"is {fields.values['vision_feature_layer']}: only -1 is served")
    _check_projector(fields)
    activation = own.get("hidden_act", str, "gelu")
    if activation not in ("gelu", "silu"):
        raise own.error("hidden_act", f"is {activation!r}: served are gelu and silu")
    hidden, heads = _size(own, "hidden_size", 1024), _size(own, "num_attention_heads", 16)
    head_dim = _size(own, "head_dim", hidden // heads, MAX_HEAD_DIM)
    if head_dim % 4:
        raise own.error("head_dim", f"is {head_dim}: it must be a multiple of 4")
    merges = "spatial_merge_size" in fields.values or fields.get("model_type", str) == "mistral3"
    size = _size(own, "patch_size", 16, 1024)
    vision = VisionConfig(
        patch=3 * size * size, merge=_size(fields, "spatial_merge_size", 2, 16) ** 2 if merges else 1,
        outputs=_size(text, "hidden_size", 4096), norm="rms", family="pixtral",
        activation="gelu" if activation == "gelu" else "",
        projector_bias=fields.get("multimodal_projector_bias", bool, not merges),
        merger_eps=text.get("rms_norm_eps", float, 1e-6))
    rope = own.inner("rope_parameters", {})
    return tower_config(architecture, vision, hidden=hidden, intermediate=_size(own, "intermediate_size", 4096),
                        layers=_size(own, "num_hidden_layers", 24, MAX_LAYERS), heads=heads, eps=1e-5,
                        head_dim=head_dim, theta=rope.get("rope_theta", float, own.get("rope_theta", float, 10_000.0)))


def siglip_tower(fields: Fields) -> ModelConfig:
    """The tower of a Gemma 3 checkpoint by its vision_config and the fields beside it."""
    own = fields.inner("vision_config")
    text = fields.inner("text_config")
    if own.get("hidden_act", str, "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise own.error("hidden_act", f"is {own.values['hidden_act']!r}: only gelu_pytorch_tanh is served")
    hidden, heads = _even_heads(own, 768, 12)
    size = _size(own, "patch_size", 16, 1024)
    side, tokens = _size(own, "image_size", 224) // size, _size(fields, "mm_tokens_per_image", 256)
    across = math.isqrt(tokens)
    if across * across != tokens or side % across:
        raise fields.error("mm_tokens_per_image", f"is {tokens}: expected the square of a number that divides {side}, "
                                                  "the patches along a side of an image")
    eps = own.get("layer_norm_eps", float, 1e-6)
    vision = VisionConfig(
        patch=3 * size * size, merge=(side // across) ** 2, outputs=_size(text, "hidden_size", 2304), side=side,
        patch_bias=True, tokens=tokens, together=True, family="siglip", merger_eps=eps)
    window = text.get("sliding_window", int, 4096)
    if window < tokens:
        raise text.error("sliding_window", f"is {window}, less than the {tokens} tokens of an image")
    return tower_config("Gemma3ForConditionalGeneration", vision, hidden=hidden,
                        intermediate=_size(own, "intermediate_size", 3072),
                        layers=_size(own, "num_hidden_layers", 12, MAX_LAYERS), heads=heads, eps=eps)


def gemma4_tower(fields: Fields) -> ModelConfig:
    """The tower of a Gemma 4 checkpoint by its vision_config and the fields beside it. The largest image is that of its
    image processor.
    """
    from allspark_server.images.gemma import soft_tokens
    from allspark_server.images.settings import read_settings

    own, text = fields.inner("vision_config"), fields.inner("text_config")
    if own.get("hidden_activation", str, "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise own.error("hidden_activation", f"is {own.values['hidden_activation']!r}: only gelu_pytorch_tanh is "
                                             "served")
    hidden, heads = _size(own, "hidden_size", 768), _size(own, "num_attention_heads", 12)
    if own.get("num_key_value_heads", int, heads) != heads:
        raise own.error("num_key_value_heads", f"is {own.values['num_key_value_heads']}: only as many as "
                                               f"num_attention_heads, {heads}, are served")
    if own.get("attention_bias", bool, False):
        raise own.error("attention_bias", "is true: only towers without biases are served")
    head_dim = _size(own, "head_dim", 64, MAX_HEAD_DIM)
    if head_dim % 4:
        raise own.error("head_dim", f"is {head_dim}: it must be a multiple of 4")
    rope = own.inner("rope_parameters", {})
    if rope.get("rope_type", str, "axial") != "axial":
        raise rope.error("rope_type", f"is {rope.values['rope_type']!r}: only 'axial' is served")
    size, pool = _size(own, "patch_size", 16, 1024), _size(own, "pooling_kernel_size", 3, 16)
    rows, most = _size(own, "position_embedding_size", 10_240), soft_tokens(read_settings(fields.path.parent))
    vision = VisionConfig(
        patch=3 * size * size, merge=pool * pool, outputs=_size(text, "hidden_size", 2304), rows=rows,
        side=min(rows, most * pool, 4096), norm="rms", family="gemma4", most=most,
        clipped=own.get("use_clipped_linears", bool, False), standardized=own.get("standardize", bool, False),
        together=text.get("use_bidirectional_attention", str) == "vision")
    return tower_config("Gemma4ForConditionalGeneration", vision, hidden=hidden,
                        intermediate=_size(own, "intermediate_size", 3072), head_dim=head_dim,
                        layers=_size(own, "num_hidden_layers", 16, MAX_LAYERS), heads=heads,
                        eps=own.get("rms_norm_eps", float, 1e-6), theta=rope.get("rope_theta", float, 100.0))


#: of LLaVA's towers by their model_type: transformers' defaults of sizes, and the activations, the default first
_LLAVA_TOWERS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "clip_vision_model": ({"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
                           "image_size": 336, "intermediate_size": 4096, "layer_norm_eps": 1e-5},
                          {"quick_gelu": "quick_gelu", "gelu": "gelu"}),
    "siglip_vision_model": ({"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "patch_size": 16,
                             "image_size": 224, "intermediate_size": 3072, "layer_norm_eps": 1e-6},
                            {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}),
}


def llava_tower(fields: Fields, architecture: str) -> ModelConfig:
    """The tower of a LLaVA checkpoint by its vision_config and the fields beside it."""
    own, text = fields.inner("vision_config"), fields.inner("text_config")
    kind = own.get("model_type", str, "clip_vision_model")
    if kind not in _LLAVA_TOWERS:
        raise own.error("model_type", f"is {kind!r}: served are {', '.join(map(repr, _LLAVA_TOWERS))} and, of LLaVA, "
                                      "'pixtral'")
    _check_projector(fields)
    defaults, activations = _LLAVA_TOWERS[kind]
    # With CLIP the rows of the class token are left out; SigLIP has none.
    leading, selected = (1, "default") if kind == "clip_vision_model" else (0, "full")
    if fields.get("vision_feature_select_strategy", str, "default") != selected:
        raise fields.error("vision_feature_select_strategy", f"is not {selected!r}, which alone is served with {kind}")
    activation = own.get("hidden_act", str, next(iter(activations)))
    if activation not in activations:
        raise own.error("hidden_act", f"is {activation!r}: served are {' and '.join(activations)}")
    hidden, heads = _even_heads(own, defaults["hidden_size"], defaults["num_attention_heads"])
    layers = _size(own, "num_hidden_layers", defaults["num_hidden_layers"], MAX_LAYERS)
    kept = fields.values.get("vision_feature_layer", -2)
    if not isinstance(kept, int) or not -layers <= kept <= layers or kept == 0:
        raise fields.error("vision_feature_layer", f"is {kept!r}: expected one layer of {layers}, such as -2")
    size = _size(own, "patch_size", defaults["patch_size"], 1024)
    side = _size(own, "image_size", defaults["image_size"]) // size
    vision = VisionConfig(
        patch=3 * size * size, merge=1, outputs=_size(text, "hidden_size", 4096), side=side, leading=leading,
        activation=activations[activation], family="llava", tokens=leading + side * side, patch_bias=not leading,
        projector_bias=fields.get("multimodal_projector_bias", bool, True))
    return tower_config(architecture, vision, hidden=hidden,
                        intermediate=_size(own, "intermediate_size", defaults["intermediate_size"]),
                        layers=kept if kept > 0 else layers + 1 + kept, heads=heads,
                        eps=own.get("layer_norm_eps", float, defaults["layer_norm_eps"]))
