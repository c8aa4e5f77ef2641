"""The targets. `start` makes what a block of inputs shares, `one` makes one input, keeps it in `data` and runs it: True when
it was accepted, False when refused in one of the ways that are right; anything else that is raised is a finding."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, Callable

import numpy as np
from google.protobuf.message import DecodeError

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client._proto import asgraph_pb2
from allspark_client.config import AsModelConfig, GenerateConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.request import RequestSpec
from allspark_client.types import AsEngineStat, GeneratedElements, ModelInfo, ModelState
from allspark_server.models import build_graph, read_config
from allspark_server.runtime.plan import NewSlot, SamplingParams, StepPlan, WorkItem
from allspark_server.runtime.runner import ModelRunner
from allspark_server.weights.asgraph import read_graph, to_message, write_graph, write_params
from allspark_server.weights.checkpoint import ParamSource, open_model, open_weights
from allspark_server.weights.safetensors import SafetensorsFile, write_safetensors
from fuzz import mutate

REFUSALS = (ValueError, TypeError, AllSparkError)
CONFIG = {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
          "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 97, "max_position_embeddings": 256,
          "rms_norm_eps": 1e-5, "eos_token_id": 2, "rope_theta": 10000.0, "tie_word_embeddings": True}  # fmt: skip
ROPES = ({"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 24.0, "mscale": 0.7},
         {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64})  # fmt: skip
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


class Finding(Exception):
    """What must not be."""


class Target:
    """share: of all inputs, when all targets run."""

    name = ""
    share = 0.0

    def __init__(self, folder: Path):
        """folder: for files, which this target alone writes; best in memory."""
        self.folder = folder
        self.data = b""
        folder.mkdir()
        self.prepare()

    def prepare(self) -> None:
        """Makes the seeds, once."""

    def start(self, rng: Random) -> None:
        """A block of inputs begins."""

    def one(self, rng: Random) -> bool:
        raise NotImplementedError

    def finish(self) -> None:
        """The last block has ended."""


def tensors_of(config: dict[str, Any], folder: Path) -> None:
    """A checkpoint of random weights."""
    (folder / "config.json").write_text(json.dumps(config))
    weights = build_graph(read_config(folder)).weights.values()
    shapes = {p.tensor: (p.rows, w.columns) if w.is_matrix else (p.rows,) for w in weights for p in w.parts}
    random = np.random.default_rng(1)
    data = [[random.normal(0, 0.3, shape).astype(np.float32)] for shape in shapes.values()]
    write_safetensors(folder / "model.safetensors", [(name, "F32", shape) for name, shape in shapes.items()], {}, data)


def runner_of(path: Path, threads: int = 1) -> ModelRunner:
    """A loaded model, small in every way."""
    config = AsModelConfig(model_name="m", model_path=str(path), engine_max_length=96, engine_max_batch=4, max_step_tokens=32,
                           cache_span_size=16, num_threads=threads, cache_memory=1 << 20)
    runner = ModelRunner(config)
    runner.load()
    runner.allocate_cache(Plans.SPANS)
    return runner


# -- step plans --------------------------------------------------------------------------------------------------------
class Plans(Target):
    """Plans that a scheduler could send, and changed ones, to one executor: what is refused must change nothing, and what
    is accepted must finish."""

    name, share = "plan", 0.45
    SLOTS, SPANS, SPAN, LENGTH, ROWS = 4, 24, 16, 96, 32

    def prepare(self) -> None:
        tensors_of(CONFIG, self.folder)

    def start(self, rng: Random) -> None:
        self.runner = runner_of(self.folder, rng.choice((1, 1, 1, 2)))
        self.slots: dict[int, list[int]] = {}  # [tokens of history, cached positions, spans]
        self.last = b""

    def one(self, rng: Random) -> bool:
        plan = self._valid(rng)
        valid = rng.random() < 0.3
        data = plan.encode() if valid else self._changed(rng, plan)
        self.data, self.last = data, data
        try:
            self.runner.step(data, rng.random() < 0.1)
        except ValueError as error:
            if valid:
                raise Finding(f"a plan that is right was refused: {error}") from error
            self._decoded(data)
            return False
        self._apply(StepPlan.decode(data))
        return True

    @staticmethod
    def _decoded(data: bytes) -> None:
        try:
            StepPlan.decode(data)
        except ValueError:
            pass

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.free:
            self.slots.pop(slot, None)
        for new in plan.new:
            self.slots[new.slot] = [len(new.history), 0, 0]
        for item in plan.work:
            slot = self.slots[item.slot]
            slot[0] += len(item.append)
            slot[1] = item.start + item.count
            slot[2] += len(item.spans)

    def _valid(self, rng: Random) -> StepPlan:
        slots = {slot: list(values) for slot, values in self.slots.items()}
        free = [slot for slot in slots if rng.random() < 0.1]
        for slot in free:
            del slots[slot]
        new, work, rows = [], [], self.ROWS
        for slot in range(self.SLOTS):
            if slot not in slots and rng.random() < 0.4:
                history = [rng.randrange(97) for _ in range(rng.choice((1, 2, 15, 16, 17, 40)))]
                new.append(NewSlot(slot, history, self._sampling(rng, len(history))))
                slots[slot] = [len(history), 0, 0]
        for slot, (length, cached, spans) in sorted(slots.items(), key=lambda _: rng.random()):
            append = [rng.randrange(97)] if cached == length and length < self.LENGTH else []
            if cached == 0 and length > 17 and rng.random() < 0.3:
                cached = 16  # what a prefix cache gives
            left = length + len(append) - cached
            if rows == 0 or left == 0 or rng.random() < 0.2:
                continue
            count = min(rows, left if rng.random() < 0.7 else rng.randint(1, left), self.LENGTH - cached)
            if count < 1:
                continue
            end = cached + count
            needed = max(0, -(-end // self.SPAN) - spans)
            sample = end == length + len(append) and rng.random() < 0.9
            work.append(WorkItem(slot, cached, count, sample, append, [rng.randrange(self.SPANS) for _ in range(needed)]))
            rows -= count
        return StepPlan(free, new, work)

    @staticmethod
    def _sampling(rng: Random, prompt_len: int) -> bytes:
        greedy = rng.random() < 0.3
        return SamplingParams(
            do_sample=not greedy, logprobs=rng.random() < 0.3, suppress_repetition_in_generation=rng.random() < 0.1,
            temperature=rng.choice((1.0, 0.1, 10.0)), top_k=rng.choice((0, 0, 1, 5, 97)), top_p=rng.choice((1.0, 0.9, 0.01)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.3)), presence_penalty=rng.choice((0.0, 0.5)),
            frequency_penalty=rng.choice((0.0, 0.5)), no_repeat_ngram_size=rng.choice((0, 0, 2)),
            min_length=rng.choice((0, 50)), top_logprobs=rng.choice((0, 0, 20)), seed=rng.getrandbits(64),
            prompt_len=prompt_len, eos=tuple(rng.choice(((), (2,), (2, 5)))), bad_words=rng.choice(((), ((3,), (4, 5)))),
        ).encode()  # fmt: skip

    def _changed(self, rng: Random, plan: StepPlan) -> bytes:
        if rng.random() < 0.3:
            return mutate.of_bytes(rng, plan.encode(), self.last)
        for _ in range(rng.choice((1, 1, 2))):
            self._change_item(rng, plan)
        words = [int.from_bytes(plan.encode()[i:i + 4], "little") for i in range(0, len(plan.encode()), 4)]
        for _ in range(rng.choice((0, 0, 1, 2))):
            words[rng.randrange(len(words))] = mutate.integer(rng, 32, False)
        return b"".join(word.to_bytes(4, "little") for word in words)

    def _change_item(self, rng: Random, plan: StepPlan) -> None:
        def near(value: int) -> int:
            return value + rng.choice((-16, -1, 1, 16)) if rng.random() < 0.5 else mutate.integer(rng, 32)

        def clipped(value: int) -> int:
            return max(-2**31, min(2**31 - 1, value))

        listed = [items for items in (plan.free, plan.new, plan.work) if items]
        if not listed or rng.random() < 0.15:
            plan.free.append(rng.choice((0, 1, clipped(near(0)))))
            return
        items = rng.choice(listed)
        at = rng.randrange(len(items))
        if rng.random() < 0.15:
            items.append(items[at])
        elif rng.random() < 0.15:
            del items[at]
        elif items is plan.free:
            items[at] = clipped(near(items[at]))
        elif items is plan.new:
            if rng.random() < 0.4:
                items[at].history = [clipped(near(0)) for _ in items[at].history] * rng.choice((0, 1, 3))
            else:
                items[at].slot = clipped(near(items[at].slot))
        else:
            name = rng.choice(("slot", "start", "count", "sample", "append", "spans"))
            value = getattr(items[at], name)
            if isinstance(value, bool):
                items[at].sample = not value
            elif isinstance(value, int):
                setattr(items[at], name, clipped(near(value)))
            else:
                value[:] = [clipped(near(v)) for v in value] + [rng.randrange(97)] * rng.choice((0, 1, 30))


# -- wire messages -----------------------------------------------------------------------------------------------------
class Messages(Target):
    """Every message that either side of the wire decodes; what is decoded is encoded again."""

    name, share = "wire", 0.3
    engine = None

    def prepare(self) -> None:
        config = GenerateConfig.parse({"top_k": 5, "seed": 7, "eos_token_id": [2, 3], "stop_words_ids": [[1, 2]], "n": 2,
                                       "bad_words_ids": [[4]], "max_new_tokens": 5, "cache_salt": "s", "logprobs": True,
                                       "top_logprobs": 3, "response_format": {"type": "json_object"}})
        specs = [RequestSpec("m", [1, 2, 3], config=config, generated=[4]), RequestSpec("m", text="hello", config=config),
                 RequestSpec("m", messages=MESSAGES)]
        elements = convert.elements_to_pb(GeneratedElements([1, 2], [[(1, -0.5)], [(2, -1.0)]], [-0.5, -1.0]))
        error = convert.error_to_pb(AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, "no"))
        model = convert.model_config_to_pb(AsModelConfig(model_name="m", model_path="/x"))
        stat = convert.stat_to_pb({"arrival_time": 1.0, "context_token_length": 3})
        event = pb.RequestEvent(id=1, started=pb.Started(fingerprint="f"), elements=[elements], status=2, error=error)
        names = list(AsModelConfig().to_dict())
        requests = [convert.request_to_pb(spec) for spec in specs]
        self.seeds: list[tuple[Any, list[str], Callable[[Any], Any]]] = [
            *((request, [], self._request) for request in requests),
            *((pb.SessionRequest(start=pb.StartRequest(id=1, request=r)), [], self._session) for r in requests),
            (model, names, self._model_config), (pb.InstallModelRequest(config=model), names, self._install),
            (error, [], lambda m: convert.error_to_pb(convert.error_from_pb(m))),
            (elements, [], lambda m: convert.elements_to_pb(convert.elements_from_pb(m))),
            (stat, [], lambda m: convert.stat_to_pb(convert.stat_from_pb(m))),
            (convert.engine_stat_to_pb(AsEngineStat(model_name="m")), [],
             lambda m: convert.engine_stat_to_pb(convert.engine_stat_from_pb(m))),
            (convert.model_info_to_pb(ModelInfo(name="m", eos_token_ids=[1])), [],
             lambda m: convert.model_info_to_pb(convert.model_info_from_pb(m))),
            (pb.SessionResponse(info=pb.ServerInfo(models=convert.models_to_pb([ModelState("m", True, "f", 0)])),
                                events=[event]), [], self._response),
        ]  # fmt: skip

    def start(self, rng: Random) -> None:
        from allspark_server.engine import Engine
        from allspark_server.session import Session
        from fake_group import FakeGroup

        self.finish()
        self.engine = Engine(group=FakeGroup())
        self.engine.install_model(AsModelConfig(model_name="m", model_path="/x"))
        self.engine.start_model("m")
        self.session = Session(self.engine, lambda session, now: None)

    def finish(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def one(self, rng: Random) -> bool:
        message, texts, handle = rng.choice(self.seeds)
        self.data = mutate.of_message(rng, message, texts)
        try:
            handle(type(message).FromString(self.data))
        except DecodeError:
            return False
        except REFUSALS as error:
            type(error)(*error.args) if not isinstance(error, AllSparkError) else str(error)
            convert.error_from_pb(convert.error_to_pb(error))
            return False
        return True

    @staticmethod
    def _request(message: pb.GenerateRequest) -> None:
        convert.request_to_pb(convert.request_from_pb(message))

    def _session(self, message: pb.SessionRequest) -> None:
        """As the service does with a session's messages."""
        action = message.WhichOneof("action")
        if action == "start":
            self.session.start(message.start.id, convert.request_from_pb(message.start.request))
            events = self.session.take()
            self.session.release(message.start.id)
            for event in events:
                if event.HasField("refused"):
                    error = convert.error_from_pb(event.refused)
                    if isinstance(error, AllSparkError) and error.status == AsStatus.ALLSPARK_UNKNOWN_ERROR:
                        raise Finding(str(error))
        elif action == "stop":
            self.session.stop(message.stop)
        elif action == "release":
            self.session.release(message.release)

    @staticmethod
    def _model_config(message: pb.ModelConfig) -> None:
        convert.model_config_to_pb(convert.model_config_from_pb(message))

    def _install(self, message: pb.InstallModelRequest) -> None:
        config = convert.model_config_from_pb(message.config)
        if config.model_name != "m":
            self.engine.install_model(config)
            self.engine.release_model(config.model_name)

    @staticmethod
    def _response(message: pb.SessionResponse) -> None:
        convert.models_from_pb(message.info.models)
        for event in message.events:
            for elements in event.elements:
                convert.elements_from_pb(elements)
            convert.as_allspark_error(event.error)
            convert.stat_from_pb(event.stat)


