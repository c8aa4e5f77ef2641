"""GGUF files: recovered weights bit by bit, text, ranks, serialization, the tokenizer, and refusal of foreign files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from allspark_client.config import AsModelConfig
from allspark_client.errors import AllSparkError
from allspark_server import Engine, HuggingFaceModel
from allspark_server.models.config import Fields
from allspark_server.models.network import RopeConfig
from allspark_server.models.rotary import rotary_of
from allspark_server.tokenizer.tokenizer import Tokenizer
from allspark_server.weights.checkpoint import open_model
from allspark_server.weights.gguf import GgufFile, model_config, tokenizer as gguf_tokenizer, tokenizer_directory
from support.checkpoints import check_logits, prompt_of, reference_logits
from support.driver import Driver
from support.gguf_files import (
    BLOCKS,
    FILES,
    NUMBERS,
    SPECS,
    metadata_of,
    random_blocks,
    recover,
    write_gguf,
    write_pair,
)
from support.greedy import reference_greedy
from support.quantized_checkpoints import assert_equal, recovered

TOLERANCE = 3e-3  # activations of 16 bits
QUICK = ("q4_k_m", "mixed")
every_file = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FILES])


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = {}

    def get(name: str):
        if name not in made:
            made[name] = write_pair(tmp_path_factory.mktemp(name), *FILES[name], seed=len(made))
        return made[name]

    return get


@every_file
def test_recovered_weights_are_ggml_s_on_any_number_of_ranks(pair, name):
    file, twin = pair(name)
    expected, _ = recovered(twin, 1, weight_dtype="float32")
    for world in (1, 2, 3):
        assert_equal(recovered(file, world)[0], expected)


@every_file
def test_text_is_that_of_the_recovered_weights(pair, name):
    file, twin = pair(name)
    tolerance = 0.05 if name == "bf16" else TOLERANCE  # some instruction sets round activations to it
    for world in (1, 2):
        with Driver(file, world) as driver:
            for length in (1, 33, 300) if world == 1 else (33,):
                prompt = prompt_of(length)
                tokens, logits = driver.generate(prompt, 12 if length == 33 else 1)
                check_logits(logits[0], reference_logits(twin, prompt), tolerance)
                if length == 33:
                    expected = reference_greedy(twin, prompt, 12)
                    tied = next((i for i, gap in enumerate(expected.gaps) if gap < 2 * tolerance), 12)
                    assert tokens[:tied] == expected.tokens[:tied]


@every_file
def test_serialized_as_it_is(pair, name, tmp_path):
    file, _ = pair(name)
    HuggingFaceModel(file, "m").serialize_to_path(None, tmp_path)
    prompt = prompt_of(40)
    with Driver(file) as a, Driver(tmp_path / "m.asgraph") as b:
        (tokens, logits), (others, other_logits) = a.generate(prompt, 3), b.generate(prompt, 3, chunk=7)
    assert tokens == others
    np.testing.assert_array_equal(logits, other_logits)
    assert (tmp_path / "m.tokenizer" / "tokenizer.json").exists()


def test_activations_of_8_bits_where_they_are_wanted(pair):
    file, twin = pair("q4_k_m")
    prompt = prompt_of(33)
    expected = reference_logits(twin, prompt)
    with Driver(file, weight_dtype="w4a8") as driver:
        found = driver.generate(prompt, 1)[1][0]
        assert driver.info.weight_dtype == "int4"
    assert TOLERANCE < np.abs(found - expected).max() / expected.std() < 0.5
    with pytest.raises(AllSparkError, match="is quantized, as int4:32.*; use weight_dtype='auto' or 'w4a8'"):
        Driver(file, weight_dtype="int8")


def test_text_through_an_engine(pair):
    """The tokenizer, its end-of-sequence id and the chat template come from the file."""
    file, _ = pair("q4_k_m")
    opened = open_model(str(file))
    assert opened.graph.config.eos_token_ids == (2,)
    with Engine() as engine:
        engine.install_model(AsModelConfig(model_name="tiny", model_path=str(file), engine_max_length=256))
        engine.start_model("tiny")
        tokenizer = Tokenizer.from_dir(opened.tokenizer_dir)
        text = "the quick <|im_end|> owl, größer 🙂"
        ids = tokenizer.encode(text)
        tokens = metadata_of("llama", SPECS["llama"])["tokenizer.ggml.tokens"]
        assert 2 in ids and tokenizer.decode(ids, skip_special_tokens=False) == text
        assert tokens[ids[0]] == "the" and tokens[ids[1]] == "Ġ"  # by the merges
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]).startswith("<|im_start|>user")
        _, handle, queue = engine.start_request_text("tiny", None, text, {"max_new_tokens": 4, "do_sample": False})
        engine.sync_request("tiny", handle)
        assert queue.GeneratedLength() == 4
        engine.release_request("tiny", handle)
        engine.stop_model("tiny")


def test_sentence_pieces():
    """Pieces with scores give the tokens of sentencepiece's BPE, and bytes where there is no piece."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)] + [
        "▁", "a", "b", "c", "ab", "▁a", "▁ab", "abc", "▁abc"]
    scores = np.array([0.0] * 260 + [-float(i) for i in range(len(pieces) - 260)], np.float32)
    types = np.array([2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259), np.int32)
    fields = Fields({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": scores,
                     "tokenizer.ggml.token_type": types, "tokenizer.ggml.bos_token_id": 1,
                     "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}, Path("x.gguf"))
    backend = gguf_tokenizer._backend(fields)
    found = backend.encode("abc ab é")
    assert found.tokens == ["<s>", "▁abc", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert backend.decode(found.ids) == "abc ab é"


# -- foreign files -----------------------------------------------------------------------------------------------------
def _file(tmp_path, change=None, **metadata) -> Path:
    """A small valid file with changed metadata (None: without it) and tensors."""
    rng = np.random.default_rng(0)
    values = {**metadata_of("qwen2", SPECS["qwen2"]), **metadata}
    tensors = {"token_embd.weight": ("Q8_0", random_blocks("Q8_0", 1031, 96, rng)),
               "output_norm.weight": ("F32", np.ones(96, np.float32))}
    if change is not None:
        change(tensors)
    return write_gguf(tmp_path / "x.gguf", {k: v for k, v in values.items() if v is not None}, tensors)


@pytest.mark.parametrize("metadata, problem", [
    ({"general.architecture": "mamba"}, "general.architecture.* is 'mamba', which is not supported: known are llama"),
    ({"general.architecture": None}, "general.architecture.* is missing"),
    ({"qwen2.block_count": None}, "qwen2.block_count.* is missing: expected int"),
    ({"qwen2.block_count": 1 << 31}, "num_hidden_layers.* must be positive and at most"),
    ({"qwen2.attention.head_count": 0}, "head_count.* is 0: it must be positive"),
    ({"qwen2.attention.head_count_kv": np.array([2, 1], np.int32)}, "head_count_kv.* differs from layer to layer"),
    ({"qwen2.embedding_length": "96"}, "embedding_length.* is '96': expected int"),
    ({"qwen2.rope.dimension_count": 8}, "dimension_count.* is 8: expected 16"),
    ({"qwen2.rope.scaling.type": "su"}, "scaling.type.* is 'su': known are"),
    ({"qwen2.attention.sliding_window": 7}, "sliding_window.* is 7: .* not supported"),
    ({"general.alignment": 24}, "general.alignment is 24: expected a power of two"),
    ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "holds 'a' twice"),
    ({"tokenizer.ggml.merges": ["a"]}, "holds 'a': expected two tokens each"),
    ({"tokenizer.ggml.merges": ["zz zzz"]}, "tokenizers .* cannot make the tokenizer of"),
    ({"tokenizer.ggml.token_type": np.array([1], np.int32)}, "has 1 values: expected a number for each of 1031"),
    ({"tokenizer.ggml.bos_token_id": 5000, "tokenizer.ggml.add_bos_token": True}, "is 5000: there are 1031 tokens"),
])
def test_metadata_that_is_refused(tmp_path, metadata, problem):
    with pytest.raises(AllSparkError, match=problem):
        file = GgufFile(_file(tmp_path, **metadata))
        if any(key.startswith("tokenizer") for key in metadata):
            tokenizer_directory(file)
        else:
            model_config([file])


def test_unknown_tokenizers_leave_a_model_of_ids(tmp_path, caplog):
    for metadata in ({"tokenizer.ggml.pre": "viking"}, {"tokenizer.ggml.model": "rwkv"}):
        assert tokenizer_directory(GgufFile(_file(tmp_path, **metadata))) is None
        assert next(iter(metadata.values())) in caplog.text and "known are" in caplog.text


def test_tensors_that_are_refused(tmp_path):
    def config(change, **metadata):
        return open_model(str(_file(tmp_path, change, **metadata)))

    with pytest.raises(AllSparkError, match="has no tensor 'token_embd.weight'"):
        config(lambda tensors: tensors.pop("token_embd.weight"))
    with pytest.raises(AllSparkError, match="model.layers.0.input_layernorm.weight"):
        Driver(_file(tmp_path))
    with pytest.raises(AllSparkError, match="begins at .*, but the one before ends at"):
        path = _file(tmp_path)
        data = bytearray(path.read_bytes())
        at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4
        data[at:at + 8] = struct.pack("<Q", 32)
        path.write_bytes(data)
        GgufFile(path)
    with pytest.raises(AllSparkError, match="begins at 33, no multiple of the alignment 32"):
        data[at:at + 8] = struct.pack("<Q", 33)
        path.write_bytes(data)
        GgufFile(path)
    for number, problem in ((20, "Type IQ4_NL of tensor .*known are F32"), (77, "the unknown type 77")):
        data[at - 4:at] = struct.pack("<I", number)
        path.write_bytes(data)
        with pytest.raises(AllSparkError, match=problem):
            GgufFile(path)


def test_rope_factors_are_llama3_s_scaling(tmp_path):
    """Llama 3.1's converter stores the quotient of plain and scaled frequencies as the tensor rope_freqs.weight."""
    plain = model_config([GgufFile(_file(tmp_path))])
    scaled = RopeConfig("llama3", plain.rope.theta, 8.0, 8192, 1.0, 4.0)
    factors = (rotary_of(plain.rope, plain.head_dim).inv_freq / rotary_of(scaled, plain.head_dim).inv_freq)

    def with_factors(values):
        def change(tensors):
            tensors["rope_freqs.weight"] = ("F32", values.astype(np.float32))

        return model_config([GgufFile(_file(tmp_path, change))]).rope

    assert with_factors(factors) == scaled
    assert with_factors(np.ones_like(factors)) == plain.rope
    with pytest.raises(AllSparkError, match="rope_freqs.weight.* holds factors that differ from llama3's scaling"):
        with_factors(factors * np.linspace(1, 2, len(factors), dtype=np.float32))


def test_scales_that_are_no_numbers(tmp_path):
    path, _ = write_pair(tmp_path, "qwen2", "Q8_0")
    file = GgufFile(path)
    data = bytearray(path.read_bytes())
    row = file.get("blk.0.ffn_up.weight").data[3].tobytes()
    at = bytes(data).index(row)
    data[at:at + 2] = np.array([np.nan], np.float16).tobytes()
    path.write_bytes(data)
    with pytest.raises(AllSparkError, match="'blk.0.ffn_up.weight' .* holds 1 scales that are NaN or infinite"):
        Driver(path)


def test_headers_that_are_cut_off_or_lie(tmp_path):
    path = _file(tmp_path)
    data = path.read_bytes()
    whole = GgufFile(path)
    header = data.index(b"output_norm.weight") + 60
    rng = np.random.default_rng(0)
    for length in [0, 3, 4, 11, 23, 24, *rng.integers(24, header, 60).tolist(), len(data) - 64]:
        path.write_bytes(data[:length])
        with pytest.raises(AllSparkError, match="not a readable GGUF file"):
            GgufFile(path)

    def written(at: int, value: int, form: str = "<Q") -> None:
        changed = bytearray(data)
        struct.pack_into(form, changed, at, value)
        path.write_bytes(changed)

    for at, value, form, problem in (
            (0, 0x46554747, ">I", "begins with b'FUGG'"), (4, 1, "<I", "its version is 1"), (4, 3, ">I", "big-endian"),
            (8, 1 << 40, "<Q", "claims 1099511627776 tensors"), (16, 1 << 60, "<Q", "claims 2 tensors and"),
            (16, 60_000, "<Q", "not a readable GGUF file"), (24, 1 << 62, "<Q", "a metadata key claims"),
            (24, 40_000, "<Q", "not a readable GGUF file")):
        written(at, value, form)
        with pytest.raises(AllSparkError, match=problem):
            GgufFile(path)
    tokens = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    for value in (1 << 30, 1 << 62, 1200):
        written(tokens, value)
        with pytest.raises(AllSparkError, match="not a readable GGUF file"):
            GgufFile(path)
    for _ in range(300):  # either an error that names the file, or a valid file
        changed = bytearray(data)
        for at in rng.integers(0, header, 3):
            changed[at] = rng.integers(0, 256)
        path.write_bytes(changed)
        try:
            model_config([GgufFile(path)])
        except AllSparkError as error:
            assert str(path) in str(error)
    assert whole.names() == ["token_embd.weight", "output_norm.weight"]


def test_parts(pair, tmp_path):
    file, _ = pair("q8_0")
    source = GgufFile(file)
    stored = {name: (source.get(name).type.name, source.get(name)) for name in source.names()}
    names = sorted(stored)
    for part, some in enumerate((names[:7], names[7:])):
        tensors = {}
        for name in some:
            kind, tensor = stored[name]
            data = tensor.data.reshape(*tensor.shape[:-1], -1)
            tensors[name] = kind, data if kind in BLOCKS else data.view({"F32": np.float32}[kind])
        metadata = {"split.count": 2, "split.no": part}
        write_gguf(tmp_path / f"m-0000{part + 1}-of-00002.gguf",
                   {**(metadata_of("qwen2", SPECS["qwen2"]) if not part else {}), **metadata}, tensors)
    assert_equal(recovered(tmp_path / "m-00001-of-00002.gguf", 1)[0], recovered(file, 1)[0])
    with pytest.raises(AllSparkError, match="is one of 2 parts: give the first"):
        open_model(str(tmp_path / "m-00002-of-00002.gguf"))


@pytest.mark.slow
def test_blocks_are_recovered_as_ggml_s_own_library_does():
    quants = pytest.importorskip("gguf.quants")
    rng = np.random.default_rng(1)
    for kind, (_values, _size, _) in BLOCKS.items():
        raw = random_blocks(kind, 5, 3 * 256, rng)
        np.testing.assert_array_equal(recover(kind, raw),
                                      quants.dequantize(raw, quants.GGMLQuantizationType(NUMBERS[kind])))


def test_a_model_is_called_as_its_file(tmp_path):
    from allspark_server.__main__ import model_config as of_argument

    found = of_argument(str(_file(tmp_path)))
    assert (found.model_name, found.model_path) == ("x", str(tmp_path / "x.gguf"))
