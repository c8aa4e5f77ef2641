"""Graphs with features that later models need: built, written and read, split over ranks, loaded from a checkpoint with
fused tensors, and computed; against one dense computation from the checkpoint's arrays.
"""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format

from allspark_client.errors import AllSparkError
from allspark_server.models.graph import Graph
from allspark_server.models.graph_elements import Block, Part, Weight
from allspark_server.models.network import ModelConfig, RopeConfig
from allspark_server.models.rotary import Rotary
from allspark_server.weights.asgraph import from_message, read_graph, to_message, write_graph
from allspark_server.weights.checkpoint import OpenedModel
from allspark_server.weights.formats import ScaleLayout, StoredQuantization, WeightFormat
from allspark_server.weights.loader import unquantized_type
from allspark_server.weights.safetensors import write_safetensors
from allspark_server.weights.shard import Split
from allspark_server.weights.sources import open_weights
from reference.loading import loaded, runner_of
from reference.ops import gelu_tanh, rms, sigmoid, softmax
from reference.test_attention_toy import dense

HIDDEN, VOCAB, INNER, EXPERTS, TOP, SHARED = 12, 41, 6, 5, 2, 4
CONFIG = ModelConfig("LlamaForCausalLM", HIDDEN, INNER, 2, 6, 3, 4, VOCAB, 1e-6, 512, rope=RopeConfig())
LAYERS = ({"heads": 6, "kv": 3, "dim": 4, "window": 0}, {"heads": 4, "kv": 2, "dim": 6, "window": 9})
BASES = (1e4, 1e2)


def frequencies(table, dim):
    return (1 / BASES[table] ** (np.arange(0, dim, 2) / dim)).astype(np.float32)


def build() -> Graph:
    """Two layers that differ in everything in which layers may differ."""
    graph = Graph(CONFIG)
    for table, layer in enumerate(LAYERS):
        graph.rotary_table(Rotary(layer["dim"], BASES[table], frequencies(table, layer["dim"])), table)
    routed = graph.row_set("routed", TOP)
    x = graph.embedding(graph.matrix("embed", VOCAB, HIDDEN, row_split=graph.vocab), scale=HIDDEN**0.5)
    for number, layer in enumerate(LAYERS):
        attention(graph, x, number, **layer)
        h = graph.rms_norm(x, f"{number}.norm", unit_offset=1)
        logits = graph.linear(h, graph.matrix(f"{number}.router", EXPERTS, HIDDEN), None, out="router_logits")
        scores = graph.router(logits, routed, normalized=1)
        graph.add(x, graph.all_reduce(experts(graph, h, scores, number, routed)))
    shared_expert(graph, x)
    selected = graph.select_rows(x)
    graph.hidden_states(selected)
    head = graph.matrix("embed", VOCAB, HIDDEN, row_split=graph.vocab)
    graph.sample(graph.soft_cap(graph.scale(graph.linear(selected, head, None, out="logits"), 0.25), 5.0))
    return graph


