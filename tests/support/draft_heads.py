"""Checkpoints with a draft head, which transformers does not load, and a reference of the head: a model of one layer
computes the head's layer, in float64.
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from allspark_server.runtime.plan import SAMPLE, Flag, NewSlot, SamplingParams, StepPlan, WorkItem
from support.checkpoints import (
    CONFIGS,
    EXPERTS,
    LATENT,
    NEAR_TIE,
    RECURRENT,
    Spec,
    check_logits,
    prompt_of,
    reference_logits,
    reference_model,
    write_checkpoint,
)

DRAFTS = 3  # that check_drafts() asks for


@dataclass(frozen=True)
class Names:
    """Names of a head's tensors. one_plus: its norms multiply by 1 + w. normed: it feeds itself normed states.
    hidden_first: its projection takes the hidden state before the embedding.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    output: str
    one_plus: bool
    normed: bool
    hidden_first: bool = False


def next_n(layers: int) -> Names:
    """GLM's and DeepSeek's."""
    prefix = f"model.layers.{layers}."
    return Names(prefix, f"{prefix}enorm.weight", f"{prefix}hnorm.weight", f"{prefix}eh_proj.weight",
                 f"{prefix}shared_head.norm.weight", f"{prefix}shared_head.head.weight", False, False)


MTP = Names("mtp.layers.0.", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight",
            "mtp.norm.weight", "", True, True)

MIMO = Names("model.mtp_layers.0.", "model.mtp_layers.0.token_layernorm.weight",
             "model.mtp_layers.0.hidden_layernorm.weight", "model.mtp_layers.0.input_proj.weight",
             "model.mtp_layers.0.final_layernorm.weight", "", False, True, True)

SPECS = {name: (CONFIGS | EXPERTS | LATENT | RECURRENT)[name] for name in (
    "glm4-moe", "glm4-moe-plain", "deepseek-v3", "deepseek-v32", "glm4-moe-lite-plain", "qwen3-next", "qwen3-5",
    "qwen3-5-moe", "mimo")}


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


def save(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Writes the tensors of a checkpoint into one file."""
    separate = {name: t.contiguous().clone() for name, t in tensors.items()}
    save_file(separate, directory / "model.safetensors", {"format": "pt"})


def one_layer(spec: Spec) -> Spec:
    """The model of one layer that the head's layer is."""
    fields = {**spec.fields, "num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": [],
              "tie_word_embeddings": False}
    if "layer_types" in fields or spec.family.startswith("qwen3"):
        fields["layer_types"] = ["full_attention"]
    if "mlp_layer_types" in fields or spec.family == "glm4_moe_lite":
        fields["mlp_layer_types"] = ["sparse"]
    return replace(spec, fields=fields)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a draft head. head: a checkpoint of the head's layer as a model."""

    path: Path
    head: Path
    names: Names

    @functools.cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, in float64."""
        return {name: t.double() for name, t in tensors_of(self.path).items()}

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> tuple[list[int], float]:
        """The greedy drafts that follow `tokens`, of which the model has computed all but the last, and the smallest
        gap between the two best logits, in their standard deviations.
        """
        model, head = (reference_model(path, torch.float64) for path in (self.path, self.head))
        states = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        rows = self._merged(states, tokens[1:])
        drafts, gap = [], 9e9
        for _ in range(count):
            before: list[torch.Tensor] = []
            hook = head.model.layers[0].register_forward_hook(
                lambda _m, _i, out: before.append(out[0] if isinstance(out, tuple) else out))
            normed = head.model(inputs_embeds=rows[None]).last_hidden_state[0, -1]
            hook.remove()
            logits = head.lm_head(normed)
            best = torch.topk(logits, 2).values
            gap = min(gap, float((best[0] - best[1]) / logits.std()))
            drafts.append(int(logits.argmax()))
            state = normed if self.names.normed else before[0].reshape(-1, normed.shape[-1])[-1]
            rows = torch.cat([rows, self._merged(state[None], drafts[-1:])])
        return drafts, gap

    def _merged(self, states: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        eps = json.loads((self.path / "config.json").read_text())["rms_norm_eps"]

        def normed(x: torch.Tensor, name: str) -> torch.Tensor:
            return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * (self.tensors[name] + self.names.one_plus)

        embeddings = self.tensors["model.embed_tokens.weight"][tokens]
        both = [normed(embeddings, self.names.embedding_norm), normed(states, self.names.hidden_norm)]
        return torch.cat(both[::-1] if self.names.hidden_first else both, -1) @ self.tensors[self.names.projection].T


def write(folder: Path, name: str, change: Any = None, **fields: Any) -> Checkpoint:
    """Writes a checkpoint with a draft head. change: called with all tensors and the names before they are written.
    fields: replace those of the named checkpoint.
    """
    spec = replace(SPECS[name], fields={**SPECS[name].fields, **fields})
    source = write_checkpoint(folder / "model", spec)
    layer = write_checkpoint(folder / "head", one_layer(spec), seed=1)
    if spec.architecture == "MiMoForCausalLM":
        names = MIMO
    else:
        names = MTP if spec.family.startswith("qwen") else next_n(spec.fields["num_hidden_layers"])
    tensors, head = tensors_of(source), tensors_of(layer)
    size = tensors["model.embed_tokens.weight"].shape[1]
    generator = torch.Generator().manual_seed(2)
    for norm in (names.embedding_norm, names.hidden_norm):
        tensors[norm] = (not names.one_plus) + 0.2 * torch.randn(size, generator=generator)
    tensors[names.projection] = torch.randn(size, 2 * size, generator=generator) * size ** -0.5
    tensors |= {names.layer + n.removeprefix("model.layers.0."): t for n, t in head.items() if ".layers.0." in n}
    tensors[names.norm] = head["model.norm.weight"]
    output = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    if names.output:
        tensors[names.output] = head["lm_head.weight"]
    else:
        head["lm_head.weight"] = output.clone()
        save(head, layer)
    if change:
        change(tensors, names)
    both = folder / "both"
    shutil.copytree(source, both, ignore=shutil.ignore_patterns("*.safetensors*"))
    save(tensors, both)
    return Checkpoint(both, layer, names)


def _verified(driver, tokens: list[int], chunk: int) -> np.ndarray:
    """The logits of the step after `tokens` that verifies drafts."""
    new = [NewSlot(0, tokens, SamplingParams(do_sample=False, prompt_len=len(tokens)).encode())]
    spans = list(range(-(-(len(tokens) + DRAFTS) // driver.info.span_size)))
    for begin in range(0, len(tokens) - 1, chunk):
        count = min(chunk, len(tokens) - 1 - begin)
        driver.step(StepPlan(new=new, work=[WorkItem(0, count, 0, spans=spans)]))
        new, spans = [], []
    plan = StepPlan(new=new, work=[WorkItem(0, 1, SAMPLE | int(Flag.MODEL), spans=spans, drafts=DRAFTS)]).encode()
    results = driver._each(lambda runner: runner.step(plan, True))
    driver.step(StepPlan(free=[0]))
    return np.concatenate([result.logits for result in results], axis=1)


def check_drafts(driver, made, *cases) -> None:
    """Compares the logits of drafts after prompts of (length, rows of a step)."""
    for length, chunk in cases:
        tokens = prompt_of(length, seed=length)
        logits = _verified(driver, tokens, chunk)
        drafts, gap = made.drafts(tokens, DRAFTS)
        assert gap > NEAR_TIE and len(logits) == 1 + DRAFTS
        for row, found in enumerate(logits):
            check_logits(found, reference_logits(made.path, [*tokens, *drafts[:row]]))


transformers.logging.set_verbosity_error()
