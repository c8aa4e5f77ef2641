"""The table of ops, and programs: errors and their texts, bound weights, costs."""

from __future__ import annotations

import pytest

from allspark_server import _native
from allspark_server.models.ops import op_spec, op_specs


@pytest.fixture
def program():
    p = _native.Program()
    p.add_cache_group("full")
    return p


def test_specs_are_complete_and_readable():
    for name, spec in op_specs().items():
        assert spec.inputs[0] <= spec.inputs[1] and spec.outputs[0] <= spec.outputs[1] and name == spec.name
        for attribute in spec.attributes.values():
            assert attribute.scope in ("model", "rank", "graph") and attribute.allowed
            if not attribute.required and attribute.scope != "graph":
                other = spec.attributes.get(attribute.default) if attribute.type == "integer" else None
                assert other is not None or attribute.fits(attribute.default), (name, attribute)
    with pytest.raises(ValueError, match="unknown op 'conv': known are rotary_table"):
        op_spec("conv")


@pytest.mark.parametrize(
    "op, inputs, outputs, weights, attributes, problem",
    [
        ("conv", [], [], [], {}, "unknown op conv"),
        ("linear", ["x"], ["y"], [], {}, "number of inputs, outputs or weights: 1, 1 and 0, expected 1, 1 and 1 to 2"),
        ("linear", ["x"], [99], ["m"], {}, "no tensor 99"),
        ("linear", ["x"], ["y"], [99], {}, "no weight 99"),
        ("linear", ["x"], ["x"], ["m"], {}, "output is 64 wide, expected 32"),
        ("linear", ["x"], ["y"], ["v64"], {}, "weight 1 is a vector, expected a matrix"),
        ("linear", ["x"], ["y"], ["m", "v64"], {}, "vector of 64 values, expected 32"),
        ("rms_norm", ["x"], ["y"], ["v64"], {"eps": 1e-6}, "output is 32 wide, expected 64"),
        ("rms_norm", ["y"], ["logits"], ["v64"], {"eps": 1e-6}, "input and output differ in rows"),
        ("rms_norm", ["x"], ["x"], ["v64"], {}, "needs attribute eps"),
        ("rms_norm", ["x"], ["x"], ["v64"], {"eps": "small"}, "attribute eps is 'small': expected a number of"),
        ("rms_norm", ["x"], ["x"], ["v64"], {"eps": float("nan")}, "attribute eps is nan: expected a number of"),
        ("rms_norm", ["x"], ["x"], ["v64"], {"eps": 1, "epz": 1}, "op rms_norm has no attribute epz: known are eps"),
        ("add", ["x", "x"], ["x"], [], {"eps": 1}, "op add has no attribute eps: it takes none"),
        ("rope", [], [], [], {"offset": 0}, "op rope takes one input, changed in place"),
        ("rope", ["x"], ["y"], [], {"offset": 0, "heads": 1, "head_dim": 16}, "its output must be tensor 0"),
        ("rope", ["x"], [], [], {"offset": 1e30, "heads": 1, "head_dim": 16}, "offset is 1e.30: expected an integer"),
        ("rope", ["x"], [], [], {"offset": 0.5, "heads": 1, "head_dim": 16}, "offset is 0.5: expected an integer of"),
        ("rope", ["x"], [], [], {"offset": 0, "heads": 1, "head_dim": 16}, "rotary_dim differs from rotary_table's"),
        ("rope", ["x"], [], [], {"offset": 0, "heads": 5, "head_dim": 16}, "op rope reaches past its input"),
        ("head_norm", ["x"], [], ["v16"], {"eps": 1, "offset": -16, "heads": 1, "head_dim": 16}, "reaches past"),
        ("head_norm", ["x"], [], ["v16"], {"eps": 1, "block": 0}, "needs attribute head_dim"),
        ("qk_square_sums", ["x"], ["y"], [], {"q_columns": 9, "k_offset": 9, "k_columns": 9},
         "output is 32 wide, expected 2"),
        ("qk_norm", ["x", "y"], [], ["v16", "v16"], {"eps": 1, "q_width": 16, "k_width": 16, "q_columns": 16,
                                                     "k_columns": 16}, "second input is 32 wide, expected 2"),
        ("qk_norm", ["x", "two"], [], ["v64"], {"eps": 1, "q_width": 64, "q_columns": 64, "k_width": 9},
         "keys have columns, a width and a weight, or none of them"),
        ("add", ["x", "logits64"], [], [], {}, "its inputs differ in rows"),
        ("concat", ["x", "y"], ["x"], [], {}, "output is 64 wide, expected 96"),
        ("keep_hidden", ["logits64"], [], [], {}, "its input must have all rows"),
        ("dispatch_rows", ["routed", "y"], [], [], {"layer": 0}, "its input must have rows of tokens or outputs"),
        ("dispatch_rows", ["x", "y"], [], [], {"layer": 0}, "second input is 32 wide, expected 1"),
        ("dispatch_rows", ["x", "one"], [], [], {"layer": 0}, "must have a row set formed of the first one's rows"),
        ("dispatch_rows", ["logits64", "routed"], [], [], {"layer": 0}, "a row set formed of the first one's rows"),
        ("dispatch_rows", ["x", "routed"], [], [], {"layer": -1}, "layer is -1: expected an integer of 0"),
        ("returned_sums", [], ["routed"], [], {}, "its output must have a row for each token or output"),
        ("dispatched_rows", [], ["routed"], [], {"layer": 0}, "its output must have a row for each token or output"),
        ("dispatched_choices", ["x"], ["one"], [], {"experts": 4}, "row set formed of its input's rows"),
        ("dispatched_choices", ["x"], ["routed"], [], {"experts": 2}, "it has fewer experts than a row chooses"),
        ("return_sums", ["routed", "routed"], [], [], {}, "its input must have rows of tokens or outputs"),
        ("return_sums", ["logits64", "routed"], [], [], {}, "has no entries of the first one's rows"),
        ("causal_conv", ["x"], ["x"], ["v64"], {"taps": 2}, "vector of 64 values, expected 128"),
        ("causal_conv", ["x"], ["y"], ["v64"], {"taps": 1}, "output is 32 wide, expected 64"),
        ("causal_conv", ["x"], ["x"], ["v64"], {"taps": 65}, "taps is 65: expected an integer of 1 to 64"),
        ("causal_conv", ["logits64"], ["logits64"], ["v64"], {"taps": 1}, "must have a row for each token"),
        ("gated_delta", ["x", "y"], ["y"], ["v16", "v16"], {"key_dim": 16, "value_dim": 24},
         "input of 64 and output of 32 columns are not key heads of 16"),
        ("gated_delta", ["x", "y"], ["y"], ["v16", "v16"], {"key_dim": 16, "value_dim": 16},
         "second input is 32 wide, expected 4"),
        ("gated_delta", ["x", "y"], ["y"], ["v16", "v64"], {"key_dim": 16, "value_dim": 2},
         "vector of 64 values, expected 16"),
        ("gated_delta", ["x", "logits"], ["y"], ["v16", "v16"], {"key_dim": 16, "value_dim": 2},
         "must have a row for each token"),
        ("ssd", ["x", "y"], ["y"], ["v16"] * 3, {"state_dim": 16, "head_dim": 24},
         "input of 64 and output of 32 columns are not heads of 24 and groups of B and C of 16"),
        ("ssd", ["x", "y"], ["y"], ["v16"] * 3, {"state_dim": 16, "head_dim": 16},
         "second input is 32 wide, expected 2"),
        ("ssd", ["x", "logits"], ["y"], ["v16"] * 3, {"state_dim": 16, "head_dim": 1},
         "must have a row for each token"),
        ("ssd", ["x", "y"], ["y"], ["v16"] * 3, {"state_dim": 16, "head_dim": 1}, "vector of 16 values, expected 32"),
        ("ssd", ["x", "y"], ["y"], ["v16"] * 3, {"state_dim": 16, "head_dim": 1, "least_step": 2, "most_step": 1},
         "least_step is above most_step"),
        ("gated_rms_norm", ["x", "x"], [], ["v16"], {"eps": 1, "head_dim": 16, "gate_first": 1},
         "vector of 16 values, expected 64"),
        ("gated_rms_norm", ["x", "y"], [], ["v16"], {"eps": 1, "head_dim": 16}, "second input is 32 wide, expected 64"),
        ("gated_rms_norm", ["x", "x"], [], ["v16"], {"eps": 1, "head_dim": 24}, "64 columns are not heads of 24"),
        ("sigmoid_gate", ["x", "y"], [], [], {}, "second input is 32 wide, expected 64"),
        ("multiply", ["x", "y"], [], [], {}, "it reaches past its second input"),
        ("select_rows", ["logits"], ["logits"], [], {}, "a row for each token"),
        ("embedding", [], ["logits64"], ["m"], {"vocab_begin": 0}, "a row for each token"),
        ("sample", ["x"], [], [], {"vocab_begin": 0, "vocab_size": 64}, "a row for each row that samples"),
        ("sample", ["logits"], [], [], {"vocab_begin": 0, "vocab_size": 10}, r"outside of \[0, 10\)"),
    ],
)  # fmt: skip
def test_ops_that_cannot_be(program, op, inputs, outputs, weights, attributes, problem):
    tensors = {"x": program.add_tensor(64), "y": program.add_tensor(32), "two": program.add_tensor(2)}
    tensors |= {"logits": program.add_tensor(32, 1), "logits64": program.add_tensor(64, 1)}
    tensors |= {"one": program.add_tensor(1), "routed": program.add_tensor(1, program.add_row_set(0, 3))}
    ids = {"m": program.add_matrix(32, 64, "float32"), "v64": program.add_vector(64), "v16": program.add_vector(16)}
    with pytest.raises(ValueError, match=problem):
        program.add_op(op, [tensors.get(t, t) for t in inputs], [tensors.get(t, t) for t in outputs],
                       [ids.get(w, w) for w in weights], attributes)
    assert program.ops == []


