"""Tiny random Hugging Face checkpoints with awkward sizes, and the logits of transformers for them.

`checkpoint(name)` writes one of support/tiny_configs.py once per process. `reference_logits` and `check_logits` compare
with transformers; greedy.py compares tokens. Weights are scaled so that logits depend on the whole context.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from support.gemma4 import VOCAB
from support.tiny_configs import COMPRESSED, CONFIGS, DENSE, EXPERTS, GEMMA4, GPT_OSS, LATENT, RECURRENT, STORED, Spec

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

NEAR_TIE = 2e-4  # of the logits' standard deviation: beyond this, float32 may pick either of the two best
LOGIT_TOLERANCE = 1e-4  # of the logits' standard deviation
PROMPT_LENGTHS = (1, 2, 7, 33, 64, 129, 300, 700)


def _glm5_next(**text: Any) -> transformers.Glm5NextConfig:
    """A config of GLM-5.3-Flash with the smallest vision tower, which tests do not use."""
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 4, "image_size": 16,
              "out_hidden_size": text["hidden_size"], "projection_intermediate_size": 16}
    return transformers.Glm5NextConfig(text_config=text, vision_config=vision, eos_token_id=text["eos_token_id"],
                                       tie_word_embeddings=text.get("tie_word_embeddings", False))


_CLASSES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "ministral": (transformers.MinistralConfig, transformers.MinistralForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "internlm3": (transformers.InternLM3Config, transformers.AutoModelForCausalLM.from_config),
    "cwm": (transformers.CwmConfig, transformers.CwmForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "glm": (transformers.GlmConfig, transformers.GlmForCausalLM),
    "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "gemma4_text": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
    "seed_oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
    "ernie4_5": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM),
    "hunyuan_v1_dense": (transformers.HunYuanDenseV1Config, transformers.HunYuanDenseV1ForCausalLM),
    "exaone4": (transformers.Exaone4Config, transformers.Exaone4ForCausalLM),
    "arcee": (transformers.ArceeConfig, transformers.ArceeForCausalLM),
    "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "deepseek_v32": (transformers.DeepseekV32Config, transformers.DeepseekV32ForCausalLM),
    "deepseek_v4": (transformers.DeepseekV4Config, transformers.DeepseekV4ForCausalLM),
    "glm_moe_dsa": (transformers.GlmMoeDsaConfig, transformers.GlmMoeDsaForCausalLM),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
    "minimax_m2": (transformers.MiniMaxM2Config, transformers.MiniMaxM2ForCausalLM),
    "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, transformers.Ernie4_5_MoeForCausalLM),
    "afmoe": (transformers.AfmoeConfig, transformers.AfmoeForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "granitemoe": (transformers.GraniteMoeConfig, transformers.GraniteMoeForCausalLM),
    "dots1": (transformers.Dots1Config, transformers.Dots1ForCausalLM),
    "exaone_moe": (transformers.ExaoneMoeConfig, transformers.ExaoneMoeForCausalLM),
    "hunyuan_v1_moe": (transformers.HunYuanMoEV1Config, transformers.HunYuanMoEV1ForCausalLM),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "lfm2": (transformers.Lfm2Config, transformers.Lfm2ForCausalLM),
    "lfm2_moe": (transformers.Lfm2MoeConfig, transformers.Lfm2MoeForCausalLM),
    "granitemoehybrid": (transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM),
    "bamba": (transformers.BambaConfig, transformers.BambaForCausalLM),
    "falcon_h1": (transformers.FalconH1Config, transformers.FalconH1ForCausalLM),
    "nemotron_h": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM),
    "kimi_linear": (transformers.KimiLinearConfig, transformers.KimiLinearForCausalLM),
    "glm5_next": (_glm5_next, transformers.Glm5NextForConditionalGeneration),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
}


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="allspark-checkpoints-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def checkpoint(name: str) -> Path:
    """The directory of a named checkpoint, which is written on first use and removed when the process ends."""
    spec = (CONFIGS | DENSE | EXPERTS | GEMMA4 | GPT_OSS | RECURRENT | LATENT | COMPRESSED | STORED)[name]
    return write_checkpoint(_root() / name, spec, seed=zlib.crc32(repr(sorted(spec.fields.items())).encode()))


def write_checkpoint(directory: Path, spec: Spec, seed: int = 0) -> Path:
    """Writes a checkpoint of random weights."""
    config_class, model_class = _CLASSES[spec.family]
    fields = {**spec.fields, "eos_token_id": 2, "bos_token_id": 1}
    model = model_class(config_class(**fields))
    randomize(model, spec.family, seed)
    model = model.to(getattr(torch, spec.dtype))
    model.save_pretrained(directory, **({"max_shard_size": spec.shard} if spec.shard else {}))
    if spec.architecture:
        values = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**values, "architectures": [spec.architecture]}))
    return directory


def randomize(model: torch.nn.Module, family: str, seed: int) -> None:
    """Gives a model of a family random weights, scaled so that logits depend on the whole context."""
    gemma = family.startswith("gemma")
    offset = family.startswith(("gemma2", "gemma3", "qwen3_next", "qwen3_5"))  # their norms are 1 + w
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if family.startswith("gemma4") and ("q_norm" in name or "k_norm" in name):  # its scores have no scale
                normal(parameter, 0.1, parameter.shape[0] ** -0.25)
            elif "norm" in name:
                normal(parameter, 0.2, 0.0 if offset and "linear_attn" not in name else 1.0)
            elif name.endswith("A_log"):
                normal(parameter, 1.5, -2.0)
            elif name.endswith("e_score_correction_bias"):  # of probabilities; other families have a buffer, see below
                normal(parameter, 0.05)
            elif name.endswith("bias"):
                normal(parameter, 0.3)
            elif name.endswith("sinks"):
                normal(parameter, 2.0)
            elif name.endswith("router.scale"):  # of normed rows, before a factor of hidden_size^-0.5
                normal(parameter, 0.5, parameter.shape[0] ** 0.5)
            elif name.endswith("per_expert_scale"):
                normal(parameter, 0.3, 1.0)
            elif family == "gpt_oss" and "experts" in name:  # [experts, inputs, outputs]
                normal(parameter, 1.3 * parameter.shape[1] ** -0.5)
            elif name.endswith("position_embedding_table"):
                normal(parameter, 0.5)
            elif "embed_tokens" in name or "embeddings" in name:
                normal(parameter, 0.5 * (parameter.shape[-1] ** -0.5 if gemma else 1.0))  # which Gemma scales
            elif parameter.dim() > 3:  # a convolution over patches
                normal(parameter, parameter[0].numel() ** -0.5)
            else:
                normal(parameter, 1.3 * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                normal(buffer, 0.2)
            elif name.endswith("tid2eid"):  # different experts for each token
                order = torch.rand((len(buffer), model.config.n_routed_experts), generator=generator).argsort(1)
                buffer.copy_(order[:, :buffer.shape[1]])
            elif name.endswith("layer_scalar"):
                normal(buffer, 0.2, 0.8)
            elif name.endswith(("_min", "_max")):   # of the values of a layer that is clipped
                normal(buffer, 0.3, -1.2 if name.endswith("_min") else 1.2)
            elif name.endswith(("std_bias", "std_scale")):
                normal(buffer, 0.3, 1.0 if name.endswith("scale") else 0.2)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng((seed, length)).integers(3, VOCAB, length).tolist()


def load_plain(directory: Path, dtype: torch.dtype):
    """A new model of transformers whose kernels take any size and type."""
    plain = {"attn_implementation": "eager"}
    chosen = {"num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"}
    config = json.loads((directory / "config.json").read_text())
    if chosen & set(config.get("text_config", config)):
        plain["experts_implementation"] = "eager"  # others want aligned rows
    sees = config["architectures"][0].endswith("ForConditionalGeneration")
    loader = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    return loader.from_pretrained(directory, dtype=dtype, **plain).eval()


@functools.lru_cache(maxsize=4)
def _model(directory: Path, dtype: torch.dtype):
    return load_plain(directory, dtype)


def reference_model(directory: Path, dtype: torch.dtype = torch.float32):
    """Transformers' model, in the state of a fresh one."""
    return reset_rotary(_model(Path(directory), dtype))


