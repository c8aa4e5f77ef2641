"""Reads the fields of config.json that describe routed experts."""

from __future__ import annotations

from allspark_server.models.fields import MAX_EXPERTS, Fields
from allspark_server.models.network import ExpertConfig


def routed(fields: Fields, *, intermediate: str, normalized: bool, shared: int = 0,
           dense: tuple[int, ...] = ()) -> ExpertConfig:
    """`intermediate` names the field with the intermediate size of an expert."""
    name = "num_experts" if fields.get("num_experts", int) is not None else "num_local_experts"
    count = fields.need_positive(name, most=MAX_EXPERTS)
    return ExpertConfig(count, fields.need_positive("num_experts_per_tok", most=count),
                        fields.need_positive(intermediate), normalized, shared, dense)


def mixtral_experts(fields: Fields, layers: int) -> ExpertConfig:
    """Experts in every layer; the weights of a token's experts add up to 1."""
    return routed(fields, intermediate="intermediate_size", normalized=True)


def qwen_experts(fields: Fields, layers: int, shared: int = 0) -> ExpertConfig:
    """Experts in every decoder_sparse_step-th layer but those of mlp_only_layers."""
    step, only = fields.get("decoder_sparse_step", int, 1), fields.get("mlp_only_layers", list, [])
    if step < 1:
        raise fields.error("decoder_sparse_step", f"is {step}: it must be positive")
    if not all(isinstance(layer, int) for layer in only):
        raise fields.error("mlp_only_layers", f"is {only!r}: expected numbers of layers")
    dense = tuple(layer for layer in range(layers) if layer in only or (layer + 1) % step)
    return routed(fields, intermediate="moe_intermediate_size", normalized=fields.get("norm_topk_prob", bool, False),
                  shared=shared, dense=dense)