def test_attention_that_cannot_be(program):
    x, out = program.add_tensor(32), program.add_tensor(16)
    good = {"layer": 0, "q_heads": 2, "kv_heads": 1, "head_dim": 8, "group": 2, "scale": 1}
    for change in ({"layer": -1}, {"kv_begin": -1}, {"group": 1 << 24, "kv_begin": 1 << 24}):
        with pytest.raises(ValueError, match="invalid layer"):
            program.add_op("span_attention", [x], [out], [], {**good, **change})
    with pytest.raises(ValueError, match="input is 32 wide, expected 40"):
        program.add_op("span_attention", [x], [out], [], {**good, "q_heads": 3})
    with pytest.raises(ValueError, match="no cache group 1"):
        program.add_op("span_attention", [x], [out], [], {**good, "cache_group": 1})


def test_weights_tensors_and_groups_that_cannot_be(program):
    for problem, call in (
        ("matrix of 0 x 4: both must be positive", lambda: program.add_matrix(0, 4, "float32")),
        ("group_size must be a multiple of 8, or 0, got 20", lambda: program.add_matrix(4, 4, "int8", 20)),
        ("no weight format int7: known are float32", lambda: program.add_matrix(4, 4, "int7")),
        ("tensor width must be positive, got 0", lambda: program.add_tensor(0)),
        ("no row set 2", lambda: program.add_tensor(4, 2)),
        ("a tensor's type must be", lambda: program.add_tensor(4, 0, "int8")),
        ("a cache group must be full, sliding, latent or recurrent", lambda: program.add_cache_group("big")),
        ("sliding ones have one", lambda: program.add_cache_group("sliding")),
    ):
        with pytest.raises(ValueError, match=problem):
            call()


