"""Reads what a checkpoint of sentence-transformers says besides its network: pooling, dense layers after it, prompts.

The files are `modules.json`, the `config.json` of each module that it names, and `config_sentence_transformers.json`
(https://sbert.net/docs/package_reference/sentence_transformer/models.html).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allspark_server.models.fields import Fields
from allspark_server.models.network import DenseLayer
from allspark_server.models.yes_no_reranker import CARD, INSTRUCTION, compared_tokens, is_yes_no_reranker
from allspark_server.weights.files import read_json, read_json_list

POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_FUNCTIONS = {"Identity": "", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu"}


@dataclass(frozen=True)
class SentenceModules:
    """pooling: "cls", "mean", "last", or "" if the checkpoint does not say. normalized: embeddings have length 1.
    prompts: texts that precede a text, by their names. default_prompt: the name of the one that texts get by default.
    max_length: the most tokens of a text, 0 if it is the network's. compared: of a reranker that generates, the ids of
    the tokens whose logits say that a document is relevant and, if there is one, that it is not.
    """

    pooling: str = ""
    dense: tuple[DenseLayer, ...] = ()
    normalized: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    max_length: int = 0
    compared: tuple[int, ...] = ()


def read_modules(directory: str | Path | None) -> SentenceModules:
    """What the files of a checkpoint's directory say; nothing if it has none. AllSparkError names the field that is
    wrong or not supported.
    """
    if directory is None:
        return SentenceModules()
    if not os.path.lexists(Path(directory, "modules.json")):
        if not is_yes_no_reranker(directory):
            return SentenceModules()
        return SentenceModules(compared=compared_tokens(directory), prompts={"web": INSTRUCTION}, default_prompt="web")
    directory = Path(directory)
    listed = read_json_list(directory / "modules.json")
    found: dict[str, Any] = {}
    dense: list[DenseLayer] = []
    for number, entry in enumerate(listed):
        fields = Fields(entry if isinstance(entry, dict) else {}, directory / "modules.json", f"[{number}].")
        kind = fields.need("type", str).rsplit(".", 1)[-1]
        place = fields.get("path", str, "")
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise fields.error("path", f"is {place!r}: expected a folder of the checkpoint")
        if kind == "Pooling":
            found["pooling"] = _pooling(directory / place / "config.json")
        elif kind == "Dense":
            dense.append(_dense(directory / place / "config.json", place))
        elif kind == "LogitScore":
            found["compared"] = _compared(directory / place / "config.json")
        elif kind == "Normalize":
            found["normalized"] = True
        elif kind == "Transformer":
            found["max_length"] = _max_length(directory / place)
        elif kind != "Dropout":
            raise fields.error("type", f"is {fields.values['type']!r}: known modules are Transformer, Pooling, Dense, "
                                       "Normalize, LogitScore and Dropout")
    return SentenceModules(dense=tuple(dense), **found, **_prompts(directory / "config_sentence_transformers.json"))


def module_files(directory: str | Path) -> list[str]:
    """The names of the files that read_modules reads, below the directory; those that exist and others."""
    path = Path(directory, "modules.json")
    if not os.path.lexists(path):
        return [CARD, "config.json"] if is_yes_no_reranker(directory) else []
    read_modules(directory)  # refuses paths to elsewhere
    folders = [entry.get("path") or "" for entry in read_json_list(path)]
    return [path.name, "config_sentence_transformers.json",
            *(str(Path(folder, name)) for folder in folders for name in ("sentence_bert_config.json", "config.json")
              if folder or name != "config.json")]


def _pooling(path: Path) -> str:
    fields = Fields(read_json(path), path)
    if not fields.get("include_prompt", bool, True):
        raise fields.error("include_prompt", "is false: only pooling that includes the prompt is served")
    mode = fields.get("pooling_mode", str)
    if mode is None:
        names = [name.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens")
                 for name, value in fields.values.items() if name.startswith("pooling_mode_") and value is True]
        mode = "+".join(names) or "mean"
    if mode not in POOLINGS:
        raise fields.error("pooling_mode", f"is {mode!r}: known are {', '.join(POOLINGS)}")
    return POOLINGS[mode]


def _compared(path: Path) -> tuple[int, ...]:
    fields = Fields(read_json(path), path)
    ids = [fields.need("true_token_id", int), fields.get("false_token_id", int)]
    found = tuple(i for i in ids if i is not None)
    if min(found) < 0:
        raise fields.error("true_token_id", f"is {ids[0]}, and false_token_id {ids[1]}: expected ids of tokens")
    return found


def _dense(path: Path, place: str) -> DenseLayer:
    fields = Fields(read_json(path), path)
    name = fields.get("activation_function", str, "torch.nn.modules.activation.Tanh").rsplit(".", 1)[-1]
    if name not in _FUNCTIONS:
        raise fields.error("activation_function", f"is {name!r}: known are {', '.join(_FUNCTIONS)}")
    if fields.get("use_residual", bool, False):
        raise fields.error("use_residual", "is true: only dense layers without a residual are served")
    return DenseLayer(place, fields.need_positive("in_features"), fields.need_positive("out_features"),
                      fields.get("bias", bool, True), _FUNCTIONS[name])


def _max_length(directory: Path) -> int:
    path = directory / "sentence_bert_config.json"
    return Fields(read_json(path), path).get("max_seq_length", int, 0) if os.path.lexists(path) else 0


def _prompts(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        return {}
    fields = Fields(read_json(path), path)
    prompts = fields.get("prompts", dict, {})
    if not all(isinstance(text, str) for text in prompts.values()):
        raise fields.error("prompts", "holds values that are no texts")
    default = fields.get("default_prompt_name", str, "")
    if default and default not in prompts:
        raise fields.error("default_prompt_name", f"is {default!r}: known are {', '.join(prompts) or 'none'}")
    return {"prompts": dict(prompts), "default_prompt": default}
