"""The registry of model families. A new family is a file in this folder and its name in `FAMILIES`."""

from __future__ import annotations

from allspark_server.models import (
    afmoe,
    arcee,
    baichuan,
    bamba,
    bert,
    chatglm,
    deepseek,
    deepseek_v4,
    dots1,
    ernie,
    ernie_moe,
    exaone4,
    exaone_moe,
    falcon_h1,
    gemma,
    gemma4,
    glm,
    glm4_moe,
    glm5_next,
    gpt_oss,
    granite,
    granite_hybrid,
    gte,
    hunyuan,
    kimi_linear,
    lfm2,
    llama,
    mimo,
    minimax,
    mixtral,
    modernbert,
    nemotron_h,
    olmo2,
    olmoe,
    phi3,
    pixtral,
    qwen,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    qwen_vl,
    seed_oss,
)
from allspark_server.models.architecture import Architecture
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig

FAMILIES = (qwen2, mimo, qwen3, llama, qwen2_moe, qwen3_moe, qwen_vl, qwen3_next, lfm2, nemotron_h, mixtral, gpt_oss,
            phi3, glm, glm4_moe, deepseek, deepseek_v4, kimi_linear, glm5_next, dots1, minimax, gemma, gemma4, olmo2,
            olmoe, exaone4, exaone_moe, arcee, afmoe, seed_oss, granite, granite_hybrid, bamba, falcon_h1, ernie,
            ernie_moe, hunyuan, qwen, chatglm, baichuan, pixtral, bert, modernbert, gte)

ARCHITECTURES: dict[str, Architecture] = {
    name: architecture for family in FAMILIES for name, architecture in family.ARCHITECTURES.items()
}


def build_graph(config: ModelConfig) -> Graph:
    """The op list of a model. config.architecture is a key of ARCHITECTURES, which read_config has checked."""
    return ARCHITECTURES[config.architecture].build(config)


def known_architectures() -> str:
    """The names of all served architectures, separated by commas."""
    return ", ".join(ARCHITECTURES)


def served_table() -> str:
    """The table of served models, in Markdown."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, architecture in ARCHITECTURES.items():
        rows.setdefault((architecture.served, architecture.checked), []).append(f"`{name}`")
    lines = ["| Family | config.json's `architectures` | Logits and greedy output checked against |",
             "| --- | --- | --- |"]
    lines += [f"| {served} | {', '.join(names)} | {checked} |" for (served, checked), names in rows.items()]
    return "\n".join(lines) + "\n"
