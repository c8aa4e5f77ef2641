"""RequestSpec: a request between the API call and the scheduler."""
from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from .chat import ChatOptions
from .config import GenerateConfig
from .fields import valid_unicode
from .images import Image, Video

MAX_TENANT_BYTES = 256
#: bytes of a request's parts from which on making its message takes long
LARGE = 1 << 20
_TRACE_LENGTH = 55      # of a traceparent of version 00


def current_trace() -> str:
    """The traceparent (W3C Trace Context) of the caller's current span; empty if this program does not trace."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")


def adapter_name(lora: str) -> str:
    """The name of a LoRA adapter that is given as NAME, PATH (its last part is the name) or NAME=PATH."""
    name, given, _ = lora.partition("=")
    return name if given and "/" not in name else os.path.basename(lora.rstrip("/"))


def adapter_path(lora: str) -> str:
    """The path of a LoRA adapter that is given as NAME, PATH or NAME=PATH; NAME itself if it has none."""
    name, given, path = lora.partition("=")
    return path if given and "/" not in name else lora


def absolute_lora(lora: str) -> str:
    """`lora` with an absolute path if an adapter is there: servers have another working directory."""
    if not isinstance(lora, str):
        raise TypeError(f"lora_name must be a str, not {type(lora).__name__}")
    path = adapter_path(lora)
    here = os.path.isfile(os.path.join(path, "adapter_config.json"))
    return f"{adapter_name(lora)}={os.path.abspath(path)}" if here else lora


@dataclass
class RequestSpec:
    """One request. Exactly one of `input_ids`, `text` and `messages` is set; rank 0 tokenizes the latter two."""

    model: str
    input_ids: list[int] | None = None
    text: str | None = None
    #: with text: a second text, for models that compare two
    text_pair: str | None = None
    #: a chat, [{"role": "user", "content": "…"}, …], which the checkpoint's chat template renders
    messages: list[dict[str, Any]] | None = None
    #: images and videos of the prompt in the order of its placeholders: the parts {"type": "image"} of messages, or
    #: what the model has for them in text and ids. They stay when the prompt becomes ids, which hold all tokens of
    #: each image
    images: list[Image | Video] = field(default_factory=list)
    #: options of messages, also once they are tokenized; None: a plain chat, or no chat
    chat: ChatOptions | None = None
    config: GenerateConfig = field(default_factory=GenerateConfig)
    #: tokens that another group has generated and the client has received: they are not sent again
    generated: list[int] = field(default_factory=list)
    #: whether elements carry text besides token ids
    want_text: bool = False
    #: the tenant whose shares and limits apply; empty: this client's own. Only an HTTP server may name others
    tenant: str = ""
    #: requests share cached prefixes and grammars only within one scope; set by rank 0 for tenants
    cache_scope: str = ""
    #: with n > 1, instead of `generated`: the tokens of each sample
    samples: list[list[int]] = field(default_factory=list)
    #: another server, which was lost, had accepted it before
    resumed: bool = False
    #: servers that were lost while they computed it, before it got a new token: it may have crashed them
    deaths: int = 0
    #: whether `deaths` is known to be true; set by rank 0
    proven: bool = True
    #: digest of the LoRA adapter config.lora_name on the server that accepted the request; set by rank 0
    adapter: str = ""
    #: the start of the answer that the chat template wrote, such as "<think>\n"; set by rank 0 with the prompt's ids
    opened: str = ""
    #: a traceparent: the parent of this request's spans
    trace: str = field(default_factory=current_trace)
    #: whether its message takes long to make, so that event loops leave that to a thread
    large: bool = False

    def set_images(self, images: list[Image | Video]) -> None:
        """Sets the images and videos of the prompt."""
        self.images = images
        self.large = sum(image.size for image in images) > LARGE

    def set_prompt(self, ids: list[int]) -> None:
        """Replace the prompt by its ids. Text that another server renders or tokenizes again may give other ids."""
        self.input_ids, self.text, self.text_pair, self.messages = ids, None, None, None

    def cut_prompt(self) -> None:
        """Drop what config.truncate_prompt_tokens drops of a prompt of ids. Raises ValueError if it has images."""
        most = self.config.truncate_prompt_tokens
        if self.input_ids is None or most is None or len(self.input_ids) <= most:
            return
        if self.images:
            raise ValueError(f"truncate_prompt_tokens={most} would cut a prompt of {len(self.input_ids)} tokens, whose "
                             "images must stay whole; send fewer images or texts")
        self.input_ids = self.input_ids[-most:]

    def check_tenant(self) -> None:
        """Raises ValueError if the tenant's name is too long or not valid Unicode."""
        size = len(valid_unicode("tenant", self.tenant).encode())
        if size > MAX_TENANT_BYTES:
            raise ValueError(f"tenant={self.tenant[:40]!r}... has {size} bytes; allowed: at most {MAX_TENANT_BYTES}")

    def trust_trace(self, given: str) -> None:
        """Set the traceparent that a caller gave. One of another form is ignored, as the standard demands."""
        self.trace = given if len(given) == _TRACE_LENGTH and given.isascii() else ""

    def generated_of(self, sample: int) -> list[int]:
        """The tokens of a sample that another group has already generated."""
        return self.samples[sample] if self.samples else self.generated

    @property
    def prompt_len(self) -> int:
        """The number of prompt tokens; 0 before the prompt is tokenized."""
        return len(self.input_ids) if self.input_ids is not None else 0
