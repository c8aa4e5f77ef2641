"""Log probabilities in the forms of chats and of completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from allspark_client.types import GeneratedElements

#: JSON knows no -inf: what others write for it
_LEAST = -9999.0


def finite(logprob: float) -> float:
    """As JSON can hold it."""
    return logprob if math.isfinite(logprob) else _LEAST


def token_text(data: bytes) -> str:
    """A token's text; of a part of a character the form that OpenAI's completions have."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(elements: GeneratedElements, tokens: dict[int, bytes], top: int) -> list[dict[str, Any]]:
    """`content` of a choice's logprobs: an entry a token, with `top` alternatives."""
    found = []
    for i, logprob, pairs in zip(elements.ids_from_generate, elements.token_logprobs_list, elements.log_probs_list):
        found.append({
            **_chat_entry(tokens[i], logprob),
            "top_logprobs": [_chat_entry(tokens[other], value) for other, value in pairs[:top]],
        })
    return found


def _chat_entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """`logprobs` of a completion's choice, whose text begins at `offset`."""

    def __init__(self, top: int, offset: int = 0):
        self._top, self._offset = top, offset

    def of(self, ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[list[tuple[int, float]]],
           tokens: dict[int, bytes], text: str | None = None) -> dict[str, Any]:
        """Of further tokens. A logprob of None: the first token of a prompt, which nothing precedes. `text`: of all
        tokens, where some may not be in it: what a tokenizer puts before a prompt.
        """
        texts, offsets, best = [], [], []
        for i, logprob, pairs in zip(ids, logprobs, tops):
            data = tokens[i]
            texts.append(token_text(data))
            offsets.append(self._offset)
            plain = data.decode(errors="ignore")
            if text is None or text.startswith(plain, self._offset):
                self._offset += len(plain)
            if logprob is None:
                best.append(None)
                continue
            entry = {token_text(tokens[other]): finite(value) for other, value in pairs[:self._top]}
            entry.setdefault(texts[-1], finite(logprob))    # OpenAI's hold the token itself in any case
            best.append(entry)
        return {
            "tokens": texts,
            "token_logprobs": [None if value is None else finite(value) for value in logprobs],
            "top_logprobs": best if self._top else None,
            "text_offset": offsets,
        }


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Logprobs of tokens that follow each other."""
    if len(parts) == 1:
        return parts[0]
    return {key: None if parts[0][key] is None else [value for part in parts for value in part[key]]
            for key in parts[0]}
