"""The CUDA backend of allspark_server as a distribution of its own; allspark_server.runtime.native loads it."""
import importlib.metadata

__version__ = importlib.metadata.version("allspark-numa-cuda")
