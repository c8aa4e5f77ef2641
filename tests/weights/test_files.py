"""Files that a client or a checkpoint names may contain anything: each is opened, read and parsed within bounds, or
refused by name.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allspark_client.errors import AllSparkError
from allspark_server.weights.files import open_regular, read_file, read_json, without_collections

SIMPLE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip

# Each call names a file in its own way: {path} is the hostile one, {folder} holds it under every name of a checkpoint.
CALLS = {
    "graph": "from allspark_server.weights.asgraph import read_graph; read_graph(Path(path))",
    "params": "from allspark_server.weights.sources import ParamSource; ParamSource(Path(path))",
    "model": "from allspark_server.weights.checkpoint import open_model; open_model(path)",
    "config": "from allspark_server.models import read_config; read_config(folder)",
    "weights": "from allspark_server.weights.sources import open_weights; open_weights(Path(folder))",
    "tokenizer": "from allspark_server.tokenizer.tokenizer import Tokenizer; Tokenizer.from_dir(folder)",
}
CHILD = """
import resource, sys
from pathlib import Path
import numpy, tokenizers
from allspark_client.errors import AllSparkError
call, path, folder = sys.argv[1:]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
try:
    exec(call)
except AllSparkError as error:
    print(error)
"""


def folder_of(path: Path | str, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).symlink_to(path)
    return folder


def refused_by_child(call: str, path: Path | str, tmp_path: Path) -> str:
    """The error about a file in a process of its own that has a GiB of memory and a few seconds."""
    words = [sys.executable, "-c", CHILD, CALLS[call], str(path), str(folder_of(path, tmp_path))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


@pytest.mark.parametrize("call", CALLS)
def test_device_is_refused(call, tmp_path):
    assert "is a device: expected a regular file" in refused_by_child(call, "/dev/zero", tmp_path)


@pytest.mark.parametrize("call", CALLS)
def test_fifo_is_refused_without_waiting(call, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert "is a FIFO: expected a regular file" in refused_by_child(call, tmp_path / "fifo", tmp_path)


@pytest.mark.parametrize("call", CALLS)
def test_huge_file_is_refused_unread(call, tmp_path):
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    said = refused_by_child(call, tmp_path / "huge", tmp_path)
    assert str(1 << 40) in said or "not valid JSON" in said or "cannot be mapped" in said


def test_what_opens(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to("a")
    assert read_file(tmp_path / "link", 10) == b"x" * 10
    with open_regular(tmp_path / "a") as file:
        assert not os.get_inheritable(file.fileno())
    with pytest.raises(AllSparkError, match="a has 10 bytes: a file of this kind may have at most 9"):
        read_file(tmp_path / "a", 9)
    with pytest.raises(AllSparkError, match="is a directory: expected a regular file"):
        open_regular(tmp_path)
    for path, problem in (
        ("nowhere", "does not exist"),
        ("a/b", "Not a directory"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(AllSparkError, match=problem):
            open_regular(tmp_path / path)


@pytest.mark.parametrize("text, problem", [
    ("[" * 100_000, "nested too deeply"), ('{"a": ' + "9" * 5000 + "}", "digits"), (b"\xff", "not valid JSON"),
    ("[]", "list"),
])  # fmt: skip
def test_json_that_breaks_parsers(text, problem, tmp_path):
    (tmp_path / "x.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(AllSparkError, match=f"x.json .*{problem}"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("field, value", [
    ("num_hidden_layers", 10**9), ("hidden_size", 2**40), ("vocab_size", 2**40), ("intermediate_size", 2**40),
    ("num_attention_heads", 2**40), ("head_dim", 2**30), ("max_position_embeddings", 10**30), ("rms_norm_eps", 10**400),
    ("rope_theta", float("inf")), ("rope_theta", float("nan")), ("partial_rotary_factor", float("nan")),
    ("eos_token_id", 2**40), ("eos_token_id", list(range(5000))),
])  # fmt: skip
def test_numbers_that_no_network_has(field, value, tmp_path):
    from allspark_server.models import read_config

    (tmp_path / "config.json").write_text(json.dumps({**SIMPLE, field: value}))
    with pytest.raises(AllSparkError, match=f"{field[:8]}.*"):
        read_config(tmp_path)


@pytest.mark.parametrize("rope", [
    {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1.0},
    {"rope_type": "yarn", "original_max_position_embeddings": 0},
])  # fmt: skip
def test_rotary_embeddings_that_are_none(rope, tmp_path):
    from allspark_server.models import build_graph, read_config

    (tmp_path / "config.json").write_text(json.dumps({**SIMPLE, "rope_scaling": rope}))
    with pytest.raises((AllSparkError, ValueError), match="original_max|rotary embedding"):
        build_graph(read_config(tmp_path))


def safetensors(path: Path, header: dict, data: int) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


@pytest.mark.parametrize("header, problem", [
    ({"a": {"dtype": "F32", "shape": [1] * 1000, "data_offsets": [0, 4]}}, "shape"),
    ({"a": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, "impossible shape"),
    ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "shape"),
    ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "unknown dtype"),
    ({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}, "but the one before ends at 8"),
    ({"__metadata__": {"format": 3}}, "__metadata__"),
])  # fmt: skip
def test_safetensors_headers(header, problem, tmp_path):
    from allspark_server.weights.safetensors import SafetensorsFile

    with pytest.raises(AllSparkError, match=problem):
        SafetensorsFile(safetensors(tmp_path / "x.safetensors", header, 64))


def test_nested_safetensors_header(tmp_path):
    from allspark_server.weights.safetensors import SafetensorsFile

    text = b"[" * 100_000
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(AllSparkError, match="nested too deeply"):
        SafetensorsFile(tmp_path / "x.safetensors")


def test_tensor_that_repeats_what_a_torch_file_holds(tmp_path):
    torch = pytest.importorskip("torch")
    from allspark_server.weights.sources import open_weights

    torch.save({"a": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(AllSparkError, match="tensor 'a' in .*pytorch_model.bin is not stored whole"):
        open_weights(tmp_path)


@pytest.fixture
def graph(tmp_path_factory):
    """The message of a small model's .asgraph."""
    from allspark_server.models import build_graph, read_config
    from allspark_server.weights.asgraph import to_message

    folder = tmp_path_factory.mktemp("simple")
    (folder / "config.json").write_text(json.dumps(SIMPLE))
    return to_message(build_graph(read_config(folder)))


