"""The fingerprint of a model: a digest of everything that the bytes of its answers depend on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path

from allspark_client.types import ModelInfo

from ..runtime.digest import results_digest
from ..weights.files import MAX_TOKENIZER_BYTES, read_file

# Files that decide how text becomes ids and ids become text, chat templates included.
_TOKENIZER_FILES = ("tokenizer*", "qwen.tiktoken", "special_tokens*", "added_tokens*", "chat_template*",
                    "additional_chat_templates/*.jinja")


def fingerprint(info: ModelInfo, gpu: int | None = None) -> str:
    """Equal for two groups only if a request gives the same bytes on both. `gpu`: the one that computes; None: CPUs.

    How images are prepared has a fingerprint of its own (`ImageStage`): texts do not depend on it.
    """
    # engine_max_length is not included: only dynamic rotary scaling depends on a length, namely the prompt's length.
    facts = (results_digest(gpu), info.ranks, info.weight_dtype, info.weight_group_size, info.quantize_head,
             info.cache_dtype, info.span_size, info.model_hash, _tokenizer_digest(info.tokenizer_dir),
             sorted(info.eos_token_ids),
             importlib.metadata.version("llguidance"))  # it turns grammars into masks
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _tokenizer_digest(directory: str | None) -> str:
    digest = hashlib.sha256()
    if not directory:
        return digest.hexdigest()
    for path in sorted(path for name in _TOKENIZER_FILES for path in Path(directory).glob(name)):
        if path.is_file():
            data = read_file(path, MAX_TOKENIZER_BYTES)
            digest.update(f"{path.relative_to(directory)} {len(data)} ".encode() + data)
    return digest.hexdigest()
