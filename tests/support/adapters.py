"""Random LoRA adapters in PEFT's format, and models with such an adapter merged into their weights."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allspark_server.models.adapters import with_adapters
from allspark_server.weights.checkpoint import open_model
from allspark_server.weights.safetensors import SafetensorsFile, write_safetensors

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"]


def modules_of(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Sizes (out features, in features) of the linear layers that an adapter may target."""
    _, targets = with_adapters(open_model(str(checkpoint), "").graph)
    return {target.module: (target.rows, target.weight.columns) for target in targets}


def write_adapter(directory: Path, checkpoint: Path, targets: Any = ALL, rank: int = 8, dtype: str = "F32",
                  ranks: dict[str, int] | None = None, strength: float = 0.5, **config: Any) -> Path:
    """Writes an adapter for the named modules. Its values depend on the directory's name.

    `ranks` overrides the rank of single modules, keyed by the ends of their names; `config` adds fields to
    adapter_config.json.
    """
    directory.mkdir(parents=True)
    rng = np.random.default_rng(zlib.crc32(directory.name.encode()))
    tensors = {}
    for module, (rows, columns) in modules_of(checkpoint).items():
        if module.rsplit(".", 1)[-1] not in (targets if isinstance(targets, list) else ALL):
            continue
        own = next((r for end, r in (ranks or {}).items() if module.endswith(end)), rank)
        a = rng.normal(size=(own, columns)) * columns ** -0.5
        b = rng.normal(size=(rows, own)) * strength
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    _write(directory, tensors, dtype)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": targets, "bias": "none",
              "lora_dropout": 0.05, "base_model_name_or_path": str(checkpoint), "task_type": "CAUSAL_LM", **config}
    if ranks:
        values["rank_pattern"] = ranks
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory


def write_parameters(directory: Path, checkpoint: Path, rank: int = 8, dtype: str = "F32",
                     strength: float = 0.2) -> Path:
    """Writes an adapter for the parameters with all experts of each layer, as PEFT does with transformers 5."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(zlib.crc32(directory.name.encode()))
    _, targets = with_adapters(open_model(str(checkpoint), "").graph)
    tensors = {}
    for target in targets:
        if (rows := target.of_experts) is None or rows.expert:
            continue
        wrapped = ".base_layer" if rows.parameter == "gate_up_proj" else ""
        name, columns = f"base_model.model.{rows.names[0]}{wrapped}", target.weight.columns
        tensors[f"{name}.lora_A.weight"] = rng.normal(size=(rank * rows.experts, columns)) * columns ** -0.5
        tensors[f"{name}.lora_B.weight"] = rng.normal(size=(rows.rows, rank * rows.experts)) * strength
    _write(directory, tensors, dtype)
    (directory / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": rank, "lora_alpha": 16, "bias": "none",
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}))
    return directory


def _write(directory: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    encoded = {name: torch.tensor(values).to(_TYPES[dtype]).contiguous() for name, values in tensors.items()}
    write_safetensors(directory / "adapter_model.safetensors",
                      [(name, dtype, tuple(t.shape)) for name, t in encoded.items()], {"format": "pt"},
                      [[t.view(torch.int32 if dtype == "F32" else torch.int16).numpy()] for t in encoded.values()])


def change_config(directory: Path, **config: Any) -> None:
    """Overwrites fields of adapter_config.json."""
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def merged(model: torch.nn.Module, directory: Path, scale) -> torch.nn.Module:
    """The model with the adapter's products added to its weights; scale(module) is the factor of each."""
    file = SafetensorsFile(directory / "adapter_model.safetensors")

    def values(name: str) -> torch.Tensor:
        found = file.get(name)
        return torch.frombuffer(bytearray(file.raw(name)), dtype=_TYPES[found.dtype]).reshape(found.shape).double()

    with torch.no_grad():
        for name in file.names():
            if name.endswith(".lora_A.weight"):
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                weight = _expert_weight(model, module) if ".experts." in module else model.get_submodule(module).weight
                delta = scale(module) * values(name.replace("lora_A", "lora_B")) @ values(name)
                weight.copy_(weight.double() + delta)
    return model


def _expert_weight(model: torch.nn.Module, module: str) -> torch.Tensor:
    """The rows of transformers' parameter with all experts that are one expert's layer."""
    holder, expert, kind = module.rsplit(".", 2)
    experts = model.get_submodule(holder.replace("block_sparse_moe", "mlp"))
    if kind in ("down_proj", "w2"):
        return experts.down_proj[int(expert)]
    half = experts.gate_up_proj.shape[1] // 2
    begin = half * (kind in ("up_proj", "w3"))
    return experts.gate_up_proj[int(expert), begin:begin + half]
