"""The files of a model but its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from google.protobuf import text_format

from allspark_client.config import AsModelConfig
from allspark_server.models import build_graph, read_config
from allspark_server.runtime.plan import SAMPLE, NewSlot, SamplingParams, StepPlan, WorkItem
from allspark_server.runtime.runner import ModelRunner
from allspark_server.weights.asgraph import read_graph, to_message, write_graph, write_params
from allspark_server.weights.checkpoint import open_model
from allspark_server.weights.safetensors import SafetensorsFile, write_safetensors
from allspark_server.weights.sources import ParamSource, open_weights
from fuzz import mutate
from fuzz.target import CONFIG, REFUSALS, ROPES, Target, tensors_of


def _touch(source: Any) -> None:
    """Reads every byte of every tensor."""
    for name in list(source.names()):
        tensor = source.get(name)
        if tensor.data is not None:
            tensor.data.tobytes()


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _with_header(rng: Random, header: dict[str, Any], data: bytes) -> bytes:
    text = mutate.of_json(rng, header)
    length = len(text) if rng.random() < 0.95 else mutate.integer(rng, 64, False)
    return length.to_bytes(8, "little") + text + (data if rng.random() < 0.9 else data[: rng.randrange(len(data))])


class Safetensors(Target):
    """Headers of safetensors files."""

    name, share = "safetensors", 0.08

    def prepare(self) -> None:
        entries = [
            ("a", "F32", (2, 3)),
            ("b", "BF16", (5,)),
            ("c", "I64", (2,)),
            ("d", "U8", (3,)),
            ("e", "F16", (0, 4)),
        ]
        data = [
            [np.zeros(24, np.uint8)],
            [np.zeros(10, np.uint8)],
            [np.zeros(16, np.uint8)],
            [np.zeros(3, np.uint8)],
            [],
        ]
        write_safetensors(self.folder / "seed", entries, {"format": "pt"}, data)
        self.header, self.tail = _header(self.folder / "seed")
        self.whole = (self.folder / "seed").read_bytes()

    def one(self, rng: Random) -> bool:
        changed = rng.random() < 0.8
        self.data = (
            _with_header(rng, self.header, self.tail) if changed else mutate.of_bytes(rng, self.whole, self.whole)
        )
        (self.folder / "x").write_bytes(self.data)
        try:
            _touch(SafetensorsFile(self.folder / "x"))
        except REFUSALS:
            return False
        return True


class Index(Target):
    """model.safetensors.index.json."""

    name, share = "index", 0.03

    def prepare(self) -> None:
        for name in "ab":
            write_safetensors(
                self.folder / f"{name}.safetensors", [(name, "F32", (2,))], {}, [[np.zeros(2, np.float32)]]
            )
        self.seed = {"metadata": {"total_size": 16}, "weight_map": {name: f"{name}.safetensors" for name in "ab"}}

    def one(self, rng: Random) -> bool:
        self.data = mutate.of_json(rng, self.seed)
        (self.folder / "model.safetensors.index.json").write_bytes(self.data)
        try:
            _touch(open_weights(self.folder))
        except REFUSALS:
            return False
        return True


class Config(Target):
    """config.json and generation_config.json, and the op list that follows from them."""

    name, share = "config", 0.05

    def one(self, rng: Random) -> bool:
        seed = {**CONFIG, "rope_scaling": rng.choice(ROPES)} if rng.random() < 0.5 else CONFIG
        generation = rng.random() < 0.1
        self.data = mutate.of_json(rng, {"eos_token_id": [1, 2]} if generation else seed)
        (self.folder / "config.json").write_bytes(json.dumps(seed).encode() if generation else self.data)
        (self.folder / "generation_config.json").write_bytes(self.data if generation else b"{}")
        try:
            build_graph(read_config(self.folder))
        except REFUSALS:
            return False
        return True


class Serialized(Target):
    """.asgraph and .asparam: files that can be read are installed and compute a step."""

    name, share = "graph", 0.05

    def prepare(self) -> None:
        tensors_of(CONFIG, self.folder)
        model = open_model(str(self.folder))
        write_graph(model.graph, self.folder / "seed.asgraph")
        write_params(model.graph, model.source, self.folder / "seed.asparam")
        self.graph, self.params = to_message(model.graph), (self.folder / "seed.asparam").read_bytes()
        self.texts = [t.name for t in self.graph.tensors] + [w.name for w in self.graph.weights]
        self.header, self.tail = _header(self.folder / "seed.asparam")

    def one(self, rng: Random) -> bool:
        params = rng.random() < 0.3
        self.data = _with_header(rng, self.header, self.tail) if params else self._graph(rng)
        graph = self.folder / ("seed.asgraph" if params else "x.asgraph")
        weights = self.folder / ("x.asparam" if params else "seed.asparam")
        (self.folder / ("x.asparam" if params else "x.asgraph")).write_bytes(self.data)
        try:
            if params and rng.random() < 0.7:
                source = ParamSource(weights)
                source.verify(0, 1)
                _touch(source)
                return True
            read_graph(graph)
            if rng.random() < 0.5:
                self._run(graph, weights)
        except REFUSALS:
            return False
        return True

    def _graph(self, rng: Random) -> bytes:
        data = mutate.of_message(rng, self.graph, self.texts)
        if rng.random() < 0.05:
            text = text_format.MessageToString(self.graph).encode()
            data = b"# allspark graph, text form\n" + mutate.of_bytes(rng, text, text)
        return data

    @staticmethod
    def _run(graph: Path, weights: Path) -> None:
        config = AsModelConfig(
            model_name="m",
            model_path=str(graph),
            weights_path=str(weights),
            engine_max_length=96,
            engine_max_batch=2,
            max_step_tokens=32,
            cache_span_size=16,
            num_threads=1,
            cache_memory=1 << 22,
        )
        runner = ModelRunner(config)
        runner.load()
        runner.allocate_cache(12)
        sampling = SamplingParams(prompt_len=20).encode()
        plan = StepPlan(new=[NewSlot(0, list(range(20)), sampling)], work=[WorkItem(0, 20, SAMPLE, spans=[0, 1])])
        runner.step(plan.encode())
        runner.close()
