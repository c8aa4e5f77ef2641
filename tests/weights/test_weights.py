"""Reading checkpoints: valid ones are read exactly, and errors of others are named."""

from __future__ import annotations

import builtins
import json
import logging
import shutil

import numpy as np
import pytest

from allspark_client.errors import AllSparkError, AsStatus
from allspark_server import HuggingFaceModel
from allspark_server.weights.asgraph import from_float32, read_graph, to_float32, to_message
from allspark_server.weights.checkpoint import open_model
from allspark_server.weights.loader import Loader, unquantized_type
from allspark_server.weights.safetensors import SafetensorsFile, aligned, write_safetensors
from allspark_server.weights.shard import Split, split
from allspark_server.weights.sources import open_weights

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import itertools

from reference.loading import Loaded, unquantized
from support.checkpoint_edits import edit_config, move_to_odd_addresses
from support.checkpoints import check_logits, checkpoint, prompt_of, reference_logits, rewrite_header
from support.driver import Driver
from support.tiny_configs import STORED


# -- who holds what ----------------------------------------------------------------------------------------------------
def test_ranges_are_balanced_and_cover_everything():
    assert [split(14, rank, 3) for rank in range(3)] == [(0, 5), (5, 10), (10, 14)]
    for n in (1, 2, 14, 151, 1031):
        for world in range(1, 9):
            ranges = [split(n, rank, world) for rank in range(world)]
            assert ranges[0][0] == 0 and ranges[-1][1] == n
            assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
            widths = [end - begin for begin, end in ranges]
            assert max(widths) - min(widths) <= 1


