"""Reads the fields of config.json that describe routed experts."""

from __future__ import annotations

from typing import Any

from allspark_server.models.fields import MAX_EXPERTS, Fields
from allspark_server.models.network import ExpertConfig


def routed(fields: Fields, *, intermediate: str, normalized: bool, shared: int = 0, dense: tuple[int, ...] = (),
           number: str = "", per_token: str = "num_experts_per_tok", **router: Any) -> ExpertConfig:
    """`intermediate`, `number` and `per_token` name the fields with the intermediate size of an expert, the number of
    experts and how many of them compute a token. `router`: further fields of ExpertConfig.
    """
    number = number or ("num_experts" if fields.get("num_experts", int) is not None else "num_local_experts")
    count = fields.need_positive(number, most=MAX_EXPERTS)
    return ExpertConfig(count, fields.need_positive(per_token, most=count),
                        fields.need_positive(intermediate), normalized, shared, dense, **router)


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


def grouped_experts(fields: Fields, layers: int) -> ExpertConfig:
    """As in DeepSeek-V3: first_k_dense_replace layers without experts, then n_routed_experts in n_group groups, of
    which topk_group are chosen, and n_shared_experts for every token.
    """
    dense, groups, chosen = (fields.get(name, int, 1) for name in ("first_k_dense_replace", "n_group", "topk_group"))
    count, size = (fields.need_positive(name) for name in ("n_routed_experts", "moe_intermediate_size"))
    if dense < 0:
        raise fields.error("first_k_dense_replace", f"is {dense}: it must not be negative")
    if groups < 1 or count % groups:
        raise fields.error("n_group", f"is {groups}: it must divide n_routed_experts ({count})")
    if not 0 < chosen <= groups:
        raise fields.error("topk_group", f"is {chosen}: it must be from 1 to n_group ({groups})")
    per_token = fields.need_positive("num_experts_per_tok")
    if per_token > count // groups * chosen:
        raise fields.error("num_experts_per_tok", f"is {per_token}: topk_group groups have "
                                                  f"{count // groups * chosen} experts")
    shared = fields.get("n_shared_experts", int, 1)
    if not 0 <= shared <= MAX_EXPERTS:
        raise fields.error("n_shared_experts", f"is {shared}: it must be from 0 to {MAX_EXPERTS}")
    return routed(fields, intermediate="moe_intermediate_size", number="n_routed_experts",
                  normalized=fields.get("norm_topk_prob", bool, True), shared=shared * size,
                  dense=tuple(range(min(dense, layers))), scores="sigmoid", groups=groups, top_groups=chosen,
                  scale=fields.need_positive("routed_scaling_factor", float)
                  if "routed_scaling_factor" in fields.values else 1.0)
