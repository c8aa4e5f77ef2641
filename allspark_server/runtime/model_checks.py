"""What ranks say when a model does not fit, or lies on other nodes; the config of models whose texts need one step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_server.models.sentence_modules import read_modules
from allspark_server.runtime import memory
from allspark_server.runtime.binding import pages_by_node
from allspark_server.runtime.memory import memory_nodes, nodes_of_cpus, own_nodes
from allspark_server.runtime.rank_model import RankModel

logger = logging.getLogger(__name__)

MISPLACED_SHARE = 0.05


def mib(size: int) -> str:
    """A number of bytes in MiB, as text."""
    return f"{size / 2**20:,.1f} MiB"


@contextmanager
def memory_errors(purpose: str) -> Iterator[None]:
    """A context that turns the native library's allocation failures into ALLSPARK_MEMORY_ERROR.

    purpose: what needed the memory, for the text.
    """
    try:
        yield
    except MemoryError as error:
        raise AllSparkError(AsStatus.ALLSPARK_MEMORY_ERROR, f"{purpose}: {error or 'out of memory'}") from error
    except RuntimeError as error:
        if isinstance(error, AllSparkError) or "cannot allocate" not in str(error):
            raise
        raise AllSparkError(AsStatus.ALLSPARK_MEMORY_ERROR, f"{purpose}: {error}") from error


def config_of_texts(config: AsModelConfig, model: RankModel) -> AsModelConfig:
    """The config of a classifier, or of an encoder: its texts are as long as the network and the checkpoint allow.
    AllSparkError for what they do not have.
    """
    config, name = copy.copy(config), model.graph.config.architecture
    for field, without in (("speculation", "off"), ("host_cache_memory", 0)):
        if getattr(config, field) != without:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"{field}={getattr(config, field)!r} of model {config.model_name!r}: {name} "
                                f"generates no tokens, so only {without!r} is possible")
    if not model.graph.whole_texts:
        return config
    most = read_modules(model.opened.tokenizer_dir).max_length or config.engine_max_length
    config.engine_max_length = min(config.engine_max_length, model.graph.config.max_position_embeddings, most)
    if 0 < config.max_step_tokens < config.engine_max_length:
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"max_step_tokens={config.max_step_tokens} of model {config.model_name!r} is less than "
                            f"its longest text, {config.engine_max_length} tokens (engine_max_length): {name} "
                            "computes a text in one step")
    return config


def placement_of(cpus: list[int], rank: int) -> dict:
    """Where this process's pages lie (see RankModels.numbers). Warns if too many are on other NUMA nodes than those of
    `cpus`; raises AllSparkError instead if the group is strict about it.
    """
    own = own_nodes(cpus)
    pages = pages_by_node()
    total = sum(pages.values())
    elsewhere = sum(size for node, size in pages.items() if node not in own) if len(memory_nodes()) > 1 else 0
    home = own & nodes_of_cpus(cpus) or own
    if own and total and elsewhere > MISPLACED_SHARE * total:
        message = (f"{mib(elsewhere)} ({100 * elsewhere / total:.0f} %) of rank {rank}'s memory are on other NUMA "
                   f"nodes than its own ({', '.join(map(str, sorted(own)))}): decoding will be slower")
        if memory.strict:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, f"{message}, and the group is strict about it; free "
                                "memory on that node, or give the model less (cache_memory)")
        logger.warning("%s", message)
    return {"node": min(home, default=-1), "bytes_on_node": pages, "misplaced_bytes": elsewhere}
