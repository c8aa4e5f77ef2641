"""The families of models whose images can be processed, by the model_type in their config.json."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..models.fields import Fields
from . import gemma, llava, pixtral, qwen
from .processor import ImageProcessor
from .settings import Settings, read_settings


def _read_llava(settings: Settings, config: Fields) -> ImageProcessor:
    if config.inner("vision_config").get("model_type", str, "pixtral") == "pixtral":
        return pixtral.read(settings, config)
    return llava.read(settings, config)


FAMILIES: dict[str, Callable[[Settings, Fields], ImageProcessor]] = {
    "qwen2_vl": qwen.read, "qwen2_5_vl": qwen.read, "qwen3_vl": qwen.read, "qwen3_vl_moe": qwen.read,
    "qwen3_5": qwen.read, "qwen3_5_moe": qwen.read, "mistral3": pixtral.read, "llava": _read_llava,
    "llava_next": llava.read, "gemma3": gemma.read_gemma3, "gemma4": gemma.read_gemma4,
}


def read_processor(directory: str | Path, config: dict[str, Any]) -> ImageProcessor | None:
    """The image processor of a checkpoint. `config`: the object in its config.json.

    None if the model takes no images, or its directory does not say how. AllSparkError names the setting that is wrong
    or not supported.
    """
    read = FAMILIES.get(config.get("model_type", ""))
    if read is None or not isinstance(config.get("vision_config"), dict):
        return None
    settings = read_settings(directory)
    return read(settings, Fields(config, Path(directory, "config.json"))) if settings is not None else None
