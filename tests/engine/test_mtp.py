"""speculation="mtp" changes no bit: greedy and sampled requests alone without drafts, and together with the drafts of
a head that is often right and often wrong, with a cache that is too small, on two ranks, and in chats; also where steps
are queued, as on GPUs. ALLSPARK_TEST_UNIT=CUDA:0 runs all on a GPU.
"""

from __future__ import annotations

import json
import random
import shutil
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen3_5_moe")

from allspark_client import AllSparkError, AsModelConfig
from allspark_client.types import AsCacheMode
from allspark_server.engine.input_stage import InputStage
from allspark_server.runtime.device import Cpus
from allspark_server.scheduler import PredictedText, state
from allspark_server.scheduler.speculation import DraftLengths
from support import draft_heads, eagle_heads, quantized_checkpoints
from support.adapters import write_adapter
from support.checkpoints import checkpoint, prompt_of
from support.gemma4 import VOCAB
from support.invariance import PENALTIES, bits
from support.units import EXPERT_RANKS, GPUS, UNIT

slow = pytest.mark.slow
# and how many layers their heads have
WITH_LAYERS = [("qwen3-next", 1), ("glm4-moe", 2),
               *(pytest.param(*case, marks=slow) for case in (("glm4-moe", 1), ("deepseek-v3", 1), ("qwen3-next", 3),
                                                              ("deepseek-v32", 1))),
               *([] if GPUS or EXPERT_RANKS else [pytest.param("glm5-next", 1, marks=slow)])]  # GPUs refuse it
WAYS: list[dict[str, Any]] = [
    {"do_sample": False}, {"temperature": 0.3}, {"temperature": 0.9, "top_k": 8}, {"top_p": 0.6, "temperature": 0.5},
    {"temperature": 0.2, **PENALTIES}, {"do_sample": False, "repetition_penalty": 1.3, "min_length": 90},
    {"temperature": 0.5, "stop_words_ids": [[token] for token in range(0, 300, 9)]},
]
REQUESTS = [(prompt_of(1 + 13 * i, seed=i), {"seed": i, **WAYS[i % len(WAYS)]}) for i in range(14)]


def often_right(share: float):
    """The model's layers add little, `share`, to its embedding, and its head's layers nothing: they predict from the
    last token alone.
    """
    def change(tensors, *layers):
        root = draft_heads.root_of(tensors)
        for name, tensor in tensors.items():
            own = name.startswith(tuple(names.layer for names in layers))
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
                tensor *= 0 if own else share
        for names in layers:
            size = len(tensors[names.projection])
            tensors[names.projection] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
            tensors[names.embedding_norm] = torch.full((size,), 1.0 - names.one_plus)
            tensors[names.norm] = tensors[f"{root}norm.weight"].clone()
            if names.output:
                tensors[names.output] = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).clone()

    return change


@pytest.fixture(autouse=True)
def no_doubt(monkeypatch):
    """Some heads here are seldom right, and yet their drafts are to be tried."""
    monkeypatch.setattr(DraftLengths, "DOUBT", 1 << 30)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    made = {}

    def of(name, share=0.1, layers=1):
        if (key := (name, share, layers)) not in made:
            made[key] = draft_heads.write(tmp_path_factory.mktemp(name), name, often_right(share), layers).path
        return made[key]

    return of


