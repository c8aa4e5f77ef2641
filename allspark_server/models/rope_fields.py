"""Reads the rotary embedding of a config.json: `rope_parameters` (transformers 5, nested by kind of layer where they
differ) or `rope_theta` and `rope_scaling` (transformers 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from allspark_server.models.fields import MAX_POSITIONS, MAX_SIZE, Fields
from allspark_server.models.network import PLAIN_ROPE_TYPES, RopeConfig

FULL, SLIDING = "full_attention", "sliding_attention"
LONGROPE_ALIASES = ("su",)  # the name in the first Phi-3 checkpoints


def read_rope(fields: Fields, head_dim: int, default_theta: float, partial: float | None = None,
              kinds: Sequence[str] = PLAIN_ROPE_TYPES) -> RopeConfig:
    """The rotary embedding; where layers differ, that of the layers with full attention.

    partial: default part of a head's features that is rotated; None if only 1 is allowed. kinds: the scaling types that
    the architecture supports.
    """
    name = "rope_scaling" if fields.get("rope_scaling", dict) else "rope_parameters"
    values = fields.get(name, dict, {})
    if isinstance(values.get(FULL), dict):
        name, values = f"{name}.{FULL}", values[FULL]
    rope = Fields(values, fields.path, f"{name}.")
    kind = rope.get("rope_type", str) or rope.get("type", str, "default")
    kind = "longrope" if kind in LONGROPE_ALIASES else "default" if kind == "mrope" else kind
    if kind not in kinds:
        raise rope.error("rope_type", f"is {kind!r}: known types are {', '.join(kinds)}")
    theta = rope.get("rope_theta", float, fields.get("rope_theta", float, default_theta))
    if not theta > 0:
        raise rope.error("rope_theta", f"is {theta}: it must be positive")
    if kind == "proportional":
        return _proportional(fields, rope, theta)
    common: dict[str, Any] = {"theta": theta, "dim": _rotated(fields, rope, head_dim, partial)}
    common |= _sections(rope, (common["dim"] or head_dim) // 2)
    if kind == "default":
        return RopeConfig(**common)
    original = max_positions = fields.need_positive("max_position_embeddings", most=MAX_POSITIONS)
    if kind in ("llama3", "yarn", "longrope"):
        original = fields.get("original_max_position_embeddings", int,
                              rope.get("original_max_position_embeddings", int,
                                       None if kind == "longrope" else max_positions))
        if original is None:
            raise rope.error("original_max_position_embeddings", "is missing: expected int")
        if not 0 < original <= MAX_POSITIONS:
            raise rope.error("original_max_position_embeddings", f"is {original}: it must be positive")
    if kind in ("yarn", "longrope") and rope.get("factor", float) is None:
        factor = max_positions / original
    else:
        factor = rope.need_positive("factor", float)
    llama3 = kind == "llama3"
    if kind == "longrope":
        pairs = (common["dim"] or head_dim) // 2
        common |= {f"{n}_factors": _factors(rope, f"{n}_factor", pairs) for n in ("short", "long")}
    return RopeConfig(
        type=kind, factor=factor, original_max=original,
        low_freq_factor=rope.need_positive("low_freq_factor", float) if llama3 else 0.0,
        high_freq_factor=rope.need_positive("high_freq_factor", float) if llama3 else 0.0,
        attention_factor=rope.get("attention_factor", float),
        beta_fast=rope.get("beta_fast", float) or RopeConfig.beta_fast,
        beta_slow=rope.get("beta_slow", float) or RopeConfig.beta_slow, mscale=rope.get("mscale", float, 0.0),
        mscale_all_dim=rope.get("mscale_all_dim", float, 0.0), truncate=rope.get("truncate", bool, True), **common)


def _sections(rope: Fields, pairs: int) -> dict[str, Any]:
    """How pairs are divided among time, height and width of a position; {} if they are not."""
    sections = rope.get("mrope_section", list)
    if sections is None:
        return {}
    right = len(sections) == 3 and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sections)
    if not right or sum(sections) != pairs:
        raise rope.error("mrope_section", f"is {sections!r}: expected three numbers of pairs that add up to {pairs}")
    return {"sections": tuple(sections), "interleaved": rope.get("mrope_interleaved", bool, False)}


def _proportional(fields: Fields, rope: Fields, theta: float) -> RopeConfig:
    part = rope.get("partial_rotary_factor", float, 1.0)
    if not 0 < part <= 1:
        raise rope.error("partial_rotary_factor", f"is {part}: it must be positive and at most 1")
    factor = rope.need_positive("factor", float) if "factor" in rope.values else 1.0
    return RopeConfig("proportional", theta, factor, part=part,
                      original_max=fields.need_positive("max_position_embeddings", most=MAX_POSITIONS))


def _rotated(fields: Fields, rope: Fields, head_dim: int, partial: float | None) -> int:
    """How many features of a head are rotated; 0: all."""
    part = rope.get("partial_rotary_factor", float, fields.get("partial_rotary_factor", float, partial or 1.0))
    if part == 1.0:
        return 0
    if partial is None:
        raise rope.error("partial_rotary_factor", f"is {part}: only 1.0 is supported")
    dim = int(head_dim * part)
    if not 0 < dim <= head_dim or dim % 2:
        raise rope.error("partial_rotary_factor", f"is {part}: of head_dim {head_dim} it rotates {dim} features, which "
                                                  f"must be even and from 2 to {head_dim}")
    return dim


def _factors(rope: Fields, name: str, pairs: int) -> tuple[float, ...]:
    factors = rope.need(name, list)
    if len(factors) != pairs:
        raise rope.error(name, f"holds {len(factors)} numbers: expected {pairs}, one for each pair of rotated features")
    each = Fields({f"{name}[{i}]": value for i, value in enumerate(factors)}, rope.path, rope.prefix)
    return tuple(each.need_positive(n, float, most=MAX_SIZE) for n in each.values)


def sliding_rope(fields: Fields, default_theta: float) -> RopeConfig:
    """The rotary embedding of layers with a window, which has no scaling: from `rope_parameters.sliding_attention`
    (transformers 5) or `rope_local_base_freq` (transformers 4).
    """
    values = fields.get("rope_parameters", dict, {}).get(SLIDING)
    if not isinstance(values, dict):
        return RopeConfig(theta=fields.need_positive("rope_local_base_freq", float)
                          if "rope_local_base_freq" in fields.values else default_theta)
    rope = Fields(values, fields.path, f"rope_parameters.{SLIDING}.")
    kind = rope.get("rope_type", str, "default")
    if kind != "default":
        raise rope.error("rope_type", f"is {kind!r}: layers with a window support only 'default'")
    return RopeConfig(theta=rope.get("rope_theta", float, default_theta))


def rescaled(fields: Fields, rope_scaling: dict[str, Any], read: Callable[[Fields], RopeConfig]) -> Fields:
    """The same config.json with another rotary scaling; max_position_embeddings grows to the scaled length."""
    old = fields.get("rope_parameters", dict, {})
    kept = {name: old[name] for name in (SLIDING, "partial_rotary_factor") if name in old}
    values = {**fields.values, "rope_scaling": {"rope_theta": read(fields).theta, **kept, **rope_scaling},
              "rope_parameters": kept}
    values.pop("original_max_position_embeddings", None)
    fields = Fields(values, fields.path)
    if rope_scaling.get("type", rope_scaling.get("rope_type")) == "yarn":
        rope = read(fields)
        values["max_position_embeddings"] = max(values["max_position_embeddings"],
                                                round(rope.original_max * rope.factor))
    return fields