def attention(graph, x, number, heads, kv, dim, window):
    """One fused tensor [q | k | v] that is sliced; sinks in the first layer, slopes in the second."""
    queries, keys = Split(heads, dim), Split(heads, dim, heads // kv)
    of = (heads + 2 * kv) * dim
    firsts = (0, heads * dim, (heads + kv) * dim)
    parts = tuple(Part(f"{number}.qkv", split.width, split, first, of)
                  for split, first in zip((queries, keys, keys), firsts))
    qkv = graph.linear(x, graph.weight(Weight(f"{number}.qkv", parts, HIDDEN)), None, out=f"qkv{number}")
    graph.rope(qkv, table=number, head_dim=dim, pairs=("halves", "interleaved")[number])
    group = graph.cache_group("sliding", window) if window else 0
    more = {"window": window, "cache_group": group} if window else {}
    if number == 0:
        more["sinks"] = graph.head_values("sinks", queries)
    else:
        more["slopes"] = graph.head_values("slopes", queries, (0.5, 0.25, 0.125, 0.0625))
    attended = graph.span_attention(qkv, 0, out=f"attended{number}", head_dim=dim, **more)
    out = graph.matrix(f"{number}.o", HIDDEN, heads * dim, column_split=queries)
    graph.add(x, graph.all_reduce(graph.linear(attended, out, None, out="branch")))


def experts(graph, h, scores, number, routed):
    """Experts in two three-dimensional tensors, split by features; or each in a tensor of its own, with whole experts
    per rank.
    """
    inner, whole = Split(INNER), Split(EXPERTS)
    if number == 0:
        both = tuple(Part("experts.gate_up", INNER, inner, first, 2 * INNER, expert=e)
                     for e in range(EXPERTS) for first in (0, INNER))
        down = Weight("0.down", tuple(Part("experts.down", HIDDEN, expert=e) for e in range(EXPERTS)), INNER, inner,
                      experts=EXPERTS)
    else:
        both = tuple(Part(f"{e}.{kind}", INNER, unit=e, units=whole) for e in range(EXPERTS) for kind in ("gate", "up"))
        down = Weight("1.down", tuple(Part(f"{e}.down", HIDDEN, unit=e, units=whole) for e in range(EXPERTS)), INNER,
                      experts=EXPERTS)
    gate_up = graph.weight(Weight(f"{number}.gate_up", both, HIDDEN, experts=EXPERTS))
    y = graph.expert_linear(h, gate_up, None, routed, out=f"both{number}")
    y = graph.gelu_tanh_mul(y, out=f"inner{number}")
    y = graph.expert_linear(y, graph.weight(down), None, routed, out="expert_out")
    return graph.combine_experts(y, scores, out="branch")


def shared_expert(graph, x):
    inner = Split(SHARED)
    parts = (Part("shared.both", SHARED, inner, 0, 2 * SHARED), Part("shared.both", SHARED, inner, SHARED, 2 * SHARED))
    both = graph.linear(x, graph.weight(Weight("shared.both", parts, HIDDEN)), None, out="shared_both")
    graph.lora(both, x, target=3, block=1)
    down = graph.matrix("shared.down", HIDDEN, SHARED, column_split=inner)
    y = graph.all_reduce(graph.linear(graph.silu_mul(both, out="shared_inner"), down, None, out="branch"))
    gate = graph.linear(x, graph.matrix("shared.gate", 1, HIDDEN), None, out="shared_gate")
    graph.add(x, graph.sigmoid_mul(y, gate))


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(5)

    def normal(*shape):
        return (rng.normal(size=shape) * shape[-1] ** -0.5).astype(np.float32)

    found = {"embed": normal(VOCAB, HIDDEN), "sinks": normal(6) * 3}
    for number, layer in enumerate(LAYERS):
        found[f"{number}.qkv"] = normal((layer["heads"] + 2 * layer["kv"]) * layer["dim"], HIDDEN) * 2
        found[f"{number}.o"] = normal(HIDDEN, layer["heads"] * layer["dim"])
        found[f"{number}.norm"], found[f"{number}.router"] = normal(HIDDEN), normal(EXPERTS, HIDDEN) * 3
    found["experts.gate_up"], found["experts.down"] = normal(EXPERTS, 2 * INNER, HIDDEN), normal(EXPERTS, HIDDEN, INNER)
    for e in range(EXPERTS):
        found |= {f"{e}.gate": normal(INNER, HIDDEN), f"{e}.up": normal(INNER, HIDDEN)}
        found[f"{e}.down"] = normal(HIDDEN, INNER)
    return found | {"shared.both": normal(2 * SHARED, HIDDEN), "shared.down": normal(HIDDEN, SHARED),
                    "shared.gate": normal(1, HIDDEN)}


@pytest.fixture(scope="module")
def source(arrays, tmp_path_factory):
    path = tmp_path_factory.mktemp("graph") / "model.safetensors"
    write_safetensors(path, [(n, "F32", a.shape) for n, a in arrays.items()], {}, [[a] for a in arrays.values()])
    return open_weights(path)


def turned(x, number, heads, dim, pairs):
    """Heads of x [rows, heads * dim] after rotary embedding, computed with complex numbers."""
    angles = (np.arange(len(x), dtype=np.float32)[:, None] * frequencies(number, dim)).astype(float)
    y = x.reshape(len(x), heads, dim)
    a, b = (y[..., :dim // 2], y[..., dim // 2:]) if pairs == "halves" else (y[..., ::2], y[..., 1::2])
    z = (a + 1j * b) * np.exp(1j * angles)[:, None]
    both = np.concatenate([z.real, z.imag], -1) if pairs == "halves" else np.stack([z.real, z.imag], -1)
    return both.reshape(x.shape)


def expected_logits(arrays, prompt, lora=None):
    """The whole model at once, from the checkpoint's arrays."""
    w = {name: values.astype(float) for name, values in arrays.items()}
    x = w["embed"][prompt] * HIDDEN**0.5
    for number, layer in enumerate(LAYERS):
        heads, kv, dim = layer["heads"], layer["kv"], layer["dim"]
        q, k, v = np.split(x @ w[f"{number}.qkv"].T, [heads * dim, (heads + kv) * dim], 1)
        q, k = (turned(a, number, n, dim, ("halves", "interleaved")[number]) for a, n in ((q, heads), (k, kv)))
        more = {"sinks": w["sinks"]}
        if number == 1:
            more = {"slopes": [0.5, 0.25, 0.125, 0.0625], "window": layer["window"]}
        x = x + dense(np.concatenate([q, k, v], 1), heads, kv, dim, **more) @ w[f"{number}.o"].T
        h = rms(x, 1 + w[f"{number}.norm"], 1e-6)
        shares = softmax(h @ w[f"{number}.router"].T)
        for row in range(len(x)):
            chosen = np.argsort(-shares[row])[:TOP]
            for e in chosen:
                if number == 0:
                    gate, up = np.split(w["experts.gate_up"][e] @ h[row], 2)
                    down = w["experts.down"][e]
                else:
                    gate, up, down = w[f"{e}.gate"] @ h[row], w[f"{e}.up"] @ h[row], w[f"{e}.down"]
                x[row] += shares[row, e] / shares[row, chosen].sum() * (down @ (gelu_tanh(gate) * up))
    both = x @ w["shared.both"].T
    if lora is not None:
        both[:, SHARED:] += x @ lora[0].T @ lora[1].T
    gate, up = np.split(both, 2, 1)
    x = x + (gate * sigmoid(gate) * up) @ w["shared.down"].T * sigmoid(x @ w["shared.gate"].T)
    return 5.0 * np.tanh(x[-1] @ w["embed"].T * 0.25 / 5.0)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_same_on_any_number_of_ranks(arrays, source, world):
    """And equal to the dense computation, from a checkpoint of fused tensors and through the written graph."""
    graph = from_message(to_message(build()))
    model = OpenedModel(graph, source, None)
    assert unquantized_type(graph, source) == "float32"
    runner = runner_of([loaded(model, rank, world) for rank in range(world)], num_spans=(8, 8))
    prompt = np.random.default_rng(1).integers(0, VOCAB, 33).tolist()
    rng = np.random.default_rng(9)
    a, b = rng.normal(size=(2, HIDDEN)), rng.normal(size=(SHARED, 2))
    from reference.toy import SAMPLE, item, plan, spans_for, start

    cuts = [Split(SHARED).range_of(rank, world) for rank in range(world)]
    runner.set_adapter([[{3: (a, b[slice(*cut)])}] for cut in cuts])
    for lora in (None, (a, b)):
        work = item(0, 33, SAMPLE, spans=spans_for(33), other_spans=[spans_for(33)], adapter=-1 if lora is None else 0)
        found = runner.step(plan([work], [start(0, prompt)])).logits[0]
        runner.step(plan([], free=[0]))
        np.testing.assert_allclose(found, expected_logits(arrays, prompt, lora), rtol=1e-7, atol=1e-9)
    with pytest.raises(ValueError):
        runner.step(plan([item(0, 33, SAMPLE, spans=spans_for(33), other_spans=[[]])], [start(0, prompt)]))


@pytest.mark.parametrize("text", [False, True])
def test_graphs_are_written_and_read(tmp_path, text):
    graph = build()
    write_graph(graph, tmp_path / "m.asgraph", text=text)
    again = read_graph(tmp_path / "m.asgraph")
    assert to_message(again) == to_message(graph)
    for name in ("tensors", "weights", "row_sets", "cache_groups", "ops"):
        assert getattr(again, name) == getattr(graph, name), name


def test_layouts_of_scales_are_written_and_read():
    graph = build()
    layout = ScaleLayout("float16", "points", permuted=True)
    form = WeightFormat("int4", 128, layout)
    graph = graph.quantized({w.name: form for w in graph.weights.values()}, StoredQuantization(form, True, "float32"))
    again = from_message(to_message(graph))
    assert again.weights["embed"].stored == form and again.quantization.format.layout == layout


@pytest.mark.parametrize("change, problem", [
    ('ops { type: "rope" inputs: "x" outputs: "x" attrs { key: "heds" value { integer: 1 } } }',
     r"op 0 \(rope\) of the model's graph is not valid: "
     "op rope has no attribute heds: known are head_dim.*did you mean"),
    ('ops { type: "rope" inputs: "x" outputs: "x" attrs { key: "head_dim" value { integer: 4 } }'
     ' attrs { key: "pairs" value { choice: "all" } } }',
     "attribute pairs is 'all': expected one of halves, interleaved"),
    ('ops { type: "rope" inputs: "x" outputs: "x" attrs { key: "head_dim" value { number: 4.5 } } }',
     "attribute head_dim is 4.5: expected an integer of"),
    ('ops { type: "rope" inputs: "x" outputs: "x" attrs { key: "head_dim" value { integer: 4 } }'
     ' attrs { key: "offset" value { integer: 0 } } }', "op rope has no attribute offset: known are"),
    ('ops { type: "rms_norm" inputs: "x" outputs: "x" weights: "w" }', "op rms_norm needs attribute eps"),
    ('ops { type: "add" inputs: "x" outputs: "x" }', "has 1 inputs, 1 outputs and 0 weights: expected 2, 1 and 0"),
    ('tensors { name: "y" blocks { width: 1 } rows: "routed" }', "has unknown rows 'routed'"),
    ('row_sets { name: "a" of: "b" times: 2 }', "unknown rows"),
    ('cache_groups { kind: "sliding" window: 4 } cache_groups { kind: "full" }',
     "groups of full attention do not come first"),
    ('weights { name: "v" columns: 4 parts { tensor: "t" rows: 3 first: 2 of: 4 } }', "rows 2 to 5 .* which has 4"),
    ('weights { name: "v" columns: 4 parts { tensor: "t" rows: 3 unit: 2 } }', "unit 2 of None"),
])  # fmt: skip
def test_graphs_that_cannot_be(change, problem):
    message = to_message(Graph(CONFIG))
    text_format.Merge('tensors { name: "x" blocks { width: 12 } } weights { name: "w" parts { tensor: "w" rows: 12 } }',
                      message)
    text_format.Merge(change, message)
    with pytest.raises(ValueError, match=problem):
        from_message(message)


def test_tensors_of_another_shape_are_named(source):
    for part, problem in (
        (Part("experts.down", HIDDEN, expert=7), r"experts.down.*has shape \[5, 12, 6\]: expected \[8, 12, 6\]"),
        (Part("experts.down", HIDDEN), r"has shape \[5, 12, 6\]: expected \[12, 6\]"),
        (Part("0.o", 5, first=2, of=9), r"has shape \[12, 24\]: expected \[9, 6\]"),
    ):
        graph = Graph(CONFIG)
        graph.weight(Weight("w", (part,), INNER))
        with pytest.raises(AllSparkError, match=problem):
            unquantized_type(graph, source)


def test_buffers_have_one_shape_and_row_sets_one_meaning():
    graph = Graph(CONFIG)
    graph.row_set("routed", 2)
    with pytest.raises(ValueError, match="row set 'routed' is declared in two ways"):
        graph.row_set("routed", 3)
    graph.tensor("x", (Block(3),), "routed")
    with pytest.raises(ValueError, match="buffer 'x' is used with two shapes"):
        graph.tensor("x", (Block(3),))
    assert graph.cache_group("sliding", 7) == graph.cache_group("sliding", 7) == 1 and graph.cache_group("full") == 0
