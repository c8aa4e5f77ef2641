"""GGUF files (llama.cpp): weights, config and tokenizer in one file.

file.py reads the container and blocks.py its quantized types. model.py maps metadata and tensors to a model, and
tokenizer.py turns the vocabulary into a tokenizer.
"""

from __future__ import annotations

from allspark_server.weights.gguf.file import GgufFile, open_parts
from allspark_server.weights.gguf.model import GgufSource, model_config
from allspark_server.weights.gguf.tokenizer import tokenizer_directory

__all__ = ["GgufFile", "GgufSource", "model_config", "open_parts", "tokenizer_directory"]
