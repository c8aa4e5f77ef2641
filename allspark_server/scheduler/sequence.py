"""One sequence: a prompt, its tokens so far, and when to stop."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .prompt_outputs import PromptOutputs

if TYPE_CHECKING:
    from ..guided import Guidance
    from .prediction import Prediction
    from .prompt_images import PromptImages
    from .tenants import Account

NO_ADAPTER = -1
# Approximate host memory per token, in bytes: the Python int, its place in the list, and its share of a span's key.
TOKEN_BYTES = 40


class State(enum.Enum):
    """WAITING: it waits for a slot and spans. BLOCKED: it waits for something else first, named by `blocked_on`.
    RUNNING: steps compute it. ENDED: complete or cancelled.
    """

    WAITING = "waiting"
    BLOCKED = "blocked"
    RUNNING = "running"
    ENDED = "ended"


class FinishReason(enum.Enum):
    """Why a sequence is complete, in the API's words. STOP: an end-of-sequence token, or a stop string, which the
    output stage finds.
    """

    STOP = "stop"
    STOP_WORD = "stop_word"
    LENGTH = "length"


@dataclass(frozen=True)
class StopRules:
    """When a sequence is complete. The token or word that ends it belongs to its output.

    `max_length` counts prompt and output. `stop_words` are searched in generated ids only, across steps. `eos` is empty
    if the end-of-sequence token is ignored.
    """

    max_length: int
    eos: frozenset[int] = frozenset()
    stop_words: tuple[tuple[int, ...], ...] = ()
    # A trie of the words read backwards; None marks the end of a word.
    _trie: dict[int | None, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        trie: dict[int | None, Any] = {}
        for word in self.stop_words:
            node = trie
            for token in reversed(word):
                node = node.setdefault(token, {})
            node[None] = word
        object.__setattr__(self, "_trie", trie)

    def check(self, tokens: list[int], prompt_len: int) -> FinishReason | None:
        """Why `tokens`, whose last one is generated, are complete; None if they are not."""
        last = tokens[-1]
        if last in self.eos:
            return FinishReason.STOP
        node = self._trie.get(last)
        at = len(tokens) - 2
        while node is not None:  # at most as far back as the longest word reaches
            if None in node:
                return FinishReason.STOP_WORD
            node = node.get(tokens[at]) if at >= prompt_len else None
            at -= 1
        if len(tokens) >= self.max_length:
            return FinishReason.LENGTH
        return None


@dataclass(eq=False)
class Sequence:
    """A sequence and its state in the scheduler.

    `tokens` is prompt and output. While the sequence runs, its last tokens may still be in the scheduler's `SlotTable`.
    Positions 0 … `computed`-1 are in the cache, in `spans`: for each cache group, a table by position. A preempted
    sequence loses only its spans and its slot: it waits again, and its tokens are computed again.
    """

    tokens: list[int]
    prompt_len: int
    sampling: bytes
    stop: StopRules
    priority: int = 0  # higher is scheduled first; see PRIORITY_SECONDS
    salt: str = ""
    adapter: int = NO_ADAPTER  # index of the adapter of its rows
    prompt_outputs: PromptOutputs | None = None  # requested results of the prompt's rows
    generates: bool = True  # False: it is complete when its prompt is computed
    tenant: str = ""  # the tenant whose shares and limits count
    extra: int = 0  # bytes in this process, tokens not included
    guidance: Guidance | None = None  # its tokens are sampled under masks
    images: PromptImages | None = None  # of its prompt
    prediction: Prediction | None = None  # drafts of a text that its output may resemble
    owner: Any = None  # not used by the scheduler
    blocked_on: str = ""  # what it waits for while it is BLOCKED
    brought: bool = False  # spans were brought to the host cache for it: they are copied back whatever that costs
    root: bytes = b""
    keys: list[bytes] = field(default_factory=list)  # hash chain of the full spans, as far as known

    state: State = State.WAITING
    # (arrival time minus PRIORITY_SECONDS times its priority, arrival number); the lowest is scheduled first
    order: tuple[float, int] = (0.0, 0)
    slot: int = -1
    admitted: int = 0  # tokens of its history when it got its spans
    planned: int = 0  # positions that planned steps compute
    computed: int = 0  # positions that completed steps have computed
    in_flight: int = 0  # results still to come from a slot that it has left
    spans: list[list[int]] = field(default_factory=list)
    passed_spans: list[int] = field(default_factory=list)  # of each table: leading spans that its window has passed
    sent_spans: int = 0  # spans of each table that the ranks have
    entered: int = 0  # leading spans that are in the prefix cache
    state_spans: list[Any] = field(default_factory=list)  # spans from which its slot's state will be loaded
    checkpoint: int = 0  # position of its last checkpoint
    fork: int = 0  # position where it leaves the histories in the prefix cache, if these have no state there
    prefix_len: int | None = None  # positions found in the prefix cache when first admitted
    restored: int = 0  # positions that came from the host cache
    preemptions: int = 0
    account: Account = field(init=False, repr=False)  # its tenant's, once it is in the queue
    # For PendingSpans: the number of spans that it has announced; the sequences that wait for them, as (spans, number,
    # sequence); the earliest turn of these; the sequence that this one waits for.
    announced: int = 0
    followers: list[tuple[int, int, Sequence]] = field(default_factory=list)
    inherited_turn: tuple[float, tuple[float, int]] = (math.inf, (math.inf, 0))
    awaited: Sequence | None = None

    @property
    def size(self) -> int:
        """Bytes in this process."""
        return self.extra + TOKEN_BYTES * len(self.tokens)

    @property
    def turn(self) -> tuple[float, tuple[float, int]]:
        """Its turn among the running sequences: the lowest goes first."""
        return min((self.account.time, self.order), self.inherited_turn)

    @property
    def outputs_every_row(self) -> bool:
        """Whether the prompt has rows left whose outputs were requested, so that no row may come from the cache."""
        wanted = self.prompt_outputs
        return wanted is not None and wanted.every and wanted.received < self.prompt_len

    @property
    def covered(self) -> int:
        """The number of leading spans that every cache group's table has or had."""
        return min(map(len, self.spans))

    @property
    def held_spans(self) -> int:
        """Spans that it holds a reference to."""
        return sum(map(len, self.spans)) - sum(self.passed_spans)

    def take_unsent(self) -> list[list[int]]:
        """For each table, the spans that the ranks get now."""
        begin, self.sent_spans = self.sent_spans, self.covered
        return [table[begin : self.sent_spans] for table in self.spans]

    def lose_cache(self) -> None:
        """Resets the sequence to nothing computed."""
        self.slot = -1
        self.planned = self.computed = self.sent_spans = self.entered = self.checkpoint = 0
        self.spans, self.passed_spans = [], []
