"""What a request is, on its way from an API call to the scheduler."""
from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from .chat import ChatOptions
from .config import GenerateConfig
from .fields import valid_unicode

MAX_TENANT_BYTES = 256
_TRACE_LENGTH = 55      # of a traceparent of version 00


def current_trace() -> str:
    """The traceparent (W3C Trace Context) of the span that the caller is in; empty if this program makes no spans."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def adapter_name(lora: str) -> str:
    """The name of a LoRA adapter that is given as NAME, PATH (then its last part is the name) or NAME=PATH."""
    name, given, _ = lora.partition("=")
    return name if given and "/" not in name else os.path.basename(lora.rstrip("/"))


def adapter_path(lora: str) -> str:
    """Where an adapter is that is so given: a path, or the name itself."""
    name, given, path = lora.partition("=")
    return path if given and "/" not in name else lora


def absolute_lora(lora: str) -> str:
    """The same, its path absolute if there is an adapter here: servers have another working directory."""
    if not isinstance(lora, str):
        raise TypeError(f"lora_name must be a str, not {type(lora).__name__}")
    path = adapter_path(lora)
    here = os.path.isfile(os.path.join(path, "adapter_config.json"))
    return f"{adapter_name(lora)}={os.path.abspath(path)}" if here else lora


@dataclass
class RequestSpec:
    """One request. Exactly one of `input_ids`, `text` and `messages` is given; rank 0 tokenizes the latter two."""

    model: str
    input_ids: list[int] | None = None
    text: str | None = None
    #: a chat: [{"role": "user", "content": "…"}, …], put through the checkpoint's chat template
    messages: list[dict[str, Any]] | None = None
    #: beside messages, and beside the ids that they became; None: a plain chat, or none
    chat: ChatOptions | None = None
    config: GenerateConfig = field(default_factory=GenerateConfig)
    #: tokens that another group has already produced and the client has: they are not emitted again
    generated: list[int] = field(default_factory=list)
    #: deliver newly decodable text with the tokens
    want_text: bool = False
    #: whose shares and limits count; empty: this client's own. Only an HTTP server in front may name others
    tenant: str = ""
    #: with n > 1, instead of `generated`: of each sample
    samples: list[list[int]] = field(default_factory=list)
    #: it was taken before, by a server that was lost
    resumed: bool = False
    #: servers that were lost while they ran it, without a token since it began there: it may be what ends them
    deaths: int = 0
    #: digest of the LoRA adapter that config.lora_name was, where it was taken; rank 0 says it
    adapter: str = ""
    #: what the chat's template has begun of the answer, such as "<think>\n"; rank 0 says it with the prompt's ids
    opened: str = ""
    #: a traceparent: the span below which this request's are
    trace: str = field(default_factory=current_trace)

    def set_prompt(self, ids: list[int]) -> None:
        """The prompt is these ids from now on, whatever it was before: text rendered or tokenized anew, elsewhere or on
        another day, may become others.
        """
        self.input_ids, self.text, self.messages = ids, None, None

    def check_tenant(self) -> None:
        """Raises ValueError for a name that is too long, or cannot be sent."""
        size = len(valid_unicode("tenant", self.tenant).encode())
        if size > MAX_TENANT_BYTES:
            raise ValueError(f"tenant={self.tenant[:40]!r}... has {size} bytes; allowed: at most {MAX_TENANT_BYTES}")

    def trust_trace(self, given: str) -> None:
        """Takes a traceparent that somebody else gave; one of another form counts for nothing, as its standard says."""
        self.trace = given if len(given) == _TRACE_LENGTH and given.isascii() else ""

    def generated_of(self, sample: int) -> list[int]:
        """What another group has already produced of a sample."""
        return self.samples[sample] if self.samples else self.generated

    @property
    def prompt_len(self) -> int:
        """Prompt tokens; 0 while the prompt is not tokenized."""
        return len(self.input_ids) if self.input_ids is not None else 0
