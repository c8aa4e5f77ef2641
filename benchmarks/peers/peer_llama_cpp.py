"""llama.cpp. Needs: llama-cpp-python (built for this machine: CMAKE_ARGS=-DGGML_NATIVE=ON), gguf, numpy."""
from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from adapter import Job, PeerFormat, Stepper, main

FORMATS = [PeerFormat("bf16", 16, ("bfloat16",)), PeerFormat("q8_0", 8.5, ("int8", "w8a8"), True),
           PeerFormat("q4_0", 4.5, ("int4", "w4a8"), True)]
FILE_TYPES = {"q8_0": 7, "q4_0": 2}     # of llama.h's llama_ftype
ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama"}
NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight"}


def tensors(checkpoint: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """(name, type, array) of every tensor of the safetensors files; bfloat16 as uint16."""
    kinds = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    for path in sorted(checkpoint.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        length = int(data[:8].view(np.uint64)[0])
        for name, entry in json.loads(bytes(data[8:8 + length])).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                yield name, entry["dtype"], np.frombuffer(data[begin:end].tobytes(),
                                                          kinds[entry["dtype"]]).reshape(entry["shape"])


def as_float32(array: np.ndarray, kind: str) -> np.ndarray:
    if kind == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def write_gguf(job: Job, path: Path) -> None:
    """The checkpoint as bf16, without a vocabulary. Llama's rotary pairs stay where they are: speed is the same."""
    import gguf
    config = job.config
    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[config["model_type"]])
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base((config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta", 1e4)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(32)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    for name, kind, array in tensors(job.checkpoint):
        target = TOP.get(name)
        if target is None:
            _, _, layer, rest = name.split(".", 3)
            part, _, suffix = rest.rpartition(".")
            target = f"blk.{layer}.{NAMES[part]}.{suffix}"
        elif name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if array.ndim == 1:
            writer.add_tensor(target, as_float32(array, kind))
            continue
        if kind != "BF16":
            array = (as_float32(array, kind).view(np.uint32) >> 16).astype(np.uint16)
        writer.add_tensor(target, np.ascontiguousarray(array).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(job: Job, form: PeerFormat) -> Path:
    """The model file of a format, made when it is not there."""
    import llama_cpp
    source, target, partial = (job.work / f"{name}.gguf" for name in ("bf16", form.name, "partial"))
    if not target.exists() and not source.exists():
        write_gguf(job, partial)
        partial.rename(source)
    if not target.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread, params.pure = FILE_TYPES[form.name], os.cpu_count(), True
        if llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama_model_quantize to {form.name} failed")
        partial.rename(target)
    return target


class LlamaModel(Stepper):
    def __init__(self, context, vocab_size: int, largest: int):
        import llama_cpp
        self.L, self.context, self.vocab_size = llama_cpp, context, vocab_size
        self.memory = llama_cpp.llama_get_memory(context)
        self.tokens = llama_cpp.llama_batch_init(largest, 0, 1)

    def decode(self, rows: list[tuple[int, int, bool]]) -> None:
        """rows: (sequence, position, whether its logits are wanted)."""
        batch = self.tokens
        batch.n_tokens = len(rows)
        for i, (sequence, position, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = (7 * position + 13 * sequence) % self.vocab_size, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wanted
        if self.L.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        self.L.llama_get_logits_ith(self.context, -1)       # waits for the end

    def prefill(self, batch: int, prompt: int) -> None:
        self.L.llama_memory_clear(self.memory, True)
        for sequence in range(batch):
            self.decode([(sequence, p, p == prompt - 1) for p in range(prompt)])
        self.batch, self.position = batch, prompt

    def step(self) -> None:
        self.decode([(sequence, self.position, True) for sequence in range(self.batch)])
        self.position += 1


@contextlib.contextmanager
def load(job: Job, form: PeerFormat) -> Iterator[LlamaModel]:
    import llama_cpp
    llama_cpp.llama_backend_init()
    path = converted(job, form)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    params = llama_cpp.llama_context_default_params()
    sequences = max(cell.batch for cell in job.cells)
    largest = max(64, sequences, *(cell.prompt for cell in job.cells))
    length = -(-max(32, *(cell.length for cell in job.cells)) // 256) * 256
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = sequences * length, largest, 512, sequences
    params.n_threads = params.n_threads_batch = job.threads
    params.flash_attn_type = 1
    context = llama_cpp.llama_init_from_model(model, params)
    try:
        yield LlamaModel(context, job.config["vocab_size"], largest)
    finally:
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


if __name__ == "__main__":
    main({"llama_cpp": "llama_cpp_python", "gguf": "gguf"}, FORMATS, load)
