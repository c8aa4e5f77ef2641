"""Greedy output, compared with that of transformers in float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from support.checkpoints import NEAR_TIE, reference_model


@dataclass(frozen=True)
class Greedy:
    """Greedy tokens, and for each of them the gap between the two best logits, in standard deviations of the logits."""

    tokens: list[int]
    gaps: list[float]

    def add(self, logits: torch.Tensor) -> None:
        """Adds the token that these logits [vocab] prefer."""
        best = torch.topk(logits, 2).values
        self.tokens.append(int(logits.argmax()))
        self.gaps.append(float((best[0] - best[1]) / logits.std()))


@torch.inference_mode()
def reference_greedy(directory: Path, prompt: list[int], n: int, dtype: torch.dtype = torch.float64) -> Greedy:
    """`n` tokens by greedy decoding in float64, token by token with a cache, ignoring the end-of-sequence token."""
    model, ids = reference_model(directory, dtype), torch.tensor([prompt])
    cache = transformers.DynamicCache(config=model.config)
    found, more = Greedy([], []), {}
    for _ in range(n):
        if model.config.model_type == "bamba":  # it numbers the rows it is given from 0, whatever is in the cache
            begin = len(prompt) + len(found.tokens) - ids.shape[1]
            more = {"position_ids": torch.arange(begin, begin + ids.shape[1])[None]}
        found.add(model(ids, past_key_values=cache, use_cache=True, **more).logits[0, -1].double())
        ids = torch.tensor([found.tokens[-1:]])
    return found


def check_greedy_output(found: list[int], directory: Path, prompt: list[int]) -> int:
    """As check_greedy, with what transformers' model in `directory` says after `prompt`."""
    return check_greedy(found, _expected(Path(directory), tuple(prompt), tuple(found)))


@functools.lru_cache(maxsize=64)
@torch.inference_mode()
def _expected(directory: Path, prompt: tuple[int, ...], found: tuple[int, ...]) -> Greedy:
    """The token after each position of prompt and output. They are reference_greedy's as far as `found` is right, in a
    hundredth of the time. Where rotary frequencies change with the number of positions, all is computed token by token.
    """
    model, expected = reference_model(directory, torch.float64), Greedy([], [])
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope") and len(prompt) + len(found) > rope.get(
            "original_max_position_embeddings", model.config.max_position_embeddings):
        return reference_greedy(directory, list(prompt), len(found))
    for logits in model(torch.tensor([prompt + found[:-1]]), use_cache=False).logits[0, len(prompt) - 1:].double():
        expected.add(logits)
    return expected


def check_greedy(found: list[int], expected: Greedy) -> int:
    """Returns how many tokens are equal. Raises AssertionError if they differ where float64's two best logits are not
    nearly tied.
    """
    assert len(found) == len(expected.tokens), f"{len(found)} tokens, expected {len(expected.tokens)}"
    for i, (a, b, gap) in enumerate(zip(found, expected.tokens, expected.gaps)):
        if gap < NEAR_TIE:
            return i
        assert a == b, f"token {i} is {a}, expected {b} (gap to the second best {gap:.1e} standard deviations)"
    return len(found)
