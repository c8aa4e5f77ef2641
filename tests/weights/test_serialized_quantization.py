"""Serialized quantized weights: the same bits as weights quantized at load, on any number of ranks; and refusals."""

import os
import subprocess
import sys

import numpy as np
import pytest

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError
from allspark_server import HuggingFaceModel, _native
from allspark_server.weights.asgraph import read_graph, to_message, write_graph
from allspark_server.weights.checkpoint import open_model
from allspark_server.weights.formats import WeightFormat, group_of_slice, quantization_of
from support.checkpoints import checkpoint, prompt_of, rewrite_header, write_checkpoint
from support.driver import Driver
from support.quantized_checkpoints import assert_equal, recovered
from support.tiny_configs import Spec, _rope, _sizes

FORMATS = {"int8": "int8", "int4": "uint4", "w8a8": "int8", "w4a8": "uint4"}
GROUPS = (0, 32, 64, 512)
# Sizes at which ranks cut inside groups: 5 heads of 48 (at 96, 144, 192), 25 units of 32 in the MLP (at 288, 416, 544).
SPEC = Spec(
    "qwen3", _sizes(136, 5, 5, 800, layers=1, head_dim=48, tie_word_embeddings=True) | _rope("default", 1e6), "bfloat16"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "uneven", SPEC)


def options(dtype, group, **more):
    return {"enable_quant": True, "customized_quant_config": {
        "quant_method": "instant_quant", "weight_format": FORMATS[dtype], "group_size": group,
        "compute_method": "activate_quant" if dtype.startswith("w") else "weight_only", **more}}


def serialize(directory, target, dtype, group=0, **more):
    HuggingFaceModel(directory, "m").serialize_to_path(None, target, **options(dtype, group, **more))
    return target / "m.asgraph"


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("group", GROUPS)
def test_the_same_weights_at_load_and_serialized_on_any_number_of_ranks(directory, tmp_path, dtype, group):
    path = serialize(directory, tmp_path, dtype, group)
    expected, _ = recovered(directory, 1, weight_dtype=dtype, weight_group_size=group)
    hashes = set()
    plain_weights, _ = recovered(directory, 1, weight_dtype="float32")
    for name, values in plain_weights.items():     # they are what they should be, too
        error = np.abs(expected[name] - values)
        assert 0 < error.max() < (0.02 if FORMATS[dtype] == "int8" else 0.3) * np.abs(values).max(), name
    for world in (1, 2, 3):
        for source, fields in ((directory, {"weight_dtype": dtype, "weight_group_size": group}), (path, {})):
            found, info = recovered(source, world, **fields)
            assert_equal(found, expected)
            assert (info.weight_dtype, info.weight_group_size, info.cache_dtype) == (dtype, group, "bfloat16")
            if source == path:
                hashes.add(info.model_hash)
    assert len(hashes) == 1     # of its checksums, which do not depend on the ranks


@pytest.mark.parametrize("dtype, group", [("int8", 0), ("int4", 64), ("w8a8", 0), ("w4a8", 64)])
def test_the_same_logits(tmp_path, dtype, group):
    plain, prompt = checkpoint("qwen2-gqa-tied"), prompt_of(40)
    path = serialize(plain, tmp_path, dtype, group)
    with Driver(plain, weight_dtype=dtype, weight_group_size=group) as a, Driver(path) as b:
        (tokens, logits), (others, other_logits) = a.generate(prompt, 6), b.generate(prompt, 6)
    assert tokens == others
    np.testing.assert_array_equal(logits, other_logits)


@pytest.mark.parametrize("dtype, group", [("int8", 0), ("int4", 64), ("w8a8", 32), ("w4a8", 512)])
def test_ranks_compute_the_same_but_for_the_order_of_sums(directory, dtype, group):
    """Weights do not depend on the number of ranks. The activation scales of w8a8 and w4a8 do, because each rank has
    its own.
    """
    prompt, logits = prompt_of(40), {}
    for world, kind in ((1, "float32"), (1, dtype), (2, dtype), (3, dtype)):
        fields = {"weight_group_size": group} if kind == dtype else {}
        with Driver(directory, world, weight_dtype=kind, **fields) as driver:
            logits[world, kind] = driver.generate(prompt, 1)[1][0]
    noise = np.abs(logits[1, dtype] - logits[1, "float32"]).max()
    allowed = noise if dtype.startswith("w") else 0.02 * noise
    for world in (2, 3):
        assert 0 < np.abs(logits[world, dtype] - logits[1, dtype]).max() < allowed