def test_kv_heads_are_copied_where_query_heads_of_several_ranks_read_them():
    heads = Split(14, 64, 7)  # 14 query heads, 2 KV heads
    assert heads.width == 128
    assert [heads.units_of(rank, 2) for rank in range(2)] == [(0, 1), (1, 2)]
    assert [heads.units_of(rank, 3) for rank in range(3)] == [(0, 1), (0, 2), (1, 2)]
    assert [heads.units_of(rank, 4) for rank in range(4)] == [(0, 1), (0, 2), (1, 2), (1, 2)]
    assert heads.range_of(1, 3) == (0, 128)
    for q_heads, kv_heads in ((14, 2), (6, 3), (8, 8), (4, 1), (12, 4)):
        group = q_heads // kv_heads
        for world in range(1, q_heads + 1):
            for rank in range(world):
                begin, end = split(q_heads, rank, world)
                first, last = Split(q_heads, 1, group).units_of(rank, world)
                assert {q // group for q in range(begin, end)} == set(range(first, last))


def test_more_ranks_than_query_heads_are_refused():
    with pytest.raises(AllSparkError, match="divided among 5 ranks: it has 4 query heads"):
        from allspark_server.runtime.lowering import check_ranks
        check_ranks(open_model(str(checkpoint("llama-yarn-mscale"))).graph, 5)


# -- safetensors -------------------------------------------------------------------------------------------------------
@pytest.fixture
def simple(tmp_path):
    """A safetensors file with one float32 and one bfloat16 tensor."""
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([0x3F80, 0xC000], np.uint16)
    path = tmp_path / "x.safetensors"
    write_safetensors(path, [("a", "F32", (2, 3)), ("b", "BF16", (2,))], {"format": "test"}, [[a], [b]])
    return path


def test_written_files_are_read_back(simple):
    file = SafetensorsFile(simple)
    np.testing.assert_array_equal(file.get("a").data, np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(to_float32(file.get("b").data, "BF16"), [1.0, -2.0])
    assert file.metadata == {"format": "test"}
    assert not file.get("a").data.flags.owndata
    safetensors = pytest.importorskip("safetensors.torch")
    assert safetensors.load_file(simple)["b"].tolist() == [1.0, -2.0]


@pytest.mark.parametrize("data, problem", [
    (b"", "0 bytes"), (b"abc", "3 bytes"), (b"\xff" * 20, "header claims 18446744073709551615 bytes"),
    ((100).to_bytes(8, "little") + b"{}", "header takes 108 bytes, the file has 10"),
    ((4).to_bytes(8, "little") + b"{{{{", "not valid JSON"), ((2).to_bytes(8, "little") + b"[]", "a JSON list"),
])
def test_files_that_are_not_safetensors(tmp_path, data, problem):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(AllSparkError, match=problem) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value) and caught.value.status == AsStatus.ALLSPARK_IO_ERROR


@pytest.mark.parametrize("entry, problem", [
    ({"dtype": "F32"}, "lacks dtype, shape or data_offsets"), ("no", "lacks"),
    ({"dtype": "F32", "shape": [2, -3], "data_offsets": [0, 24]}, r"has shape \[2, -3\]"),
    ({"dtype": "F32", "shape": [2, 3], "data_offsets": [0]}, "data_offsets"),
    ({"dtype": "X9", "shape": [2, 3], "data_offsets": [0, 24]}, "unknown dtype 'X9'"),
    ({"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 24]}, "needs 32 bytes"),
    ({"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 24]}, "needs 4000000000000000000 bytes"),
    ({"dtype": "F32", "shape": [2, 3], "data_offsets": [1000, 1024]}, "truncated: its tensors need"),
])
def test_bad_header_entries(simple, entry, problem):
    rewrite_header(simple, lambda header: header.update(a=entry))
    with pytest.raises(AllSparkError, match=problem):
        SafetensorsFile(simple)


def test_truncated_file_is_named_with_both_sizes(simple):
    data = simple.read_bytes()
    simple.write_bytes(data[:-3])
    with pytest.raises(AllSparkError, match=f"need {len(data)} bytes, the file has {len(data) - 3}") as caught:
        SafetensorsFile(simple)
    assert str(simple) in str(caught.value)


def test_tensor_at_an_odd_address(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (-len(header) % 8 + 1)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + np.float32([1, 2]).tobytes())
    file = SafetensorsFile(path)
    data = file.get("a").values
    assert data.tolist() == [1.0, 2.0] and not data.flags.aligned
    assert np.shares_memory(data, file.get("a").values)     # a large one would be copied for each of its experts
    assert aligned(data).flags.aligned and aligned(data[:0]).size == 0


def test_a_checkpoint_at_odd_addresses_is_the_same_model(tmp_path):
    directory = shutil.copytree(checkpoint("qwen3-moe"), tmp_path / "odd")
    expected = loaded_hash(directory)
    move_to_odd_addresses(directory / "model.safetensors")
    assert not SafetensorsFile(directory / "model.safetensors").get("model.norm.weight").values.flags.aligned
    assert loaded_hash(directory) == expected


# -- checkpoints -------------------------------------------------------------------------------------------------------
def replace_tensor(directory, name, change):
    """Rewrites model.safetensors with one tensor changed; None removes it."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(directory / "model.safetensors")
    tensor = change(tensors.pop(name))
    if tensor is not None:
        tensors[name] = tensor.contiguous()
    safetensors.save_file(tensors, directory / "model.safetensors")


def loaded_hash(directory):
    with Driver(directory) as driver:
        return driver.info.model_hash


def check_model(directory):
    model = open_model(str(directory))
    return unquantized_type(model.graph, model.source)


def test_missing_directory(tmp_path):
    with pytest.raises(AllSparkError, match="model_path .*nowhere' does not exist"):
        open_model(str(tmp_path / "nowhere"))


def test_directory_without_weights(copy):
    directory = copy()
    (directory / "model.safetensors").unlink()
    with pytest.raises(AllSparkError, match="holds no weights: looked for model.safetensors"):
        check_model(directory)


def test_missing_shard_is_named(copy):
    directory = copy("qwen3-bf16-sharded")
    shards = sorted(directory.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(AllSparkError, match=f"lacks 1 of the {len(shards)} weight files.*{shards[1].name}"):
        check_model(directory)


def test_index_that_places_a_tensor_wrongly(copy):
    directory = copy("qwen3-bf16-sharded")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    names = sorted(set(index["weight_map"].values()))
    tensor = next(t for t, file in index["weight_map"].items() if file == names[0])
    index["weight_map"][tensor] = names[1]
    path.write_text(json.dumps(index))
    with pytest.raises(AllSparkError, match=f"tensor '{tensor}' is not in .*{names[1]}"):
        check_model(directory)
    index["weight_map"][tensor] = "../x.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(AllSparkError, match="expected a file name"):
        check_model(directory)


def test_stored_head_that_differs_from_a_tied_embedding_is_used(copy, caplog):
    directory = copy()
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.save_file(tensors, directory / "model.safetensors")
    assert open_model(str(directory)).graph.config.tie_word_embeddings
    tensors["lm_head.weight"][5] *= 2
    safetensors.save_file(tensors, directory / "model.safetensors")
    assert not open_model(str(directory)).graph.config.tie_word_embeddings
    assert "stored 'lm_head.weight' differs" in caplog.text
    with Driver(directory) as driver:
        check_logits(driver.generate(prompt_of(9), 1)[1][0], reference_logits(directory, prompt_of(9)))


NORM = "model.layers.1.input_layernorm.weight"
DOWN = "model.layers.2.mlp.down_proj.weight"


@pytest.mark.parametrize("name, change, problem", [
    (DOWN, lambda t: None, "has no tensor 'model.layers.2.mlp.down_proj.weight'"),
    (DOWN, lambda t: t.T, r"down_proj.weight' in .*model.safetensors has shape \[151, 112\]: expected \[112, 151\]"),
    (NORM, lambda t: t[:-1], r"has shape \[111\]: expected \[112\]"),
    (NORM, lambda t: t.long(), "has type I64: expected one of F32, F16, BF16"),
    (DOWN, lambda t: t.to(torch.int8), "has type I8"),
])
def test_wrong_tensors_are_named(copy, name, change, problem):
    directory = copy()
    replace_tensor(directory, name, change)
    with pytest.raises(AllSparkError, match=problem) as caught:
        check_model(directory)
    assert caught.value.status == AsStatus.ALLSPARK_PARAM_ERROR


def test_untied_head_that_is_missing(copy):
    directory = copy()
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": False}))
    with pytest.raises(AllSparkError, match="no tensor 'lm_head.weight'.*tie_word_embeddings"):
        check_model(directory)


@pytest.mark.parametrize("name", (NORM, DOWN))
@pytest.mark.parametrize("value", (float("nan"), float("-inf")))
def test_values_that_are_not_finite_bring_one_warning(copy, caplog, name, value):
    directory = copy()

    def spoil(tensor):
        tensor.view(-1)[[3, 50]] = value
        return tensor

    replace_tensor(directory, name, spoil)
    with caplog.at_level(logging.WARNING), Driver(directory):
        pass
    lines = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert len(lines) == 1 and repr(name) in lines[0] and "2 values" in lines[0] and "model.safetensors" in lines[0]


def test_unused_tensors_are_named(copy, caplog):
    directory = copy("llama-biases")
    edit_config(directory, mlp_bias=False)
    with Driver(directory):
        pass
    assert "holds 9 tensors that LlamaForCausalLM does not use: model.layers.0.mlp.down_proj.bias" in caplog.text


def test_loader_reports_progress():
    model = open_model(str(checkpoint("llama-biases")))
    seen = []
    Loader(
        model.graph, model.source, Loaded(), 1, 3, unquantized(model.graph), lambda *done: seen.append(done)
    ).load()
    assert all(a[0] < b[0] for a, b in itertools.pairwise(seen))
    constants = len(model.graph.weights["rotary.inv_freq"].values)
    assert seen[-1] == (seen[-1][1] - constants, seen[-1][1])


# -- torch .bin --------------------------------------------------------------------------------------------------------
def as_torch_files(directory, shards):
    """Turns a copied checkpoint into pytorch_model*.bin."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors.update(safetensors.load_file(file))
        file.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    if shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin")
        return
    weight_map = {name: f"pytorch_model-{i % shards}.bin" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        torch.save({n: t for n, t in tensors.items() if weight_map[n] == file}, directory / file)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("shards", (1, 3))
def test_torch_files_hold_the_same_model(copy, name, shards):
    directory = copy(name)
    as_torch_files(directory, shards)
    assert loaded_hash(directory) == loaded_hash(checkpoint(name))


def test_torch_file_of_parameters_and_views(copy):
    directory = copy()
    as_torch_files(directory, 1)
    tensors = torch.load(directory / "pytorch_model.bin")
    tensors[NORM] = torch.nn.Parameter(tensors[NORM])
    tensors[DOWN] = tensors[DOWN].T.contiguous().T
    torch.save(tensors, directory / "pytorch_model.bin")
    assert loaded_hash(directory) == loaded_hash(checkpoint("qwen2-gqa-tied"))
    torch.save([1], directory / "pytorch_model.bin")
    with pytest.raises(AllSparkError, match="pytorch_model.bin does not hold tensors by name"):
        open_weights(directory)


def test_torch_files_without_torch(copy, monkeypatch):
    directory = copy()
    as_torch_files(directory, 1)
    real = builtins.__import__

    def without_torch(name, *rest, **more):
        if name == "torch":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(AllSparkError, match="torch is not installed: install torch, or convert"):
        open_weights(directory)


def test_torch_file_with_code_in_it_is_refused(copy, tmp_path):
    directory = copy()
    (directory / "model.safetensors").unlink()
    ran = tmp_path / "ran"

    class Code:
        def __reduce__(self):
            return open, (str(ran), "w")

    torch.save({"x": Code()}, directory / "pytorch_model.bin")
    with pytest.raises(AllSparkError, match="cannot read weight file .*pytorch_model.bin"):
        open_weights(directory)
    assert not ran.exists()


# -- .asgraph and .asparam ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ("qwen2-yarn", "qwen3-dynamic-bias", "llama-biases", "llama3", "qwen3-bf16-sharded"))
@pytest.mark.parametrize("text", (False, True))
def test_serialized_form_is_the_same_model(tmp_path, name, text):
    HuggingFaceModel(checkpoint(name), "m").load_model().serialize_to_path(None, tmp_path, text_graph=text).free_model()
    plain, serialized = open_model(str(checkpoint(name))), open_model(str(tmp_path / "m.asgraph"))
    assert serialized.graph.config == plain.graph.config
    assert to_message(serialized.graph) == to_message(plain.graph)
    serialized.source.verify(0, 1)
    with Driver(checkpoint(name)) as a, Driver(tmp_path / "m.asgraph", weights_path=str(tmp_path / "m.asparam")) as b:
        prompt = prompt_of(40)
        (tokens, logits), (other_tokens, other_logits) = a.generate(prompt, 8), b.generate(prompt, 8)
        assert tokens == other_tokens
        np.testing.assert_array_equal(logits, other_logits)


@pytest.mark.parametrize("dtype, kind", (("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32")))
def test_serializing_converts(tmp_path, dtype, kind):
    HuggingFaceModel(checkpoint("llama3"), "m", user_set_data_type=dtype).serialize_to_path(None, tmp_path)
    source = open_model(str(tmp_path / "m.asgraph")).source
    found, plain = source.get(DOWN), open_model(str(checkpoint("llama3"))).source.get(DOWN)
    assert found.dtype == kind
    expected = torch.from_numpy(plain.data.copy()).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(np.stack([to_float32(row, kind) for row in found.data]), expected)


def test_bfloat16_rounding_is_that_of_torch():
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    values = np.concatenate([any_bits, np.float32([np.nan, np.inf, -np.inf])])
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(to_float32(from_float32(values, "BF16"), "BF16"), expected)


@pytest.fixture
def serialized(tmp_path):
    HuggingFaceModel(checkpoint("llama-linear"), "m").serialize_to_path(None, tmp_path)
    return tmp_path


def test_flipped_bit_is_found(serialized):
    path = serialized / "m.asparam"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(AllSparkError, match=r"tensor '.*' of .*m.asparam is damaged: its crc32 is [0-9a-f]{8}"):
        Driver(serialized / "m.asgraph")


def test_ranks_share_the_checking_of_checksums(serialized):
    path = serialized / "m.asparam"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    source, failed = open_model(str(serialized / "m.asgraph")).source, 0
    for rank in range(3):
        try:
            source.verify(rank, 3)
        except AllSparkError:
            failed += 1
    assert failed == 1


def test_damaged_graphs(serialized):
    path = serialized / "m.asgraph"
    data = path.read_bytes()
    for spoilt in (data[:len(data) // 2], b"", b"\xff" * 100, b"# allspark graph, text form\nno", b"{}"):
        path.write_bytes(spoilt)
        with pytest.raises(AllSparkError, match="m.asgraph is not a readable .asgraph file"):
            open_model(str(path))
    message = to_message(open_model(str(checkpoint("llama-linear"))).graph)
    for change, problem in ((lambda m: setattr(m, "version", 9), "version is 9: this build reads versions 1 and 2"),
                            (lambda m: setattr(m.ops[3], "type", "conv"), "unknown op 'conv'"),
                            (lambda m: m.ops[3].inputs.append("zz"), "refers to 'zz'"),
                            (lambda m: setattr(m.config, "architecture", "X"), "architecture is 'X'")):
        spoilt = type(message).FromString(message.SerializeToString())
        change(spoilt)
        path.write_bytes(spoilt.SerializeToString())
        with pytest.raises(AllSparkError, match=problem):
            read_graph(path)


def test_params_missing_or_of_another_kind(serialized):
    (serialized / "m.asparam").unlink()
    with pytest.raises(AllSparkError, match="m.asparam does not exist"):
        open_model(str(serialized / "m.asgraph"))
    with pytest.raises(AllSparkError, match="is not an .asparam file: its metadata has format 'pt'"):
        open_model(str(serialized / "m.asgraph"), str(checkpoint("llama-linear") / "model.safetensors"))


# -- HuggingFaceModel --------------------------------------------------------------------------------------------------
def test_in_memory_serialization_and_reference_configs(tmp_path):
    model = HuggingFaceModel(checkpoint("llama-linear"), "m", in_memory_serialize=True).load_model().read_model_config()
    assert model.serialize_to_memory(None) is model
    config = model.create_reference_runtime_config_builder("served", "CPU", [0], max_batch=3).build()
    assert config.model_path.startswith("/dev/shm/") and (config.model_name, config.engine_max_batch) == ("served", 3)
    generate = model.create_reference_generation_config_builder(config).build()
    assert generate.eos_token_id == [2] and generate.max_length == config.engine_max_length
    with Driver(config.model_path, weights_path=config.weights_path):
        model.free_memory_serialize_file()
    with pytest.raises(AllSparkError, match="does not exist"):
        open_model(config.model_path)
    model.export_model_diconfig(tmp_path)
    assert json.loads((tmp_path / "m.json").read_text())["model_path"] == str(checkpoint("llama-linear"))


def test_existing_files_are_kept_if_wanted(serialized):
    before = (serialized / "m.asparam").stat().st_mtime_ns
    model = HuggingFaceModel(checkpoint("llama-linear"), "m")
    model.serialize_to_path(None, serialized, skip_if_exists=True)
    assert (serialized / "m.asparam").stat().st_mtime_ns == before
    model.serialize_to_path(None, serialized)
    assert (serialized / "m.asparam").stat().st_mtime_ns != before


def test_what_hugging_face_model_refuses(tmp_path, caplog):
    with pytest.raises(ValueError, match="user_set_data_type='int3' is not known; allowed: auto, float32"):
        HuggingFaceModel(tmp_path, "m", user_set_data_type="int3")
    with pytest.raises(ValueError, match="cannot be a file name"):
        HuggingFaceModel(tmp_path, "..")
    assert HuggingFaceModel(tmp_path, "org/m", user_set_data_type=None).name == "org_m"
    with pytest.raises(ValueError, match="override_data_type='int3'"):
        HuggingFaceModel(tmp_path, "m").load_model(override_data_type="int3")
    with pytest.raises(ValueError, match="load_format='x' is not known"):
        HuggingFaceModel(tmp_path, "m").load_model(load_format="x")
    with pytest.raises(ValueError, match="lora_cfg: 'x' is not known; allowed: input_base_dir, lora_names, lora_only"):
        HuggingFaceModel(tmp_path, "m").serialize_to_path(None, tmp_path, lora_cfg={"x": 1})
    with pytest.raises(TypeError, match="lora_cfg must be a dict"):
        HuggingFaceModel(tmp_path, "m").serialize_to_memory(None, lora_cfg=["x"])
    with pytest.raises(ValueError, match="lora_names=.*'../x'.*expected names of directories"):
        HuggingFaceModel(tmp_path, "m").serialize_to_path(None, tmp_path, lora_cfg={"lora_names": ["../x"]})
    with pytest.raises(ValueError, match="lora_only=True needs a directory"):
        HuggingFaceModel(tmp_path, "m", in_memory_serialize=True).serialize(None, lora_cfg={"lora_only": True})
    with pytest.raises(AllSparkError, match="is not a directory"):
        HuggingFaceModel(tmp_path / "none", "m").load_model()
    HuggingFaceModel(tmp_path, "m", trust_remote_code=True)
    assert "trust_remote_code is ignored" in caplog.text
