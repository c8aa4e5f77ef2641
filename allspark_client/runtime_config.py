"""AsModelRuntimeConfigBuilder builds an AsModelConfig by chained calls."""
from __future__ import annotations

import copy
import os
from typing import Any

from .config import AsModelConfig
from .errors import nearest_name
from .fields import as_int, wrong_type
from .types import AsCacheMode, TargetDevice


class AsModelRuntimeConfigBuilder:
    """Builds an AsModelConfig by chained calls.

    Each method checks its argument and returns the builder; a wrong value raises ValueError or TypeError.
    """

    #: spellings of DashInfer's configuration files
    _ALIASES = {"kv_cache_mode": "cache_mode", "kv_cache_span_size": "cache_span_size"}

    def __init__(self) -> None:
        self._config = AsModelConfig()

    def _set(self, **values: Any) -> AsModelRuntimeConfigBuilder:
        self._config.update(values)
        return self

    def model_name(self, model_name: str) -> AsModelRuntimeConfigBuilder:
        """Sets the name under which the model is installed; calls of the engine use it."""
        return self._set(model_name=model_name)

    def model_dir(self, model_dir: str, file_name_prefix: str | None = None) -> AsModelRuntimeConfigBuilder:
        """Sets the Hugging Face directory; with a prefix, the directory of PREFIX.asgraph and PREFIX.asparam."""
        if file_name_prefix is None:
            return self._set(model_path=model_dir, weights_path="")
        return self._set(model_path=os.path.join(model_dir, f"{file_name_prefix}.asgraph"),
                         weights_path=os.path.join(model_dir, f"{file_name_prefix}.asparam"))

    def model_file_path(self, model_file_name: str, weight_file_path: str = "") -> AsModelRuntimeConfigBuilder:
        """Sets the model's .asgraph and .asparam files, or its Hugging Face directory."""
        return self._set(model_path=model_file_name, weights_path=weight_file_path)

    def compute_unit(self, target_device: TargetDevice | str, device_id_array: list[int] | None = None,
                     compute_thread_in_device: int = 0) -> AsModelRuntimeConfigBuilder:
        """Sets the devices that the model runs on.

        Args:
            target_device: a TargetDevice or its name.
            device_id_array: numbers of GPUs or NUMA nodes; None: [0]. With CPU, one process ignores all but the first.
            compute_thread_in_device: threads for each device; 0: its physical cores.
        """
        if isinstance(target_device, str):
            names = {d.name: d for d in TargetDevice}
            if target_device.upper() not in names:
                raise ValueError(f"target_device={target_device!r} is not known; allowed: {', '.join(names)}"
                                 f"{nearest_name(target_device.upper(), names)}")
            target_device = names[target_device.upper()]
        if not isinstance(target_device, TargetDevice):
            raise wrong_type("target_device", target_device, "a TargetDevice or its name")
        ids = [as_int(f"device_id_array[{i}]", v, 0) for i, v in enumerate(device_id_array or [0])]
        if target_device is TargetDevice.CPU:
            ids = ids[:1]   # one process that ignores nodes, as in DashInfer
        unit = "CUDA" if target_device is TargetDevice.CUDA else "CPU"
        return self._set(compute_unit=f"{unit}:{','.join(map(str, ids))}", num_threads=compute_thread_in_device)

    def max_length(self, length: int) -> AsModelRuntimeConfigBuilder:
        """Sets the limit of tokens in prompt and output together."""
        return self._set(engine_max_length=length)

    def max_batch(self, batch: int) -> AsModelRuntimeConfigBuilder:
        """Sets the limit of sequences in a step."""
        return self._set(engine_max_batch=batch)

    def max_prefill_length(self, length: int) -> AsModelRuntimeConfigBuilder:
        """Sets the limit of tokens in a prompt chunk; longer prompts are computed in several."""
        return self._set(engine_max_prefill_length=length)

    def kv_cache_mode(self, cache_mode: AsCacheMode) -> AsModelRuntimeConfigBuilder:
        """Sets how keys and values are stored."""
        return self._set(cache_mode=cache_mode)

    def kv_cache_span_size(self, span_size: int) -> AsModelRuntimeConfigBuilder:
        """Sets the tokens in a span of the cache: 16, 32, 64 or 128."""
        return self._set(cache_span_size=span_size)

    def prefill_cache(self, enable: bool = True) -> AsModelRuntimeConfigBuilder:
        """Sets whether prompts share cached prefixes."""
        return self._set(enable_prefix_cache=enable)

    def prefix_cache_ttl(self, ttl: int = 300) -> AsModelRuntimeConfigBuilder:
        """Sets how long the cache keeps an unused prefix, in seconds."""
        return self._set(prefix_cache_ttl=ttl)

    def quantize_head(self, enable: bool = True) -> AsModelRuntimeConfigBuilder:
        """Sets whether the embedding and the language-model head are quantized with the other weights."""
        return self._set(quantize_head=enable)

    def lora_max_rank(self, rank: int) -> AsModelRuntimeConfigBuilder:
        """Sets the largest rank of a LoRA adapter."""
        return self._set(lora_max_rank=rank)

    def lora_max_num(self, num: int) -> AsModelRuntimeConfigBuilder:
        """Sets how many LoRA adapters may be loaded at once."""
        return self._set(lora_max_num=num)

    def set_compute_unit_from_str(self, compute_unit: str) -> AsModelRuntimeConfigBuilder:
        """Sets the devices by one text, such as "CPU:0,1"."""
        return self._set(compute_unit=compute_unit)

    @staticmethod
    def parse_device_type(compute_unit: str) -> tuple[str, list[int]]:
        """The device and the ids of a text such as "CPU:0,1": ("CPU", [0, 1])."""
        config = AsModelConfig(compute_unit=compute_unit)
        return config.compute_unit.partition(":")[0], config.device_ids

    def set_span_init_size(self, span_init_size: int = 0) -> AsModelRuntimeConfigBuilder:
        """Accepts DashInfer's setting at 0 only, since the cache is allocated at once."""
        return self._set(cache_span_num_init=span_init_size)

    def enable_sparsity_matmul(self, enable: bool = False) -> AsModelRuntimeConfigBuilder:
        """Accepts DashInfer's setting at False only, since sparse matrices are not offered."""
        return self._set(enable_sparsity_matmul=enable)

    def from_dict(self, values: dict[str, Any]) -> AsModelRuntimeConfigBuilder:
        """Resets the builder to the values of a dict as update_from_dict takes it."""
        self._config = AsModelConfig()
        return self.update_from_dict(values)

    def update_from_dict(self, values: dict[str, Any]) -> AsModelRuntimeConfigBuilder:
        """Sets the values of a dict with the keys of AsModelConfig or of DashInfer's configuration files.

        The latter spell compute_unit {"device_type": "CPU", "device_ids": [0], "compute_thread_in_device": 0}. Raises
        ValueError for an unknown key, with the nearest known name.
        """
        if not isinstance(values, dict):
            raise wrong_type("values", values, "a dict")
        for key, value in values.items():
            if key == "compute_unit" and isinstance(value, dict):
                parts: dict[str, Any] = {"device_type": "CPU", "device_ids": [0], "compute_thread_in_device": 0}
                for part in value:
                    if part not in parts:
                        raise ValueError(f"compute_unit has no key {part!r}{nearest_name(part, parts)}")
                parts.update(value)
                self.compute_unit(parts["device_type"], parts["device_ids"], parts["compute_thread_in_device"])
            else:
                self._set(**{self._ALIASES.get(key, key): value})
        return self

    def build(self) -> AsModelConfig:
        """Returns the config; later calls on this builder do not change it."""
        return copy.deepcopy(self._config)