def test_plain_rows_are_what_asgraph_proto_says():
    rng = np.random.default_rng(0)
    executor = _native.Executor(num_threads=2)
    for bits, k in ((8, 129), (4, 129), (4, 64)):
        values = rng.normal(size=(37, k)).astype(np.float32)
        q, scales, offsets, bad = executor.quantize_rows(values, "F32", bits, 32)
        assert bad == 0 and q.dtype == np.uint8
        if bits == 4:
            q = np.stack([q & 15, q >> 4], axis=2).reshape(37, -1)[:, :k]
        groups = np.arange(k) // 32
        wide = [(s.astype(np.uint32) << 16).view(np.float32) if s.itemsize == 2 else s for s in (scales, offsets)]
        again = (wide[0][:, groups] * (q.astype(np.float32) - 2.0 ** (bits - 1)) + wide[1][:, groups]).astype(
            np.float32
        )
        handle = executor.add_matrix(37, k, "int8" if bits == 8 else "int4", 32)
        executor.fill_matrix(handle, values, "F32")
        np.testing.assert_array_equal(np.stack([executor.read_row(handle, row) for row in range(37)]), again)
        assert np.abs(again - values).max() < np.ptp(values) / (2 ** bits - 1)


def test_values_that_are_not_finite_are_counted_once():
    values = np.ones((3, 100), np.float32)
    values[1, 70:73] = np.nan
    executor = _native.Executor()
    assert executor.quantize_rows(values, "F32", 4, 32)[3] == 3
    handle = executor.add_matrix(3, 40, "int8", 8)
    assert executor.fill_matrix(handle, values, "F32", 0, 56, 64) == 3      # local groups of 8 in the one from 64 on
    assert np.isnan(executor.read_row(handle, 1)).tolist() == [False] * 8 + [True] * 32


@pytest.mark.skipif(len(_native.isas()) < 2, reason="one instruction set only")
@pytest.mark.parametrize("dtype, group", [("int8", 0), ("int4", 32)])
def test_the_same_files_on_another_instruction_set(directory, tmp_path, dtype, group):
    path = serialize(directory, tmp_path / "here", dtype, group)
    script = (
        f"from allspark_server import HuggingFaceModel, _native; assert _native.isa() == {_native.isas()[-1]!r}; "
        f"HuggingFaceModel({str(directory)!r}, 'm').serialize_to_path(None, {str(tmp_path / 'there')!r}, "
        f"**{options(dtype, group)!r})"
    )
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "ALLSPARK_ISA": _native.isas()[-1]}, check=True)
    for suffix in (".asgraph", ".asparam"):
        assert path.with_suffix(suffix).read_bytes() == (tmp_path / "there" / "m").with_suffix(suffix).read_bytes()


# -- which tensors -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype, group", [("int8", 0), ("w4a8", 64)])
@pytest.mark.parametrize("name", ["qwen2-bf16", "llama-bf16", "llama-fp16-sharded"])
def test_head_and_embedding_stay_as_they_are_if_wanted(tmp_path, name, dtype, group):
    plain = checkpoint(name)
    path = serialize(plain, tmp_path, dtype, group, quantize_head=False)
    exact, _ = recovered(plain, 1)
    all_quantized, with_head = recovered(plain, 1, weight_dtype=dtype, weight_group_size=group)
    assert with_head.quantize_head
    for source, world, fields in (
        (plain, 1, {"weight_dtype": dtype, "weight_group_size": group, "quantize_head": False}),
        (path, 1, {}),
        (path, 1, {"quantize_head": False}),
        (path, 1 if group else 2, {}),
    ):
        found, info = recovered(source, world, **fields)
        assert info.quantize_head is False and info.model_hash != with_head.model_hash
        for weight, values in found.items():
            kept = weight in ("model.embed_tokens.weight", "lm_head.weight")
            np.testing.assert_array_equal(values, (exact if kept else all_quantized)[weight])
    assert ("lm_head.weight" in exact) == (name == "llama-fp16-sharded")


