"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen's text models, which turn rows of images by time, height and width
(M-RoPE), and vision towers (models/vision.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allspark_server.models.architecture import Architecture, text_part, translated
from allspark_server.models.expert_fields import qwen_experts
from allspark_server.models.fields import Fields
from allspark_server.models.network import ModelConfig
from allspark_server.models.qwen2 import qwen2
from allspark_server.models.qwen3 import qwen3
from allspark_server.models.qwen3_moe import qwen3_moe
from allspark_server.models.vision import qwen_tower


def _text(fields: Fields) -> Fields:
    """The fields of the text model, which the first checkpoints have beside vision_config."""
    return text_part(fields) if "text_config" in fields.values else fields


def _moe_text(fields: Fields) -> Fields:
    fields = _text(fields)
    return fields if "norm_topk_prob" in fields.values else translated(fields, norm_topk_prob=True)


def _tower(architecture: str, kind: str) -> Callable[[Fields], ModelConfig]:
    return lambda fields: qwen_tower(fields, architecture, kind)


def _sees(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"tower": _tower(name, kind), "stored_as": "text_part", "translate": _text, **more}


_QWEN3: dict[str, Any] = {"head_dim": 128, "has_bias_fields": True, "rope_theta": 500_000.0}
ARCHITECTURES = {
    "Qwen2VLForConditionalGeneration": Architecture(
        qwen2, "qwen2_vl", "Qwen2-VL", rope_theta=1_000_000.0, **_sees("Qwen2VLForConditionalGeneration", "qwen2")),
    "Qwen2_5_VLForConditionalGeneration": Architecture(
        qwen2, "qwen2_5_vl", "Qwen2.5-VL", rope_theta=1_000_000.0,
        **_sees("Qwen2_5_VLForConditionalGeneration", "qwen2.5")),
    "Qwen3VLForConditionalGeneration": Architecture(
        qwen3, "qwen3_vl", "Qwen3-VL", **_QWEN3, **_sees("Qwen3VLForConditionalGeneration", "qwen3")),
    "Qwen3VLMoeForConditionalGeneration": Architecture(
        qwen3_moe, "qwen3_vl_moe", "Qwen3-VL with experts", experts=qwen_experts, **_QWEN3,
        **_sees("Qwen3VLMoeForConditionalGeneration", "qwen3", translate=_moe_text,
                stored_as="text_part_with_experts")),
}
