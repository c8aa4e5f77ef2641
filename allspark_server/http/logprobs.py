"""Log probabilities in OpenAI's forms for chats and for completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from allspark_client.types import GeneratedElements

#: what other servers write for -inf, which JSON does not have
_LEAST = -9999.0


def finite(logprob: float) -> float:
    """A log probability that JSON can represent."""
    return logprob if math.isfinite(logprob) else _LEAST


def token_text(data: bytes) -> str:
    """A token's text; for a part of a character, its bytes in the form of OpenAI's completions."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(elements: GeneratedElements, tokens: dict[int, bytes], top: int) -> list[dict[str, Any]]:
    """The field `content` of a chat's logprobs: an entry per token, with `top` alternatives."""
    entries = []
    for i, logprob, pairs in zip(elements.ids_from_generate, elements.token_logprobs_list, elements.log_probs_list):
        entries.append({
            **_chat_entry(tokens[i], logprob),
            "top_logprobs": [_chat_entry(tokens[other], value) for other, value in pairs[:top]],
        })
    return entries


def _chat_entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """Makes the field `logprobs` of a completion's choice, whose text begins at `offset`."""

    def __init__(self, top: int, offset: int = 0):
        self._top, self._offset = top, offset

    def of(self, ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[list[tuple[int, float]]],
           tokens: dict[int, bytes], text: str | None = None) -> dict[str, Any]:
        """The field for the next tokens. A logprob is None for the first token of a prompt, which has no context.

        `text`: the text of all tokens, which may lack some: those that a tokenizer puts before a prompt.
        """
        texts: list[str] = []
        offsets: list[int] = []
        best: list[dict[str, float] | None] = []
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
            entry.setdefault(texts[-1], finite(logprob))    # OpenAI always includes the token itself
            best.append(entry)
        return {
            "tokens": texts,
            "token_logprobs": [None if value is None else finite(value) for value in logprobs],
            "top_logprobs": best if self._top else None,
            "text_offset": offsets,
        }


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of consecutive tokens as one."""
    if len(parts) == 1:
        return parts[0]
    return {key: None if parts[0][key] is None else [value for part in parts for value in part[key]]
            for key in parts[0]}
