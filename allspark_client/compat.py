"""Importing this module makes DashInfer's import lines work: `from dashinfer import allspark` and the like.

Aliased are `dashinfer`, `dashinfer.allspark` and its modules `engine`, `prompt_utils`, `_allspark`, `model_loader`,
`runtime_config` and `generation_config`. All resolve to this project's objects; those of the server (Engine,
HuggingFaceModel) are imported when first used. A real `dashinfer` is left alone.
"""
from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import sys
import types as module_types
from typing import Any

import allspark_client
from allspark_client.prompt_utils import PromptTemplate

logger = logging.getLogger(__name__)

_SERVER_NAMES = ("Engine", "HuggingFaceModel")
_MODULES: dict[str, tuple[str, ...]] = {
    "_allspark": ("AsCacheMode", "AsEngineStat", "AsEvictionStrategy", "AsFileInfo", "AsMHAPrefill", "AsModelConfig",
                  "AsSchedulingStrategy", "AsStatus", "GenerateRequestStatus", "GeneratedElements", "ResultQueue",
                  "VocabType"),
    "engine": ("ASGenerationConfigBuilder", "AsCacheMode", "AsEngineStat", "AsModelConfig", "AsStatus", "ClientEngine",
               "Engine", "RequestStatInfo", "TargetDevice"),
    "model_loader": ("HuggingFaceModel",),
    "runtime_config": ("AsCacheMode", "AsModelConfig", "AsModelRuntimeConfigBuilder", "TargetDevice"),
    "generation_config": ("ASGenerationConfigBuilder",),
    "prompt_utils": ("PromptTemplate",),
}


class _Alias(module_types.ModuleType):
    """A module whose names live in this project's packages."""

    def __init__(self, name: str, names: tuple[str, ...]):
        super().__init__(name, f"This project's objects under the name of DashInfer's {name}.")
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        self.__package__ = name
        self._names = names
        # A client-only installation has no Engine: `import *` must not ask for it.
        server = importlib.util.find_spec("allspark_server") is not None
        self.__all__ = [n for n in names if server or n not in _SERVER_NAMES]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in _SERVER_NAMES:
            value = getattr(importlib.import_module("allspark_server"), name)
        elif name == "PromptTemplate":
            value = PromptTemplate
        else:
            value = getattr(allspark_client, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._names})


def install() -> bool:
    """Register the aliases; whether they are in place (False: a real `dashinfer` is installed)."""
    present = sys.modules.get("dashinfer")
    if isinstance(present, _Alias):
        return True
    if present is not None or importlib.util.find_spec("dashinfer") is not None:
        logger.info("dashinfer is installed: its names are left as they are")
        return False
    public = tuple(n for n in allspark_client.__all__ if not n.startswith("_")) + (*_SERVER_NAMES, "PromptTemplate")
    root, allspark = _Alias("dashinfer", ()), _Alias("dashinfer.allspark", public)
    root.allspark = allspark
    root.__all__ = ["allspark"]
    sys.modules["dashinfer"], sys.modules["dashinfer.allspark"] = root, allspark
    for short, names in _MODULES.items():
        module = _Alias(f"dashinfer.allspark.{short}", names)
        setattr(allspark, short, module)
        sys.modules[module.__name__] = module
    return True


install()
