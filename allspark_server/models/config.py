"""Reads config.json of a Hugging Face checkpoint, as transformers 4 and 5 write it, into a `ModelConfig`.

Nothing is guessed. A missing field that the architecture needs is an error that names field and file; so is a feature
that the model files do not support (a sliding window where none is served, another activation, quantized weights).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.architecture import Architecture
from allspark_server.models.fields import MAX_LAYERS, MAX_POSITIONS, Fields
from allspark_server.models.network import ModelConfig, RopeConfig
from allspark_server.models.registry import ARCHITECTURES, known_architectures
from allspark_server.models.rope_fields import read_rope, rescaled, sliding_rope
from allspark_server.models.sentence_modules import read_modules
from allspark_server.weights.files import read_json


def read_config(directory: str | Path, rope_scaling: dict[str, Any] | None = None) -> ModelConfig:
    """Reads config.json (and the end-of-sequence ids of generation_config.json) of a checkpoint directory.

    rope_scaling: replaces the field of that name; {} for no scaling. AllSparkError names the field that is wrong.
    """
    directory = Path(directory)
    fields = Fields(read_json(directory / "config.json"), directory / "config.json")
    config = config_of(fields, _eos_token_ids(fields, directory), rope_scaling)
    if (compared := read_modules(directory).compared) and max(compared) >= config.vocab_size:
        raise fields.error("vocab_size", f"is {config.vocab_size}, but the checkpoint's LogitScore has the tokens "
                                         f"{', '.join(map(str, compared))}")
    return replace(config, compared=compared)


def config_of(fields: Fields, eos_token_ids: tuple[int, ...],
              rope_scaling: dict[str, Any] | None = None) -> ModelConfig:
    """The network that the fields of a config.json describe."""
    name, architecture = _architecture(fields)
    sees = architecture.tower is not None and fields.get("vision_config", dict) is not None
    tower = architecture.tower(fields) if architecture.tower is not None and sees else None
    if architecture.translate is not None:
        fields = architecture.translate(fields)
    _refuse_unsupported(fields, architecture)
    hidden, heads = fields.need_positive("hidden_size"), fields.need_positive("num_attention_heads")
    if architecture.kv_heads_required:
        kv_heads = fields.need_positive("num_key_value_heads")
    else:
        kv_heads = fields.get("num_key_value_heads", int, heads)
    if kv_heads < 1 or heads % kv_heads:
        raise fields.error("num_key_value_heads", f"is {kv_heads}: it must divide num_attention_heads ({heads})")
    head_dim = _head_dim(fields, architecture, hidden, heads)

    def rope_of(fields: Fields) -> RopeConfig:
        return read_rope(fields, head_dim, architecture.rope_theta, architecture.partial_rotary,
                         architecture.rope_types)

    if rope_scaling is not None:
        fields = rescaled(fields, rope_scaling, rope_of)
    layers = fields.need_positive("num_hidden_layers", most=MAX_LAYERS)
    more: dict[str, Any] = {"rope": rope_of(fields), **(architecture.more(fields) if architecture.more else {})}
    if tower is not None:
        more["tower"] = tower
    if architecture.windows:
        more |= _layer_kinds(fields, architecture)
    if architecture.local_theta is not None:
        more["local_rope"] = sliding_rope(fields, architecture.local_theta or more["rope"].theta)
    config = ModelConfig(
        architecture=name, hidden_size=hidden, intermediate_size=fields.need_positive("intermediate_size"),
        num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        vocab_size=fields.need_positive("vocab_size"), rms_norm_eps=fields.need_positive("rms_norm_eps", float),
        max_position_embeddings=fields.need_positive("max_position_embeddings", most=MAX_POSITIONS),
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, architecture.tied),
        attention_bias=(fields.get("qkv_bias", bool, True) if architecture.qkv_bias_field else
                        architecture.has_bias_fields and fields.get("attention_bias", bool,
                                                                    architecture.attention_bias)),
        mlp_bias=architecture.has_bias_fields and fields.get("mlp_bias", bool, False),
        eos_token_ids=eos_token_ids,
        experts=architecture.experts and architecture.experts(fields, layers), **more)
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


def _head_dim(fields: Fields, architecture: Architecture, hidden: int, heads: int) -> int:
    head_dim = fields.get("head_dim", int, architecture.head_dim)
    if head_dim is None:
        if hidden % heads:
            raise fields.error("hidden_size", f"is {hidden}: without a head_dim it must be a multiple of "
                                              f"num_attention_heads ({heads})")
        head_dim = hidden // heads
    if head_dim < 2 or head_dim % 2:
        raise fields.error("head_dim", f"is {head_dim}: the rotary embedding needs an even, positive number")
    return head_dim


def _layer_kinds(fields: Fields, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The windows of the layers, and the layers without rotary embedding."""
    count = fields.need_positive("num_hidden_layers", most=MAX_LAYERS)
    rotated = [1] * count
    if architecture.nope_layers:
        interval = fields.get("no_rope_layer_interval", int, 4)
        if interval < 1:
            raise fields.error("no_rope_layer_interval", f"is {interval}: it must be positive")
        rotated = fields.get("no_rope_layers", list, [int((i + 1) % interval != 0) for i in range(count)])
        if len(rotated) < count or any(flag not in (0, 1) for flag in rotated):
            raise fields.error("no_rope_layers", f"must hold 0 or 1 for each of {count} layers")
    width = fields.get("sliding_window", int) if "sliding_window" in fields.values else architecture.window
    if width is not None and not 0 < width <= MAX_POSITIONS:
        raise fields.error("sliding_window", f"is {width}: it must be positive and at most {MAX_POSITIONS}")
    types = fields.get("layer_types", list) if architecture.layer_types else None
    if types is None and architecture.nope_layers:
        slides = fields.get("use_sliding_window", bool, False)
        types = ["sliding_attention" if slides and width and not flag else "full_attention" for flag in rotated]
    if types is None and architecture.window_pattern:
        pattern = fields.get("sliding_window_pattern", int, architecture.window_pattern)
        if pattern < 1:
            raise fields.error("sliding_window_pattern", f"is {pattern}: it must be positive")
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]
    types = types or ["sliding_attention" if width else "full_attention"] * count
    unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if unknown or len(types) != count:
        raise fields.error("layer_types", f"holds {len(types)} layers{' of ' + ', '.join(unknown) if unknown else ''}: "
                                          f"expected {count} of full_attention or sliding_attention")
    if width is None and "sliding_attention" in types:
        raise fields.error("sliding_window", "is missing: layer_types holds sliding_attention")
    if architecture.nope_globals and width:
        rotated = [int(kind == "sliding_attention") for kind in types]
    windows = tuple(int(width or 0) if kind == "sliding_attention" else 0 for kind in types)
    return {"windows": windows if any(windows) else (),
            "unrotated": tuple(i for i in range(count) if not rotated[i])}


