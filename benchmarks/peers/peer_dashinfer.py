"""DashInfer 1.3, one process, fp32 (its only type on x86 without AVX-512 BF16).

Needs: dashinfer==1.3.0 (CPython 3.8 to 3.11), torch, "transformers==4.44.2", "numpy<2".
"""
from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from adapter import Cell, Job, PeerFormat, main

FORMATS = [PeerFormat("float32", 32, ("float32", "bfloat16"))]
NAME = "model"
TYPES = {"qwen2": "Qwen_v20", "llama": "LLaMA_v2"}
SPARE = 32      # tokens of engine_max_length beside those of a request: it wants two, and the warm-up has 18


def older_checkpoint(job: Job) -> Path:
    """The checkpoint with a config.json that transformers 4.44 knows."""
    folder, config = job.work / "checkpoint", job.config
    if not folder.exists():
        shutil.copytree(job.checkpoint, folder)
        rope = config.pop("rope_parameters", None) or {}
        config.setdefault("rope_theta", rope.get("rope_theta", 1e4))
        config["torch_dtype"] = config.pop("dtype", config.get("torch_dtype", "bfloat16"))
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def serialize(engine, job: Job, folder: Path) -> None:
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(older_checkpoint(job)).float().eval()
    base = float(model.config.rope_theta)
    config = dict(model.config.__dict__, use_dynamic_ntk=False, use_logn_attn=False, rotary_emb_base=base,
                  size_per_head=model.config.hidden_size // model.config.num_attention_heads)
    engine.serialize_model_from_torch(
        model_name=NAME, model_type=TYPES[job.config["model_type"]], torch_model=model.state_dict(),
        model_config=config, save_dir=str(folder), multinode_mode=False, data_type="float32", rotary_base=base)


class DashInferModel:
    def __init__(self, engine, vocab_size: int):
        self.engine, self.vocab_size = engine, vocab_size

    def start(self, cell: Cell, number: int):
        import torch
        from torch.utils.dlpack import to_dlpack
        ids = torch.randint(10, self.vocab_size, (1, cell.prompt), dtype=torch.int64)
        options = dict(num_beams=1, num_return_sequences=1, temperature=1.0, do_sample=True, early_stopping=False,
                       top_k=1, top_p=0.8, repetition_penalty=1.0, presence_penalty=0.0, length_penalty=1.0,
                       no_repeat_ngram_size=0, min_length=0, max_length=cell.length, eos_token_id=0, seed=1,
                       uuid=str(number))
        return self.engine.start_request(NAME, {"input_ids": to_dlpack(ids)}, generate_config=options)[1:]

    def time(self, cell: Cell) -> tuple[float, float | None]:
        from dashinfer.allspark import GenerateRequestStatus as Status
        begin = time.perf_counter()
        requests = [self.start(cell, i) for i in range(cell.batch)]
        tokens, live, first, before, end, counted = [0] * cell.batch, set(range(cell.batch)), 0.0, 0, 0.0, 0
        while live:
            for i in sorted(live):
                status, elements = requests[i][1].GenerateStatus(), requests[i][1].GetNoWait()
                tokens[i] += len(elements.ids_from_generate) if elements is not None else 0
                if status in (Status.GenerateFinished, Status.GenerateInterrupted) and elements is None:
                    live.discard(i)
            now = time.perf_counter()
            if not first and min(tokens) > 0:
                first, before = now, sum(tokens)
            if not end and len(live) < cell.batch:
                end, counted = now, sum(tokens)
            time.sleep(0.001)
        for handle, _ in requests:
            self.engine.release_request(NAME, handle)
        decode = (counted - before) / (end - first) if cell.output > 1 and counted > before else None
        return cell.batch * cell.prompt / (first - begin), decode


@contextlib.contextmanager
def load(job: Job, form: PeerFormat) -> Iterator[DashInferModel]:
    from dashinfer import allspark
    engine, folder = allspark.Engine(), job.work / "serialized"
    if not (folder / f"{NAME}.ditensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        serialize(engine, job, folder)
    config = allspark.AsModelConfig(model_name=NAME, model_path=str(folder / f"{NAME}.dimodel"),
                                    weights_path=str(folder / f"{NAME}.ditensors"),
                                    engine_max_length=max(cell.length for cell in job.cells) + SPARE,
                                    engine_max_batch=max(cell.batch for cell in job.cells))
    config.compute_unit, config.num_threads, config.matmul_precision = "CPU:0", job.threads, "highest"
    config.cache_mode = allspark.AsCacheMode.AsCacheDefault
    config.prefill_mode = allspark.AsMHAPrefill.AsPrefillDefault
    engine.build_model_from_config_struct(config)
    engine.start_model(NAME)
    try:
        yield DashInferModel(engine, job.config["vocab_size"])
    finally:
        engine.stop_model(NAME)
        engine.release_model(NAME)


if __name__ == "__main__":
    main({"dashinfer": "dashinfer", "torch": "torch"}, FORMATS, load)
