"""Importing this module makes DashInfer's import lines work, such as `from dashinfer import allspark`.

Aliased are `dashinfer`, `dashinfer.helper`, `dashinfer.allspark` and its modules `engine`, `prompt_utils`, `_allspark`,
`model_loader`, `quantization`, `runtime_config` and `generation_config`. All resolve to this project's objects; those
of the server (Engine, HuggingFaceModel) are imported when first used. A real `dashinfer` is not touched.

    python -m allspark_client.compat SCRIPT [ARGUMENT …]     runs a script of DashInfer's as it is
"""
from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import os
import runpy
import sys
import types as module_types
from typing import Any

import allspark_client

logger = logging.getLogger(__name__)

_SERVER_NAMES = ("Engine", "HuggingFaceModel")
#: names that allspark_client does not export, and the modules that define them
_ELSEWHERE = {"Engine": "allspark_server", "HuggingFaceModel": "allspark_server",
              "PromptTemplate": "allspark_client.prompt_utils", "EngineHelper": "allspark_client.helper",
              "ConfigManager": "allspark_client.helper", "QuantizeConfig": "allspark_client.helper",
              "MultiMediaInfo": "allspark_client.images"}
_MODULES: dict[str, tuple[str, ...]] = {
    "_allspark": ("AsCacheMode", "AsEngineStat", "AsEvictionStrategy", "AsFileInfo", "AsMHAPrefill", "AsModelConfig",
                  "AsSchedulingStrategy", "AsStatus", "GenerateRequestStatus", "GeneratedElements", "MultiMediaInfo",
                  "ResultQueue", "VocabType"),
    "engine": ("ASGenerationConfigBuilder", "AsCacheMode", "AsEngineStat", "AsModelConfig", "AsStatus", "ClientEngine",
               "Engine", "RequestStatInfo", "RoPEScaleMethod", "TargetDevice"),
    "model_loader": ("HuggingFaceModel",),
    "runtime_config": ("AsCacheMode", "AsModelConfig", "AsModelRuntimeConfigBuilder", "TargetDevice"),
    "generation_config": ("ASGenerationConfigBuilder",),
    "prompt_utils": ("PromptTemplate",),
    "quantization": ("QuantizeConfig",),
}


class _Alias(module_types.ModuleType):
    """A module whose names are defined in this project's packages."""

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
        value = getattr(importlib.import_module(_ELSEWHERE.get(name, "allspark_client")), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._names})


def install() -> bool:
    """Register the aliases; returns whether they are in place (False: a real `dashinfer` is installed)."""
    present = sys.modules.get("dashinfer")
    if isinstance(present, _Alias):
        return True
    if present is not None or importlib.util.find_spec("dashinfer") is not None:
        logger.info("dashinfer is installed: its names are not replaced")
        return False
    public = (*(n for n in allspark_client.__all__ if not n.startswith("_")), *_SERVER_NAMES, "PromptTemplate",
              "MultiMediaInfo")
    root, allspark = _Alias("dashinfer", ()), _Alias("dashinfer.allspark", public)
    helper = _Alias("dashinfer.helper", ("EngineHelper", "ConfigManager"))
    root.__dict__.update(allspark=allspark, helper=helper, __all__=["allspark", "helper"])
    for module in (root, allspark, helper):
        sys.modules[module.__name__] = module
    for short, names in _MODULES.items():
        module = _Alias(f"dashinfer.allspark.{short}", names)
        setattr(allspark, short, module)
        sys.modules[module.__name__] = module
    return True


def main() -> None:
    """Runs the script that the command line names."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit("usage: python -m allspark_client.compat SCRIPT [ARGUMENT …]")
    del sys.argv[0]
    if not install():
        logger.warning("dashinfer is installed: %s runs with it", sys.argv[0])
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))     # as python SCRIPT has it
    runpy.run_path(sys.argv[0], run_name="__main__")


install()
if __name__ == "__main__":
    main()