def reset_rotary(model):
    """The model, with the state that dynamic rotary scaling keeps reset to that of a fresh one."""
    for name in ("rotary_emb", "pos_emb"):
        if getattr(model.model, name, None) is not None:
            setattr(model.model, name, type(getattr(model.model, name))(model.config))
    return model


def reference_logits(directory: Path, prompt: list[int], dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Logits after the last token of a prompt: [vocab], float64. Computed once for all numbers of ranks."""
    return _logits(Path(directory), tuple(prompt), dtype)


@functools.lru_cache(maxsize=64)
@torch.inference_mode()
def _logits(directory: Path, prompt: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    return reference_model(directory, dtype)(torch.tensor([prompt])).logits[0, -1].double().numpy()


def check_logits(found: np.ndarray, expected: np.ndarray, tolerance: float = LOGIT_TOLERANCE) -> float:
    """Returns the largest difference in standard deviations of the logits; raises AssertionError from `tolerance`
    on.
    """
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    worst = float(np.abs(found - expected).max() / expected.std())
    assert worst < tolerance, f"logits differ by {worst:.2e} of their standard deviation, allowed {tolerance:.0e}"
    return worst


def rewrite_header(path: Path, change) -> None:
    """Changes the header of a safetensors (.asparam) file in place by `change(header)`."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length:])
