"""Prompts with images: logits and greedy output as transformers has them, and the same bits whatever else runs,
wherever the prompt is cut, and whatever is cached.

Runs in one process and in groups; -m "slow or not slow" runs all families and group sizes.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from allspark_client import AllSparkError, AsModelConfig, GenerateConfig, GenerateRequestStatus
from allspark_client._proto import asgraph_pb2
from allspark_client.images import Video
from allspark_client.request import RequestSpec
from allspark_server import HuggingFaceModel
from allspark_server.runtime.device import Cpus
from allspark_server.runtime.rank_model import RankModel
from allspark_server.weights.asgraph import graphs_of, read_graphs
from support.checkpoints import LOGIT_TOLERANCE, NEAR_TIE
from support.driver import Driver
from support.gemma4 import VOCAB
from support.gguf_files import write_pair
from support.invariance import bits
from support.units import UNIT
from support.vision import CONFIGS, END, PAD, START, TOGETHER, VIDEO, Reference, checkpoint, film, picture, placed

slow = pytest.mark.slow
NEW_TOKENS = 12
ALWAYS = {"max_new_tokens": NEW_TOKENS, "eos_token_id": -1, "logprobs": True, "top_logprobs": 3}
_names = (f"images-{i}" for i in itertools.count())
_models: dict[str, str] = {}    # the checkpoint of each


def text(length: int, seed: int = 0) -> list[int]:
    """Random ids that are no marks of images."""
    return np.random.default_rng((seed, length)).integers(11, VOCAB, length).tolist()


def shown(*parts: int | list[int]) -> list[int]:
    """The ids of a prompt: text, and a placeholder for each number."""
    return [i for part in parts for i in (part if isinstance(part, list) else [START, PAD, END])]


#: prompts and their images: one of a single unit, several in a row, 300 tokens between two, one longer than a chunk
PROBES = [
    (shown(text(7), 0, text(5)), [picture(12, 12)]),
    (shown(0, text(1)), [picture(31, 200, 1)]),
    (shown(text(40), 0, text(300), 1, 2, text(9)), [picture(50, 70, 2), picture(13, 90, 3), picture(120, 25, 4)]),
    (shown(text(90), 0, text(33)), [picture(160, 190, 5)]),
]
OTHERS = [(text(3 + 23 * i, i + 1), []) for i in range(6)]


@contextlib.contextmanager
def installed(engine, model: str, **fields) -> Iterator[str]:
    name = next(_names)
    _models[name] = model
    engine.install_model(AsModelConfig(model_name=name, **{
        "model_path": str(checkpoint(model)), "num_threads": 1,
        "enable_prefix_cache": False, "max_step_tokens": 1024, "engine_max_batch": 16,
        "lora_max_num": 0, **UNIT, **fields}))
    try:
        engine.start_model(name)
        yield name
    finally:
        engine.release_model(name)


def step(model: str, rows: int) -> int:
    """The rows of a small step, which has room for all 70 rows of an image of Gemma 4."""
    return rows + 30 * (model == "gemma4")


def start(engine, name, probe, **generate):
    ids, images = probe
    inputs = {"input_ids": placed(_models[name], ids), "images": images}
    return engine.start_request(name, inputs, {**ALWAYS, "do_sample": False, **generate})


def collect(results) -> tuple[list[int], list[str]]:
    ids, logprobs = [], []
    for elements in results:
        ids += elements.ids_from_generate
        logprobs += bits(elements.token_logprobs_list)
    assert results.GenerateStatus() is GenerateRequestStatus.GenerateFinished
    return ids, logprobs


def run_alone(engine, name) -> list[tuple]:
    return [collect(start(engine, name, probe, seed=i, do_sample=i % 2 == 0)[2]) for i, probe in enumerate(PROBES)]


def run_together(engine, name) -> list[tuple]:
    others = [start(engine, name, other)[2] for other in OTHERS[:3]]
    probes = [start(engine, name, probe, seed=i, do_sample=i % 2 == 0)[2] for i, probe in enumerate(PROBES)]
    others += [start(engine, name, other)[2] for other in OTHERS[3:]]
    found = [collect(results) for results in probes]
    for results in others:
        collect(results)
    return found


_first: dict[tuple[int, str], list[tuple]] = {}


def first_run(engine, model) -> list[tuple]:
    """Each probe alone, in one chunk, without a prefix cache."""
    key = (id(engine), model)
    if key not in _first:
        with installed(engine, model) as name:
            _first[key] = run_alone(engine, name)
    return _first[key]


def some(chosen, models=CONFIGS):
    """Pairs of an engine and a model that its ranks can divide; those that are not chosen are marked slow."""
    pairs = itertools.product(("engine", "client-2", "client-3"), models)
    return [pytest.param(*pair, marks=() if pair in chosen else slow) for pair in pairs
            if pair not in (("client-3", "qwen3.5"), ("client-3", "qwen3-vl-moe"))]


@pytest.fixture(scope="module")
def references():
    found = {}
    return lambda name: found.setdefault(name, Reference(name))


@pytest.mark.parametrize("where, model", some({
    ("engine", "qwen2-vl"), ("engine", "qwen3.5"), ("engine", "pixtral"), ("engine", "gemma3"),
    ("client-2", "qwen2.5-vl"), ("client-2", "mistral3"), ("client-3", "qwen3-vl")}))
def test_logits_and_greedy_output(request, engine_of, references, where, model):
    """Log probabilities of the prompt's rows, behind images and between them, and of the output."""
    engine, reference = engine_of(where), references(model)
    count = 256 if request.config.getoption("markexpr").startswith("slow") else 24
    with installed(engine, model, num_threads=0 if where == "engine" else 1) as name:
        # transformers' Mistral 3 fails on an image of one row: its squeeze(0) takes the row for a batch
        for prompt, images in PROBES[2 * (model == "mistral3")::2]:
            together = model in TOGETHER    # which have no log probabilities of such prompts
            more = {} if together else {"prompt_logprobs": 4}
            *_, results = start(engine, name, (prompt, images), max_new_tokens=count, **more)
            elements = list(results)
            tokens = [i for element in elements for i in element.ids_from_generate]
            ids = reference.processor.expand(placed(model, prompt), reference.processor.process(images))
            logits = reference.logits(ids, images)
            normed = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            rows = [row for element in elements for row in element.prompt_logprobs_list]
            rows += [each for element in elements for each in element.log_probs_list][:1] if together else []
            first = len(ids) - len(rows) if together else 0
            assert len(rows) == (1 if together else len(ids) - 1)
            worst = max(abs(value - normed[first + i, token]) for i, row in enumerate(rows) for token, value in row)
            assert worst <= 2 * LOGIT_TOLERANCE * logits.std()
            assert len(tokens) == count
            tokens = tokens[:(tokens + [PAD]).index(PAD)]   # which transformers takes for an image in an output, too
            chosen_from = reference.logits(ids + tokens[:-1], images)[len(ids) - 1:]
            for i, (row, found) in enumerate(zip(chosen_from, tokens)):
                assert row.max() - row[found] <= NEAR_TIE * row.std(), f"token {i} of the output"


