"""The vision tower of a model on one rank: it computes images whole, or in parts between the steps of the model, whose
threads it shares.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import AsCacheMode
from allspark_server.runtime.device import gpu_of
from allspark_server.runtime.profile import OpProfile, Profiler
from allspark_server.runtime.rank_model import RankModel
from allspark_server.weights.asgraph import to_float32

if TYPE_CHECKING:
    from allspark_server.models.graph import Graph
    from allspark_server.models.graph_elements import Op
    from allspark_server.runtime.device import Device
    from allspark_server.weights.checkpoint import OpenedModel
    from allspark_server.weights.loader import Progress

#: the most images of a step
MAX_IMAGES = 16
#: the most embedding rows of an image, if the model's configuration does not say otherwise
MAX_IMAGE_TOKENS = 4096
SPAN_SIZE = 32


#: kinds of ops: matrix products, attention, and what goes through memory once
KINDS = ("product", "attention", "other")


@dataclass(frozen=True)
class OpCost:
    """The operations of an op of a tower for a patch, for an output, and for a pair of patches of one image: estimates.
    Other work than matrix products counts as the operations that a product does in the same time on a core with AVX2.
    """

    kind: str
    row: float = 0.0
    output: float = 0.0
    pair: float = 0.0


def _row_end(opened: OpenedModel) -> np.ndarray | None:
    """The row that ends a row of an image (LLaVA-NeXT). AllSparkError if it has another number of values."""
    name, vision = opened.row_end, opened.graph.config.vision
    if name is None or vision is None:
        return None
    tensor = opened.source.get(name)
    if tensor.data is None or tensor.shape != (vision.outputs,):
        raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                            f"tensor {name!r} in {tensor.file} has shape {list(tensor.shape)} and type {tensor.dtype}: "
                            f"expected {vision.outputs} numbers")
    return to_float32(tensor.data, tensor.dtype)


class TowerRunner:
    """As ModelRunner, for a vision tower.

    `rows`: the most patches of a step, which may be one view's; `tokens`: the most outputs. `vision`: the tower's
    description. `row_end`: the embedding row that ends a row of an image, float32 [width]; None if there is none.
    `rotary_parts`: whether its model turns rows by time, height and width of their positions. `gpu`: the index of the
    GPU that computes; None if CPUs compute. `rate`: operations a second that are assumed before the first image.
    """

    def __init__(self, config: AsModelConfig, opened: OpenedModel, rank: int, world: int, device: Device,
                 rotary_parts: bool):
        """`config`: the model's. Raises AllSparkError if the tower cannot be divided among `world` ranks."""
        vision = opened.graph.config.vision
        assert vision is not None
        self.vision, self.rotary_parts = vision, rotary_parts
        most = config.max_image_tokens or MAX_IMAGE_TOKENS
        self.tokens = vision.tokens or min(most, config.engine_max_length, vision.most or most)
        self.rows = self.tokens * vision.merge
        self.row_end = _row_end(opened)
        self.gpu = gpu_of(config, rank, world) if config.on_gpus else None
        self.rate = device.tower_rate
        if self.rows > device.most_rows:
            raise AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR,
                                f"max_image_tokens={self.tokens} of model {config.model_name!r}: an image may have "
                                f"{device.most_rows // vision.merge} tokens with compute_unit={config.compute_unit!r}")
        own = copy.copy(config)
        own.weight_dtype, own.weight_group_size = config.vision_weight_dtype, 0
        own.speculation, own.cache_mode, own.lora_max_num = "off", AsCacheMode.AsCacheDefault, 0
        own.engine_max_length, own.engine_max_batch, own.cache_span_size = self.rows, MAX_IMAGES, SPAN_SIZE
        self._device = device
        self._executor: Any = None
        self._profiler: Profiler | None = None  # of rank 0, once it is allocated
        self._model = RankModel(own, "", "", rank, world, device, opened=opened)
        self.spans = self.rows // SPAN_SIZE + MAX_IMAGES

    @property
    def memory(self) -> int:
        """Bytes that it takes on this rank: weights, activations, and keys and values of a step."""
        return (self._model.weight_bytes(self._device) + self.spans * self._model.span_bytes(self._device)
                + self._device.activation_bytes(self._model, self.rows, self.tokens))

    @property
    def digest(self) -> str:
        """A digest of the weights that load() has read."""
        more = b"" if self.row_end is None else self.row_end.tobytes()
        return self._model.digest + (f" {hashlib.blake2b(more, digest_size=16).hexdigest()}" if more else "")

    @property
    def hash_facts(self) -> str:
        """What the bits of its outputs depend on besides the digest."""
        formats = sorted((name, str(form)) for name, form in self._model.formats.items())
        return repr((self._model.graph.config, formats, self._model.cache_dtype))

    @property
    def costs(self) -> list[OpCost]:
        """What each op costs on all ranks, once it is allocated. A step is cut between them and within them."""
        assert self._executor is not None
        graph, alone = self._model.graph, {entry["index"] for entry in self._executor.profile()}
        return [_cost(graph, op, number in alone) for number, op in enumerate(graph.ops)]

    def load(self, executor: Any, progress: Progress | None = None) -> str:
        """Loads weights and ops into an executor that shares the model's threads. Returns the address of this rank's
        device for the tower on other ranks.
        """
        self._executor = executor
        self._device.check(self._model.config, set(self._model.formats.values()), self._model.cache_dtype)
        self._model.load(executor, progress)
        return self._device.share(executor, self.rows, self.tokens)

    def connect(self, addresses: Sequence[str]) -> None:
        """Connects this rank's device to those of other ranks. `addresses`: of load(), by rank."""
        self._device.connect(self._executor, addresses)

    def allocate(self) -> None:
        """Allocates activations and the cache of a step."""
        sizes = MAX_IMAGES, self.rows, SPAN_SIZE, self.spans
        self._device.allocate(self._executor, self.rows, sizes, self._model.cache_dtype, self.tokens, [], 0, {})
        if self._model.rank == 0:
            self._profiler = Profiler(self._executor)

    def profile(self) -> list[OpProfile]:
        """What the ops of the profiled steps cost, each a line of its own (rank 0 only)."""
        assert self._profiler is not None
        ops = self._profiler.read(self._model.graph, self._model.formats)
        return [dataclasses.replace(op, op=f"tower:{op.op}") for op in ops]

    def warm_up(self, count: int) -> tuple[int, int]:
        """See `ModelRunner.warm_up`."""
        return self._device.warm_up(self._executor, count)

    def move_memory(self, loaded: bool) -> None:
        """See `ModelRunner.move_memory`."""
        (self._executor.load if loaded else self._executor.unload)()

    def step(self, plan: bytes) -> Any:
        """Runs one step plan without the GIL. Returns the native StepResult."""
        assert self._executor is not None
        if (switch := self._profiler_switch()) is not None:
            self._executor.set_profiling(switch)
        return self._executor.step(plan, False)

    def submit(self, stepper: Any, plan: bytes, shared_memory: Any, kind: int, prefix: bytes) -> None:
        """See `ModelRunner.submit`."""
        switch = self._profiler_switch()
        stepper.submit(self._executor, plan, shared_memory, kind, prefix, -1 if switch is None else int(switch))

    def _profiler_switch(self) -> bool | None:
        return self._profiler.before_step() if self._profiler is not None and self._profiler.active else None

    def close(self) -> None:
        """Frees weights and memory."""
        self._executor = self._profiler = None


