"""The networks, as op lists: one short file an architecture, the graph they build, and config.json.

Nothing here touches weights; of native code only the table of ops is read. A new architecture is a model file, an entry
in `architectures.ARCHITECTURES` (its config.json) and one in `MODELS`.
"""

from __future__ import annotations

from allspark_server.models.baichuan import baichuan
from allspark_server.models.chatglm import chatglm
from allspark_server.models.config import read_config
from allspark_server.models.gemma import gemma
from allspark_server.models.glm import glm
from allspark_server.models.gpt_oss import gpt_oss
from allspark_server.models.graph import Graph
from allspark_server.models.llama import llama
from allspark_server.models.mixtral import mixtral
from allspark_server.models.network import ModelConfig
from allspark_server.models.olmo2 import olmo2
from allspark_server.models.phi3 import phi3
from allspark_server.models.qwen import qwen
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
    "GptOssForCausalLM": gpt_oss,
    "MistralForCausalLM": llama,
    "MinistralForCausalLM": llama,
    "SmolLM3ForCausalLM": llama,
    "Phi3ForCausalLM": phi3,
    "GlmForCausalLM": glm,
    "Glm4ForCausalLM": glm,
    "Gemma2ForCausalLM": gemma,
    "Gemma3ForCausalLM": gemma,
    "Gemma3ForConditionalGeneration": gemma,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo2,
    "QWenLMHeadModel": qwen,
    "ChatGLMModel": chatglm,
    "ChatGLMForConditionalGeneration": chatglm,
    "BaiChuanForCausalLM": baichuan,
    "BaichuanForCausalLM": baichuan,
}


def build_graph(config: ModelConfig) -> Graph:
    """The op list of a model; the architecture is one of MODELS, which read_config has checked."""
    return MODELS[config.architecture](config)


__all__ = ["MODELS", "Graph", "ModelConfig", "build_graph", "read_config"]
