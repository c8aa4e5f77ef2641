"""/v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .call import Call
from .errors import bad_value
from .wire import CUT, Body, ModelName

AdapterName = Annotated[str, Field(pattern=r"^[^/=]{1,256}$"), CUT]


class UnloadRequest(Body):
    """A request to free an adapter. `model`: may be left out if there is one."""

    lora_name: AdapterName
    model: ModelName | None = None


class LoadRequest(UnloadRequest):
    """A request to load an adapter from a path on the machines of the groups."""

    lora_path: Annotated[str, Field(min_length=1, max_length=4096), CUT]


async def load_adapter(call: Call, request: LoadRequest) -> None:
    """Loads an adapter on all members of the pool; requests then name it as their model."""
    model = await _model_of(call, request)
    await call.pool.load_adapter(model, f"{request.lora_name}={request.lora_path}")
    await _reply(call, request, "added")


async def unload_adapter(call: Call, request: UnloadRequest) -> None:
    """Frees an adapter on all members of the pool, unless requests use it."""
    model = await _model_of(call, request)
    await call.pool.unload_adapter(model, request.lora_name)
    await _reply(call, request, "removed")


async def _model_of(call: Call, request: UnloadRequest) -> str:
    if request.model is not None:
        return (await call.model(request.model)).name
    names = [model.name for model in await call.pool.models() if model.running]
    if len(names) != 1:
        raise bad_value("model", f"it must name one of the models {', '.join(names) or '(none runs)'}")
    return names[0]


async def _reply(call: Call, request: UnloadRequest, what: str) -> None:
    text = f"Success: LoRA adapter '{request.lora_name}' {what} successfully."
    await call.reply(text.encode(), kind=b"text/plain; charset=utf-8")
