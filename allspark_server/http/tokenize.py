"""/tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from allspark_client.config import GenerateConfig
from allspark_client.request import RequestSpec
from allspark_server.json_structure import MAX_VALUES

from .call import Call
from .chat_wire import Messages, Tool, plain_messages, plain_tools
from .completions import TokenId
from .images import ProcessorKwargs, read_images
from .logprobs import token_text
from .pieces import json_list, json_object
from .replies import chat_spec, template_kwargs
from .wire import Body, Expression, JsonObject, Many, ModelName


class TokenizeRequest(Body):
    """A request for the token ids of a text or a chat."""

    model: ModelName
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # Of chats, as in chats.
    tools: Annotated[Many[Tool], Field(min_length=1, max_length=1024)] | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    chat_template: Expression | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("must have one of 'prompt' and 'messages'")
        return self


class DetokenizeRequest(Body):
    """A request for the text of token ids."""

    model: ModelName
    tokens: Annotated[Many[TokenId], Field(max_length=MAX_VALUES)]


async def tokenize(call: Call, request: TokenizeRequest) -> None:
    """The token ids of a text or a chat."""
    info = await call.model(request.model)
    ids: list[int] = []
    if request.messages is not None:
        spec = chat_spec(
            request.model, plain_messages(request.messages), GenerateConfig(), tools=plain_tools(request.tools),
            chat_template=request.chat_template, continue_final_message=request.continue_final_message,
            chat_template_kwargs=template_kwargs(request.chat_template_kwargs, request.add_generation_prompt))
        await read_images(call, info, spec, request.mm_processor_kwargs)
        ids = await call.pool.tokenize(spec, places=call.image_places)
    elif request.prompt:
        bare = request.add_special_tokens is False
        ids = await call.pool.tokenize(RequestSpec(request.model, text=request.prompt), bare)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_length, "tokens": json_list(ids, 4096),
                              "token_strs": None}
    if request.return_token_strs:
        known = await call.pool.token_bytes(info, set(ids))
        answer["token_strs"] = json_list(token_text(known[i]) for i in ids)
    await call.reply_in_pieces(json_object(answer))


async def detokenize(call: Call, request: DetokenizeRequest) -> None:
    """The text of token ids."""
    await call.model(request.model)
    text = (await call.pool.detokenize(request.model, request.tokens)).text if request.tokens else ""
    await call.reply({"prompt": text})