# -- model files -------------------------------------------------------------------------------------------------------
def _touch(source: Any) -> None:
    """Every byte of every tensor."""
    for name in list(source.names()):
        tensor = source.get(name)
        if tensor.data is not None:
            tensor.data.tobytes()


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8:8 + length]), data[8 + length:]


def _with_header(rng: Random, header: dict[str, Any], data: bytes) -> bytes:
    text = mutate.of_json(rng, header)
    length = len(text) if rng.random() < 0.95 else mutate.integer(rng, 64, False)
    return length.to_bytes(8, "little") + text + (data if rng.random() < 0.9 else data[:rng.randrange(len(data))])


class Safetensors(Target):
    """Headers of safetensors files."""

    name, share = "safetensors", 0.08

    def prepare(self) -> None:
        entries = [("a", "F32", (2, 3)), ("b", "BF16", (5,)), ("c", "I64", (2,)), ("d", "U8", (3,)), ("e", "F16", (0, 4))]
        data = [[np.zeros(24, np.uint8)], [np.zeros(10, np.uint8)], [np.zeros(16, np.uint8)], [np.zeros(3, np.uint8)], []]
        write_safetensors(self.folder / "seed", entries, {"format": "pt"}, data)
        self.header, self.tail = _header(self.folder / "seed")
        self.whole = (self.folder / "seed").read_bytes()

    def one(self, rng: Random) -> bool:
        changed = rng.random() < 0.8
        self.data = _with_header(rng, self.header, self.tail) if changed else mutate.of_bytes(rng, self.whole, self.whole)
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
            write_safetensors(self.folder / f"{name}.safetensors", [(name, "F32", (2,))], {}, [[np.zeros(2, np.float32)]])
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
    """config.json and generation_config.json, and the op list that they describe."""

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
    """.asgraph and .asparam; what is read is installed, and computes a step."""

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
        from google.protobuf import text_format

        data = mutate.of_message(rng, self.graph, self.texts)
        if rng.random() < 0.05:
            text = text_format.MessageToString(self.graph).encode()
            data = b"# allspark graph, text form\n" + mutate.of_bytes(rng, text, text)
        assert asgraph_pb2.Graph is type(self.graph)
        return data

    @staticmethod
    def _run(graph: Path, weights: Path) -> None:
        config = AsModelConfig(model_name="m", model_path=str(graph), weights_path=str(weights), engine_max_length=96,
                               engine_max_batch=2, max_step_tokens=32, cache_span_size=16, num_threads=1,
                               cache_memory=1 << 22)
        runner = ModelRunner(config)
        runner.load()
        runner.allocate_cache(12)
        sampling = SamplingParams(prompt_len=20).encode()
        plan = StepPlan(new=[NewSlot(0, list(range(20)), sampling)], work=[WorkItem(0, 0, 20, True, [], [0, 1])])
        runner.step(plan.encode())
        runner.close()


