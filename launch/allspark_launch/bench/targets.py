"""Targets of `allspark bench serving`: an Engine in this process, a group or pool, an OpenAI-compatible endpoint."""
from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from allspark_client import AbstractEngine, AllSparkError, AsyncClientEngine

from .workload import Turn


@dataclass
class Answer:
    """The outcome of one request. Times are of time.perf_counter()."""

    due: float                  # when it should be sent
    sent: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)  # when tokens arrived, and how many
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    ids: list[int] = field(default_factory=list)
    text: str = ""


@dataclass
class Conversation:
    """The turns and answers of a session so far."""

    ids: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)

    def add(self, turn: Turn, answer: Answer) -> None:
        """Adds a turn and its answer."""
        self.ids += turn.ids + answer.ids
        self.messages += [{"role": "user", "content": turn.text}, {"role": "assistant", "content": answer.text}]


class Target(Protocol):
    """A server under test."""

    name: str
    vocab_size: int

    async def open(self) -> None:
        """Connects and finds the model."""

    async def ask(self, conversation: Conversation, turn: Turn, seed: int, answer: Answer) -> None:
        """Sends the next turn of a session and fills in `answer`. Raises one of `failures` if that fails."""

    async def close(self) -> None:
        """Disconnects."""


class _EngineTarget:
    """Sends requests of ids. They are greedy unless a temperature is given, and end at their length."""

    def __init__(self, name: str, model: str, temperature: float):
        self.name, self.vocab_size = name, 0
        self._model, self._temperature = model, temperature

    def _config(self, turn: Turn, seed: int) -> dict[str, Any]:
        config: dict[str, Any] = {"max_new_tokens": turn.output, "early_stopping": turn.schema is not None}
        if self._temperature:
            config |= {"temperature": self._temperature, "seed": seed}
        else:
            config |= {"do_sample": False}
        if turn.schema is not None:
            config["response_format"] = {"type": "json_schema", "json_schema": {"name": "bench", "schema": turn.schema}}
        return config

    async def _read(self, queue: Any, answer: Answer) -> None:
        async for elements in queue:
            answer.events.append((time.perf_counter(), len(elements.ids_from_generate)))
            answer.ids += elements.ids_from_generate
        answer.ended = time.perf_counter()
        stat = queue.RequestStatInfo()
        answer.prompt_tokens, answer.cached_tokens = stat.context_token_length, stat.context_cached_length
        answer.output_tokens = len(answer.ids)


class InProcess(_EngineTarget):
    """An Engine in this process, whose threads share the interpreter with the load's threads."""

    def __init__(self, name: str, engine: AbstractEngine, model: str, temperature: float):
        super().__init__(name, model, temperature)
        self._engine = engine

    async def open(self) -> None:
        """Connects and finds the model."""
        self.vocab_size = self._engine.get_model_info(self._model).vocab_size

    async def ask(self, conversation: Conversation, turn: Turn, seed: int, answer: Answer) -> None:
        """Sends a turn and fills in `answer`."""
        _, handle, queue = await asyncio.to_thread(
            self._engine.start_request, self._model, {"input_ids": conversation.ids + turn.ids},
            self._config(turn, seed))
        try:
            await self._read(queue, answer)
        finally:
            await asyncio.to_thread(self._engine.release_request, self._model, handle)

    async def close(self) -> None:
        """Disconnects."""


class Group(_EngineTarget):
    """A group or a pool, by gRPC. Without a model name: the model that runs there."""

    def __init__(self, name: str, addresses: str, model: str, temperature: float):
        super().__init__(name, model, temperature)
        self._engine = AsyncClientEngine(addresses)

    async def open(self) -> None:
        """Connects and finds the model."""
        if not self._model:
            running = [state.name for state in await self._engine.list_models() if state.running]
            if len(set(running)) != 1:
                raise ValueError(f"{self.name} runs {', '.join(running) or 'no model'}: name one with --model-name")
            self._model = running[0]
        self.vocab_size = (await self._engine.get_model_info(self._model)).vocab_size

    async def ask(self, conversation: Conversation, turn: Turn, seed: int, answer: Answer) -> None:
        """Sends a turn and fills in `answer`."""
        inputs = {"input_ids": conversation.ids + turn.ids}
        async with self._engine.generate(self._model, inputs, self._config(turn, seed)) as generation:
            await self._read(generation.queue, answer)

    async def close(self) -> None:
        """Disconnects."""
        await self._engine.close()


class OpenAI:
    """An OpenAI-compatible endpoint, streamed. `chat`: /v1/chat/completions with messages of words, otherwise
    /v1/completions with ids. A chunk counts as a token. The total is the server's usage, if it reports that.
    """

    def __init__(self, name: str, url: str, model: str, temperature: float, chat: bool, vocab_size: int, key: str,
                 body: dict[str, Any]):
        try:
            import httpx
        except ImportError:
            raise ValueError("an OpenAI endpoint needs httpx: pip install httpx") from None
        self.name, self.vocab_size = name, vocab_size
        self._model, self._temperature, self._chat, self._body = model, temperature, chat, body
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        self._http = httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"} if key else {},
                                       timeout=httpx.Timeout(None, connect=10.0),
                                       # Servers close idle connections after 5 s, some as a request comes.
                                       limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0))

    async def open(self) -> None:
        """Connects and finds the model."""
        if self._model:
            return
        answer = await self._http.get(f"{self._base}/models", timeout=10.0)
        answer.raise_for_status()
        served = [entry["id"] for entry in answer.json()["data"]]
        if len(served) != 1:
            raise ValueError(f"{self.name} serves {', '.join(served) or 'no model'}: name one with --model-name")
        self._model = served[0]

    def _request(self, conversation: Conversation, turn: Turn, seed: int) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": self._model, "max_tokens": turn.output, "temperature": self._temperature,
                                "seed": seed, "stream": True, "stream_options": {"include_usage": True}}
        if turn.schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "bench", "schema": turn.schema}}
        else:
            body |= self._body
        if self._chat:
            messages = [*conversation.messages, {"role": "user", "content": turn.text}]
            return "chat/completions", body | {"messages": messages}
        return "completions", body | {"prompt": turn.ids}

    async def ask(self, conversation: Conversation, turn: Turn, seed: int, answer: Answer) -> None:
        """Sends a turn and fills in `answer`."""
        path, body = self._request(conversation, turn, seed)
        async with self._http.stream("POST", f"{self._base}/{path}", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise RuntimeError(f"status {response.status_code}: {text[:300]}")
            pieces: list[str] = []
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                    self._take(json.loads(data), pieces, answer)
        answer.ended, answer.text = time.perf_counter(), "".join(pieces)
        answer.output_tokens = answer.output_tokens or sum(count for _, count in answer.events)
        if not answer.events:
            raise RuntimeError("the stream had no tokens")

    def _take(self, chunk: dict[str, Any], pieces: list[str], answer: Answer) -> None:
        if "error" in chunk:
            raise RuntimeError(str(chunk["error"])[:300])
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = (delta.get("content") or delta.get("reasoning_content")) if self._chat else choice.get("text")
            if text:
                answer.events.append((time.perf_counter(), 1))
                pieces.append(text)
        usage = chunk.get("usage")
        if usage:
            answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    async def close(self) -> None:
        """Disconnects."""
        await self._http.aclose()


def failures() -> tuple[type[Exception], ...]:
    """The exceptions of failed requests. Others are defects of the benchmark."""
    try:
        import httpx
    except ImportError:
        return AllSparkError, ValueError, TypeError
    return AllSparkError, ValueError, TypeError, RuntimeError, httpx.HTTPError