def test_tensors_may_have_formats_of_their_own(tmp_path):
    plain = checkpoint("llama3")
    path = serialize(plain, tmp_path, "int8", 0, tensors={
        "*.0.mlp.down_proj.weight": None, "*.mlp.down_proj.weight": {"weight_format": "uint4", "group_size": 32},
        "*.self_attn.[qkv]_proj.weight": {"compute_method": "activate_quant"}})
    found = {w.name: str(w.stored) for w in read_graph(path).weights.values() if w.is_matrix}
    assert found["model.layers.0.mlp.down_proj.weight"] == "None"
    assert found["model.layers.1.mlp.down_proj.weight"] == "int4:32"
    assert found["model.layers.1.self_attn.q_proj+k_proj+v_proj.weight"] == "w8a8"
    assert found["model.embed_tokens.weight"] == found["model.layers.0.mlp.gate_proj+up_proj.weight"] == "int8"
    weights, info = recovered(path, 1)
    exact, _ = recovered(plain, 1, weight_dtype="float32")
    eight, of_all = recovered(plain, 1, weight_dtype="int8")
    four, _ = recovered(plain, 1, weight_dtype="int4", weight_group_size=32)
    for name, values in weights.items():
        expected = {"None": exact, "int4:32": four}.get(found[name], eight)
        np.testing.assert_array_equal(values, expected[name])
    assert info.weight_dtype == "int8" and info.model_hash != of_all.model_hash
    with Driver(path) as driver:
        assert len(driver.generate(prompt_of(5), 2)[0]) == 2
        assert driver.runners[0].profile().ops


@pytest.mark.parametrize(
    "config, problem",
    [
        ({"quant_method": "gptq"}, "quant_method='gptq' is not offered; allowed: 'instant_quant'"),
        (
            {"weight_format": "fp8_e4m3"},
            "weight_format='fp8_e4m3' is not known; allowed: 'int8', 'uint8', 'int4', 'uint4'",
        ),
        ({"compute_method": "none"}, "compute_method='none' is not known"),
        ({"group_size": 48}, "group_size=48 is not known; allowed: 0, 32, 64"),
        ({"groupsize": 64}, "no key 'groupsize'.*did you mean 'group_size'"),
        ({"activate_format": "fp8_e4m3"}, "activate_format='fp8_e4m3' is not offered"),
        ({"tensors": {"x.*": {"group_size": 33}}}, r"tensors\['x.\*'\]: group_size=33"),
        ({"tensors": {"x.*": {"quantize_head": True}}}, r"tensors\['x.\*'\] has no key 'quantize_head'"),
        ({"tensors": {"x.*": None}}, r"the pattern 'x\.\*' matches no matrix"),
        (
            {"tensors": {"*.q_proj.weight": None}},
            "computed as one matrix and must have one format: .*q_proj.weight .float32.",
        ),
    ],
)
def test_configs_that_are_refused(tmp_path, config, problem):
    with pytest.raises(ValueError, match=problem):
        HuggingFaceModel(checkpoint("llama3"), "m").serialize_to_path(
            None, tmp_path, True, customized_quant_config=config
        )
    assert not list(tmp_path.glob("m.*"))


def test_what_the_arguments_mean():
    def form(weight_only, customized=None):
        return str(quantization_of(weight_only, customized).format)

    assert form(True) == "int8" and form(False) == "w8a8"
    assert form(False, {"quant_method": "instant_quant", "weight_format": "int8"}) == "int8"
    assert form(True, {"weight_format": "uint4", "group_size": 128}) == "int4:128"
    assert form(False, {"weight_format": "int8", "compute_method": "activate_quant"}) == "w8a8"
    with pytest.raises(ValueError, match="contradicts weight_only_quant=True"):
        form(True, {"compute_method": "activate_quant"})
    with pytest.raises(ValueError, match="enable_quant is False"):
        HuggingFaceModel(".", "m").serialize_to_path(None, ".", customized_quant_config={"group_size": 64})


# -- loading -----------------------------------------------------------------------------------------------------------
def test_other_formats_than_the_stored_are_refused(directory, tmp_path):
    path = serialize(directory, tmp_path, "int4", 64)
    for fields, problem in (
        ({"weight_dtype": "int8"}, "weight_dtype='int8'.* serialized as int4:64; use weight_dtype='auto'"),
        ({"weight_dtype": "bfloat16"}, "serialized as int4:64"),
        ({"weight_dtype": "int4"}, "weight_group_size=0.* serialized as int4:64"),
        ({"quantize_head": False}, "quantize_head=False: the model was serialized with its embedding"),
    ):
        with pytest.raises(AllSparkError, match=problem):
            Driver(path, **fields)
    with Driver(path, weight_dtype="int4", weight_group_size=64) as driver:
        assert driver.info.weight_dtype == "int4"