@pytest.mark.parametrize("change, problem", [
    (lambda m: setattr(m.config, "num_layers", 2**30), "num_layers"),
    (lambda m: setattr(m.config, "num_kv_heads", 0), "num_kv_heads"),
    (lambda m: setattr(m.config, "head_dim", -8), "head_dim"),
    (lambda m: setattr(m.config.rope, "type", "spiral"), "spiral"),
    (lambda m: setattr(m.tensors[1].blocks[0], "width", 7), "split"),
    (lambda m: m.tensors[0].ClearField("blocks"), "has no columns"),
    (lambda m: setattr(m.weights[1], "columns", -1), "must have parts"),
    (lambda m: m.weights[1].ClearField("parts"), "must have parts"),
    (lambda m: setattr(m.ops.add(), "type", "kept_hidden"), "kept_hidden.* is for draft heads"),
])  # fmt: skip
def test_graphs_that_cannot_be(graph, change, problem, tmp_path):
    from allspark_server.weights.asgraph import read_graph

    # tensors[1] must be one that is split over ranks
    graph.tensors.sort(key=lambda t: not t.blocks[0].HasField("split"))
    graph.tensors.insert(0, graph.tensors.pop())
    change(graph)
    (tmp_path / "x.asgraph").write_bytes(graph.SerializeToString())
    with pytest.raises(AllSparkError, match=problem):
        read_graph(tmp_path / "x.asgraph")


def test_ops_that_cannot_be(tiny_model, tmp_path):
    """Each op of an .asgraph in turn loses a part: the model is refused, and nothing is indexed out of range."""
    from allspark_client import AsModelConfig
    from allspark_server.runtime.runner import ModelRunner
    from allspark_server.weights.asgraph import to_message
    from allspark_server.weights.checkpoint import open_model
    from allspark_server.weights.huggingface import HuggingFaceModel

    HuggingFaceModel(tiny_model, "m").load_model().serialize_to_path(None, tmp_path)
    good = to_message(open_model(str(tmp_path / "m.asgraph")).graph)
    seen = set()
    for i, op in enumerate(good.ops):
        if op.type in seen:
            continue
        seen.add(op.type)
        for field, problem in (
            ("inputs", "op .* has 0 inputs"),
            ("outputs", "0 outputs"),
            ("weights", "0 weights"),
            ("attrs", rf"op {i} \({op.type}\) of the model's graph is not valid"),
        ):
            if not len(getattr(op, field)):
                continue
            spoilt = type(good).FromString(good.SerializeToString())
            spoilt.ops[i].ClearField(field)
            (tmp_path / "m.asgraph").write_bytes(spoilt.SerializeToString())
            config = AsModelConfig(model_name="m", model_path=str(tmp_path / "m.asgraph"), engine_max_length=64)
            with pytest.raises(AllSparkError, match=problem):
                ModelRunner(config).load()


