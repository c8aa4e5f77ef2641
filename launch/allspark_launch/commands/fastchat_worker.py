"""`allspark fastchat-worker`: a model worker with FastChat's HTTP protocol, in front of a group or a pool."""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any

from allspark_client import AllSparkError, AsStatus, AsyncClientEngine, ModelInfo
from allspark_client.config import GenerateConfig

from ..pool.members import environment_addresses
from . import AddCommand
from .own_group import add_group_flags, own_group

logger = logging.getLogger(__name__)

#: seconds: FastChat's WORKER_HEART_BEAT_INTERVAL; between two attempts to reach the controller; for one attempt
_BEAT_SECONDS, _RETRY_SECONDS, _ANSWER_SECONDS = 45.0, 3.0, 5.0
#: values of FastChat's ErrorCode
_OUT_OF_RANGE, _CONTEXT_OVERFLOW, _OVERLOADED, _INTERNAL = 40302, 40303, 42903, 50001
#: a conversation in ChatML, with the fields of FastChat's Conversation; 9 is its SeparatorStyle.CHATML
CHATML = {"name": "chatml", "system_template": "<|im_start|>system\n{system_message}", "system_message": "",
          "roles": ["<|im_start|>user", "<|im_start|>assistant"], "messages": [], "offset": 0, "sep_style": 9,
          "sep": "<|im_end|>", "sep2": None, "stop_str": "<|im_end|>", "stop_token_ids": None}

EPILOG = """\
The worker registers with FastChat's controller; then FastChat's API server and web server offer the model. They render
the prompts with a conversation template: --conv-template names one of FastChat's (fschat must be installed here); the
default is ChatML.

examples:
  python -m fastchat.serve.controller
  allspark fastchat-worker --model ~/Qwen2.5-7B-Instruct --model-names qwen,gpt-3.5-turbo
  python -m fastchat.serve.openai_api_server --port 8000

  allspark fastchat-worker --address unix:/run/allspark/a --conv-template llama-3 --port 21003"""


class Refused(Exception):
    """A request that is answered with one of FastChat's error codes."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {"text": str(self), "error_code": self.code}


def conversation(name: str | None) -> dict[str, Any]:
    """The template of a conversation. Raises ValueError if FastChat does not know the name."""
    if name is None:
        return CHATML
    try:
        from fastchat.conversation import get_conv_template
    except ImportError:
        raise ValueError("--conv-template needs FastChat: pip install fschat") from None
    try:
        template = get_conv_template(name)
    except KeyError:
        raise ValueError(f"--conv-template {name}: FastChat has no conversation of that name") from None
    return {**asdict(template), "sep_style": int(template.sep_style)}


def config_of(params: dict[str, Any], info: ModelInfo) -> GenerateConfig:
    """The configuration for a request's parameters. Raises Refused."""
    if params.get("use_beam_search") or (params.get("best_of") or 1) > 1:
        raise Refused(_OUT_OF_RANGE, "best_of and beam search are not offered")
    if params.get("logprobs"):
        raise Refused(_OUT_OF_RANGE, "logprobs are not offered by this worker")
    values: dict[str, Any] = {}
    for theirs, ours in (("top_p", "top_p"), ("repetition_penalty",) * 2, ("presence_penalty",) * 2,
                         ("frequency_penalty",) * 2, ("max_new_tokens",) * 2, ("seed",) * 2):
        if params.get(theirs) is not None:
            values[ours] = params[theirs]
    temperature = params.get("temperature")
    if (temperature is not None and 0 <= temperature < 1e-5) or params.get("top_p") == 0:
        values["do_sample"] = False
        values.pop("top_p", None)
    elif temperature is not None:
        values["temperature"] = temperature
    if params.get("top_k") is not None:
        values["top_k"] = max(0, params["top_k"])
    stop = params.get("stop") or []
    values["stop"] = [stop] if isinstance(stop, str) else [text for text in stop if text]
    values["stop_words_ids"] = [[i] for i in params.get("stop_token_ids") or () if 0 <= i < info.vocab_size]
    try:
        return GenerateConfig(**values)
    except (ValueError, TypeError) as error:
        raise Refused(_OUT_OF_RANGE, str(error)) from None


@dataclass
class Identity:
    """How the worker presents itself to the controller."""

    address: str
    names: list[str]
    controller: str


