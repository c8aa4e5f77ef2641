"""OpenVINO. Needs: torch, "optimum-intel[openvino]"; no torchvision other than one built with that torch.

The graph is cut before the language-model head, so that a prompt's prefill computes the logits of its last token only,
as OpenVINO GenAI does (and this engine, and llama.cpp).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from adapter import Job, PeerFormat, Stepper, main

# int8 and int4 weights with OpenVINO's settings as they come: activations are quantized too, 32 values at a time
# (dynamic quantization). int4: 64 weights share a 16-bit scale and a 4-bit offset; embedding and head, which is often
# the same matrix, stay 8-bit.
FORMATS = [PeerFormat("16 bit", 16, ("bfloat16",)), PeerFormat("int8", 8, ("int8", "w8a8"), True),
           PeerFormat("int4", 4.4, ("int4", "w4a8"), True)]
STORED = {"u4": 4, "i4": 4, "u8": 8, "i8": 8, "bf16": 16, "f16": 16, "f32": 32}    # bits


def export(job: Job, form: PeerFormat) -> Path:
    """The checkpoint as OpenVINO's model files, made when they are not there."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    target = job.work / form.name.replace(" ", "-")
    if not target.exists():
        # Without a word of 8 bits, optimum would quantize a model of over 10^9 weights.
        options = {"16 bit": {"load_in_8bit": False}, "int8": {"load_in_8bit": True},
                   "int4": {"quantization_config": OVWeightQuantizationConfig(bits=4, group_size=64, sym=False)}}
        partial = job.work / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        model = OVModelForCausalLM.from_pretrained(job.checkpoint, export=True, compile=False,
                                                   **options[form.name])
        model.save_pretrained(partial)
        partial.rename(target)
    return target


def keep_last_row(model) -> None:
    """Only the last token's row reaches the head."""
    from openvino import opset13 as ops
    head = model.output("logits").get_node().input(0).get_source_output().get_node()
    if head.get_type_name() != "MatMul":
        raise RuntimeError(f"the logits come from a {head.get_type_name()}, not from a product")
    rows = head.input(0).get_source_output()        # [batch, tokens, hidden]
    first, last, one = (ops.constant([value]) for value in (-1, np.iinfo(np.int64).max, 1))
    head.input(0).replace_source_output(ops.slice(rows, first, last, one, one).output(0))
    model.validate_nodes_and_infer_types()


def weight_bits(model) -> float:
    """Bits stored for each weight, with scales and offsets: of all matrices, the embedding once."""
    weights = bits = 0
    for node in model.get_ops():
        kind = node.get_type_name() == "Constant" and node.get_element_type().get_type_name()
        if kind in STORED and node.get_byte_size() > 1024:
            bits += 8 * node.get_byte_size()
            # Scales and offsets are matrices too, of one value a row or a group.
            weights += 0 if node.get_friendly_name().endswith(("/scale", "/zero_point")) else np.prod(node.shape)
    return bits / weights


class OpenVinoModel(Stepper):
    def __init__(self, request, names: set[str], vocab_size: int, bits: float):
        self.request, self.names, self.vocab_size, self.weight_bits = request, names, vocab_size, bits
        self.random = np.random.default_rng(0)

    def run(self, batch: int, count: int, past: int) -> None:
        inputs = {"input_ids": self.random.integers(10, self.vocab_size, (batch, count)),
                  "attention_mask": np.ones((batch, past + count), np.int64),
                  "position_ids": np.tile(np.arange(past, past + count), (batch, 1)),
                  "beam_idx": np.arange(batch, dtype=np.int32)}
        self.request.start_async({name: value for name, value in inputs.items() if name in self.names})
        self.request.wait()         # infer() would copy the logits

    def prefill(self, batch: int, prompt: int) -> None:
        self.request.reset_state()
        self.batch, self.past = batch, prompt
        self.run(batch, prompt, 0)

    def step(self) -> None:
        self.run(self.batch, 1, self.past)
        self.past += 1


@contextlib.contextmanager
def load(job: Job, form: PeerFormat) -> Iterator[OpenVinoModel]:
    folder = export(job, form)
    import openvino
    core = openvino.Core()
    model = core.read_model(folder / "openvino_model.xml")
    bits = weight_bits(model)
    keep_last_row(model)
    compiled = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": job.threads, "PERFORMANCE_HINT": "LATENCY"})
    yield OpenVinoModel(compiled.create_infer_request(), {i.get_any_name() for i in model.inputs},
                        job.config["vocab_size"], bits)


if __name__ == "__main__":
    main({"openvino": "openvino", "optimum.intel": "optimum-intel[openvino]"}, FORMATS, load)
