"""/v1/models, /v1/models/{id}, /version, /health, /health/ready and /health/live."""

from __future__ import annotations

import contextlib
from typing import Any

from allspark_client.types import ModelInfo, ModelState
from allspark_client.version import __version__

from .call import Call
from .errors import ApiError
from .wire import Body, ModelName


def task_of(info: ModelInfo) -> str:
    """What a model is for: "generate", "embed", "rerank" or "classify"."""
    if not info.only_pools:
        return "generate"
    return "embed" if not info.labels else "rerank" if len(info.labels) == 1 else "classify"


async def _cards(call: Call, model: ModelState) -> list[dict[str, Any]]:
    """The entries of a model and, as in vLLM, of each of its aliases and adapters, which clients name like models.

    Those of a loaded model have the most tokens of prompt and output together, and the form of its tool calls and
    reasoning, which is a guess where the chat template has tool calls of no known form, and whether they see images.
    """
    card: dict[str, Any] = {"id": model.name, "object": "model", "created": call.worker.started,
                            "owned_by": "allspark", "loaded": model.running, "on_demand": model.installed_on_demand}
    if model.running:
        info = await call.pool.info(model.name)
        card |= {"max_model_len": info.max_length, "chat_format": info.chat_format,
                 "chat_format_guessed": info.chat_format_guessed, "task": task_of(info),
                 "capabilities": {"vision": info.sees_images}}
    further = [*model.aliases, *sorted(model.adapters)]
    return [each for each in (card, *({**card, "id": name, "parent": model.name} for name in further))
            if call.client.may_use(each["id"], model.name)]


async def list_models(call: Call, _: None) -> None:
    """The models that take requests, also those that a request would load, and their aliases and adapters."""
    cards: list[dict[str, Any]] = []
    for model in await call.pool.models():
        if model.running or model.on_demand:
            with contextlib.suppress(ApiError):     # it has just been released
                cards += await _cards(call, model)
    await call.reply({"object": "list", "data": cards})


async def one_model(call: Call, _: None) -> None:
    """A model or an adapter."""
    name = call.path_rest
    base = (await call.pool.resolve(name))[0]
    for model in await call.pool.models():
        if model.name == base and (model.running or model.on_demand):
            card = next((card for card in await _cards(call, model) if card["id"] == name), None)
            if card is not None:
                await call.reply(card)
                return
    raise ApiError(404, f"The model '{name}' does not exist", "model", "model_not_found")


class NamedModel(Body):
    """Names a model."""

    model: ModelName


async def load(call: Call, request: NamedModel) -> None:
    """Loads a model on demand, in llama-server's form; answers once it is loaded."""
    await call.model(request.model)
    await call.reply({"success": True})


async def unload(call: Call, request: NamedModel) -> None:
    """Unloads a model on demand that no request uses, in llama-server's form."""
    await call.pool.unload((await call.pool.resolve(request.model))[0])
    await call.reply({"success": True})


async def version(call: Call, _: None) -> None:
    """The version of this server, in vLLM's form."""
    await call.reply({"version": __version__})


async def health(call: Call, _: None) -> None:
    """200 while the pool takes requests, 503 otherwise, also while all of it drains; for probes, which have no key."""
    why = "the server is draining" if call.worker.draining else call.pool.health()
    if why:
        await call.reply({"status": "unavailable", "reason": why}, 503, headers=[(b"retry-after", b"1")])
    else:
        await call.reply({"status": "ok"})


async def live(call: Call, _: None) -> None:
    """200 while this server answers, whatever the pool does."""
    await call.reply({"status": "ok"})
