"""vLLM on GPUs. Needs: vllm (the wheel of PyPI) and its requirements. With VLLM_BATCH_INVARIANT=1 in the environment it
is measured in the mode in which a request's tokens do not depend on the batch, which is always so here.

Its offline interface hides the steps: decode is the time of a whole run minus that of a run of one token.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

from adapter import Job, PeerFormat, main
from peer_vllm import VllmModel

FORMATS = [PeerFormat("bfloat16", 16, ("bfloat16", "auto")), PeerFormat("float16", 16, ("float16",)),
           PeerFormat("float32", 32, ("float32",))]


@contextlib.contextmanager
def load(job: Job, form: PeerFormat) -> Iterator[VllmModel]:
    from vllm import LLM
    model = LLM(model=str(job.checkpoint), dtype=form.name, skip_tokenizer_init=True, enable_prefix_caching=False,
                tensor_parallel_size=job.gpus, gpu_memory_utilization=0.8,
                max_model_len=max(32, *(cell.length for cell in job.cells)),
                max_num_seqs=max(cell.batch for cell in job.cells))
    yield VllmModel(model, job.config["vocab_size"])


if __name__ == "__main__":
    main({"vllm": "vllm"}, FORMATS, load, on_gpus=True)
