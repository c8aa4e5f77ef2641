"""Families that transformers does not have (the first Qwen, ChatGLM2 and 3, GLM-4 as first published, Baichuan 1 and
2), against a float64 reference written from the publications and against transformers' models with the same numbers.
"""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from allspark_client.errors import AllSparkError
from allspark_server import HuggingFaceModel
from allspark_server.models import read_config
from support.checkpoints import PROMPT_LENGTHS, check_logits, prompt_of
from support.driver import Driver, together
from support.greedy import check_greedy
from support.published import PUBLISHED, Published, twin, write

slow = pytest.mark.slow
FORMATS = [("bfloat16", 0, 0.15), ("int8", 0, 0.2), ("int4", 32, 1.2), ("w8a8", 0, 0.4), ("w4a8", 32, 1.2)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")

    def of(name):
        if not (root / name).exists():
            write(root / name, PUBLISHED[name], zlib.crc32(name.encode()))
        return root / name

    return of


# -- the reference itself ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.endswith("13b") and name != "qwen-long"])
def test_the_reference_is_as_transformers(name, checkpoint):
    model, reference = twin(checkpoint(name)), Published(checkpoint(name))
    for length in (1, 33, 300):
        prompt = prompt_of(length)
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].numpy()
        check_logits(reference.logits(prompt), expected)


