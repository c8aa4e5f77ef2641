"""Prompts for what stands between a text and a suffix, by the tokens that models of code have for it."""

from __future__ import annotations

import asyncio

from allspark_client.request import RequestSpec
from allspark_client.types import ModelInfo

from .errors import bad_value, not_available
from .pool import Pool

#: the tokens before the text, before the suffix, and before what is to be filled in
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),         # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),               # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),             # noqa: RUF001 (DeepSeek)
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),      # GLM
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),                                 # Code Llama
)
_found: dict[str, tuple[str, str, str] | None] = {}     # by model_hash


async def prompts_with_suffix(pool: Pool, info: ModelInfo, prompts: list[str | list[int]], suffix: str) -> list[str]:
    """The prompts by which a model fills in what stands between each of `prompts` and `suffix`.

    Raises ApiError if the tokenizer has no tokens for that, or for a prompt of ids.
    """
    if info.model_hash not in _found:
        _found[info.model_hash] = await _marks_of(pool, info)
    marks = _found[info.model_hash]
    if marks is None:
        raise not_available("suffix", f"the tokenizer of model {info.name!r} has no tokens for filling in")
    before, behind, middle = marks
    texts = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise bad_value("suffix", "it needs a prompt of text")
        texts.append(f"{before}{prompt}{behind}{suffix}{middle}")
    return texts


async def _marks_of(pool: Pool, info: ModelInfo) -> tuple[str, str, str] | None:
    for marks in _MARKS:
        found = await asyncio.gather(*(pool.tokenize(RequestSpec(info.name, text=mark), True) for mark in marks))
        if all(len(ids) == 1 for ids in found) and len({ids[0] for ids in found}) == len(marks):
            return marks
    return None
