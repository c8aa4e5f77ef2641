"""The thin client of the runtime, and the types of its API.

`ClientEngine` talks gRPC to a server group, and starts one if it is given no address; `allspark_server.Engine` has the
same API in one process. This package has the API's types and configs, the abstract engine, the client, and the
conversion between types and protobuf. It needs only grpcio, protobuf and numpy: no MPI, no torch, no native library.
"""
from .async_client import AsyncClientEngine
from .client import ClientEngine
from .config import ASGenerationConfigBuilder, AsModelConfig, GenerateConfig
from .engine import AbstractEngine, as_token_ids
from .errors import AllSparkError, AsStatus
from .generation import AsyncGeneration, Generation, Usage
from .images import Image, Video
from .queue import ResultQueue
from .runtime_config import AsModelRuntimeConfigBuilder
from .types import (
                    AsCacheMode,
                    AsEngineStat,
                    AsEvictionStrategy,
                    AsFileInfo,
                    AsMHAPrefill,
                    AsSchedulingStrategy,
                    GeneratedElements,
                    GenerateRequestStatus,
                    ModelInfo,
                    ModelState,
                    RequestStatInfo,
                    RoPEScaleMethod,
                    TargetDevice,
                    TlsConfig,
                    VocabType,
)
from .version import __version__

__all__ = [
    "ASGenerationConfigBuilder", "AbstractEngine", "AllSparkError", "AsCacheMode", "AsEngineStat",
    "AsEvictionStrategy", "AsFileInfo", "AsMHAPrefill", "AsModelConfig", "AsModelRuntimeConfigBuilder",
    "AsSchedulingStrategy", "AsStatus", "AsyncClientEngine", "AsyncGeneration", "ClientEngine", "GenerateConfig",
    "GenerateRequestStatus", "GeneratedElements", "Generation", "Image", "ModelInfo", "ModelState", "RequestStatInfo",
    "ResultQueue", "RoPEScaleMethod", "TargetDevice", "TlsConfig", "Usage", "Video", "VocabType", "__version__",
    "as_token_ids",
]
