"""Bodies of HTTP requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from allspark_launch.group.background import background_group, shipped_model
from allspark_launch.group.http_server import HttpOptions, open_socket
from allspark_server.http.chat_wire import ChatRequest
from allspark_server.http.completions import CompletionRequest
from allspark_server.http.embeddings import EmbeddingRequest
from allspark_server.http.messages_wire import MessagesRequest, Prompt
from allspark_server.http.responses_wire import ResponsesRequest
from allspark_server.http.tokenize import DetokenizeRequest, TokenizeRequest
from allspark_server.options import worker_words
from fuzz import mutate
from fuzz.target import Finding, Target
from support.paths import ROOT, TESTS

MODEL = "fable"
ENDPOINTS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": Prompt,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
#: what a status may be; 5xx only where the same request may be served later
STATUSES = {200, 400, 404, 408, 413, 415, 429, 503}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
TEXTS = ("Once", "Once upon a time", "What is 2+3?", "naïve 🙂", "a\u0301\u0301\u0301", "\u202egnirts\u202c", "\ufeff",
         "\U0010ffff", "\x00", "<|im_end|>", "<think>", "</think>", '<tool_call>{"name": "f"}</tool_call>', "{{ x }}",
         "\r\n\r\n", "\\", '"', "data: [DONE]\n\n", "👨‍👩‍👧‍👦", "ﷺ" * 20)  # fmt: skip
SURROGATES = ("\ud800", "\udfff", "\udc00\ud800")
SCHEMAS = ({}, {"type": "object"}, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
           {"$ref": "#"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, {"enum": ["a", 1, None]},
           {"type": "string", "pattern": "^(a+)+$"}, {"type": "array", "items": {"$ref": "#/$defs/x"}})  # fmt: skip
#: values of fields whose type does not say what makes sense
MEANT: dict[str, tuple[Any, ...]] = {
    "model": (MODEL,) * 30 + ("", "nobody's", "x" * 2000),
    "n": (1, 1, 1, 2, 3),
    "regex": ("a+", "[0-9]{3}", "(a|b)*", "(", ".{1000}"),
    "guided_regex": ("a+", "("),
    "grammar": ('start: "a"', "start: /x+/ start?", "%"),
    "guided_grammar": ('start: "a"', "root ::= [a-z]+"),
    "syntax": ("lark", "ebnf", None),
    "arguments": ("{}", '{"a": 1}', "[]", "no JSON"),
    "seed": (0, 7, -1),
    "priority": (0, 1, -1),
    "effort": ("low", "none", None),
    "encoding_format": ("float", "base64"),
    "temperature": (0, 0.5, 1),
}
#: MiB that the worker may take, and how long an answer is waited for, s
RSS_LIMIT, SECONDS = 500.0, 8.0


class Maker:
    """Makes valid values of a form by its JSON schema."""

    def __init__(self, form: Any):
        self._schema = form.model_json_schema()
        self._defs = self._schema.get("$defs", {})

    def body(self, rng: Random) -> dict[str, Any]:
        """A body that the form accepts; what its endpoint refuses may be in it."""
        made = self._object(rng, self._schema, 0)
        fields = self._schema["properties"]
        if "messages" in fields and rng.random() < 0.6:
            made["messages"] = [{"role": "user", "content": rng.choice(TEXTS)}]
        lengths = [name for name in LENGTHS if name in fields]
        if lengths and rng.random() < 0.98:
            for name in lengths:
                made.pop(name, None)
            made[rng.choice(lengths)] = rng.choice((1, 1, 2, 4))
        return made

    def _value(self, rng: Random, schema: dict[str, Any], depth: int, name: str = "") -> Any:
        if name in MEANT and rng.random() < 0.9:
            return rng.choice(MEANT[name])
        if "$ref" in schema:
            return self._value(rng, self._defs[schema["$ref"].rpartition("/")[2]], depth, name)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self._value(rng, rng.choice(schema[union]), depth, name)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        make: Callable[[Random, dict[str, Any], int], Any] | None = {
            "string": self._string, "integer": self._integer, "number": self._number, "boolean": self._boolean,
            "array": self._array, "object": self._object}.get(schema.get("type", ""))  # fmt: skip
        return make(rng, schema, depth) if make is not None else None

    @staticmethod
    def _string(rng: Random, schema: dict[str, Any], depth: int) -> str:
        if "pattern" in schema:
            return rng.choice(("f", "get_weather", "a-b_C9"))
        most = schema.get("maxLength", 100)
        return (rng.choice(TEXTS) if rng.random() < 0.9 else rng.choice(TEXTS) * rng.choice((2, 50)))[:most] or "x"

    @staticmethod
    def _integer(rng: Random, schema: dict[str, Any], depth: int) -> int:
        least, most = schema.get("minimum", -(2**31)), schema.get("maximum", 2**31)
        near = rng.choice((least, most, least + 1, most - 1)) if rng.random() < 0.2 else rng.randrange(1500)
        return max(least, min(most, near))

    @staticmethod
    def _number(rng: Random, schema: dict[str, Any], depth: int) -> float:
        least, most = schema.get("minimum", schema.get("exclusiveMinimum", -100)), schema.get("maximum", 100)
        return rng.choice((least, most, (least + most) / 2, rng.uniform(least, most), 5e-324 if least == 0 else most))

    @staticmethod
    def _boolean(rng: Random, schema: dict[str, Any], depth: int) -> bool:
        return rng.random() < 0.5

    def _array(self, rng: Random, schema: dict[str, Any], depth: int) -> list[Any]:
        least, most = schema.get("minItems", 0), schema.get("maxItems", 4)
        count = max(least, min(most, rng.choice((0, 1, 1, 1, 2, 3)) if depth < 6 else 0))
        return [self._value(rng, schema["items"], depth + 1) for _ in range(count)]

    def _object(self, rng: Random, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        fields = schema.get("properties")
        if fields is not None:
            required, part = schema.get("required", ()), 2 / (len(fields) + 1)
            return {name: self._value(rng, field, depth + 1, name) for name, field in fields.items()
                    if name in required or rng.random() < part}  # fmt: skip
        values = schema.get("additionalProperties")
        if isinstance(values, dict):
            count = min(schema.get("maxProperties", 4), rng.randrange(4))
            return {str(rng.randrange(1600)): self._value(rng, values, depth + 1) for _ in range(count)}
        return dict(rng.choice(SCHEMAS))


def duplicated(rng: Random, data: bytes) -> bytes:
    """An object with a field twice, the second time with another value."""
    name = rng.choice(("model", "messages", "prompt", "stream", "max_tokens", "n", "x"))
    other = json.dumps(mutate._json_value(rng, "x")).encode()
    return data[:-1] + b', "%s": %s}' % (name.encode(), other) if data.startswith(b"{") else data


def huge(rng: Random, body: dict[str, Any]) -> bytes:
    """A body with one value that is large: many values, names or containers, long texts, or deep nesting."""
    size = rng.choice((5_000, 17_000, 70_000, 500_000, 2_000_000, 15 << 20))
    key, value = _fitting(rng, size) if rng.random() < 0.5 else _any(rng, body, size)
    rest = json.dumps({name: inner for name, inner in body.items() if name != key}).encode()
    return rest[:-1] + (b", " if len(rest) > 2 else b"") + b'"' + key.encode() + b'": ' + value + b"}"


def _many(unit: bytes, size: int, most: int) -> bytes:
    return b"[" + b",".join([unit] * min(most, size // (len(unit) + 1))) + b"]"


def _text(rng: Random, size: int) -> bytes:
    units = (b"x", b"the ", "é".encode(), "🙂".encode(), b"\\n", b"\\u0041", b"\\ud83d\\ude00", b'\\"', b"\\\\")
    unit, wide = rng.choice(units), rng.choice((b"", b"", "🙂".encode(), b"\\ud83d\\ude00"))
    return b'"' + wide + unit * (size // len(unit)) + b'"'


def _any(rng: Random, body: dict[str, Any], size: int) -> tuple[str, bytes]:
    """A field, and a large value of any type."""
    key = rng.choice([*body, "messages", "prompt", "input", "tokens", "tools", "stop", "logit_bias", "metadata"])
    match rng.randrange(6):
        case 0:
            value = _text(rng, size)
        case 1:
            value = b"{" + b",".join(b'"%x":1' % i for i in range(min(size, 2_000_000) // 10)) + b"}"
        case 2:
            value = b"[" * min(size, 200_000) + b"]" * min(size, 200_000)
        case 3:
            value = rng.choice((b"1", b"-", b" ")) * size
        case _:
            units = (b"1", b"150000", b"{}", b"[]", b"null", b'""', b"1e300", b"[1]", b'{"a":{"a":{"a":1}}}',
                     b'{"role":"user","content":"x"}', b'{"type":"text","text":""}')  # fmt: skip
            value = _many(rng.choice(units), size, 1 << 24)
    return key, value


def _fitting(rng: Random, size: int) -> tuple[str, bytes]:
    """A field, and a large value of its type."""

    def text() -> bytes:
        return _text(rng, size)

    user, part = b'{"role":"user","content":%s}', b'{"type":"text","text":""}'
    call = b'{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}'
    makers: tuple[tuple[str, Callable[[], bytes]], ...] = (
        *((name, text) for name in ("prompt", "input", "system", "instructions", "guided_regex", "cache_salt")),
        ("messages", lambda: b"[" + user % text() + b"]"),
        ("messages", lambda: b"[" + user % (b'[{"type":"text","text":' + text() + b"}]") + b"]"),
        *((name, lambda: _many(b"7", size, 1 << 19)) for name in ("prompt", "input", "tokens")),
        *((name, lambda: _many(b'"a"', size, 2048)) for name in ("prompt", "input")),
        *((name, lambda: _many(b"[7]", size, 2048)) for name in ("prompt", "input")),
        *((name, lambda: _many(user % b'"x"', size, 4096)) for name in ("messages", "input")),
        ("prompt", lambda: b"[" + text() + b', "x"]'),
        ("messages", lambda: b"[" + user % _many(part, size, 16_000) + b"]"),
        ("messages", lambda: b'[{"role":"assistant","tool_calls":' + _many(call, size, 1024) + b"}]"),
        ("system", lambda: _many(part, size, 16_000)),
        ("tools", lambda: _many(b'{"type":"function","function":{"name":"f"}}', size, 1024)),
        ("guided_choice", lambda: _many(b'"a"', size, 4096)),
        ("guided_json", lambda: b'{"enum":' + _many(b"1", size, 1 << 19) + b"}"),
        ("stop", lambda: b"[" + text() + b"]"),
        ("response_format", lambda: b'{"type":"json_schema","json_schema":{"name":"x","schema":{"enum":'
         + _many(b'"a"', size, 1 << 19) + b"}}}"),
        ("chat_template_kwargs", lambda: b'{"x":' + text() + b"}"),
        ("tools", lambda: b'[{"name":"f","input_schema":{"enum":' + _many(b'"a"', size, 1 << 19) + b"}}]"),
    )  # fmt: skip
    name, make = rng.choice(makers)
    return name, make()


class Bodies(Target):
    """Bodies for all endpoints of a worker of the HTTP server, before a group with the shipped model.

    A finding is: a status of 5xx but 503 with Retry-After, an answer that is not the JSON or the events it should be, a
    worker of more than 500 MiB, an event loop that stands still for more than 100 ms, a worker that ends.
    """

    name, share = "http", 0.02
    #: the address of a running group; without it one is started
    group = ""

    def prepare(self) -> None:
        self._stack = contextlib.ExitStack()
        self._makers = {path: Maker(form) for path, form in ENDPOINTS.items()}
        if not self.group:
            words = ["--model", str(shipped_model()), "--max-length", "256"]
            self.group = self._stack.enter_context(background_group(words, timeout=60.0)).addresses[0]
        self._stalls, self._seen = self.folder / "stalls", 0
        self._stalls.touch()
        listener, address = open_socket("127.0.0.1:0")
        listener.set_inheritable(True)
        words = worker_words(HttpOptions(insecure=True, pool=[self.group]))
        path = os.pathsep.join((str(ROOT), str(ROOT / "launch"), str(TESTS), os.environ.get("PYTHONPATH", "")))
        self.worker = subprocess.Popen(
            [sys.executable, "-m", "support.probed_worker", str(self._stalls), *words, "--fd", str(listener.fileno())],
            pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "ALLSPARK_HTTP_PARENT": str(os.getpid())})  # fmt: skip
        listener.close()
        self._stack.callback(self._end)
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._connection = self._connect()
        deadline = time.monotonic() + 60
        while self._ask("GET", "/health/ready")[0] != 200:
            assert time.monotonic() < deadline and self.worker.poll() is None, "the worker does not serve"
            time.sleep(0.05)
        self._stalled()  # imports at the start

    def _end(self) -> None:
        self.worker.terminate()
        try:
            self.worker.wait(10)
        except subprocess.TimeoutExpired:
            self.worker.kill()
            self.worker.wait()

    def finish(self) -> None:
        self._connection.close()
        self._stack.close()

    def one(self, rng: Random) -> bool:
        path = rng.choice(list(ENDPOINTS))
        body = self._body(rng, path)
        self.data = path.encode() + b"\n" + body
        gone = rng.random() < 0.01
        pieces = _pieces(rng, body) if rng.random() < 0.1 else None
        try:
            status, headers, answer = self._ask("POST", path, pieces or body, gone)
        except TimeoutError:
            answer, status, headers = b"", 0, {}  # it may compute for long; but the worker must answer others
        self._check_worker(len(body))
        if not status:
            return False
        if status not in STATUSES or (status in (429, 503) and "retry-after" not in headers):
            raise Finding(f"{path}: status {status}: {answer[:500]!r}")
        try:
            check(path, status, headers, answer)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise Finding(f"{path}: {type(error).__name__} {error}: {answer[:500]!r} … {answer[-200:]!r}") from error
        return status == 200

    def _body(self, rng: Random, path: str) -> bytes:
        made, kind = self._makers[path].body(rng), rng.random()
        if kind < 0.45:
            return json.dumps(made, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
        if kind < 0.93:
            return mutate.of_json(rng, made)
        if kind < 0.96:
            return duplicated(rng, json.dumps(made).encode())
        if kind < 0.995:
            text = json.dumps(made, ensure_ascii=False).replace("Once", rng.choice((*SURROGATES, *TEXTS)))
            return text.encode(errors="surrogatepass")
        return huge(rng, made)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=SECONDS)

    def _ask(
        self, method: str, path: str, body: bytes | list[bytes] | None = None, gone: bool = False
    ) -> tuple[int, dict[str, str], bytes]:
        """The answer: status, headers and body. Status 0 if there is none, because the connection was closed while the
        body was sent; `gone`: by this side, at once.
        """
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            chunked = isinstance(body, list)
            self._connection.request(method, path, body, headers, encode_chunked=chunked)  # type: ignore[arg-type]
            if gone:
                self._connection.close()
                return 0, {}, b""
            answer = self._connection.getresponse()
            found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        except (ConnectionError, http.client.HTTPException, TimeoutError) as error:
            self._connection.close()
            self._connection = self._connect()
            if isinstance(error, TimeoutError):
                raise
            return 0, {}, b""
        return found

    def _check_worker(self, size: int) -> None:
        if self.worker.poll() is not None:
            raise Finding(f"the worker has ended with {self.worker.returncode}")
        if size > 1 << 16:
            time.sleep(0.02)  # a stall is noted when it is over
        if found := self._stalled():
            raise Finding(f"the event loop stood still (seconds, CPU seconds): {found}")
        peak = peak_mib(self.worker.pid)
        if peak > RSS_LIMIT:
            Path(f"/proc/{self.worker.pid}/clear_refs").write_text("5")  # the peak begins anew
            raise Finding(f"the worker has taken {peak:.0f} MiB")

    def _stalled(self) -> str:
        size = self._stalls.stat().st_size
        seen, self._seen = self._seen, size
        return self._stalls.read_text()[seen:].strip() if size > seen else ""


def peak_mib(pid: int) -> float:
    """The most memory that a process has had, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def _pieces(rng: Random, body: bytes) -> list[bytes]:
    """The body in chunks."""
    size = max(1, len(body) // rng.choice((1, 2, 7, 50)))
    return [body[at : at + size] for at in range(0, len(body), size)]


# -- answers -----------------------------------------------------------------------------------------------------------


def strict_json(data: bytes) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    return json.loads(data.decode(), parse_constant=refuse)


def check(path: str, status: int, headers: dict[str, str], answer: bytes) -> None:
    """Raises for an answer that is not what its endpoint should send."""
    anthropic = path.startswith("/v1/messages")
    if headers.get("content-type", "").startswith("text/event-stream"):
        assert status == 200
        check_stream(path, answer, anthropic)
        return
    assert headers["content-type"] == "application/json"
    value = strict_json(answer)
    if status != 200:
        check_error(value, anthropic)
    elif path in ("/v1/chat/completions", "/v1/completions"):
        usage = value["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert [choice["index"] for choice in value["choices"]] == list(range(len(value["choices"])))
        assert all(choice["finish_reason"] in ("stop", "length", "tool_calls") for choice in value["choices"])
        assert all(isinstance(choice.get("text", ""), str) for choice in value["choices"])
    elif path == "/v1/responses":
        assert value["object"] == "response" and value["status"] in ("completed", "incomplete") and value["output"]
        assert value["usage"]["total_tokens"] == value["usage"]["input_tokens"] + value["usage"]["output_tokens"]
    elif path == "/v1/messages":
        assert value["type"] == "message" and isinstance(value["content"], list)
        assert value["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence", "tool_use")
    elif path == "/v1/messages/count_tokens":
        assert value["input_tokens"] > 0
    elif path == "/v1/embeddings":
        assert [entry["index"] for entry in value["data"]] == list(range(len(value["data"]))) and value["data"]
    elif path == "/tokenize":
        assert value["count"] == len(value["tokens"])
    else:
        assert isinstance(value["prompt"], str)


def check_error(value: Any, anthropic: bool) -> None:
    error = value["error"]
    assert isinstance(error["message"], str) and 0 < len(error["message"]) < 3000, "the message's length"
    assert set(error) == ({"type", "message"} if anthropic else {"message", "type", "param", "code"})
    assert not anthropic or value["type"] == "error"


def check_stream(path: str, answer: bytes, anthropic: bool) -> None:
    """Events are whole, and the last one ends the stream or is an error."""
    assert answer.endswith(b"\n\n")
    events = [dict(line.split(": ", 1) for line in block.split("\n")) for block in answer.decode()[:-2].split("\n\n")]
    last = events[-1]["data"]
    named = anthropic or path == "/v1/responses"
    values = [strict_json(event["data"].encode()) for event in (events if named else events[:-1])]
    if named:
        assert all(event["event"] == value["type"] for event, value in zip(events, values))
        assert values[-1]["type"] in ("message_stop", "response.completed", "response.incomplete", "error")
    elif last != "[DONE]":
        check_error(strict_json(last.encode()), False)
    else:
        assert all(value["object"] in ("chat.completion.chunk", "text_completion") for value in values)