def _cost(graph: Graph, op: Op, alone: bool) -> OpCost:
    """alone: it is not computed with the op before it, and is needed."""
    tensor = graph.tensors[(*op.inputs, *op.outputs)[0]] if op.inputs or op.outputs else None
    width = sum(block.width for block in tensor.blocks) if tensor is not None else 0
    if op.type == "span_attention":
        vision, heads = graph.config.vision, graph.config.hidden_size
        assert vision is not None
        seen = vision.window ** 2 if op.attrs.get("segments") else 0
        return OpCost("attention", _OF_HEADS * heads + _OF_PAIR * heads * seen, pair=0.0 if seen else _OF_PAIR * heads)
    if op.type == "rotary_table":
        return OpCost("other", _OF_ANGLE * int(op.attrs["rotary_dim"]) / 2)
    kind, operations = "other", float(_OF_VALUE.get(op.type, 20) * width) if alone else 0.0
    if op.type == "linear":
        kind, operations = "product", 2.0 * graph.weights[op.weights[0]].elements_of(0, 1)
    if tensor is not None and tensor.logit_rows:
        return OpCost(kind, output=operations)
    return OpCost(kind, operations)


# Operations, as OpCost counts them: of attention for each feature of a patch's heads, and for each feature of a pair of
# patches; for each angle of a rotary table; and for each value of the tensor, by op.
_OF_HEADS, _OF_PAIR, _OF_ANGLE = 1300.0, 8.0, 30_000.0
_OF_VALUE = {"activate": 800, "silu_mul": 800, "gelu_mul": 800, "gelu_tanh_mul": 800, "layer_norm": 100,
             "grid_embedding": 300, "all_reduce": 250}
