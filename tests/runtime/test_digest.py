"""The digest of results runs every op of the op table with every attribute, and every field of the sampling parameters:
an upgrade that changes what one of them computes changes the fingerprint.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np

from allspark_server import _native
from allspark_server.models.ops import op_specs
from allspark_server.runtime import digest, sampler_digest
from allspark_server.runtime.digest_programs.attention import latent, several_heads
from allspark_server.runtime.digest_programs.compressed import GROUPS, compressed
from allspark_server.runtime.digest_programs.decoders import decoder, variant
from allspark_server.runtime.digest_programs.encoders import encoder
from allspark_server.runtime.digest_programs.images import seeing, tower
from allspark_server.runtime.digest_programs.parts import LONG
from allspark_server.runtime.digest_programs.recurrent import recurrent, state_space
from allspark_server.runtime.plan import SamplingParams

# Which place in memory is used, not what is computed.
PLACES = {("span_attention", "layer"), ("span_attention", "cache_group"), ("latent_attention", "layer"),
          ("latent_attention", "cache_group"), *(("compress", name) for name in (
              "layer", "cache_group", "rows_layer", "rows_group")), ("compressed_attention", "layer"),
          ("compressed_attention", "cache_group"), ("indexer", "layer"), ("indexer", "cache_group"), ("rope", "table"),
          ("rotary_table", "table"), ("lora", "target"), ("expert_lora", "target")}
# Of draft heads: they copy rows, and which tokens come out does not depend on drafts.
OF_DRAFT_HEADS = {"keep_hidden", "kept_hidden", "spread_columns"}
# Of mixed groups: they copy rows, and add the ranks' sums in rank order, as all_reduce does.
OF_MIXED_GROUPS = {"dispatch_rows", "returned_sums", "dispatched_rows", "dispatched_choices", "return_sums"}
SIZES = {"heads", "head_dim", "group", "rotary_dim"}
RANK = {"q_head_begin", "kv_begin", "expert_begin", "vocab_begin"}     # of several ranks


class Recorder:
    """An executor that notes its ops; `change(number, name, attributes)` may replace an op's attributes."""

    def __init__(self, change=lambda number, name, attributes: attributes):
        self.executor, self.ops, self._change = _native.Executor(num_threads=1), [], change

    def __getattr__(self, name):
        return getattr(self.executor, name)

    def add_op(self, name, inputs, outputs, weights, attributes):
        attributes = self._change(len(self.ops), name, dict(attributes))
        self.ops.append((name, len(weights), attributes))
        self.executor.add_op(name, inputs, outputs, weights, attributes)


MODELS = {
    "plain": (lambda empty: decoder("float32", 0, "float32", empty=empty),
              lambda e: digest.run(e, (3, 37, 1, LONG - 41))),
    "experts": (lambda empty: decoder("float32", 0, "float32", experts=True, empty=empty),
                lambda e: digest.run(e, (3, 37, 1))),
    "adapters": (lambda empty: decoder("float32", 0, "float32", adapted=True, empty=empty),
                 lambda e: digest.run(e, (3, 37, 1), adapter=0)),
    "adapters of experts": (lambda empty: decoder("float32", 0, "float32", experts=True, adapted=True, empty=empty),
                            lambda e: digest.run(e, (3, 37, 1), adapter=0)),
    "recurrent": (lambda empty: recurrent("float32", 0, empty=empty),
                  lambda e: digest.run(e, (3, 63, 130))),
    "bounded decays": (lambda empty: recurrent("float32", 0, empty=empty, lower_bound=-5.0),
                       lambda e: digest.run(e, (3, 63, 130))),
    "state space": (lambda empty: state_space("float32", 0, empty=empty),
                    lambda e: digest.run(e, (3, 63, 130))),
    "latent": (lambda empty: latent("float32", 0, "float32", empty=empty),
               lambda e: digest.run(e, (3, 63, 130), groups=2)),
    "indexer": (lambda empty: latent("float32", 0, "float32", empty=empty, selected=40),
                lambda e: digest.run(e, (3, 63, 130), groups=2)),
    "pools": (lambda empty: latent("float32", 0, "float32", empty=empty, selected=40, pool=5),
              lambda e: digest.run(e, (3, 63, 130), groups=3)),
    "compressed": (lambda empty: compressed("float32", 0, "float32", empty=empty),
                   lambda e: digest.run(e, (3, 63, 130), groups=len(GROUPS))),
    "heads": (lambda empty: several_heads("float32", 0, "float32", empty=empty),
              lambda e: digest.run(e, (3, 63, 130), groups=2)),
    "tower": (lambda empty: tower("float32", 0, "float32", empty=empty), digest.run_tower),
    **{f"images {together}": (lambda empty, together=together: seeing("float32", 0, "float32", not together, empty),
                              lambda e, together=together: digest.run_seeing(e, together))
       for together in (False, True)},
    "encoder": (lambda empty: encoder("float32", 0, empty=empty), digest.run_encoder),
    **{f"variant {long}": (lambda empty, long=long: variant("float32", 0, empty, long), digest.run_variant)
       for long in (False, True)},
}