class Worker:
    """Answers requests of FastChat's API server. Use it between `open` and `close`."""

    def __init__(self, engine: AsyncClientEngine, identity: Identity, template: dict[str, Any], concurrency: int):
        self._engine, self._identity, self._template = engine, identity, template
        self._room = asyncio.Semaphore(concurrency)
        self._requests = 0  # that run or wait
        self._info = ModelInfo()
        self._heartbeats: asyncio.Task | None = None

    async def open(self, model: str | None, register: bool) -> None:
        """Finds the model (`model`, or the only one that runs). Registers with the controller in the background."""
        await self._engine.__aenter__()
        running = sorted({state.name for state in await self._engine.list_models() if state.running or state.on_demand})
        if model is None and len(running) != 1:
            raise ValueError(f"the pool runs {', '.join(running) or 'no model'}: name one with --model-name")
        self._info = await self._engine.get_model_info(model or running[0])
        self._identity.names = self._identity.names or [self._info.name]
        if register:
            self._heartbeats = asyncio.create_task(self._send_heartbeats())

    async def close(self) -> None:
        """Disconnects."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        await self._engine.close()

    # --- the controller ------------------------------------------------------------------------------------------

    async def _send_heartbeats(self) -> None:
        known = False
        while True:
            try:
                if not known:
                    await self._tell("/register_worker", {
                        "worker_name": self._identity.address, "check_heart_beat": True,
                        "worker_status": self.status(), "multimodal": False})
                    logger.info("registered with %s", self._identity.controller)
                    known = True
                await asyncio.sleep(_BEAT_SECONDS)
                answer = await self._tell("/receive_heart_beat", {"worker_name": self._identity.address,
                                                                  "queue_length": self._requests})
                known = bool(answer and answer.get("exist"))
            except (OSError, ValueError) as error:
                logger.warning("the controller at %s: %s", self._identity.controller, error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _tell(self, path: str, body: dict[str, Any]) -> Any:
        def post() -> Any:
            request = urllib.request.Request(self._identity.controller + path, json.dumps(body).encode(),
                                             {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
                return json.loads(answer.read() or b"null")

        return await asyncio.to_thread(post)

    def status(self) -> dict[str, Any]:
        """What the controller knows of this worker."""
        return {"model_names": self._identity.names, "speed": 1, "queue_length": self._requests}

    # --- requests ------------------------------------------------------------------------------------------------

    async def stream(self, params: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The answer so far, each time that it grows. An error comes last."""
        self._requests += 1
        try:
            async with self._room:
                prompt, config = params["prompt"], config_of(params, self._info)
                begin = prompt if params.get("echo", True) else ""
                async with self._engine.generate(self._info.name, {"text": prompt}, config) as generation:
                    async for _ in generation:
                        yield self._answer(begin, generation, None)
                    reason = "length" if generation.finish_reason == "length" else "stop"
                    yield self._answer(begin, generation, reason)
        except Refused as error:
            yield error.body()
        except (AllSparkError, ValueError, TypeError) as error:
            yield _refusal(error).body()
        finally:
            self._requests -= 1

    @staticmethod
    def _answer(begin: str, generation: Any, reason: str | None) -> dict[str, Any]:
        usage = generation.usage
        return {"text": begin + generation.text, "error_code": 0, "finish_reason": reason,
                "usage": {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.generated_tokens,
                          "total_tokens": usage.prompt_tokens + usage.generated_tokens}}

    async def whole(self, params: dict[str, Any]) -> dict[str, Any]:
        """The complete answer."""
        answer: dict[str, Any] = {}
        async for part in self.stream(params):
            answer = part
        return answer

    async def count(self, params: dict[str, Any]) -> dict[str, Any]:
        """The number of tokens of a prompt."""
        if not params["prompt"]:
            return {"count": 0, "error_code": 0}
        return {"count": len(await self._engine.tokenize(self._info.name, {"text": params["prompt"]})), "error_code": 0}

    async def embed(self, params: dict[str, Any]) -> dict[str, Any]:
        """The mean of each text's hidden states, scaled to length 1."""
        async def one(text: str) -> tuple[list[float], int]:
            async with self._engine.generate(self._info.name, {"text": text}, {"pooling": "mean"}) as generation:
                await generation.read()
            vector = generation.samples[0].tensors_from_model_inference[0]["embedding"]
            return (vector / max(float((vector ** 2).sum()) ** 0.5, 1e-12)).tolist(), generation.usage.prompt_tokens

        embedded = await asyncio.gather(*(one(text) for text in params["input"]))
        return {"embedding": [vector for vector, _ in embedded], "token_num": sum(count for _, count in embedded)}

    async def details(self, _: dict[str, Any]) -> dict[str, Any]:
        """The context length."""
        return {"context_length": self._info.max_length}

    async def conversation(self, _: dict[str, Any]) -> dict[str, Any]:
        """The conversation's template."""
        return {"conv": self._template}

    async def worker_status(self, _: dict[str, Any]) -> dict[str, Any]:
        """The status, for FastChat."""
        return self.status()


