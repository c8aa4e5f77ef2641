"""The server side: engine, gRPC service, scheduler, span cache, graph and models, weights, ranks.

A request goes service → input stage → engine → scheduler → cache → runtime, and its tokens go output stage → service.
The two public names are loaded on first use, so importing this package needs neither the native library nor MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from allspark_client.version import __version__

if TYPE_CHECKING:
    from allspark_server.engine.engine import Engine
    from allspark_server.weights.huggingface import HuggingFaceModel

__all__ = ["Engine", "HuggingFaceModel", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from allspark_server.runtime.native import native_library
        native_library()  # its error says clearly what is wrong
        from allspark_server.engine.engine import Engine
        return Engine
    if name == "HuggingFaceModel":
        from allspark_server.weights.huggingface import HuggingFaceModel
        return HuggingFaceModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