class Tokenizers(Target):
    """tokenizer.json: what is read encodes and decodes a text."""

    name, share = "tokenizer", 0.02

    def prepare(self) -> None:
        from conftest import add_tokenizer

        add_tokenizer(self.folder, 320)
        self.seed = json.loads((self.folder / "tokenizer.json").read_text())
        self.seed["model"]["merges"] = self.seed["model"]["merges"][:20]

    def one(self, rng: Random) -> bool:
        from allspark_server.text import Tokenizer

        self.data = mutate.of_json(rng, self.seed if rng.random() < 0.5 else self._parts(rng))
        (self.folder / "tokenizer.json").write_bytes(self.data)
        try:
            tokenizer = Tokenizer.from_dir(self.folder)
            tokenizer.decode(tokenizer.encode("the quick brown fox: naïve 🙂 <|im_end|>"))
        except REFUSALS:
            return False
        return True

    def _parts(self, rng: Random) -> dict[str, Any]:
        """The seed with other parts, which most changes hit."""
        small = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "##a": 4, " ": 5}
        model = rng.choice((
            {"type": "BPE", "vocab": small, "merges": ["a b"], "unk_token": "<unk>", "byte_fallback": True, "dropout": None},
            {"type": "WordPiece", "vocab": small, "unk_token": "<unk>", "continuing_subword_prefix": "##",
             "max_input_chars_per_word": 100},
            {"type": "WordLevel", "vocab": small, "unk_token": "<unk>"},
            {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]], "byte_fallback": False},
        ))  # fmt: skip
        pre = rng.choice((
            None, {"type": "Whitespace"}, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            {"type": "Split", "pattern": {"Regex": "\\s+(?!\\S)|[a-z]{1,3}"}, "behavior": "Isolated", "invert": False},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
            {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, {"type": "Punctuation"}]},
        ))  # fmt: skip
        normalizer = rng.choice((None, {"type": "NFC"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                                 {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, {"type": "Prepend", "prepend": "a"}]}))
        decoder = rng.choice((None, {"type": "ByteLevel"}, {"type": "Metaspace", "replacement": "▁"}, {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}))
        post = rng.choice((None, {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<unk>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
            "special_tokens": {"<unk>": {"id": "<unk>", "ids": [0], "tokens": ["<unk>"]}}}))
        return {**self.seed, "model": model, "pre_tokenizer": pre, "normalizer": normalizer, "decoder": decoder,
                "post_processor": post}


