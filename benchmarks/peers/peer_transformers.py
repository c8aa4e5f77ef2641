"""transformers on torch. Needs: torch, transformers."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

from adapter import Job, PeerFormat, Stepper, main

FORMATS = [PeerFormat("float32", 32, ("float32",)), PeerFormat("bfloat16", 16, ("bfloat16",))]


class TorchModel(Stepper):
    def __init__(self, model):
        self.model = model

    def prefill(self, batch: int, prompt: int) -> None:
        import torch
        ids = torch.randint(10, self.model.config.vocab_size, (batch, prompt))
        self.out = self.model(ids, use_cache=True, logits_to_keep=1)

    def step(self) -> None:
        token = self.out.logits[:, -1:].argmax(-1)
        self.out = self.model(token, past_key_values=self.out.past_key_values, use_cache=True)


@contextlib.contextmanager
def load(job: Job, form: PeerFormat) -> Iterator[TorchModel]:
    import torch
    from transformers import AutoModelForCausalLM
    torch.set_num_threads(job.threads)
    model = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=getattr(torch, form.name)).eval()
    with torch.inference_mode():
        yield TorchModel(model)


if __name__ == "__main__":
    main({"torch": "torch", "transformers": "transformers"}, FORMATS, load)
