"""Checkpoints with a draft head, which transformers does not load, and a reference of the head: a model of one layer
computes each of the head's layers, in float64.
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

from allspark_server.runtime.plan import Flag, NewSlot, SamplingParams, StepPlan, WorkItem
from support.checkpoints import (
    LOGIT_TOLERANCE,
    NEAR_TIE,
    check_logits,
    prompt_of,
    reference_logits,
    reference_model,
    write_checkpoint,
)
from support.driver import spans_of_groups
from support.tiny_configs import CONFIGS, EXPERTS, LATENT, RECURRENT, Spec

DRAFTS = 3  # that check_drafts() asks for


@dataclass(frozen=True)
class Names:
    """Names of the tensors of a head's layer. one_plus: its norms multiply by 1 + w. normed: the next layer takes
    normed states. hidden_first: its projection takes the hidden state before the embedding.
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


def next_n(number: int) -> Names:
    """GLM's and DeepSeek's. number: of the head's layer, counted from the model's."""
    prefix = f"model.layers.{number}."
    return Names(prefix, f"{prefix}enorm.weight", f"{prefix}hnorm.weight", f"{prefix}eh_proj.weight",
                 f"{prefix}shared_head.norm.weight", f"{prefix}shared_head.head.weight", False, False)


def glm5_next(number: int) -> Names:
    """GLM-5.3-Flash's: its text is a part, and the next layer takes the hidden state after the norm."""
    prefix = f"model.language_model.layers.{number}."
    return replace(next_n(number), layer=prefix, normed=True, output="", **{
        name: prefix + getattr(next_n(number), name).removeprefix(f"model.layers.{number}.")
        for name in ("embedding_norm", "hidden_norm", "projection", "norm")})


def mtp(index: int) -> Names:
    """Qwen's. index: of the layer in the head."""
    return Names(f"mtp.layers.{index}.", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
                 "mtp.fc.weight", "mtp.norm.weight", "", True, True)


def mimo(index: int) -> Names:
    """MiMo's. index: of the layer in the head."""
    prefix = f"model.mtp_layers.{index}."
    return Names(prefix, f"{prefix}token_layernorm.weight", f"{prefix}hidden_layernorm.weight",
                 f"{prefix}input_proj.weight", f"{prefix}final_layernorm.weight", "", False, True, True)


def names_of(spec: Spec, index: int) -> Names:
    """The names of the layer with that index in the head."""
    if spec.architecture == "MiMoForCausalLM":
        return mimo(index)
    if spec.family.startswith("qwen"):
        return mtp(index)
    return (glm5_next if spec.family == "glm5_next" else next_n)(spec.fields["num_hidden_layers"] + index)


SPECS = {name: (CONFIGS | EXPERTS | LATENT | RECURRENT)[name] for name in (
    "glm4-moe", "glm4-moe-plain", "deepseek-v3", "deepseek-v32", "glm4-moe-lite-plain", "qwen3-next", "qwen3-5",
    "qwen3-5-moe", "mimo", "glm5-next")}


