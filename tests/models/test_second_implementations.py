"""Families that transformers does not have, against an independent implementation: DashInfer 1.3.0.

It needs an environment of its own; $ALLSPARK_DASHINFER names its Python (see dashinfer_greedy.py). On CPUs DashInfer
1.3.0 does not compute LogN attention (its ids are those of the same model without), so only published.py covers that.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from support.driver import Driver
from support.published import PUBLISHED, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("dashinfer_greedy.py")
PROMPTS, TOKENS = (5, 40, 90, 150, 300), 40
_WIDE = {"hidden_size": 128, "num_attention_heads": 4}
_QWEN = {**_WIDE, "kv_channels": 32, "intermediate_size": 512, "use_logn_attn": False}
_GLM = {**_WIDE, "kv_channels": 32, "ffn_hidden_size": 256}
_BAICHUAN = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
#: by name: a configuration of published.py, DashInfer's adapter, and sizes that it supports
MODELS = {
    "qwen": ("qwen", "Qwen_v10", _QWEN),
    "qwen-ntk": ("qwen-long", "Qwen_v10", _QWEN),
    "chatglm2": ("chatglm3", "ChatGLM_v2", _GLM),
    "chatglm3": ("chatglm3", "ChatGLM_v3", _GLM),
    "glm-4-9b-chat": ("glm-4-9b-chat", "ChatGLM_v4", {**_GLM, "multi_query_group_num": 2}),
    "baichuan-7b": ("baichuan-7b", "Baichuan", {**_BAICHUAN, "num_hidden_layers": 32}),
    "baichuan-13b": ("baichuan-13b", "Baichuan", {**_BAICHUAN, "num_hidden_layers": 40}),
    "baichuan2-7b": ("baichuan2-7b", "Baichuan_v2", {**_BAICHUAN, "num_hidden_layers": 32}),
    "baichuan2-13b": ("baichuan2-13b", "Baichuan_v2", {**_BAICHUAN, "num_hidden_layers": 40}),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_ids_are_dashinfers(name, tmp_path):
    """Ids are equal up to near-ties of the logits."""
    python = os.environ.get("ALLSPARK_DASHINFER")
    if not python:
        pytest.skip("ALLSPARK_DASHINFER names no Python with dashinfer==1.3.0")
    like, kind, sizes = MODELS[name]
    folder = write(tmp_path / name, {**PUBLISHED[like], **sizes})
    rng = np.random.default_rng(int(os.environ.get("ALLSPARK_TEST_SEED", "1")))
    prompts = [rng.integers(10, 400, length).tolist() for length in PROMPTS]
    done = subprocess.run([python, SCRIPT, folder, kind, tmp_path / "work", str(TOKENS)], input=json.dumps(prompts),
                          capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout, done.stderr[-2000:]
    with Driver(folder, 1, weight_dtype="float32", engine_max_length=1024) as engine:
        for prompt, theirs in zip(prompts, json.loads(done.stdout)):
            ids, logits = engine.generate(prompt, TOKENS)[:2]
            assert len(theirs) == TOKENS
            for own, other, row in zip(ids, theirs, logits):
                if own != other:
                    best = np.sort(row)[-2:]
                    assert best[1] - best[0] < 1e-3 * row.std()
                    break