def used() -> list[tuple[str, int, dict]]:
    """The ops of all models: name, number of weights, attributes."""
    found = []
    for build, _ in MODELS.values():
        recorder = Recorder()
        build(lambda recorder=recorder: recorder)
        found += recorder.ops
    return found


def test_every_op_and_attribute_is_used():
    ops = used()
    specs = {name: spec for name, spec in op_specs().items() if name not in OF_DRAFT_HEADS | OF_MIXED_GROUPS}
    assert {name for name, _, _ in ops} == set(specs)
    for spec in specs.values():
        own = [(weights, attributes) for name, weights, attributes in ops if name == spec.name]
        numbers = {0, 1} if spec.name == "span_attention" else set(spec.weights)
        assert {weights for weights, _ in own} >= numbers, spec.name
        for attribute in spec.attributes.values():
            which = (spec.name, attribute.name)
            if attribute.scope == "graph":
                continue
            values = {attributes.get(attribute.name, attribute.default) for _, attributes in own}
            if attribute.type == "choice":
                assert values >= set(attribute.choices), which
            elif not attribute.required and attribute.name not in RANK and attribute.default != "head_dim":
                assert len({float(value) for value in values}) > 1, f"{which}: only {values}"


def other(attribute, value):
    """Another value of an attribute."""
    if attribute.type == "choice":
        return next(choice for choice in attribute.choices if choice != value)
    if attribute.type == "flag":
        return 1 - int(value or 0)
    return value * 1.5 + 0.25 if attribute.type == "number" else int(value) + 1


def test_every_attribute_changes_the_digest():
    """In a model that uses it, or the model with another value is refused. So what an attribute does is run."""
    known, changing = set(), set()
    for build, run in MODELS.values():
        recorder = Recorder()
        before = run(build(lambda recorder=recorder: recorder))
        for number, (op, _, attributes) in enumerate(recorder.ops):
            for name, value in attributes.items():
                if (op, name) in PLACES or name in RANK | SIZES:
                    continue
                known.add((op, name))
                if (op, name) in changing:
                    continue

                another = other(op_specs()[op].attributes[name], value)

                def change(n, _, found, number=number, name=name, another=another):
                    return {**found, name: another} if n == number else found

                try:
                    if run(build(lambda change=change: Recorder(change))) != before:
                        changing.add((op, name))
                except (ValueError, RuntimeError):
                    changing.add((op, name))
    assert changing == known


def test_every_field_of_the_sampling_parameters_changes_the_digest():
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    cases = [(params, np.arange(0, 3000, 7, dtype=np.int32)) for params in sampler_digest.SAMPLINGS]
    cases += sampler_digest.more_samplings()
    changing = set()
    for params, history in cases:
        before = sampler_digest.sampled([(params, history)])
        for name, default in fields.items():
            if getattr(params, name) != default:
                if sampler_digest.sampled([(dataclasses.replace(params, **{name: default}), history)]) != before:
                    changing.add(name)
    assert changing == set(fields)


def test_another_process_finds_the_same():
    code = "from allspark_server.runtime.digest import results_digest; print(results_digest())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest.results_digest()


def test_the_digest_covers_each_of_its_cases(monkeypatch):
    before = digest.results_digest()
    for name in ("result_digests", "expert_digests", "adapter_digests", "variant_digests",
                 "recurrent_digests", "latent_digests", "compressed_digests", "heads_digests", "encoder_digests",
                 "image_digests"):
        cases = getattr(digest, name)()
        assert len(set(cases.values())) == len(cases) and np.all([len(found) == 16 for found in cases.values()])
        for case, found in cases.items():
            monkeypatch.setattr(digest, name, lambda case=case, found=found, cases=cases: {**cases, case: found[::-1]})
            assert digest.results_digest() != before, case
            monkeypatch.undo()


def test_the_digest_of_experts_covers_the_exact_recipe(monkeypatch):
    before, cases = digest.results_digest(experts=True), digest.exact_digests()
    assert before != digest.results_digest() and set(cases) > {"exact 0", "exact 1"}
    for case, found in cases.items():
        monkeypatch.setattr(digest, "exact_digests", lambda case=case, found=found: {**cases, case: found[::-1]})
        assert digest.results_digest(experts=True) != before, case
