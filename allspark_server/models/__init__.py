"""The networks, as op lists: one short file an architecture, the graph they build, and config.json.

Nothing here touches weights; of native code only the table of ops is read. A new architecture is a model file, an entry
in `config.ARCHITECTURES` (its config.json) and one in `MODELS`.
"""

from __future__ import annotations

from allspark_server.models.config import ModelConfig, read_config
from allspark_server.models.graph import Graph
from allspark_server.models.llama import llama
from allspark_server.models.mixtral import mixtral
from allspark_server.models.qwen2 import qwen2
from allspark_server.models.qwen2_moe import qwen2_moe
from allspark_server.models.qwen3 import qwen3
from allspark_server.models.qwen3_moe import qwen3_moe

MODELS = {
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "LlamaForCausalLM": llama,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "MixtralForCausalLM": mixtral,
    "MistralForCausalLM": llama,
    "MinistralForCausalLM": llama,
    "SmolLM3ForCausalLM": llama,
}


def build_graph(config: ModelConfig) -> Graph:
    """The op list of a model; the architecture is one of MODELS, which read_config has checked."""
    return MODELS[config.architecture](config)


__all__ = ["MODELS", "Graph", "ModelConfig", "build_graph", "read_config"]