def tokenizer_folder(tmp_path: Path, tokenizer: dict, **config) -> Path:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_tokenizer_files_that_are_none(tiny_model, tmp_path):
    from allspark_server.tokenizer.tokenizer import Tokenizer

    good = json.loads((tiny_model / "tokenizer.json").read_text())
    for template in (3, ["x"]):
        with pytest.raises(ValueError, match="chat template .* must be a str"):
            Tokenizer.from_dir(tokenizer_folder(tmp_path, good, chat_template={"default": template}))
    with pytest.raises(ValueError, match="more than 64 chat templates"):
        Tokenizer.from_dir(tokenizer_folder(tmp_path, good, chat_template={str(i): "x" for i in range(65)}))
    shutil.copy(tiny_model / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="tokenizer_config.json is not valid JSON: it is nested too deeply"):
        Tokenizer.from_dir(tmp_path)


def test_ops_that_reach_past_their_buffers():
    """The executor refuses ops that would read past a buffer."""
    from allspark_server import _native

    executor = _native.Executor()
    table = [executor.add_vector([1.0] * n) for n in (8, 1)]
    rows, some = executor.add_tensor(32), executor.add_tensor(32, True)
    executor.add_op("rotary_table", [], [], [table[0]], {"rotary_dim": 16})
    attention = {"layer": 0, "q_heads": 2, "kv_heads": 1, "head_dim": 8, "group": 2, "scale": 1}
    for op, inputs, weights, attrs, problem in (
        ("rotary_table", [], [table[1]], {"rotary_dim": 2}, "another op makes table"),  # rope has the first one's width
        ("select_rows", [some], [], {}, "a row for each token"),
        ("rope", [rows], [], {"offset": 1e30, "heads": 1, "head_dim": 16}, "offset is 1"),
        ("span_attention", [rows], [], {**attention, "group": 1 << 24, "kv_begin": 1 << 24}, "invalid layer"),
    ):
        outputs = [executor.add_tensor(16)] if op == "span_attention" else [some] if op == "select_rows" else []
        with pytest.raises(ValueError, match=problem):
            executor.add_op(op, inputs, outputs, weights, attrs)


@pytest.fixture
def render(monkeypatch):
    from allspark_server import limited_process
    from allspark_server.tokenizer.templates import Renderer

    monkeypatch.setattr(limited_process, "WAIT_SECONDS", 200)     # a busy machine takes long to give 2 s
    renderer = Renderer()
    yield lambda template: renderer.render(template, {"messages": []})
    renderer.close()


@pytest.mark.parametrize("template", [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}", "{{ [0] * 10**10 }}", "{{ 2**(10**10) }}", "{{ 'x'|center(10**10) }}",
    "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
])  # fmt: skip
def test_templates_without_end(template, render):
    """Each is refused within bounded time and memory, and the next one is rendered."""
    with pytest.raises(
        ValueError,
        match="takes more than 2 s of a processor or 1024 MiB of memory|failed on the messages|gives more than",
    ):
        render(template)
    assert render("a{{ 1 + 1 }}") == "a2"


def test_panic_of_the_tokenizer_is_an_error(tiny_model, tmp_path):
    """A text on which a pattern backtracks endlessly makes the Rust code panic, which is not an Exception."""
    from allspark_server.tokenizer.tokenizer import Tokenizer

    tokenizer = json.loads((tiny_model / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a|aa)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    loaded = Tokenizer.from_dir(tokenizer_folder(tmp_path, tokenizer))
    with pytest.raises(ValueError, match="the tokenizer of .* failed: Onig"):
        loaded.encode("a" * 60 + "b")
    assert loaded.encode("ab")


def test_vocabulary_with_a_hole_of_any_size(tiny_model, tmp_path):
    """Ids that do not exist take no loading time."""
    from allspark_server.tokenizer.tokenizer import Tokenizer

    tokenizer = json.loads((tiny_model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["Ú"] = 999_999_999
    folder = tokenizer_folder(tmp_path, tokenizer)
    words = [sys.executable, "-c",
             f"from allspark_server.tokenizer.tokenizer import Tokenizer; Tokenizer.from_dir({str(folder)!r})"]
    subprocess.run(words, check=True, timeout=10)
    assert Tokenizer.from_dir(folder).encode("fox")


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_as_before_after_a_pause(enabled):
    @without_collections()
    def fails():
        assert not gc.isenabled()
        with without_collections():
            pass
        assert not gc.isenabled()
        raise ValueError("as loading may")

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError, match="as loading may"):
            fails()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
