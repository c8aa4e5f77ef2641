"""A request on the client's side, from start_request until it is released."""
from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .errors import AllSparkError
from .queue import ResultQueue
from .request import RequestSpec, adapter_name
from .types import GenerateRequestStatus, ModelState
from .waiting import Event

if TYPE_CHECKING:
    from .session import Session

#: The numbers of lost servers after which a request fails: of servers that ran it alone without a new token, and of all
#: servers in a row.
MAX_DEATHS, MAX_LOSSES = 2, 10


def has_adapter(model: ModelState, spec: RequestSpec) -> bool:
    """Whether a model has loaded the LoRA adapter that a request names; True for a request without one."""
    return not spec.config.lora_name or adapter_name(spec.config.lora_name) in model.adapters


@dataclass(eq=False)
class LiveRequest:
    """A request and what has been received of it. It outlives sessions: after a resumption another one feeds its queue.

    Fields are written by the session's reading thread, by the thread that starts or resumes the request, and by callers
    that stop or release it.
    """

    handle: int
    spec: RequestSpec
    queue: ResultQueue = field(default_factory=ResultQueue)
    received: list[list[int]] = field(default_factory=list)     #: token ids so far, one list a sample
    #: by sample: the fields of its elements about the prefix cache, as its server gave them last
    cached: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    fingerprint: str = ""                                   #: of the server that took it
    image_fingerprint: str = ""                             #: likewise, of a request with images
    ticket: bytes = b""                                     #: of the server that took it: shown when it is resumed
    session: Session | None = None
    wire_id: int = 0                                        #: its id within `session`
    stopped: bool = False                                   #: the caller has asked for its end
    dropped: bool = False                                   #: the caller has released it
    resumed: bool = False                                   #: it was sent again after a server was lost
    losses: int = 0                                         #: servers lost in a row without a new token
    deaths: int = 0                                         #: those of `losses` that count, see RequestSpec.deaths
    generated_at_start: int = 0                             #: tokens received when it was last sent
    begun: bool = False                                     #: a step has computed it, alone, since it was last sent
    wall_arrival: float = field(default_factory=time.time)  #: Unix time, s
    arrival: float = field(default_factory=time.monotonic)  #: on the monotonic clock, s
    first_token: float = 0.0                                #: on the monotonic clock, s; 0: none yet
    answered: Event = field(default_factory=Event)          #: the server has accepted or refused it
    refusal: Exception | None = None                        #: why it was refused, or Unavailable

    def __post_init__(self) -> None:
        self.received = self.received or [[] for _ in range(self.spec.config.n)]

    @property
    def generated(self) -> int:
        """Tokens received so far, over all samples."""
        return sum(map(len, self.received))

    def why_not_resumable(self, model: ModelState | None, address: str) -> tuple[str, bool]:
        """Why a server cannot continue this request with identical bits, and whether that is permanent.

        `model`: the request's model on that server; None: it has none. The reason is "" where the server can.
        """
        if model is None or not model.running:
            return f"model {self.spec.model!r} does not run on {address}", False
        differs = f"{address} would not continue it identically (its {{}} differs)"
        if model.fingerprint != self.fingerprint:
            return differs.format("fingerprint"), True
        if self.image_fingerprint and model.image_fingerprint != self.image_fingerprint:
            return differs.format("preparation or bound of images"), True
        if not has_adapter(model, self.spec):
            return f"{address} has not loaded lora_name={self.spec.config.lora_name!r}", False
        if self.spec.adapter and model.adapters[adapter_name(self.spec.config.lora_name)] != self.spec.adapter:
            return differs.format("adapter of that name"), False
        return "", False

    def note_loss(self) -> str:
        """Count the loss of its server; returns why the request must not be resumed again, or "".

        A request that crashes its server must not crash one server after the other. A request without a new token since
        its last start is therefore retried alone, and rejected if its server is lost twice while it runs alone.
        """
        if self.generated > self.generated_at_start:
            self.losses = self.deaths = 0
        elif not self.deaths or self.begun:
            self.deaths += 1
        self.losses += 1
        if self.deaths > MAX_DEATHS:       # at the first loss, other requests were running, too
            return f"{MAX_DEATHS} servers were lost while they ran this request alone: it seems to crash them"
        if self.losses > MAX_LOSSES:
            return f"servers were lost {self.losses} times in a row without a new token of this request"
        return ""

    def finish(self, status: GenerateRequestStatus, error: AllSparkError | None = None,
               reason: str | None = None) -> None:
        """End the request on this side. An interruption without an error means that the caller asked for it."""
        self.queue.finish(status, error, reason)