@pytest.mark.parametrize("model", [pytest.param(name, marks=() if name in ("qwen2-vl", "llava-qwen2") else slow)
                                   for name in CONFIGS])
def test_rows_of_the_tower(engine_of, references, model):
    """What a prompt takes for an image, without the text model: the tower's outputs, or, where later layers add more,
    those of the last one.
    """
    engine, reference = engine_of("engine"), references(model)
    with installed(engine, model) as name:
        for prompt, images in PROBES[2 * (model == "mistral3")::2]:
            collect(start(engine, name, (prompt, images))[2])
            ids, read = engine.served_model(name).input.images.read(placed(model, prompt), images, 10_000, "", None)
            rows = np.concatenate([read.rows[image.digest] for image in read.inputs])
            expected = reference.rows(ids, images)
            own = rows[:, :expected.shape[1]]
            assert own.shape == expected.shape
            assert np.abs(own - expected).max() <= 2 * LOGIT_TOLERANCE * expected.std()


BITWISE = some({("engine", "qwen2.5-vl"), ("engine", "gemma3"), ("client-2", "qwen3-vl")})


@pytest.mark.parametrize("where, model", BITWISE)
def test_in_a_crowd_in_chunks_and_beside_cached_prefixes(engine_of, where, model):
    engine = engine_of(where)
    expected = first_run(engine, model)
    with installed(engine, model, max_step_tokens=step(model, 61), enable_prefix_cache=True, num_threads=0) as name:
        assert run_together(engine, name) == expected
        assert run_together(engine, name) == expected       # everything is cached
        assert engine.get_as_engine_stat(name).prefix_cache_hit_token > 300
        before, _ = PROBES[3]
        collect(start(engine, name, (before[:80], []))[2])
        assert run_together(engine, name) == expected       # before the image, in it, and behind it