def test_group_size_without_quantized_weights_is_refused():
    for dtype in ("auto", "float32", "bfloat16"):
        with pytest.raises(
            ValueError, match=f"weight_group_size=64 is for quantized weights, and weight_dtype is '{dtype}'"
        ):
            AsModelConfig("m", "/path", weight_dtype=dtype, weight_group_size=64).validate()
    AsModelConfig("m", "/path", weight_dtype="w4a8", weight_group_size=64).validate()


def test_groups_that_a_rank_would_split_are_refused():
    assert [group_of_slice(64, first) for first in (0, 32, 64, 96, 200)] == [64, 32, 64, 32, 8]
    assert group_of_slice(0, 77) == 0
    plain = checkpoint("qwen2-gqa-tied")        # 151 features in the MLP: rank 1 begins at 76
    with pytest.raises(
        AllSparkError, match="weight_group_size=64 is not possible with this number of ranks: .* input feature 76"
    ):
        Driver(plain, 2, weight_dtype="int4", weight_group_size=64)
    with Driver(plain, 2, weight_dtype="int4") as driver:
        assert len(driver.generate(prompt_of(5), 2)[0]) == 2


def down(header):
    return header["model.layers.0.mlp.down_proj.weight"]


def retype(header, suffix, **values):
    header["model.layers.0.mlp.down_proj.weight" + suffix].update(values)


@pytest.mark.parametrize(
    "change, problem",
    [
        (
            lambda h: h.pop("model.layers.0.mlp.down_proj.weight.scale"),
            "has no tensor 'model.layers.0.mlp.down_proj.weight.scale'",
        ),
        (lambda h: h.pop("model.layers.0.mlp.down_proj.weight"), "has no tensor 'model.layers.0.mlp.down_proj.weight'"),
        (
            lambda h: h["__metadata__"].update({"format:model.layers.0.mlp.down_proj.weight": "int4:32"}),
            "has the format int4:32: expected int4:64",
        ),
        (
            lambda h: h["__metadata__"].pop("format:model.layers.0.mlp.down_proj.weight"),
            "has the format None: expected int4:64",
        ),
        (
            lambda h: retype(h, "", shape=[400, 136]),
            r"has type U8 and shape \[400, 136\]: expected U8 and \[136, 400\], for int4:64",
        ),
        (lambda h: retype(h, "", dtype="I8"), "has type I8 .*: expected U8"),
        (
            lambda h: retype(h, ".offset", shape=[13, 136]),
            r"weight.offset' .*shape \[13, 136\]: expected .*\[136, 13\]",
        ),
        (
            lambda h: retype(
                h,
                ".scale",
                dtype="F16" if down(h) and h["model.layers.0.mlp.down_proj.weight.scale"]["dtype"] == "BF16" else "I32",
            ),
            "weight.scale' .* has type (F16|I32)",
        ),
    ],
)
def test_containers_that_are_not_what_the_graph_says(directory, tmp_path, change, problem):
    path = serialize(directory, tmp_path, "int4", 64)
    rewrite_header(path.with_suffix(".asparam"), change)
    with pytest.raises(AllSparkError, match=problem):
        Driver(path)


def test_damaged_and_truncated_containers(directory, tmp_path):
    path = serialize(directory, tmp_path, "w8a8")
    params = path.with_suffix(".asparam")
    data = params.read_bytes()
    params.write_bytes(data[:-1])
    with pytest.raises(AllSparkError, match="truncated: its tensors need"):
        Driver(path)
    params.write_bytes(data[:-7] + bytes([data[-7] ^ 1]) + data[-6:])
    with pytest.raises(AllSparkError, match="is damaged: its crc32 is"):
        Driver(path)
    params.write_bytes(data)
    with Driver(path):
        pass


def test_graphs_that_cannot_be(directory, tmp_path):
    path = serialize(directory, tmp_path, "int4", 64)
    message = to_message(read_graph(path))
    matrix = next(w for w in message.weights if w.name.endswith("down_proj.weight"))
    vector = next(w for w in message.weights if not w.columns and w.parts)
    for change, problem in (
        (lambda: matrix.stored.__setattr__("dtype", "int3"), "unknown format 'int3' in groups of 64"),
        (lambda: matrix.stored.__setattr__("dtype", "float32"), "unknown format 'float32'"),
        (lambda: matrix.stored.__setattr__("group_size", 44), "unknown format 'int4' in groups of 44"),
        (lambda: vector.stored.CopyFrom(matrix.stored), "is quantized, but the model is not, or it is a vector"),
        (lambda: message.quantization.__setattr__("unquantized", "int8"), "of the unknown type 'int8'"),
        (lambda: message.ClearField("quantization"), "is quantized, but the model"),
    ):
        kept = message.SerializeToString()
        change()
        path.write_bytes(message.SerializeToString())
        with pytest.raises(AllSparkError, match=f"m.asgraph is not a readable .asgraph file: .*{problem}"):
            read_graph(path)
        message.ParseFromString(kept)
        matrix = next(w for w in message.weights if w.name.endswith("down_proj.weight"))
        vector = next(w for w in message.weights if not w.columns and w.parts)


