"""Prints what the exact recipe of a mixed group's experts costs in quality: perplexities beside bfloat16's.

    accuracy_experts.py [--formats int8,w8a8,int4:64,w4a8:64,mxfp4,nvfp4] [--count 100] [--json FILE]

The model is the shipped one as a mixture of experts: each MLP is cut into four experts, which every row chooses with a
weight of 1/4 and whose outputs are four times as large, so that they compute the MLP. Its architecture is Qwen2-MoE's,
with a shared expert of zeros. Each format is computed by one rank ("ordinary") and with two ranks of experts in a mixed
group ("exact"), on CPUs. In mxfp4 and nvfp4 only experts are stored, in the others all matrices. Texts are new stories.
"moved": the root mean square of the difference of tokens' log-probabilities from those of bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import accuracy  # first: it finds the modules of tools/ and tests/
import numpy as np
import story
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from stored_formats import STORED, Tensors, write_safetensors
from transformers import AutoTokenizer

from allspark_server import _native
from support.driver import Driver, logits_of

EXPERTS = 4
FORMATS = "int8,w8a8,int4:64,w4a8:64,mxfp4,nvfp4"
IGNORED = ["re:.*self_attn.*", "re:.*mlp[.]gate$", "re:.*shared_expert.*", "lm_head"]


def write_experts(source: Path, target: Path) -> Path:
    """Writes the shipped model as a mixture of experts, in bfloat16."""
    fields = json.loads((source / "config.json").read_text())
    inner = fields["intermediate_size"] // EXPERTS
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(source / "model.safetensors", "pt") as file:
        for key in file.keys():
            values = file.get_tensor(key)
            prefix, _, name = key.partition(".mlp.")
            if not name:
                tensors[key] = values
                continue
            down = name.startswith("down")
            for expert, part in enumerate(values.split(inner, 1 if down else 0)):
                tensors[f"{prefix}.mlp.experts.{expert}.{name}"] = (part * EXPERTS if down else part).contiguous()
            tensors[f"{prefix}.mlp.gate.weight"] = torch.zeros(EXPERTS, fields["hidden_size"], dtype=values.dtype)
            tensors[f"{prefix}.mlp.shared_expert_gate.weight"] = torch.zeros(1, fields["hidden_size"],
                                                                             dtype=values.dtype)
            shape = (fields["hidden_size"], 32) if down else (32, fields["hidden_size"])
            tensors[f"{prefix}.mlp.shared_expert.{name}"] = torch.zeros(shape, dtype=values.dtype)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps({
        **fields, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS, "norm_topk_prob": True, "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []}))
    return target


def write_form(source: Path, target: Path, form: str) -> Path:
    """Writes a copy whose experts are in one of STORED's formats."""
    make, config = STORED[form]
    target.mkdir()
    tensors: Tensors = {}
    with safe_open(source / "model.safetensors", "pt") as file:
        for key in file.keys():
            values = file.get_tensor(key)
            if ".experts." in key:
                tensors |= {key.removesuffix("weight").rstrip(".") + suffix: value
                            for suffix, value in make(values.float().numpy()).items()}
            else:
                tensors[key] = ("BF16", values.bfloat16().view(torch.uint16).numpy())
    write_safetensors(target / "model.safetensors", tensors)
    fields = json.loads((source / "config.json").read_text())
    config = {**config, "ignore": IGNORED}
    (target / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return target


class Ranks(accuracy.TeacherForcing):
    """Log-probabilities that a model computes on ranks that are threads of this process. exact: in a mixed group."""

    def __init__(self, folder: Path, exact: bool, **fields):
        unit = {"compute_unit": "CPU:0+CPU:0,0"} if exact else {}
        self.driver = Driver(folder, 3 if exact else 1, engine_max_batch=accuracy.BATCH, **unit, **fields)
        self.info, self.runner = self.driver.info, self

    def step(self, plan: bytes, want_logits: bool = False) -> SimpleNamespace:
        results = self.driver._each(lambda runner: runner.step(plan, want_logits))
        return SimpleNamespace(logits=logits_of(results) if want_logits else None)

    def close(self) -> None:
        self.driver.close()


def logprobs_of(folder: Path, sequences: list[list[int]], exact: bool, **fields) -> np.ndarray:
    """Of all tokens but the first of each sequence."""
    model = Ranks(folder, exact, **fields)
    try:
        most = model.info.max_batch
        return np.concatenate([values for at in range(0, len(sequences), most)
                               for values in model.logprobs(sequences[at:at + most])])
    finally:
        model.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--count", type=int, default=100, help="stories")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rng, tokenizer = random.Random("fresh"), AutoTokenizer.from_pretrained(accuracy.SHIPPED)
    sequences = [tokenizer(story.plain_story(rng))["input_ids"] for _ in range(options.count)]
    rows = []

    def add(name: str, found: np.ndarray, reference: np.ndarray) -> None:
        rows.append({"format": name, "perplexity": math.exp(-found.mean()),
                     "moved": float(np.sqrt(((found - reference) ** 2).mean()))})
        print(f"{name:<22} {rows[-1]['perplexity']:10.5f} {rows[-1]['moved']:10.5f}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = write_experts(accuracy.SHIPPED, Path(name) / "model")
        print(f"{sum(len(ids) - 1 for ids in sequences)} tokens, {_native.isa()}\n{'':<22} perplexity      moved")
        dense = logprobs_of(accuracy.SHIPPED, sequences, False, weight_dtype="bfloat16")
        add("bfloat16, not cut", dense, dense)
        add("bfloat16", logprobs_of(folder, sequences, False, weight_dtype="bfloat16"), dense)
        for form in options.formats.split(","):
            dtype, group, _ = accuracy.parts_of(form)
            stored = form in STORED
            path = write_form(folder, Path(name) / form, form) if stored else folder
            fields = {} if stored else {"weight_dtype": dtype, "weight_group_size": group}
            for exact in (False, True):
                add(f"{form}, {'exact' if exact else 'ordinary'}", logprobs_of(path, sequences, exact, **fields), dense)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
