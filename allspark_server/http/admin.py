"""What operators ask of a server, in vLLM's form: sleep and wake, the prefix cache, and a description of the server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from allspark_client.errors import AllSparkError
from allspark_client.types import ModelState
from allspark_client.version import __version__

from .call import Call
from .errors import ApiError, bad_value

#: the only level: the weights stay in host memory, so that they need not be read again
_LEVELS = ("", "1")


async def _named(call: Call) -> list[ModelState]:
    """The models that a call means: the one that the query's `model` names, or all."""
    models = await call.pool.models()
    name = call.query("model")
    if name and all(model.name != name for model in models):
        raise ApiError(404, f"The model '{name}' does not exist", "model", "model_not_found")
    return [model for model in models if name in ("", model.name)]


async def sleep(call: Call, _: None) -> None:
    """Ends the requests of the models and frees their memory on GPUs; their weights stay in host memory."""
    if call.query("level") not in _LEVELS:
        raise bad_value("level", f"it is {call.query('level')!r}; allowed: 1")
    for model in await _named(call):
        if not model.on_demand:
            await call.pool.sleep(model.name)
    await call.reply({})


async def wake_up(call: Call, _: None) -> None:
    """Lets models that sleep take requests again."""
    for model in await _named(call):
        if not model.running and not model.on_demand:
            await call.pool.wake(model.name)
    await call.reply({})


async def is_sleeping(call: Call, _: None) -> None:
    """Whether models sleep, all of them or the one that is named."""
    models = [model for model in await _named(call) if not model.on_demand]
    await call.reply({"is_sleeping": bool(models) and not any(model.running for model in models)})


async def reset_prefix_cache(call: Call, _: None) -> None:
    """Forgets the cached prefixes that no request uses. Answers do not depend on it."""
    for model in await _named(call):
        if not model.on_demand:
            await call.pool.reset_prefix_cache(model.name)
    await call.reply({})


async def server_info(call: Call, _: None) -> None:
    """The version, the models with how they run, and the groups behind the server."""
    members, models = await asyncio.gather(call.pool.members(), call.pool.models())
    described = []
    for model in models:
        with contextlib.suppress(ApiError, AllSparkError):      # it was released meanwhile
            described.append({**dataclasses.asdict(await call.pool.info(model.name)), "running": model.running})
    for info in described:
        info.pop("tokenizer_dir", None)
    await call.reply({"version": __version__, "models": described,
                      "members": [{"connected": member.connected, "draining": member.draining,
                                   "models": [model.name for model in member.models]} for member in members]})
