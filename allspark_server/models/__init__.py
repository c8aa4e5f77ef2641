"""Model families: one short file each, which builds the network as a list of ops and says how its config.json is read.

Nothing here touches weights; of the native library only the table of ops is read. A new family is a file here and its
name in registry.py.
"""

from __future__ import annotations

from allspark_server.models.config import read_config
from allspark_server.models.graph import Graph
from allspark_server.models.network import ModelConfig
from allspark_server.models.registry import build_graph

__all__ = ["Graph", "ModelConfig", "build_graph", "read_config"]