def root_of(tensors: dict[str, torch.Tensor]) -> str:
    """How the names of the text's tensors begin."""
    return next(n.removesuffix("embed_tokens.weight") for n in tensors if n.endswith("embed_tokens.weight"))


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
    if spec.family == "glm5_next":  # one stream is a residual stream, see write()
        fields |= {"layer_types": ["indexed_attention"], "hc_mult": 1, "hc_eps": 1e-12}
    return replace(spec, fields=fields)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a draft head. heads: a checkpoint of each of the head's layers as a model. names: of each."""

    path: Path
    heads: list[Path]
    names: list[Names]

    @functools.cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, in float64."""
        return {name: t.double() for name, t in tensors_of(self.path).items()}

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> tuple[list[int], float]:
        """The greedy drafts that follow `tokens`, of which the model has computed all but the last, and the smallest
        gap between the two best logits, in their standard deviations.
        """
        states = reference_model(self.path, torch.float64).model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        drafts, gap, rows = [], 9e9, torch.empty(0)
        for i in range(count):
            layer = min(i, len(self.heads) - 1)
            names, known = self.names[layer], [*tokens, *drafts]
            if i == layer:  # all positions, from the states of the layer before
                rows = self._merged(names, states, known[i + 1:])
            else:  # one more, from the last layer's own state
                rows = torch.cat([rows, self._merged(names, states[-1:], known[-1:])])
            head, before = reference_model(self.heads[layer], torch.float64), []
            hook = getattr(head.model, "language_model", head.model).layers[0].register_forward_hook(
                lambda _m, _i, out, to=before: to.append(out[0] if isinstance(out, tuple) else out))
            normed = head.model(inputs_embeds=rows[None]).last_hidden_state[0]
            hook.remove()
            logits = head.lm_head(normed[-1])
            best = torch.topk(logits, 2).values
            gap = min(gap, float((best[0] - best[1]) / logits.std()))
            drafts.append(int(logits.argmax()))
            states = normed if names.normed else before[0].reshape(-1, normed.shape[-1])
        return drafts, gap

    def _merged(self, names: Names, states: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        config = json.loads((self.path / "config.json").read_text())
        eps = config.get("text_config", config)["rms_norm_eps"]

        def normed(x: torch.Tensor, name: str) -> torch.Tensor:
            return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * (self.tensors[name] + names.one_plus)

        embeddings = self.tensors[f"{root_of(self.tensors)}embed_tokens.weight"][tokens]
        both = [normed(embeddings, names.embedding_norm), normed(states, names.hidden_norm)]
        return torch.cat(both[::-1] if names.hidden_first else both, -1) @ self.tensors[names.projection].T


def write(folder: Path, name: str, change: Any = None, layers: int = 1, **fields: Any) -> Checkpoint:
    """Writes a checkpoint with a draft head. change: called with all tensors and the names of each of its layers before
    they are written. layers: of the head. fields: replace those of the named checkpoint.
    """
    spec = replace(SPECS[name], fields={**SPECS[name].fields, **fields})
    source = write_checkpoint(folder / "model", spec)
    tensors, heads, names = tensors_of(source), [], []
    root = root_of(tensors)
    embedding = tensors[f"{root}embed_tokens.weight"]
    size, output = embedding.shape[1], tensors.get("lm_head.weight", embedding)
    for index in range(layers):
        own = names_of(spec, index)
        path = write_checkpoint(folder / f"head{index}", one_layer(spec), seed=1 + 2 * index)
        head, generator = tensors_of(path), torch.Generator().manual_seed(2 + 2 * index)
        new = {norm: (not own.one_plus) + 0.2 * torch.randn(size, generator=generator)
               for norm in (own.embedding_norm, own.hidden_norm)}
        new |= {own.projection: torch.randn(size, 2 * size, generator=generator) * size ** -0.5,
                own.norm: head[f"{root}norm.weight"]}
        tensors = new | tensors  # what layers share is the first one's
        for n in [n for n in head if ".layers.0.hc_" in n]:  # weights of 1 for the only stream
            head[n] = torch.zeros_like(head[n])
            if n.endswith("_base"):
                head[n][0] = 40
        tensors |= {own.layer + n.removeprefix(f"{root}layers.0."): t for n, t in head.items()
                    if ".layers.0." in n and ".layers.0.hc_" not in n}
        head[f"{root}norm.weight"] = tensors[own.norm]
        if own.output:
            tensors[own.output] = head["lm_head.weight"]
        else:
            head["lm_head.weight"] = output.clone()
        save(head, path)
        heads.append(path), names.append(own)
    if change:
        change(tensors, *names)
    both = folder / "both"
    shutil.copytree(source, both, ignore=shutil.ignore_patterns("*.safetensors*"))
    save(tensors, both)
    return Checkpoint(both, heads, names)


class Sequence:
    """A sequence of greedy tokens that a driver computes alone, in slot 0."""

    def __init__(self, driver, tokens: list[int], chunk: int):
        """Computes all tokens but the last. chunk: rows of a step."""
        self.driver, self.tokens = driver, list(tokens)
        self._new = [NewSlot(0, self.tokens, SamplingParams(do_sample=False, prompt_len=len(tokens)).encode())]
        self._spans = 0
        for begin in range(0, len(tokens) - 1, chunk):
            count = min(chunk, len(tokens) - 1 - begin)
            driver.step(StepPlan(new=self._new, work=[WorkItem(0, count, 0, **self._more_spans(begin + count))]))
            self._new = []

    def _more_spans(self, length: int) -> dict[str, list]:
        have, self._spans = self._spans, max(self._spans, -(-length // self.driver.info.span_size))
        fresh = list(range(have, self._spans))
        return {"spans": fresh, "other_spans": spans_of_groups(self.driver.info, fresh)}

    def step(self, drafts: int = 0, given: tuple[int, ...] = ()) -> np.ndarray:
        """Computes the last token and drafts, of the head or those that are given. Returns the logits of all rows."""
        flags = Flag.SAMPLE | (Flag.GIVEN if given else Flag.MODEL if drafts else 0)
        count = len(given) or drafts
        item = WorkItem(0, 1, int(flags), drafts=count, known=list(given), **self._more_spans(len(self.tokens) + count))
        plan, self._new = StepPlan(new=self._new, work=[item]).encode(), []
        results = self.driver._each(lambda runner: runner.step(plan, True))
        self.tokens += results[0].tokens.tolist()
        return np.concatenate([result.logits for result in results], axis=1)

    def end(self) -> None:
        """Frees the slot."""
        self.driver.step(StepPlan(free=[0], groups=len(self.driver.info.cache_windows)))


def check_rows(made: Any, tokens: list[int], logits: np.ndarray, tolerance: float = LOGIT_TOLERANCE) -> None:
    """Compares the logits of a step after `tokens` with those that follow the reference's drafts. Another draft makes a
    difference of the order of 1.
    """
    drafts, gap = made.drafts(tokens, len(logits) - 1)
    assert gap > NEAR_TIE
    for row, found in enumerate(logits):
        check_logits(found, reference_logits(made.path, [*tokens, *drafts[:row]]), tolerance)


def check_drafts(driver, made, *cases) -> None:
    """Compares the logits of drafts after prompts of (length, rows of a step)."""
    for length, chunk in cases:
        tokens = prompt_of(length, seed=length)
        sequence = Sequence(driver, tokens, chunk)
        logits = sequence.step(DRAFTS)
        sequence.end()
        assert len(logits) == 1 + DRAFTS
        check_rows(made, tokens, logits)


def check_rounds(driver, made: Checkpoint, prompt: list[int], rounds: list[int]) -> None:
    """Compares the logits of drafts of several steps of a sequence. rounds: a number of drafts of the head; minus a
    number of right drafts that are given instead, as grammars give them; 0: none.
    """
    sequence = Sequence(driver, prompt, 16)
    for count in rounds:
        before, given = list(sequence.tokens), []
        for _ in range(-count):
            given.append(int(reference_logits(made.path, [*before, *given]).argmax()))
        logits = sequence.step(max(count, 0), tuple(given))
        if count > 0:
            check_rows(made, before, logits, 10 * LOGIT_TOLERANCE)
        else:
            assert len(sequence.tokens) == len(before) + 1 - count  # all that were given are accepted
    sequence.end()


transformers.logging.set_verbosity_error()