@pytest.mark.parametrize("heads", [1, 2, 5, 8, 14, 40])
def test_slopes_are_those_of_bloom(heads):
    """Bloom is the model of transformers that has ALiBi."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    from allspark_server.models.baichuan import alibi_slopes

    wanted = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1].numpy()
    np.testing.assert_allclose(alibi_slopes(heads), wanted, rtol=1e-6)


# -- the engine --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", [1, 3, pytest.param(2, marks=slow), pytest.param(4, marks=slow)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits(name, world, checkpoint, request):
    reference = Published(checkpoint(name))
    every = "slow" in request.config.getoption("-m").replace("not slow", "")
    with Driver(checkpoint(name), world) as driver:
        for length in PROMPT_LENGTHS if every else (1, 33, 300):
            prompt = prompt_of(length)
            check_logits(driver.generate(prompt, 1)[1][0], reference.logits(prompt)[-1])


@slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("length", [1, 90])
@pytest.mark.parametrize("name", PUBLISHED)
def test_greedy_output(name, length, checkpoint):
    """256 tokens; prompts in chunks of 48 rows, then token by token."""
    prompt = prompt_of(length, seed=1)
    expected = Published(checkpoint(name)).greedy(prompt, 256)
    for world in (1, 2, 3, 4):
        with Driver(checkpoint(name), world) as driver:
            check_greedy(driver.generate(prompt, 256, chunk=48)[0], expected)


@pytest.mark.parametrize("form, group", [("float32", 0), *(pytest.param(*each[:2], marks=slow) for each in FORMATS)])
@pytest.mark.parametrize("name", ["qwen-long", "chatglm3", "baichuan2-13b"])
def test_the_same_bits_alone_and_in_a_batch(name, form, group, checkpoint):
    prompts = [prompt_of(n, seed=9) for n in (1, 3, 40, 270)]
    fields = {"weight_dtype": form, "weight_group_size": group, "engine_max_batch": 4, "max_step_tokens": 1024}
    with Driver(checkpoint(name), 1, **fields) as driver:
        expected = [together(driver, [p], 1 << 20)[0] for p in prompts]
        for chunk in (1 << 20, 37):
            for row, wanted in zip(together(driver, prompts, chunk), expected):
                np.testing.assert_array_equal(row, wanted)


@slow
@pytest.mark.parametrize("form, group, tolerance", FORMATS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_weight_formats(name, form, group, tolerance, checkpoint):
    prompt = prompt_of(64)
    expected = Published(checkpoint(name)).logits(prompt)[-1]
    for world in (1,) if group else (1, 2):  # ranks would cut inside groups
        with Driver(checkpoint(name), world, weight_dtype=form, weight_group_size=group) as driver:
            found = driver.generate(prompt, 1)[1][0]
        assert np.sqrt(np.mean((found - expected) ** 2)) / expected.std() < tolerance


@pytest.mark.parametrize("name, form", [("baichuan2-13b", "auto"), *(pytest.param(name, form, marks=slow)
                                        for name in PUBLISHED for form in ("auto", "w8a8") if name != "baichuan2-13b")])
def test_serialized_and_reloaded(name, form, checkpoint, tmp_path):
    options = {} if form == "auto" else {"enable_quant": True, "customized_quant_config": {
        "weight_format": "int8", "compute_method": "activate_quant"}}
    HuggingFaceModel(checkpoint(name), "m").serialize_to_path(None, tmp_path, **options)
    prompt = prompt_of(300)
    for world in (1, 2):
        with Driver(checkpoint(name), world, weight_dtype=form) as a, Driver(tmp_path / "m.asgraph", world) as b:
            np.testing.assert_array_equal(a.generate(prompt, 2)[1], b.generate(prompt, 2)[1])


# -- heads of unit rows ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_normalized_head_is_as_torch_rounds_it(dtype, tmp_path):
    from safetensors.torch import load_file

    from allspark_server.weights.asgraph import to_float32
    from allspark_server.weights.checkpoint import open_model

    directory = write(tmp_path / "m", PUBLISHED["baichuan2-7b"], dtype=dtype)
    head = load_file(directory / "model.safetensors")["lm_head.weight"]
    wanted = torch.nn.functional.normalize(head.double()).to(dtype).float().numpy()
    tensor = open_model(str(directory)).source.get("lm_head.weight")
    assert tensor.shape == head.shape
    np.testing.assert_array_equal(to_float32(tensor.data[3:9], tensor.dtype), wanted[3:9])
    np.testing.assert_array_equal(to_float32(tensor.data.reshape(-1), tensor.dtype), wanted.ravel())


# -- config.json -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, change, problem", [
    ("qwen", {"no_bias": False}, "'no_bias'.* is False: only True is served"),
    ("qwen", {"rotary_pct": 0.25}, "'rotary_pct'.* is 0.25: only 1.0 is served"),
    ("qwen", {"intermediate_size": 301}, "'intermediate_size'.* is 301: it must be even"),
    ("qwen", {"kv_channels": None}, "'kv_channels'.* is missing"),
    ("qwen-long", {"seq_length": "8192"}, "'seq_length'.* is '8192': expected int"),
    ("qwen-long", {"use_logn_attn": 1}, "'use_logn_attn'.* is 1: expected bool"),
    ("chatglm3", {"inner_hidden_size": 16384},
     "'inner_hidden_size'.* belongs to the first ChatGLM, which is not supported"),
    ("chatglm3", {"rmsnorm": False}, "'rmsnorm'.* is False: only True is served"),
    ("chatglm3", {"multi_query_attention": False}, "'multi_query_attention'.* only True is served"),
    ("chatglm3", {"pre_seq_len": 128}, "'pre_seq_len'.* is 128: "),
    ("chatglm3", {"quantization_bit": 4}, "'quantization_bit'.* is 4: only 0 is served"),
    ("chatglm3", {"padded_vocab_size": None}, "'padded_vocab_size'.* is missing"),
    ("chatglm3", {"rope_ratio": 0}, "'rope_ratio'.* is 0.0: it must be positive"),
    ("chatglm3", {"rope_ratio": 4, "_name_or_path": "THUDM/chatglm2-6b-32k"}, "'rope_ratio'.* is 4.0: ChatGLM2"),
    ("chatglm3", {"multi_query_group_num": 4}, "'num_key_value_heads'.* is 4: it must divide"),
    ("baichuan-13b", {"model_max_length": None}, "'model_max_length'.* is missing"),
    ("baichuan-13b", {"hidden_act": "gelu"}, "'hidden_act'.* is 'gelu': only 'silu'"),
    ("baichuan2-7b", {"tie_word_embeddings": True}, "'tie_word_embeddings'.* is True: only False is served"),
])  # fmt: skip
def test_configs_that_are_refused(name, change, problem, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[name], **change}))
    with pytest.raises(AllSparkError, match=problem):
        read_config(tmp_path)
