"""One sequence: a prompt, the tokens drawn for it so far, and when to stop."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Optional


class State(enum.Enum):
    """Waiting for a slot and spans, or for them again; in the steps; done or cancelled."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class FinishReason(enum.Enum):
    """Why a sequence is complete, as the API calls it."""

    EOS = "stop"
    STOP_WORD = "stop_word"
    LENGTH = "length"


@dataclass(frozen=True)
class StopRules:
    """When a sequence is complete. The token or word that ends it is part of its output.

    `max_length` counts prompt and output. `stop_words` are looked for in generated ids only, across steps. `eos` is
    empty when the end-of-sequence token is to be ignored.
    """

    max_length: int
    eos: frozenset[int] = frozenset()
    stop_words: tuple[tuple[int, ...], ...] = ()

    def check(self, tokens: list[int], prompt_len: int) -> Optional[FinishReason]:
        """Why `tokens`, the last of which is generated, are complete; None if they are not."""
        last = tokens[-1]
        if last in self.eos:
            return FinishReason.EOS
        for word in self.stop_words:
            size = len(word)
            if word[-1] == last and len(tokens) - prompt_len >= size and tuple(tokens[-size:]) == word:
                return FinishReason.STOP_WORD
        if len(tokens) >= self.max_length:
            return FinishReason.LENGTH
        return None


@dataclass(eq=False)
class Sequence:
    """`tokens` is prompt and output; positions 0 … `computed`-1 are in the cache, in `spans`.

    A sequence that is preempted loses its spans and its slot, nothing else: it waits again and its tokens are computed
    anew.
    """

    tokens: list[int]
    prompt_len: int
    sampling: bytes
    stop: StopRules
    priority: int = 0  # higher goes first
    salt: str = ""
    leader: Optional["Sequence"] = None  # the first sample of the same prompt; the others wait for its spans
    owner: Any = None  # the scheduler does not look at it

    state: State = State.WAITING
    rank: tuple[int, int] = (0, 0)  # (-priority, arrival): lower goes first, is preempted last
    slot: int = -1
    computed: int = 0
    spans: list[int] = field(default_factory=list)
    sent_tokens: int = 0  # of `tokens`, how many the executors have in the slot's history
    sent_spans: int = 0
    root: bytes = b""
    keys: list[bytes] = field(default_factory=list)  # hash chain of the full spans
    entered: int = 0  # spans at the front that are in the prefix cache
    prefix_len: Optional[int] = None  # positions found in the prefix cache when first admitted
    preemptions: int = 0

    def lose_cache(self) -> None:
        """Back to nothing computed."""
        self.slot = -1
        self.computed = self.sent_tokens = self.sent_spans = self.entered = 0
        self.spans = []
