"""MiMo: Qwen2's network, with a draft head."""

from __future__ import annotations

from allspark_server.models.architecture import Architecture
from allspark_server.models.draft_heads import mimo_head
from allspark_server.models.qwen2 import qwen2, qwen2_layer

ARCHITECTURES = {"MiMoForCausalLM": Architecture(qwen2, "mimo", "MiMo", "transformers' Qwen2 of the same numbers",
                                                 draft_head=mimo_head(qwen2_layer))}
