"""The compute unit that suites of the whole engine run on."""

from __future__ import annotations

import os
from typing import Any

_UNIT = os.environ.get("ALLSPARK_TEST_UNIT", "CPU:0")
_model, _, _experts = _UNIT.partition("+")
#: ALLSPARK_TEST_UNIT=CUDA:0 selects a GPU, CUDA:0,1 groups of two, CUDA:0+CPU:0,0 a mixed group, CUDA:0,1+CPU:0 one
#: with two ranks of the model (on CPUs, too: CPU:0,0+CPU:0)
UNIT: dict[str, Any] = {"compute_unit": _UNIT}
GPUS = _model.removeprefix("CUDA:").split(",") if _model.startswith("CUDA:") else []
#: the number of ranks of experts in a mixed group
EXPERT_RANKS = len(_experts.split(",")) if _experts else 0
#: the number of ranks that the model takes; 0: any
MODELS = len(_model.split(",")) if EXPERT_RANKS else len(GPUS)
#: whether ranks share a GPU: each of their sums waits until the GPU turns to the other rank, which is slow
SHARED = len(set(GPUS)) < len(GPUS)
if EXPERT_RANKS and GPUS:   # experts move while requests run, and the GPU computes those of prompts, alone and shared
    UNIT |= {"weight_dtype": "int4", "weight_group_size": 32, "hot_expert_memory": 8 << 20, "expert_streaming_rows": 40}