class Installed:
    """A model in an engine."""

    def __init__(self, engine, path, speculation="mtp", **fields):
        self.engine, self.name = engine, f"heads-{random.randrange(1 << 60)}"
        engine.install_model(AsModelConfig(self.name, str(path), speculation=speculation, **{
            "num_threads": 1, "engine_max_batch": 8, "engine_max_length": 288, "cache_span_size": 16,
            "enable_prefix_cache": False, **UNIT, **fields}))
        engine.start_model(self.name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.release_model(self.name)

    def run(self, order, together, tokens=40, predictions=None):
        """Ids, bits of logprobs and finish reason, by request. `predictions`: by request, ids as text."""
        started, outputs = {}, {}

        def take(i):
            handle, queue = started[i]
            parts = list(queue)
            outputs[i] = ([t for p in parts for t in p.ids_from_generate],
                          [b for p in parts for b in bits(p.token_logprobs_list)], queue.FinishReason())
            self.engine.release_request(self.name, handle)

        for i in order:
            prompt, config = REQUESTS[i]
            _, handle, queue = self.engine.start_request(self.name, {"input_ids": prompt}, {
                "max_new_tokens": tokens, "eos_token_id": -1, "logprobs": True, **config,
                "prediction": predictions[i] if predictions else ""})
            started[i] = handle, queue
            if not together:
                take(i)
        for i in order if together else ():
            take(i)
        return outputs

    @property
    def counters(self):
        return self.engine._models[self.name].scheduler.counters


@pytest.mark.parametrize("name, layers", WITH_LAYERS)
def test_no_bit_changes(name, layers, paths, engine_of):
    """Also where states advance between the rows of drafts, and where sequences are preempted."""
    engine, order, path = engine_of("engine"), list(range(len(REQUESTS))), paths(name, layers=layers)
    with Installed(engine, path, "off") as plain:
        expected = plain.run(order, together=False)
        weights = engine.get_model_info(plain.name).weight_bytes
    random.Random(5).shuffle(order)
    with Installed(engine, path) as drafting:
        assert drafting.run(order, together=True) == expected
        counters = drafting.counters
        assert 0 < counters.accepted_tokens < counters.drafted_tokens
        info = engine.get_model_info(drafting.name)
        assert info.draft_layers == layers and info.weight_bytes > weights
    small = 15 * (1 + layers) * (info.cache_bytes // info.num_spans)    # of the model; the head's layers come on top
    with Installed(engine, path, cache_memory=small) as drafting:
        assert drafting.run(order, together=True) == expected
        assert drafting.counters.preemptions > 0 and drafting.counters.accepted_tokens > 0


@pytest.mark.parametrize("steps", ["as they are", "queued"])
@pytest.mark.parametrize("kind", ["off", "mtp"])
@pytest.mark.parametrize("name, layers", WITH_LAYERS)
def test_predictions_change_no_bit(name, layers, kind, steps, paths, engine_of, queued, monkeypatch):
    """Predicted outputs, partly wrong, beside the drafts of a head: where states advance between the rows of drafts,
    and where steps are queued.
    """
    def predicted(stage, text):
        return PredictedText([int(token) for token in text.split()]) if text else None

    monkeypatch.setattr(InputStage, "_predicted", predicted)    # these models have no tokenizer
    engine, order, path = engine_of("engine"), list(range(len(REQUESTS))), paths(name, layers=layers)
    with Installed(engine, path, "off") as plain:
        expected = plain.run(order, together=False)
    texts = {}
    for i, (ids, *_) in expected.items():
        wrong = [*ids[:12], 5, 6, *ids[12:20], *ids[23:30], 7, *ids[31:]] if i % 3 else [9, *ids]
        texts[i] = " ".join(map(str, wrong))
    if steps == "queued":
        queued()
    random.Random(9).shuffle(order)
    with Installed(engine, path, kind) as drafting:
        assert drafting.run(order, together=True, predictions=texts) == expected
        counters = drafting.counters
        assert 200 < counters.accepted_tokens < counters.drafted_tokens


@pytest.fixture
def queued(monkeypatch):
    """Has CPUs queue steps, as GPUs do: steps without drafts begin before the one before has ended."""
    def allocate(self, executor, rows, sizes, cache_dtype, outputs, drafts, masks, adapters):
        executor.allocate(rows, *sizes, cache_dtype, outputs, drafts=drafts, masks=masks, queued=True, **adapters)

    return lambda: monkeypatch.setattr(Cpus, "allocate", allocate)


class OftenOff(DraftLengths):
    """Two drafts in 3 of 24 steps: states are held in between, and their rows computed together."""

    def start(self, slot):
        super().start(slot)
        self._pause[slot] = 0

    def choose(self, slots):
        self._pause[slots] += 1
        return np.where(self._pause[slots] % 24 < 3, 2, 0)

    def learn(self, slots, drafts, accepted):
        pass


def often_right_by_states(tensors, *layers):
    """As often_right(), but what the head predicts depends on its attention and on the model's states, too."""
    often_right(0.02)(tensors, *layers)
    generator = torch.Generator().manual_seed(3)
    for names in layers:
        size = len(tensors[names.projection])
        tensors[names.projection][:, size:] = torch.randn(size, size, generator=generator) * (0.05 * size ** -0.5)
        tensors[names.layer + "self_attn.o_proj.weight"].normal_(generator=generator).mul_(0.1 * size ** -0.5)


@pytest.mark.skipif("CUDA" in UNIT["compute_unit"], reason="GPUs queue all steps")
@pytest.mark.parametrize("name, layers", WITH_LAYERS)
def test_queued_steps(name, layers, engine_of, queued, monkeypatch, tmp_path):
    """Steps that are queued make the same tokens and the same drafts as steps one after the other."""
    monkeypatch.setattr(state, "DraftLengths", OftenOff)
    path = draft_heads.write(tmp_path, name, often_right_by_states, layers).path
    found = []
    for way in (lambda: None, queued):
        way()
        with Installed(engine_of("engine"), path, max_step_tokens=60) as model:
            for i in (3, 4, 5, 7, 8):   # not 6, which stop words end: a step that is queued by then counts, or does not
                outputs = model.run([i], together=False, tokens=70)
                found.append((outputs, model.counters.accepted_tokens, model.counters.drafted_tokens))
            together = model.run(list(range(len(REQUESTS))), together=True)
    half = len(found) // 2
    assert found[:half] == found[half:] and 10 < found[-1][1] < found[-1][2] - 10
    assert all(together[i][0][:40] == outputs[i][0][:40] for outputs, *_ in found for i in outputs)


@pytest.mark.parametrize("layers", [1, 3])
def test_drafts_do_not_depend_on_batches(layers, engine_of, tmp_path):
    """As many drafts are right when sequences share steps as when each is alone."""
    path, order = draft_heads.write(tmp_path, "glm4-moe", often_right_by_states, layers).path, list(range(8))
    with Installed(engine_of("engine"), path) as model:
        alone = model.run(order, together=False)
        accepted, drafted = model.counters.accepted_tokens, model.counters.drafted_tokens
        assert model.run(order, together=True) == alone
        assert (model.counters.accepted_tokens, model.counters.drafted_tokens) == (2 * accepted, 2 * drafted)
        assert 20 < accepted < drafted - 20


@slow
@pytest.mark.parametrize("name, layers", [("glm4-moe", 1), ("deepseek-v3", 1), ("qwen3-next", 1), ("deepseek-v3", 3)])
def test_two_ranks(name, layers, paths, engine_of):
    engine, order = engine_of("client-2"), list(range(len(REQUESTS)))
    outputs = []
    for speculation in ("off", "mtp"):
        with Installed(engine, paths(name, layers=layers), speculation) as model:
            outputs.append(model.run(order, together=speculation != "off"))
            assert engine.get_model_info(model.name).draft_layers == (layers if speculation == "mtp" else 0)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("layers", [1, 3])
def test_a_head_that_is_always_right(layers, paths, engine_of):
    """All its drafts are accepted, after prompts of one token and through several chunks; the prefix cache keeps the
    entries of the head.
    """
    path = paths("glm4-moe", 0.0, layers)
    with Installed(engine_of("engine"), path, max_step_tokens=48, enable_prefix_cache=True) as model:
        for _ in range(2):
            model.run([0, 7, 11], together=False)
        counters = model.counters
        assert counters.accepted_tokens == counters.drafted_tokens > 150


@slow
@pytest.mark.parametrize("host", [0, 64 << 20])
@pytest.mark.parametrize("name, layers", [("qwen3-next", 1), ("deepseek-v3", 1), ("deepseek-v3", 2)])
def test_the_next_turn_of_a_chat(name, layers, host, paths, engine_of):
    """The prefix cache keeps states and the head's entries; with a small cache, in its host tier."""
    engine = engine_of("engine")
    fields = {"engine_max_length": 1024, "cache_span_size": 32, "max_step_tokens": 100}

    def answers(model):
        history, found = prompt_of(300, seed=8), []
        for turn in range(4):
            _, handle, queue = engine.start_request(model.name, {"input_ids": history}, {
                "max_new_tokens": 70, "eos_token_id": -1, "temperature": 0.4, "seed": 3})
            found.append([t for part in queue for t in part.ids_from_generate])
            engine.release_request(model.name, handle)
            history = [*history, *found[-1], *prompt_of(40, seed=turn)]
            if turn == 2:
                history = prompt_of(300, seed=8)[:200] + prompt_of(30, seed=9)
        return found

    path = paths(name, layers=layers)
    with Installed(engine, path, "off", **fields) as plain:
        expected, info = answers(plain), engine.get_model_info(plain.name)
    small = {"cache_memory": 80 * (info.cache_bytes // info.num_spans)} if host else {}
    with Installed(engine, path, enable_prefix_cache=True, host_cache_memory=host, **fields, **small) as model:
        assert answers(model) == expected
        stat = engine.get_as_engine_stat(model.name)
        assert stat.prefix_cache_hit_token > 500 and model.counters.accepted_tokens > 0


@slow
@pytest.mark.parametrize("form", [{"weight_dtype": "w8a8"}, {"weight_dtype": "w8a8", "quantize_head": True},
                                  {"weight_dtype": "bfloat16", "cache_mode": AsCacheMode.AsCacheQuantI8}])
@pytest.mark.parametrize("name", ["glm4-moe", "qwen3-next"])
def test_formats(name, form, paths, engine_of):
    engine, order, outputs = engine_of("engine"), list(range(7)), []
    for how in ("off", "mtp"):
        with Installed(engine, paths(name), how, **form) as model:
            outputs.append(model.run(order, together=how != "off"))
            assert model.counters.accepted_tokens > 0 or how == "off"
    assert outputs[0] == outputs[1]


@slow
def test_float8_blocks(engine_of, tmp_path):
    """A checkpoint in blocks of float8, as GLM's and DeepSeek's are: all of the head but its projection."""
    make, quantization = quantized_checkpoints.float8_blocks(128, 128)
    spec, parts = quantized_checkpoints.GLM, {}
    for part, each in (("model", spec), ("head", draft_heads.one_layer(spec))):
        parts[part], _ = quantized_checkpoints.write_pair(tmp_path / part, each, make, quantization)
    tensors, layer = (draft_heads.tensors_of(path) for path in parts.values())
    names = draft_heads.next_n(spec.fields["num_hidden_layers"])
    tensors |= {names.layer + n.removeprefix("model.layers.0."): t for n, t in layer.items() if ".layers.0." in n}
    size = len(tensors["model.norm.weight"])
    tensors |= dict.fromkeys((names.embedding_norm, names.hidden_norm, names.norm), tensors["model.norm.weight"])
    tensors[names.projection] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    draft_heads.save(tensors, parts["model"])
    engine, outputs = engine_of("engine"), []
    for how in ("off", "mtp"):
        with Installed(engine, parts["model"], how) as model:
            outputs.append(model.run(list(range(7)), together=how != "off"))
            assert (model.counters.drafted_tokens > 0) == (how == "mtp")
    assert outputs[0] == outputs[1]


@slow
def test_adapters(paths, engine_of, tmp_path):
    """Rows with an adapter take the drafts of the head without one."""
    engine, outputs = engine_of("engine"), []
    path = paths("glm4-moe")
    adapter = write_adapter(tmp_path / "a", path, strength=0.05)
    for how in ("off", "mtp"):
        with Installed(engine, path, how, lora_max_num=2, lora_max_rank=8) as model:
            engine.load_lora(model.name, str(adapter))
            for i in range(4):
                REQUESTS[i][1]["lora_name"] = "a"
            try:
                outputs.append(model.run(list(range(7)), together=how != "off"))
            finally:
                for i in range(4):
                    del REQUESTS[i][1]["lora_name"]
    assert outputs[0] == outputs[1]


def little(tensors, share):
    """Scales what a model's layers add to the residual stream."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= share


@pytest.fixture(scope="module")
def eagle(tmp_path_factory):
    """A model and an EAGLE-3 head of it that is often right: its attention finds a token's own position, so that its
    residual stream is the token's embedding, as the model's nearly is. Its vocabulary is a half of the model's.
    """
    folder = tmp_path_factory.mktemp("eagle")
    path = shutil.copytree(checkpoint("llama-linear"), folder / "model")
    tensors = draft_heads.tensors_of(path)
    little(tensors, 0.01)
    draft_heads.save(tensors, path)
    size = len(tensors["model.norm.weight"])

    def change(head, tokens):
        own = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
        for name in ("q_proj", "k_proj"):
            head[f"midlayer.self_attn.{name}.weight"] = 4 * own
        head["midlayer.self_attn.v_proj.weight"], head["midlayer.self_attn.o_proj.weight"] = own, torch.eye(size)
        for name in ("fc", "midlayer.mlp.down_proj"):
            head[f"{name}.weight"].mul_(0.02)
        head["midlayer.input_layernorm.weight"] = torch.ones(size)
        head["norm.weight"] = tensors["model.norm.weight"].float().clone()
        head["lm_head.weight"] = tensors["lm_head.weight"].float()[tokens].clone()

    heads = json.loads((path / "config.json").read_text())["num_attention_heads"]
    made = eagle_heads.write(folder / "head", path, drafted=VOCAB // 2, change=change, num_attention_heads=heads,
                             num_key_value_heads=heads, head_dim=size // heads)
    return made


@pytest.mark.parametrize("where", ["engine", pytest.param("client-2", marks=slow)])
def test_eagle_changes_no_bit(where, eagle, engine_of):
    engine, order = engine_of(where), list(range(len(REQUESTS)))
    with Installed(engine, eagle.path, "off") as plain:
        expected = plain.run(order, together=False)
        fingerprint = engine.get_model_info(plain.name).model_hash
    with Installed(engine, eagle.path, "eagle", draft_model=str(eagle.head)) as drafting:
        assert drafting.run(order, together=True) == expected
        assert engine.get_model_info(drafting.name).model_hash == fingerprint
        if where == "engine":
            counters = drafting.counters
            assert 0.1 * counters.drafted_tokens < counters.accepted_tokens < counters.drafted_tokens, counters


@slow
@pytest.mark.parametrize("form", [{"weight_dtype": "w8a8"}, {"weight_dtype": "bfloat16"}])
def test_eagle_in_formats(form, eagle, engine_of):
    outputs = []
    for how in ("off", "eagle"):
        with Installed(engine_of("engine"), eagle.path, how, **form, **(
                {"draft_model": str(eagle.head)} if how == "eagle" else {})) as model:
            outputs.append(model.run(list(range(7)), together=how != "off"))
            assert model.counters.accepted_tokens > 0 or how == "off"
    assert outputs[0] == outputs[1]


def test_a_checkpoint_without_a_head(engine_of):
    with pytest.raises(AllSparkError, match="has no draft head that is served for Glm4MoeForCausalLM"):
        engine_of("engine").install_model(AsModelConfig("none", str(checkpoint("glm4-moe")), speculation="mtp"))