@pytest.mark.parametrize("where, model", BITWISE)
def test_preempted(engine_of, where, model):
    engine = engine_of(where)
    # The context limits an image's tokens, which Pixtral does not merge: none is made smaller than in the first run.
    length, count = (1600, 5) if model == "pixtral" else (768, 3)
    fields = {"engine_max_length": length, "max_step_tokens": step(model, 64)}
    with installed(engine, model, **{**fields, "engine_max_batch": 1}) as name:
        info = engine.get_model_info(name)
    # What the info says is rank 0's. Another rank may have more heads, and bounds the spans of all.
    shard = RankModel(AsModelConfig(model_name=name), str(checkpoint(model)), "", 0, info.ranks, Cpus([], 1))
    of_ranks = [shard.span_bytes(Cpus([], 1), rank) for rank in range(info.ranks)]
    memory = (info.num_spans + 2) * (info.cache_bytes // info.num_spans) * max(of_ranks) // of_ranks[0]
    with installed(engine, model, cache_memory=memory, **fields) as name:
        *_, grown = start(engine, name, (text(20), []), max_new_tokens=400, priority=1, n=count, do_sample=True,
                           seed=1)
        assert run_together(engine, name) == first_run(engine, model)
        engine.sync_request(name)
        assert engine.get_as_engine_stat(name).preempted_request > 0 and grown.GeneratedLength() == count * 400


@pytest.mark.parametrize("model", ["qwen3-vl", *(pytest.param(name, marks=slow) for name in CONFIGS
                                                 if name != "qwen3-vl")])
def test_resumed(engine_of, model):
    """As a client goes on elsewhere: by the ids, which hold those of the images, the tokens, and the images again."""
    engine = engine_of("engine")
    with installed(engine, model, engine_max_prefill_length=48, enable_prefix_cache=True) as name:
        for i, ((prompt, images), whole) in enumerate(zip(PROBES, first_run(engine, model))):
            config = GenerateConfig(**{**ALWAYS, "do_sample": i % 2 == 0, "seed": i})
            spec = RequestSpec(name, input_ids=placed(model, prompt), images=images, config=config)
            _, handle, _ = engine._start(spec)
            engine.release_request(name, handle)
            for done in (1, NEW_TOKENS - 1):
                again = RequestSpec(name, input_ids=spec.input_ids, images=images, config=config,
                                    generated=whole[0][:done])
                ids, logprobs = collect(engine._start(again)[2])
                assert (ids, logprobs) == (whole[0][done:], whole[1][done:])


def test_images_of_one_size_share_nothing_but_what_precedes_them(engine_of):
    """Their prompts have equal ids."""
    engine = engine_of("engine")
    prompt, first, second = shown(text(64), 0, text(40)), picture(60, 60, 7), picture(60, 60, 8)
    with installed(engine, "qwen3-vl") as name:
        expected = [collect(start(engine, name, (prompt, [image]))[2]) for image in (first, second)]
    assert expected[0] != expected[1]
    with installed(engine, "qwen3-vl", enable_prefix_cache=True) as name:
        for image, output in ((first, expected[0]), (second, expected[1]), (first, expected[0])):
            *_, results = start(engine, name, (prompt, [image]))
            elements = list(results)
            assert [i for each in elements for i in each.ids_from_generate] == output[0]
        assert max(each.prefix_cache_len for each in elements) >= 64
        *_, results = start(engine, name, (prompt, [picture(60, 60, 9)]))
        assert max(each.prefix_cache_len for each in results) == 64


def test_an_image_is_computed_once(engine_of):
    engine = engine_of("engine")
    with installed(engine, "qwen2-vl") as name:
        encoder = engine.served_model(name).input.images.encoder
        outputs = [collect(start(engine, name, probe)[2]) for probe in (PROBES[0], PROBES[0])]
        assert outputs[0] == outputs[1] and (encoder.encoded, encoder.reused) == (1, 1)
        both = [start(engine, name, PROBES[3])[2] for _ in range(3)]
        assert len({tuple(collect(results)[1]) for results in both}) == 1 and encoder.encoded == 2
    with installed(engine, "qwen2-vl", image_cache_memory=0) as name:
        encoder = engine.served_model(name).input.images.encoder
        assert [collect(start(engine, name, PROBES[0])[2]) for _ in range(2)] == outputs
        assert encoder.encoded == 2


def test_streams_go_on_while_an_image_is_computed(engine_of):
    """A large image is computed in parts; steps of a stream run between them, and its bits are the same."""
    engine = engine_of("engine")
    expected = first_run(engine, "qwen2.5-vl")[3]
    with installed(engine, "qwen2.5-vl") as name:
        encoder = engine.served_model(name).input.images.encoder
        end = encoder._pace.end
        encoder._pace.cut = lambda work, begin: min(begin + end // 40, end)     # as a slow machine would
        planned = []
        plan = encoder.plan
        encoder.plan = lambda: planned.append(stream.GeneratedLength()) or plan()
        *_, stream = start(engine, name, (text(10), []), max_new_tokens=600)
        next(iter(stream))
        assert collect(start(engine, name, PROBES[3], seed=3, do_sample=False)[2]) == expected
        engine.sync_request(name)
    parts = [length for length in planned if length < 600]
    assert len(parts) > 20 and parts[-1] - parts[0] >= len(parts) // 2


@pytest.mark.parametrize("model, dtype", [("qwen2.5-vl", "int8"), ("qwen2.5-vl", "w8a8"), ("qwen2.5-vl", "bfloat16"),
                                          ("gemma4", "w8a8"), ("gemma4-small", "int8")])
def test_quantized_towers(engine_of, model, dtype):
    """Outputs stay near those of the tower as it is stored, and repeat bit by bit."""
    engine, found = engine_of("engine"), []
    for fields in ({}, {"vision_weight_dtype": dtype}):
        with installed(engine, model, **fields) as name:
            if model in TOGETHER:
                *_, results = start(engine, name, PROBES[2], max_new_tokens=1, top_logprobs=10)
                found.append(np.array(sorted(pair for each in results for pair in each.log_probs_list[0]))[:, 1])
            else:
                *_, results = start(engine, name, PROBES[2], prompt_logprobs=0)
                rows = [row[0][1] for element in results for row in element.prompt_logprobs_list]
                found.append(np.array(rows)[50:])       # behind the first image
            assert run_alone(engine, name) == run_together(engine, name)
    assert 0 < np.abs(found[0] - found[1]).mean() < 0.2


@pytest.mark.parametrize("ids, images, reason", [
    (shown(text(3), 0), [], None),
    (text(5), [picture(20, 20)], "0 image placeholders .* and the request 1 images"),
    (shown(0, 1), [picture(20, 20)], "2 image placeholders .* and the request 1 images"),
    ([*text(3), PAD, PAD, PAD], [picture(24, 24)], "3 image placeholders"),
    (shown(0), [picture(3, 700)], "longer side"),
])
def test_wrong_images_are_refused(engine_of, ids, images, reason):
    engine = engine_of("engine")
    with installed(engine, "qwen2-vl") as name:
        if reason is None:      # a placeholder without an image is a token like others
            collect(start(engine, name, (ids, images))[2])
            return
        with pytest.raises((AllSparkError, ValueError), match=reason):
            start(engine, name, (ids, images))
        assert engine.get_as_engine_stat(name).pendding_request == 0


def test_steps_must_have_room_for_an_image_whose_rows_see_each_other(engine_of):
    engine = engine_of("engine")
    with pytest.raises(AllSparkError, match="a step has all 16 rows of an image.* set it to at least 32"), \
            installed(engine, "gemma3", max_step_tokens=31):
        pass


def test_a_tower_that_fails_ends_the_requests_that_wait_for_it(engine_of):
    """And those that come later; requests without images go on."""
    engine = engine_of("engine")
    with installed(engine, "qwen2-vl") as name:
        encoder, failed = engine.served_model(name).input.images.encoder, []

        def fail(*_):
            failed.append(1)
            raise ValueError("a plan that ranks refuse")

        encoder._plan = fail
        *_, results = start(engine, name, PROBES[0])
        with pytest.raises(AllSparkError, match="vision tower of model .* has failed .a plan that ranks refuse."):
            list(results)
        with pytest.raises(AllSparkError, match="vision tower of model"):
            start(engine, name, PROBES[0])
        assert len(collect(start(engine, name, OTHERS[1])[2])[0]) == NEW_TOKENS and failed == [1]


@pytest.mark.parametrize("model", ["qwen2-vl", "mistral3", pytest.param("pixtral", marks=slow)])
def test_large_images_are_made_smaller(engine_of, model):
    engine = engine_of("engine")
    with installed(engine, model, max_image_tokens=20) as name:
        for size in ((190, 190), (10, 150), (300, 20)):
            spec = RequestSpec(name, input_ids=shown(text(3), 0), images=[picture(*size)],
                               config=GenerateConfig(**ALWAYS))
            collect(engine._start(spec)[2])
            assert 1 <= spec.input_ids.count(PAD) <= 20


@pytest.mark.parametrize("where, model, quantized", [
    ("engine", "qwen2.5-vl", False), ("client-2", "gemma4-small", True), ("engine", "llava-next", False),
    *(pytest.param("client-2", model, quantized, marks=slow) for model in CONFIGS for quantized in (False, True))])
def test_serialized_models_answer_images_as_their_checkpoints(engine_of, tmp_path, where, model, quantized):
    """Also from where their checkpoint is not."""
    source = shutil.copytree(checkpoint(model), tmp_path / "source")
    HuggingFaceModel(source, "m").serialize_to_path(None, tmp_path / "files", enable_quant=quantized)
    shutil.rmtree(source)
    engine, form = engine_of(where), {"weight_dtype": "w8a8"} if quantized else {}
    outputs, hashes = [], []
    for fields in ({**form}, {"model_path": str(tmp_path / "files" / "m.asgraph")}):
        with installed(engine, model, **fields) as name:
            assert engine.get_model_info(name).sees_images
            outputs.append(run_together(engine, name))
            hashes.append(engine.get_model_info(name).model_hash)
            if model.startswith("qwen") and where == "engine":
                video = shown(text(3), 0, text(2))
                video[video.index(PAD)] = VIDEO
                outputs[-1].append(collect(start(engine, name, (video, [film(4, 24, 24)]))[2]))
    assert outputs[0] == outputs[1]
    with installed(engine, model, model_path=str(tmp_path / "files" / "m.asgraph"), vision_weight_dtype="int8") as name:
        assert engine.get_model_info(name).model_hash not in hashes     # it covers the tower's format
        assert run_together(engine, name) != outputs[1][:len(PROBES)]


def test_models_without_a_tower_say_what_to_do(engine_of, tmp_path):
    """Serialized before towers were, converted by llama.cpp, or without the files of the image processor."""
    engine, directory = engine_of("engine"), shutil.copytree(checkpoint("qwen2-vl"), tmp_path / "source")
    HuggingFaceModel(directory, "m").serialize_to_path(None, tmp_path)
    graph = tmp_path / "m.asgraph"
    message = asgraph_pb2.Graph.FromString(graph.read_bytes())
    message.ClearField("tower")
    (tmp_path / "old.asgraph").write_bytes(message.SerializeToString())
    (directory / "preprocessor_config.json").unlink()
    gguf, _ = write_pair(tmp_path, "qwen2", "F32")
    for path, fields, reason in (
            (tmp_path / "old.asgraph", {"weights_path": str(tmp_path / "m.asparam")}, "old.asgraph has no vision tow"),
            (gguf, {}, "GGUF file.* mmproj files are not read; load its Hugging Face directory"),
            (directory, {}, "no preprocessor_config.json")):
        with installed(engine, "qwen2-vl", model_path=str(path), **fields) as name:
            info = engine.get_model_info(name)
            assert not info.sees_images and re.search(reason, info.no_images_reason)
            with pytest.raises(AllSparkError, match=f"takes no images: .*{reason}"):
                start(engine, name, PROBES[0])
    HuggingFaceModel(checkpoint("qwen2-vl"), "old").serialize_to_path(None, tmp_path, skip_if_exists=True)
    assert read_graphs(tmp_path / "old.asgraph")[1] is not None     # written anew, with its tower


@pytest.mark.parametrize("field, value", [("patch", 0), ("merge", -1), ("merge", 1 << 30), ("outputs", 0),
                                          ("window", -5), ("tokens", 1 << 30), ("leading", -1), ("most", -1)])
def test_towers_of_damaged_files(tmp_path, field, value):
    """They are refused by name, as are towers within towers and alone."""
    HuggingFaceModel(checkpoint("qwen2-vl"), "m").serialize_to_path(None, tmp_path)
    message = asgraph_pb2.Graph.FromString((tmp_path / "m.asgraph").read_bytes())
    setattr(message.tower.config.vision, field, value)
    with pytest.raises(ValueError, match=f"vision.{field} is {value}: it must be"):
        graphs_of(message)
    good = asgraph_pb2.Graph.FromString((tmp_path / "m.asgraph").read_bytes())
    with pytest.raises(ValueError, match="without its model"):
        graphs_of(good.tower)
    good.tower.tower.ParseFromString(good.tower.SerializeToString())
    with pytest.raises(ValueError, match="its vision tower is not one"):
        graphs_of(good)


def test_experts_as_published_checkpoints_store_them(tmp_path):
    """Qwen3-VL's experts are transposed there."""
    source = checkpoint("qwen3-vl-moe")
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    stored = load_file(source / "model.safetensors")
    assert any(name.endswith("experts.down_proj") for name in stored)
    save_file({name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
               for name, tensor in stored.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    outputs = []
    for directory in (source, tmp_path):
        with Driver(directory, engine_max_length=64) as own:
            outputs.append([row.tobytes() for row in own.generate(text(20), 4)[1]])
    assert outputs[0] == outputs[1]


def test_other_bounds_of_images_leave_the_fingerprint_of_texts(engine_of):
    engine = engine_of("engine")
    states = []
    for fields in ({}, {"max_image_tokens": 60}, {"engine_max_length": 100}):
        with installed(engine, "qwen2-vl", **fields) as name:
            states.append(next(state for state in engine.list_models() if state.name == name))
    assert len({state.fingerprint for state in states}) == 1
    assert len({state.image_fingerprint for state in states}) == 3


# -- videos ------------------------------------------------------------------------------------------------------------
QWEN = [name for name in CONFIGS if name.startswith("qwen")]
_FILM = [START, VIDEO, END]
#: a video of an odd number of frames among text; one behind an image, whose time ends behind what follows it
FILMS = [
    ([*text(9), *_FILM, *text(40)], [film(5, 40, 60, 3.0)]),
    ([START, PAD, END, *text(20), *_FILM, *text(3), *_FILM, *text(2)],
     [picture(30, 50), film(20, 20, 30, 0.7, 1), film(2, 50, 31, 1.5, 2)]),
]


@pytest.mark.parametrize("where, model", some(
    {("engine", "qwen2-vl"), ("engine", "qwen2.5-vl"), ("client-2", "qwen3-vl")}, QWEN))
def test_videos(engine_of, references, where, model):
    """Log probabilities of the prompt's rows, behind videos and between them, and of the output."""
    engine, reference = engine_of(where), references(model)
    with installed(engine, model) as name:
        for prompt, images in FILMS:
            *_, results = start(engine, name, (prompt, images), max_new_tokens=24, prompt_logprobs=4)
            elements = list(results)
            tokens = [i for element in elements for i in element.ids_from_generate]
            ids = reference.processor.expand(prompt, reference.processor.process(images), reference.encode)
            logits = reference.logits(ids, images)
            normed = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            rows = [row for element in elements for row in element.prompt_logprobs_list]
            assert len(rows) == len(ids) - 1 and len(tokens) == 24
            worst = max(abs(value - normed[i, token]) for i, row in enumerate(rows) for token, value in row)
            assert worst <= 2 * LOGIT_TOLERANCE * logits.std()
            expected, rows = reference.generated(ids, images, 24)
            for wanted, found, row in zip(expected, tokens, rows):
                assert row.max() - row[found] <= NEAR_TIE * row.std()
                if wanted != found:     # after a tie, which the two resolve in two ways
                    break


@pytest.mark.parametrize("where, model", [("engine", "qwen2.5-vl"), pytest.param("engine", "qwen2-vl", marks=slow),
                                          pytest.param("client-2", "qwen3-vl", marks=slow)])
def test_bits_of_videos(engine_of, where, model):
    """In a batch, in chunks, beside cached prefixes, and resumed; also of a chat that goes on."""
    engine = engine_of(where)

    def run(name, films):
        return [collect(results) for *_, results in [start(engine, name, each, max_new_tokens=40) for each in films]]

    with installed(engine, model) as name:
        expected = [run(name, [each])[0] for each in FILMS]
        longer = [([*ids, *output[0], *text(5)], images) for (ids, images), output in zip(FILMS, expected)]
        continued = [run(name, [each])[0] for each in longer]
    with installed(engine, model, max_step_tokens=61, enable_prefix_cache=True, num_threads=0) as name:
        for _ in range(2):
            assert run(name, FILMS) == expected
            assert run(name, longer) == continued
        if where == "engine":
            for (ids, images), whole in zip(FILMS, expected):
                spec = RequestSpec(name, input_ids=ids, images=images, config=GenerateConfig(
                    **{**ALWAYS, "max_new_tokens": 40, "do_sample": False}), generated=whole[0][:33])
                assert collect(engine._start(spec)[2]) == (whole[0][33:], whole[1][33:])


@pytest.mark.parametrize("model", ["qwen2-vl", "qwen3-vl"])
def test_chats_with_videos(engine_of, references, model):
    """Qwen3-VL has the time of each view, two frames, before it, and marks around each."""
    engine, reference = engine_of("engine"), references(model)
    video = film(5, 36, 48, 4.0)
    with installed(engine, model) as name:
        answers = []
        for part in ({"type": "video", "video": list(video.frames), "fps": 4}, {"type": "video", "video": video}):
            chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, part, {"type": "text", "text": "b"}]}]
            *_, results = engine.start_request(name, {"messages": chat}, {**ALWAYS, "do_sample": False})
            answers.append(collect(results)[0])
        rows, ids = 36 // 12 * 48 // 12, reference.encode("<|im_start|>user\na")
        if model == "qwen3-vl":
            for time in (0.1, 0.6, 1.0):
                ids += [*reference.encode(f"<{time} seconds>"), START, *[VIDEO] * rows, END]
        else:
            ids += [START, *[VIDEO] * 3 * rows, END]
        ids += reference.encode("b<|im_end|>\n<|im_start|>assistant\n")
        answers.append(collect(start(engine, name, (ids, [video]), do_sample=False)[2])[0])
        assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("model, ids, images, reason", [
    ("gemma3", [START], [film(2, 20, 20)], "video 1 of the request is one too many: this model takes images, but no"),
    ("qwen2-vl", _FILM, [picture(20, 20)], "0 image placeholders .* and 1 video placeholders .* the request 1 images"),
    ("qwen2-vl", [*_FILM, PAD], [picture(20, 20), film(1, 20, 20)], "in the same order"),
    ("qwen3-vl", _FILM, [film(1, 20, 20)], "video 1 of the request has 1 frames: this model takes at least 2"),
    ("qwen2-vl", _FILM, [Video((picture(20, 20).content, picture(20, 30).content))],
     "video 1 of the request has a frame, number 2, that has 30 x 20 pixels, and the first one 20 x 20"),
])
def test_wrong_videos_are_refused(engine_of, model, ids, images, reason):
    engine = engine_of("engine")
    with installed(engine, model) as name, pytest.raises((AllSparkError, ValueError), match=reason):
        engine.start_request(name, {"input_ids": ids, "images": images}, {**ALWAYS})
