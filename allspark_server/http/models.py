"""/v1/models, /v1/models/{id} and /health."""

from __future__ import annotations

from typing import Any

from allspark_client.types import ModelState

from .call import Call
from .errors import ApiError


def _card(model: ModelState, created: int) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": created, "owned_by": "allspark"}


async def list_models(call: Call, _: None) -> None:
    """The models that take requests."""
    running = [model for model in await call.pool.models() if model.running]
    await call.reply({"object": "list", "data": [_card(model, call.door.started) for model in running]})


async def one_model(call: Call, _: None) -> None:
    """A model, and how long prompt and output together may be."""
    name = call.path_rest
    for model in await call.pool.models():
        if model.name == name and model.running:
            info = await call.model(name)
            await call.reply({**_card(model, call.door.started), "max_model_len": info.max_length})
            return
    raise ApiError(404, f"The model '{name}' does not exist", "model", "model_not_found")


async def health(call: Call, _: None) -> None:
    """200 while the pool serves a model, 503 otherwise; for probes, who have no keys."""
    try:
        running = any(model.running for model in await call.pool.models())
    except ApiError as error:
        await call.reply({"status": "unavailable", "reason": error.message}, 503)
        return
    if running:
        await call.reply({"status": "ok"})
    else:
        await call.reply({"status": "unavailable", "reason": "no model runs"}, 503)
