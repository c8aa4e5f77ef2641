"""`dashinfer_greedy.py CHECKPOINT TYPE WORK TOKENS` reads prompts as a JSON list from its input and prints DashInfer
1.3.0's greedy ids in fp32 as a JSON list. It needs an environment of its own: dashinfer==1.3.0 (CPython 3.8 to 3.11),
numpy<2, torch, transformers==4.44.2, safetensors.
"""
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.utils.dlpack
from dashinfer import allspark
from dashinfer.allspark import GenerateRequestStatus as Status
from safetensors.torch import load_file


def weights(folder: Path, config: dict) -> dict:
    """Tensors of the checkpoint, and the rotary frequencies that checkpoints of these families contain, too."""
    state = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    dim = config["size_per_head"]

    def frequencies(dim: int, base: float = 10000.0) -> torch.Tensor:
        return 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))

    if config["model_type"] == "chatglm":
        state["transformer.rotary_pos_emb.inv_freq"] = frequencies(dim // 2, 10000.0 * config.get("rope_ratio", 1))
    elif config["model_type"] == "qwen":
        state["transformer.rotary_emb.inv_freq"] = frequencies(dim)
    else:
        for layer in range(config["num_hidden_layers"]):
            state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = frequencies(dim)
    return state


def generate(engine: allspark.Engine, prompt: list, tokens: int, number: int) -> list:
    config = {"num_beams": 1, "num_return_sequences": 1, "temperature": 1.0, "do_sample": True, "early_stopping": False,
              "top_k": 1, "top_p": 0.8, "repetition_penalty": 1.0, "presence_penalty": 0.0, "length_penalty": 1.0,
              "no_repeat_ngram_size": 0, "min_length": 0, "max_length": len(prompt) + tokens, "eos_token_id": 1 << 20,
              "seed": 1, "uuid": str(number)}
    ids = torch.utils.dlpack.to_dlpack(torch.tensor([prompt], dtype=torch.int64))
    _, handle, queue = engine.start_request("m", {"input_ids": ids}, generate_config=config)
    found, end = [], time.monotonic() + 60
    while time.monotonic() < end:
        status, elements = queue.GenerateStatus(), queue.GetNoWait()
        if elements is not None:
            found += elements.ids_from_generate
        elif status in (Status.GenerateFinished, Status.GenerateInterrupted):
            break
        time.sleep(0.002)
    engine.release_request("m", handle)
    return found


def main() -> None:
    folder, kind, work, tokens = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    answer = os.dup(1)
    os.dup2(2, 1)       # it prints
    prompts = json.load(sys.stdin)
    config = json.loads((folder / "config.json").read_text())
    config["size_per_head"] = config.get("kv_channels") or config["hidden_size"] // config["num_attention_heads"]
    engine = allspark.Engine()
    engine.serialize_model_from_torch(
        model_name="m", model_type=kind, torch_model=weights(folder, config), model_config=config, save_dir=str(work),
        multinode_mode=0, data_type="float32", use_dynamic_ntk=config.get("use_dynamic_ntk", False),
        model_sequence_length=config.get("seq_length", 2048))
    settings = allspark.AsModelConfig(model_name="m", model_path=f"{work}/m.dimodel",
                                      weights_path=f"{work}/m.ditensors",
                                      engine_max_length=1024, engine_max_batch=2)
    settings.compute_unit, settings.num_threads, settings.matmul_precision = "CPU:0", 1, "highest"
    settings.cache_mode = allspark.AsCacheMode.AsCacheDefault
    settings.prefill_mode = allspark.AsMHAPrefill.AsPrefillDefault
    engine.build_model_from_config_struct(settings)
    engine.start_model("m")
    found = [generate(engine, prompt, tokens, number) for number, prompt in enumerate(prompts)]
    os.write(answer, json.dumps(found).encode())
    os._exit(0)         # it waits for its threads without end


if __name__ == "__main__":
    main()