def test_a_program_is_read_back(program):
    x, y = program.add_tensor(48), program.add_tensor(16, _native.OUTPUT_ROWS)
    table = program.add_vector(8)
    program.add_op("rotary_table", [], [], [table], {"rotary_dim": 16, "dynamic": 1})
    program.add_op("rope", [x], [], [], {"head_dim": 16, "offset": 0, "heads": 2})
    rotary, rope = program.ops
    assert rotary["attributes"]["dynamic"] is True and rotary["attributes"]["attention_factor"] == 1.0
    assert rope["outputs"] == [x] and rope["attributes"]["rotary_dim"] == 16 and rope["attributes"]["table"] == 0
    assert program.tensors == [(48, 0, "float32"), (16, 1, "float32")] and y == 1
    with pytest.raises(ValueError, match="another op makes table 0"):
        program.add_op("rotary_table", [], [], [table], {"rotary_dim": 16})
    program.add_op("rotary_table", [], [], [table], {"rotary_dim": 16, "table": 1})


def test_costs(program):
    x, y = program.add_tensor(64), program.add_tensor(32)
    m, table = program.add_matrix(32, 64, "int4", 32), program.add_matrix(100, 64, "bfloat16")
    linear = program.add_op("linear", [x], [y], [m], {})
    assert program.cost(linear, rows=3) == (3 * (64 + 32) * 4 + 32 * (32 + 2 * 4), 2 * 3 * 32 * 64)
    embedding = program.add_op("embedding", [], [x], [table], {"vocab_begin": 0})
    assert program.cost(embedding, rows=3) == (3 * 64 * 4 + 3 * 128, 0)
