"""The interface of targets, and the small model that several of them use."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from allspark_client.errors import AllSparkError
from allspark_server.models import build_graph, read_config
from allspark_server.weights.safetensors import write_safetensors

REFUSALS = (ValueError, TypeError, AllSparkError)
CONFIG = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
          "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 97, "max_position_embeddings": 256,
          "rms_norm_eps": 1e-5, "eos_token_id": 2, "rope_theta": 10000.0, "tie_word_embeddings": True}  # fmt: skip
ROPES = ({"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 24.0, "mscale": 0.7},
         {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64})  # fmt: skip
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


class Finding(Exception):
    """A violation that a target has found."""


class Target:
    """A target. `start` prepares what a block of inputs shares. `one` makes one input, keeps it in `data` and runs it;
    it returns True if the input was accepted, False if it was refused in an allowed way. Any exception is a finding.

    `share` is the target's part of all inputs when all targets run.
    """

    name = ""
    share = 0.0

    def __init__(self, folder: Path):
        """folder: for files, which this target alone writes; best in memory."""
        self.folder = folder
        self.data = b""
        folder.mkdir()
        self.prepare()

    def prepare(self) -> None:
        """Makes the seeds once."""

    def start(self, rng: Random) -> None:
        """Starts a block of inputs."""

    def one(self, rng: Random) -> bool:
        raise NotImplementedError

    def finish(self) -> None:
        """The last block has ended."""


def tensors_of(config: dict[str, Any], folder: Path) -> None:
    """A checkpoint of random weights."""
    (folder / "config.json").write_text(json.dumps(config))
    weights = build_graph(read_config(folder)).weights.values()
    shapes = {p.tensor: (p.rows, w.columns) if w.is_matrix else (p.rows,) for w in weights for p in w.parts}
    random = np.random.default_rng(1)
    data = [[random.normal(0, 0.3, shape).astype(np.float32)] for shape in shapes.values()]
    write_safetensors(folder / "model.safetensors", [(name, "F32", shape) for name, shape in shapes.items()], {}, data)