def test_quantized_graph_with_an_unquantized_checkpoint(directory, tmp_path):
    path = serialize(directory, tmp_path, "int8")
    with pytest.raises(AllSparkError, match="is not an .asparam file"):
        open_model(str(path), str(directory / "model.safetensors"))
    HuggingFaceModel(directory, "plain").serialize_to_path(None, tmp_path)
    with pytest.raises(AllSparkError, match="has the format None: expected int8|has no tensor"):
        Driver(path, weights_path=str(tmp_path / "plain.asparam"))
    with pytest.raises(AllSparkError, match="type U8: expected one of"):
        Driver(tmp_path / "plain.asgraph", weights_path=str(path.with_suffix(".asparam")))


# -- the ways to it ----------------------------------------------------------------------------------------------------
def test_text_graph_and_memory(directory, tmp_path):
    model = HuggingFaceModel(directory, "m")
    model.serialize_to_path(None, tmp_path, **options("int8", 32), text_graph=True)
    assert b'stored' in (tmp_path / "m.asgraph").read_bytes()
    a, _ = recovered(tmp_path / "m.asgraph", 1)
    model.serialize_to_memory(None, **options("int8", 32))
    config = model.create_reference_runtime_config_builder("served").build()
    assert config.model_path.startswith("/dev/shm/") and config.weight_dtype == "auto"
    b, _ = recovered(config.model_path, 1)
    model.free_memory_serialize_file()
    assert_equal(a, b)
    graph = read_graph(tmp_path / "m.asgraph")
    write_graph(graph, tmp_path / "n.asgraph")
    assert to_message(read_graph(tmp_path / "n.asgraph")) == to_message(graph)


def test_existing_files_are_kept_if_their_format_is_wanted(directory, tmp_path):
    model, params = HuggingFaceModel(directory, "m"), tmp_path / "m.asparam"
    model.serialize_to_path(None, tmp_path)
    for wanted in (options("int8", 64), options("int8", 32), options("int8", 32, quantize_head=False), {}):
        before = params.read_bytes()
        model.serialize_to_path(None, tmp_path, skip_if_exists=True, **wanted)
        assert params.read_bytes() != before
        written = params.stat().st_mtime_ns
        model.serialize_to_path(None, tmp_path, skip_if_exists=True, **wanted)
        assert params.stat().st_mtime_ns == written


def test_type_of_what_stays_unquantized(directory, tmp_path):
    """user_set_data_type converts it; the numbers then differ from the checkpoint's, and so does the hash."""
    HuggingFaceModel(directory, "m", user_set_data_type="float16").serialize_to_path(
        None, tmp_path, **options("int8", 0)
    )
    source = open_model(str(tmp_path / "m.asgraph")).source
    assert source.get("model.norm.weight").dtype == "F16"
    assert set(source.names()) == set(open_model(str(directory)).source.names())
    a, info = recovered(tmp_path / "m.asgraph", 1)
    b, plain = recovered(directory, 1, weight_dtype="int8")
    assert_equal(a, b)
    assert info.cache_dtype == "float32" and plain.cache_dtype == "bfloat16" and info.model_hash != plain.model_hash


def test_convert_command(directory, tmp_path, capsys):
    cli = pytest.importorskip("allspark_launch.cli")
    assert (
        cli.main(
            [
                "convert",
                str(directory),
                str(tmp_path),
                "--name",
                "c",
                "--weight-dtype",
                "w4a8",
                "--weight-group-size",
                "64",
                "--keep-head",
            ]
        )
        == 0
    )
    assert "c.asparam" in capsys.readouterr().out
    graph = read_graph(tmp_path / "c.asgraph")
    assert graph.quantization.format == WeightFormat("w4a8", 64) and not graph.quantization.quantize_head
    for arguments, problem in (
        (["--weight-dtype", "int7"], "int7"),
        (["--weight-group-size", "64"], "--weight-group-size"),
        (["--weight-dtype", "int8", "--weight-group-size", "7"], "group_size=7"),
    ):
        assert cli.main(["convert", str(directory), str(tmp_path), *arguments]) == 1
        assert problem in capsys.readouterr().err