def _refusal(error: AllSparkError | ValueError | TypeError) -> Refused:
    """An error of the engine as one of FastChat's error codes."""
    if isinstance(error, (ValueError, TypeError)):
        return Refused(_OUT_OF_RANGE, str(error))
    if error.retryable:
        return Refused(_OVERLOADED, error.message)
    too_long = error.status is AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR
    return Refused(_CONTEXT_OVERFLOW if too_long else _INTERNAL, error.message)


def application(worker: Worker, model: str | None, register: bool) -> Any:
    """FastChat's protocol as an ASGI application."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    def answering(method: Callable) -> Callable:
        async def answer(request: Request) -> JSONResponse:
            body = await request.body()
            try:
                return JSONResponse(await method(json.loads(body) if body else {}))
            except (AllSparkError, ValueError, TypeError, KeyError) as error:
                refused = Refused(_OUT_OF_RANGE, f"{error!r} is missing") if isinstance(error, KeyError) \
                    else _refusal(error)
                return JSONResponse(refused.body())

        return answer

    async def stream(request: Request) -> StreamingResponse:
        params = await request.json()

        async def lines() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(worker.stream(params)) as answers:
                async for answer in answers:
                    yield json.dumps(answer).encode() + b"\0"

        return StreamingResponse(lines())

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await worker.open(model, register)
        try:
            yield
        finally:
            await worker.close()

    routes = {"/worker_generate": worker.whole, "/worker_get_embeddings": worker.embed, "/count_token": worker.count,
              "/worker_get_status": worker.worker_status, "/worker_get_conv_template": worker.conversation,
              "/model_details": worker.details}
    return Starlette(lifespan=lifespan, routes=[
        Route("/worker_generate_stream", stream, methods=["POST"]),
        *(Route(path, answering(method), methods=["POST"]) for path, method in routes.items())])


# --- the command -------------------------------------------------------------------------------------------------


def add_command(command: AddCommand) -> None:
    """Adds `fastchat-worker` to the parser."""
    p = command("fastchat-worker", run_worker, "serve a model to FastChat",
                epilog=EPILOG)
    p.add_argument("--address", action="append", default=[],
                   help="a running group; repeatable (default: $ALLSPARK_ADDRESS, or a group of its own)")
    p.add_argument("--model", metavar="DIR", help="the model of a group of its own (default: the shipped model)")
    p.add_argument("--controller-address", default="http://localhost:21001", metavar="URL", help="default %(default)s")
    p.add_argument("--host", default="localhost",
                   help="where to listen (default %(default)s); there are no keys: everybody who reaches it may send "
                        "requests")
    p.add_argument("--port", type=int, default=21002, help="default %(default)s")
    p.add_argument("--worker-address", metavar="URL",
                   help="the URL for the controller and clients (default: http://HOST:PORT)")
    p.add_argument("--model-names", type=lambda text: [name for name in text.split(",") if name], default=[],
                   metavar="LIST", help="names of the model for users (default: its name in the group)")
    p.add_argument("--conv-template", metavar="NAME", help="one of FastChat's conversations (default: ChatML)")
    p.add_argument("--limit-worker-concurrency", type=int, default=1024, metavar="N", help="default %(default)s")
    p.add_argument("--no-register", action="store_true", help="do not register with the controller")
    p.add_argument("-v", "--verbose", action="store_true", help="show the log of the group's ranks")
    add_group_flags(p)


def run_worker(options: argparse.Namespace) -> int:
    """Runs the command."""
    import uvicorn
    if options.limit_worker_concurrency < 1 or not 0 < options.port < 65536:
        raise ValueError("--limit-worker-concurrency must be at least 1, --port 1 to 65535")
    addresses = options.address or environment_addresses()
    if addresses and options.model:
        raise ValueError("--model starts a group, and an address names one that runs: give one of them")
    template = conversation(options.conv_template)
    with contextlib.ExitStack() as stack:
        name = options.model_name if addresses else None
        addresses = addresses or [stack.enter_context(own_group(options))]
        address = options.worker_address or f"http://{options.host}:{options.port}"
        identity = Identity(address, options.model_names, options.controller_address.rstrip("/"))
        worker = Worker(AsyncClientEngine(addresses), identity, template, options.limit_worker_concurrency)
        logger.info("serving FastChat at %s", address)
        server = uvicorn.Server(uvicorn.Config(application(worker, name, not options.no_register), host=options.host,
                                               port=options.port, log_config=None, access_log=False))
        server.run()
    return 0 if server.started else 1
