"""One sequence: a prompt, the tokens drawn for it so far, and when to stop."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .prompt_outputs import PromptOutputs

if TYPE_CHECKING:
    from ..guided import Guidance
    from .tenants import Account

NO_ADAPTER = -1
# What a token of a history takes in this process, its part of a key included: it is an object of its own.
TOKEN_BYTES = 40


class State(enum.Enum):
    """Waiting for a slot and spans, or for them again; waiting for something else first (a grammar that is compiled,
    spans from elsewhere), which `blocked_on` names; in the steps; done or cancelled.
    """

    WAITING = "waiting"
    BLOCKED = "blocked"
    RUNNING = "running"
    ENDED = "ended"


class FinishReason(enum.Enum):
    """Why a sequence is complete, as the API calls it. STOP: an end-of-sequence token, or a stop string (which the
    output stage finds).
    """

    STOP = "stop"
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
    _trie: dict = field(init=False, repr=False, compare=False)  # of the words read backwards; None marks a word's end

    def __post_init__(self) -> None:
        trie: dict = {}
        for word in self.stop_words:
            node = trie
            for token in reversed(word):
                node = node.setdefault(token, {})
            node[None] = word
        object.__setattr__(self, "_trie", trie)

    def check(self, tokens: list[int], prompt_len: int) -> FinishReason | None:
        """Why `tokens`, the last of which is generated, are complete; None if they are not."""
        last = tokens[-1]
        if last in self.eos:
            return FinishReason.STOP
        node = self._trie.get(last)
        at = len(tokens) - 2
        while node is not None:  # as far back as some word reads, whatever the number of words
            if None in node:
                return FinishReason.STOP_WORD
            node = node.get(tokens[at]) if at >= prompt_len else None
            at -= 1
        if len(tokens) >= self.max_length:
            return FinishReason.LENGTH
        return None


@dataclass(eq=False)
class Sequence:
    """`tokens` is prompt and output; while the sequence runs, the last of its output may still be in the scheduler's
    `SlotTable`. Positions 0 … `computed`-1 are in the cache, in `spans`: of each cache group, a table by position.

    A sequence that is preempted loses its spans and its slot, nothing else: it waits again and its tokens are computed
    anew.
    """

    tokens: list[int]
    prompt_len: int
    sampling: bytes
    stop: StopRules
    priority: int = 0  # higher goes first, for a while
    salt: str = ""
    adapter: int = NO_ADAPTER  # that its rows have
    prompt_outputs: PromptOutputs | None = None  # what is wanted of the prompt's rows
    draws: bool = True  # False: it is complete when its prompt is computed
    tenant: str = ""  # whose shares and limits count
    extra: int = 0  # bytes that it takes in this process beside its tokens
    guidance: Guidance | None = None  # its tokens are drawn under masks
    owner: Any = None  # the scheduler does not look at it
    blocked_on: str = ""  # what it waits for before it may wait for a slot
    root: bytes = b""
    keys: list[bytes] = field(default_factory=list)  # hash chain of the full spans, as far as it is known

    state: State = State.WAITING
    rank: tuple[float, int] = (0.0, 0)  # (arrival time less what its priority is worth, arrival): lower goes first
    slot: int = -1
    admitted: int = 0  # tokens of its history when it got its spans
    planned: int = 0  # of these positions, those that planned steps compute
    computed: int = 0  # positions that completed steps have computed
    in_flight: int = 0  # results that are to come from a slot that it has left
    spans: list[list[int]] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)  # of each table, how many spans at the front a window has left
    sent_spans: int = 0  # of each table, how many the ranks have in the slot's
    entered: int = 0  # spans at the front that are in the prefix cache
    prefix_len: int | None = None  # positions found in the prefix cache when first admitted
    restored: int = 0  # positions that came back from the host cache
    preemptions: int = 0
    account: Account | None = None  # its tenant's
    # Of PendingSpans: spans that it has announced, who waits for some, (spans, number, sequence), and the earliest turn
    # of these; whom it waits for itself.
    announced: int = 0
    followers: list[tuple[int, int, Sequence]] = field(default_factory=list)
    pull: tuple[float, tuple[float, int]] = (math.inf, (math.inf, 0))
    awaited: Sequence | None = None

    @property
    def size(self) -> int:
        """Bytes that it takes in this process."""
        return self.extra + TOKEN_BYTES * len(self.tokens)

    @property
    def turn(self) -> tuple[float, tuple[float, int]]:
        """When it is its turn among those that run: the least goes first."""
        return min((self.account.time, self.rank), self.pull)

    @property
    def outputs_every_row(self) -> bool:
        """Whether rows of its prompt are left that must all be computed for their outputs."""
        wanted = self.prompt_outputs
        return wanted is not None and wanted.every and wanted.received < self.prompt_len

    @property
    def covered(self) -> int:
        """Spans of its history, from the first position on, that all its tables have or had."""
        return min(map(len, self.spans))

    @property
    def held_spans(self) -> int:
        """Spans that it has a reference to."""
        return sum(map(len, self.spans)) - sum(self.behind)

    def take_unsent(self) -> list[list[int]]:
        """Of each table, the spans that the ranks get now."""
        begin, self.sent_spans = self.sent_spans, self.covered
        return [table[begin : self.sent_spans] for table in self.spans]

    def lose_cache(self) -> None:
        """Back to nothing computed."""
        self.slot = -1
        self.planned = self.computed = self.sent_spans = self.entered = 0
        self.spans, self.behind = [], []
