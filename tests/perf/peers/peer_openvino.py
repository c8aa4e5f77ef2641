"""OpenVINO. Needs: torch, "optimum-intel[openvino]". Its prefill computes the logits of every token."""
from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Iterator

import numpy as np
from adapter import Job, PeerFormat, Stepper, main

FORMATS = [PeerFormat("16 bit", 16, ("bfloat16",)), PeerFormat("int8", 8, ("int8", "w8a8")),
           PeerFormat("int4", 4.4, ("int4", "w4a8"))]      # int4: 64 weights share a scale (16 bits) and an offset


def export(job: Job, form: PeerFormat) -> Path:
    """The checkpoint as OpenVINO's model files, made when they are not there."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    target = job.work / form.name.replace(" ", "-")
    if not target.exists():
        options = {"int8": {"load_in_8bit": True},
                   "int4": {"quantization_config": OVWeightQuantizationConfig(bits=4, group_size=64, sym=False)}}
        model = OVModelForCausalLM.from_pretrained(job.checkpoint, export=True, compile=False,
                                                   **options.get(form.name, {}))
        partial = job.work / "partial"
        model.save_pretrained(partial)
        partial.rename(target)
    return target


class OpenVinoModel(Stepper):
    def __init__(self, request, names: set[str], vocab_size: int):
        self.request, self.names, self.vocab_size = request, names, vocab_size
        self.random = np.random.default_rng(0)

    def run(self, batch: int, count: int, past: int) -> None:
        inputs = {"input_ids": self.random.integers(10, self.vocab_size, (batch, count)),
                  "attention_mask": np.ones((batch, past + count), np.int64),
                  "position_ids": np.tile(np.arange(past, past + count), (batch, 1)),
                  "beam_idx": np.arange(batch, dtype=np.int32)}
        self.request.infer({name: value for name, value in inputs.items() if name in self.names})

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
    model = core.compile_model(core.read_model(folder / "openvino_model.xml"), "CPU",
                               {"INFERENCE_NUM_THREADS": job.threads, "PERFORMANCE_HINT": "LATENCY"})
    yield OpenVinoModel(model.create_infer_request(), {i.get_any_name() for i in model.inputs},
                        job.config["vocab_size"])


if __name__ == "__main__":
    main({"openvino": "openvino", "optimum.intel": "optimum-intel"}, FORMATS, load)