def _refuse_unsupported(fields: Fields, architecture: Architecture) -> None:
    name = "hidden_activation" if fields.get("hidden_activation", str) else "hidden_act"
    activation = fields.get(name, str, architecture.activation[0])
    if activation not in architecture.activation:
        raise fields.error(name, f"is {activation!r}: only {architecture.activation[0]!r} is supported")
    if architecture.windows:
        return
    layers = fields.need_positive("num_hidden_layers", most=MAX_LAYERS)
    types = fields.get("layer_types", list, []) if architecture.layer_types else []
    sliding = sorted({str(kind) for kind in types} - {"full_attention"})
    if sliding:
        raise fields.error("layer_types", f"holds {', '.join(sliding)}: only full_attention is supported, "
                                          "a sliding window is not available yet")
    # In models with experts the window applies to every layer, or to layers that config.json does not name.
    used = fields.get("use_sliding_window", bool, architecture.window_always)
    if architecture.experts and used and fields.get("sliding_window", int):
        raise fields.error("sliding_window", f"is {fields.values['sliding_window']}: a sliding window is not available "
                                             "yet")
    uses_window = fields.get("use_sliding_window", bool, False) and fields.get("sliding_window", int) is not None
    if not types and uses_window and fields.get("max_window_layers", int, layers) < layers:
        width, first = fields.values["sliding_window"], fields.values["max_window_layers"]
        raise fields.error("use_sliding_window", f"is true with sliding_window={width} from layer {first}: a sliding "
                                                 "window is not available yet")


def _eos_token_ids(fields: Fields, directory: Path) -> tuple[int, ...]:
    """The ids of generation_config.json if it has some, otherwise those of config.json, as in transformers'
    generate.
    """
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