class TokenizerConfigs(Target):
    """tokenizer_config.json with its chat templates, which are rendered."""

    name, share = "tokenizer_config", 0.02

    def prepare(self) -> None:
        from conftest import CHAT_TEMPLATE, add_tokenizer

        add_tokenizer(self.folder, 280)
        self.seed = {**json.loads((self.folder / "tokenizer_config.json").read_text()), "bos_token": {"content": "<s>"},
                     "chat_template": [{"name": "default", "template": CHAT_TEMPLATE}], "extra_special_tokens": {"a": "b"},
                     "additional_special_tokens": ["<x>", {"content": "<y>"}], "model_max_length": 100}  # fmt: skip

    def one(self, rng: Random) -> bool:
        from allspark_server.text import Tokenizer

        seed = self.seed
        if rng.random() < 0.5:
            template = seed["chat_template"][0]["template"].encode()
            template = mutate.of_bytes(rng, template, template).decode(errors="replace")
            seed = {**seed, "chat_template": template}
        self.data = mutate.of_json(rng, seed)
        (self.folder / "tokenizer_config.json").write_bytes(self.data)
        try:
            Tokenizer.from_dir(self.folder).encode_chat(MESSAGES)
        except REFUSALS:
            return False
        return True


TARGETS: tuple[type[Target], ...] = (Plans, Messages, Safetensors, Index, Config, Serialized, Tokenizers, TokenizerConfigs)
