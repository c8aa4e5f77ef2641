"""Converts types of the API to and from messages of proto/allspark.proto. Client and service use it."""
from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np

from ._proto import allspark_pb2 as pb
from .chat import ChatOptions, check_messages
from .config import AsModelConfig, GenerateConfig
from .errors import AllSparkError, AsStatus, Draining, NotLoaded
from .images import DEFAULT_FPS, Image, Video, check_count, named
from .request import RequestSpec
from .types import AsEngineStat, GeneratedElements, ModelInfo, ModelState

#: The versions of allspark.proto that this code speaks. PROTOCOL is increased when an older peer would misunderstand a
#: message; versions before it stay supported, so that clients and servers can be upgraded one after the other.
OLDEST_PROTOCOL, PROTOCOL = 1, 4
#: the first versions with SessionResponse.tokens, and with GenerateRequest.images
TOKENS_PROTOCOL, IMAGES_PROTOCOL = 3, 4
#: trailing metadata key of a refused call, holding a serialized Error
ERROR_KEY = "allspark-error-bin"
#: longest error text on the wire: metadata is limited to tens of kB
_MAX_ERROR_TEXT = 4000

# --- versions ----------------------------------------------------------------------------------------------------


def hello(client: str) -> pb.Hello:
    """The first message of a session. `client`: program and version, for the server's log."""
    return pb.Hello(protocol=OLDEST_PROTOCOL, newest_protocol=PROTOCOL, client=client)


def common_protocol(oldest: int, newest: int, peer: str, own: str) -> int:
    """The version to use between `own`, which is this side, and `peer`, which speaks `oldest` to `newest`.

    Raises AllSparkError, which says which side must be upgraded, if there is none.
    """
    version = min(PROTOCOL, newest)
    if version >= max(OLDEST_PROTOCOL, oldest):
        return version
    raise AllSparkError(
        AsStatus.ALLSPARK_REQUEST_DENIED,
        f"{peer} speaks {_versions(oldest, newest)} of the protocol, {own} speaks "
        f"{_versions(OLDEST_PROTOCOL, PROTOCOL)}: upgrade {peer if newest < OLDEST_PROTOCOL else own}")


def _versions(oldest: int, newest: int) -> str:
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


# --- errors ------------------------------------------------------------------------------------------------------


def error_to_pb(error: BaseException) -> pb.Error:
    """An exception as a message; other types than the API's become ALLSPARK_UNKNOWN_ERROR."""
    if isinstance(error, AllSparkError):
        kind, status, text = pb.ALLSPARK_ERROR, int(error.status), error.message
    elif isinstance(error, ValueError):
        kind, status, text = pb.VALUE_ERROR, 0, str(error)
    elif isinstance(error, TypeError):
        kind, status, text = pb.TYPE_ERROR, 0, str(error)
    else:
        # The text of an OSError names files of this machine, which clients must not see.
        text = f"{type(error).__name__}: {(isinstance(error, OSError) and error.strerror) or error}"
        kind, status = pb.ALLSPARK_ERROR, int(AsStatus.ALLSPARK_UNKNOWN_ERROR)
    if len(text) > _MAX_ERROR_TEXT:
        text = text[:_MAX_ERROR_TEXT] + " …"
    return pb.Error(kind=kind, status=status, message=text, retryable=getattr(error, "retryable", False),
                    elsewhere=isinstance(error, Draining),
                    not_loaded=error.model if isinstance(error, NotLoaded) else "")


def error_from_pb(error: pb.Error) -> Exception:
    """The exception that the engine raised: AllSparkError, ValueError or TypeError."""
    if error.kind == pb.VALUE_ERROR:
        return ValueError(error.message)
    if error.kind == pb.TYPE_ERROR:
        return TypeError(error.message)
    if error.elsewhere:
        return Draining(error.message)
    if error.not_loaded:
        return NotLoaded(error.not_loaded)
    return as_allspark_error(error)


def as_allspark_error(error: pb.Error) -> AllSparkError:
    """A message as an AllSparkError, whatever its kind: the error that ended a running request."""
    known = error.status in set(AsStatus) and error.status != AsStatus.ALLSPARK_SUCCESS
    status = AsStatus(error.status) if known else AsStatus.ALLSPARK_UNKNOWN_ERROR
    return AllSparkError(status, error.message, error.retryable)


# --- configs -----------------------------------------------------------------------------------------------------

_SAME = ("do_sample", "seed", "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty",
         "frequency_penalty", "suppress_repetition_in_generation", "no_repeat_ngram_size", "min_length", "max_length",
         "max_new_tokens", "early_stopping", "logprobs", "top_logprobs", "lora_name", "vocab_type", "uuid",
         "user_request_id", "priority", "cache_salt", "n", "min_p", "prompt_logprobs", "pooling",
         "queue_timeout", "min_new_tokens", "truncate_prompt_tokens", "skip_special_tokens",
         "include_stop_str_in_output", "thinking_token_budget", "prediction")


def generate_config_to_pb(config: GenerateConfig) -> pb.GenerateConfig:
    """A config as a message. mm_info has no field yet: callers reject it."""
    message = pb.GenerateConfig(**{name: value for name in _SAME if (value := getattr(config, name)) is not None})
    if config.eos_token_id is not None:
        eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        message.eos_token_ids.SetInParent()
        message.eos_token_ids.ids.extend(i for i in eos if i >= 0)
    for word in config.stop_words_ids:
        message.stop_words_ids.add(ids=word)
    for word in config.bad_words_ids:
        message.bad_words_ids.add(ids=word)
    if config.response_format is not None:
        message.response_format_json = json.dumps(config.response_format)
    if config.vocab:
        message.vocab.update(config.vocab)
    message.logit_bias.update(config.logit_bias)
    message.stop.extend(config.stop)
    message.bad_words.extend(config.bad_words)
    return message


def generate_config_from_pb(message: pb.GenerateConfig) -> GenerateConfig:
    """A message as a config, with the checks of GenerateConfig; raises ValueError or TypeError."""
    values: dict[str, Any] = {name: getattr(message, name) for name in _SAME if message.HasField(name)}
    if message.HasField("eos_token_ids"):
        eos = list(message.eos_token_ids.ids)
        values["eos_token_id"] = eos if len(eos) > 1 else eos[0] if eos else -1
    values["stop_words_ids"] = [list(w.ids) for w in message.stop_words_ids]
    values["bad_words_ids"] = [list(w.ids) for w in message.bad_words_ids]
    if message.HasField("response_format_json"):
        try:
            values["response_format"] = json.loads(message.response_format_json)
        except ValueError as e:
            raise ValueError(f"response_format_json is not JSON: {e}") from None
    if message.vocab:
        values["vocab"] = dict(message.vocab)
    values["logit_bias"] = dict(message.logit_bias)
    values["stop"] = list(message.stop)
    values["bad_words"] = list(message.bad_words)
    return GenerateConfig.parse(values)


def model_config_to_pb(config: AsModelConfig) -> pb.ModelConfig:
    """A config as a message of its fields by name, without defaults: an older server may lack a field."""
    message, defaults = pb.ModelConfig(), AsModelConfig().to_dict()
    for name, value in config.to_dict().items():
        if value == defaults[name]:
            continue
        slot = message.fields[name]
        if isinstance(value, bool):
            slot.flag = value
        elif isinstance(value, int):
            slot.number = value
        elif isinstance(value, float):
            slot.real = value
        elif isinstance(value, list):
            slot.texts.SetInParent()
            slot.texts.items.extend(value)
        else:
            slot.text = value
    return message


def model_config_from_pb(message: pb.ModelConfig) -> AsModelConfig:
    """A message as a config; raises ValueError or TypeError naming the field."""
    values: dict[str, Any] = {}
    for name, slot in message.fields.items():
        kind = slot.WhichOneof("value")
        if kind is None:
            raise ValueError(f"{name} has no value")
        values[name] = list(slot.texts.items) if kind == "texts" else getattr(slot, kind)
    return AsModelConfig.from_dict(values)


# --- requests and results ----------------------------------------------------------------------------------------


def request_to_pb(spec: RequestSpec) -> pb.GenerateRequest:
    """A request as a message."""
    message = pb.GenerateRequest(model=spec.model, config=generate_config_to_pb(spec.config), generated=spec.generated,
                                 want_text=spec.want_text, tenant=spec.tenant, resumed=spec.resumed,
                                 deaths=spec.deaths, adapter=spec.adapter, trace=spec.trace,
                                 samples=[pb.TokenIds(ids=ids) for ids in spec.samples],
                                 images=map(_image_to_pb, spec.images))
    if spec.input_ids is not None:
        message.input_ids.ids.extend(spec.input_ids)
    elif spec.text is not None:
        message.text = spec.text
        if spec.text_pair is not None:
            message.text_pair = spec.text_pair
    else:
        message.chat.messages.extend(_chat_message_to_pb(m) for m in spec.messages or ())
    if spec.chat is not None:
        options = spec.chat
        message.chat_options.SetInParent()
        for name in ("tools", "tool_choice", "chat_template_kwargs"):
            if getattr(options, name):
                setattr(message.chat_options, f"{name}_json", json.dumps(getattr(options, name)))
        message.chat_options.chat_format = options.chat_format
        message.chat_options.chat_template = options.chat_template
        message.chat_options.parallel_tool_calls = options.parallel_tool_calls
        message.chat_options.continue_final_message = options.continue_final_message
    return message


def _chat_message_to_pb(message: dict[str, Any]) -> pb.ChatMessage:
    if set(message) == {"role", "content"} and isinstance(message["content"], str):
        return pb.ChatMessage(**message)
    return pb.ChatMessage(json=json.dumps(message))


def _chat_options_from_pb(message: pb.ChatOptions) -> ChatOptions:
    options = ChatOptions(chat_format=message.chat_format, continue_final_message=message.continue_final_message,
                          chat_template=message.chat_template)
    for name in ("tools", "tool_choice", "chat_template_kwargs"):
        if text := getattr(message, f"{name}_json"):
            setattr(options, name, _from_json(name, text))
    if message.HasField("parallel_tool_calls"):
        options.parallel_tool_calls = message.parallel_tool_calls
    return options.check()


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


def _image_to_pb(image: Image | Video) -> pb.Image:
    if isinstance(image, Video):
        return pb.Image(frames=image.frames, fps=image.fps, min_pixels=image.min_pixels, max_pixels=image.max_pixels)
    return pb.Image(content=image.content, min_pixels=image.min_pixels, max_pixels=image.max_pixels)


def _image_from_pb(message: pb.Image) -> Image | Video:
    if not message.frames:
        return Image(message.content, message.min_pixels, message.max_pixels)
    if message.content:
        raise ValueError("it has both content and frames; an image has content, a video frames")
    return Video(tuple(message.frames), message.fps or DEFAULT_FPS, message.min_pixels, message.max_pixels)


def request_from_pb(message: pb.GenerateRequest) -> RequestSpec:
    """A message as a request; raises ValueError or TypeError for a request that no engine would accept."""
    spec = RequestSpec(model=message.model, config=generate_config_from_pb(message.config),
                       generated=list(message.generated), want_text=message.want_text, tenant=message.tenant,
                       samples=[list(sample.ids) for sample in message.samples], resumed=message.resumed,
                       deaths=message.deaths, adapter=message.adapter, trace="")
    spec.images = [named(f"images[{i}]", _image_from_pb, one) for i, one in enumerate(message.images)]
    spec.check_tenant()
    spec.trust_trace(message.trace)
    kind = message.WhichOneof("prompt")
    if kind == "input_ids":
        spec.input_ids = list(message.input_ids.ids)
        if not spec.input_ids:
            raise ValueError("input_ids is empty; a prompt needs at least one token id")
    elif kind == "text":
        spec.text, spec.want_text = message.text, True
        if not spec.text:
            raise ValueError("text is empty; a prompt needs at least one token")
        spec.text_pair = message.text_pair if message.HasField("text_pair") else None
    elif kind == "chat":
        spec.messages = check_messages([
            _from_json(f"messages[{i}]", m.json) if m.json else {"role": m.role, "content": m.content}
            for i, m in enumerate(message.chat.messages)])
        check_count(spec.messages, spec.images)
        spec.want_text = True
    else:
        raise ValueError("the request has no prompt; set one of input_ids, text and chat")
    if message.HasField("chat_options"):
        spec.chat = _chat_options_from_pb(message.chat_options)
    return spec


def elements_to_pb(elements: GeneratedElements) -> pb.Elements:
    """Tokens of a sample as a message."""
    message = pb.Elements(
        ids=elements.ids_from_generate, token_logprobs=elements.token_logprobs_list,
        prefix_cache_len=elements.prefix_cache_len, prefix_len_gpu=elements.prefix_len_gpu,
        prefix_len_cpu=elements.prefix_len_cpu, sample_index=elements.sample_index, text=elements.text)
    for pairs in elements.log_probs_list:
        message.top_counts.append(len(pairs))
        message.top_ids.extend(i for i, _ in pairs)
        message.top_logprobs.extend(p for _, p in pairs)
    for pairs in elements.prompt_logprobs_list:
        message.prompt_logprobs.add(ids=[i for i, _ in pairs], logprobs=[p for _, p in pairs])
    for tensor in elements.tensors_from_model_inference:
        message.embedding.extend(tensor["embedding"].tolist())
    if elements.finish_reason is not None:
        message.finish_reason = elements.finish_reason
    if elements.stop_string is not None:
        message.stop_string = elements.stop_string
    return message


def elements_from_pb(message: pb.Elements) -> GeneratedElements:
    """A message as tokens of a sample."""
    elements = GeneratedElements(
        ids_from_generate=message.ids[:], token_logprobs_list=message.token_logprobs[:],
        prefix_cache_len=message.prefix_cache_len, prefix_len_gpu=message.prefix_len_gpu,
        prefix_len_cpu=message.prefix_len_cpu, sample_index=message.sample_index, text=message.text)
    # Every token passes here, but few requests ask for the following.
    if message.top_counts:
        pairs, start = list(zip(message.top_ids, message.top_logprobs)), 0
        for count in message.top_counts:
            elements.log_probs_list.append(pairs[start:start + count])
            start += count
    if message.prompt_logprobs:
        elements.prompt_logprobs_list = [list(zip(token.ids, token.logprobs))
                                         for token in message.prompt_logprobs]
    if message.embedding:
        elements.tensors_from_model_inference = [{"embedding": np.array(message.embedding, np.float32)}]
    if message.HasField("finish_reason"):
        elements.finish_reason = message.finish_reason
        if message.HasField("stop_string"):
            elements.stop_string = message.stop_string
    return elements


def tokens_from_pb(message: pb.Tokens) -> Iterable[tuple[int, int, str, int, float | None, list[tuple[int, float]]]]:
    """Tokens in columns as rows: the request's id, the token, its text, sample, log probability and top ones."""
    logprobs: Iterable[float | None] = itertools.repeat(None)
    tops: Iterable[list[tuple[int, float]]] = itertools.repeat([])
    if message.top_counts:
        given, pairs, start = iter(message.logprobs), list(zip(message.top_ids, message.top_logprobs)), 0
        logprobs, tops = [], []
        for top in message.top_counts:
            logprobs.append(None if top < 0 else next(given, None))
            tops.append(pairs[start:start + max(top, 0)])
            start += max(top, 0)
    return zip(message.requests, message.ids, message.texts or itertools.repeat(""),
               message.samples or itertools.repeat(0), logprobs, tops)


def stat_to_pb(stat: dict[str, float]) -> pb.RequestStat:
    """Fields of RequestStatInfo as a message; keys without a field are left out."""
    known = pb.RequestStat.DESCRIPTOR.fields_by_name
    values: dict[str, Any] = {k: int(v) if known[k].type == known[k].TYPE_INT32 else v
                              for k, v in stat.items() if k in known}
    return pb.RequestStat(**values)


def stat_from_pb(message: pb.RequestStat) -> dict[str, float]:
    """A message as fields of RequestStatInfo."""
    return {f.name: getattr(message, f.name) for f in pb.RequestStat.DESCRIPTOR.fields}


# --- information -------------------------------------------------------------------------------------------------


def engine_stat_to_pb(stat: AsEngineStat) -> pb.EngineStat:
    """Statistics as a message."""
    return pb.EngineStat(**{f.name: getattr(stat, f.name) for f in fields(AsEngineStat)})


def engine_stat_from_pb(message: pb.EngineStat) -> AsEngineStat:
    """A message as statistics."""
    return AsEngineStat(**{f.name: getattr(message, f.name) for f in fields(AsEngineStat)})


def model_info_to_pb(info: ModelInfo) -> pb.ModelInfo:
    """A model's description as a message, without paths of the server."""
    values = {f.name: v for f in fields(ModelInfo) if (v := getattr(info, f.name)) is not None}
    values.pop("tokenizer_dir", None)
    return pb.ModelInfo(**{**values, "sampling_defaults": pb.GenerateConfig(**info.sampling_defaults)})


def model_info_from_pb(message: pb.ModelInfo) -> ModelInfo:
    """A message as a model's description."""
    values = {f.name: getattr(message, f.name) for f in fields(ModelInfo) if f.name != "tokenizer_dir"}
    values["eos_token_ids"] = list(message.eos_token_ids)
    values["cache_windows"] = list(message.cache_windows)
    values["prompts"], values["labels"] = dict(message.prompts), list(message.labels)
    values["sampling_defaults"] = {f.name: value for f, value in message.sampling_defaults.ListFields()}
    return ModelInfo(**values)


def models_to_pb(models: Iterable[ModelState]) -> list[pb.ModelState]:
    """States of models as messages."""
    return [pb.ModelState(name=m.name, running=m.running, fingerprint=m.fingerprint, load=m.load, work=m.work,
                          adapters=m.adapters, aliases=m.aliases, on_demand=m.on_demand, isa=m.isa,
                          installed_on_demand=m.installed_on_demand,
                          image_fingerprint=m.image_fingerprint) for m in models]


def models_from_pb(messages: Iterable[pb.ModelState]) -> list[ModelState]:
    """Messages as states of models."""
    return [ModelState(m.name, m.running, m.fingerprint, m.load, m.work, dict(m.adapters), list(m.aliases), m.on_demand,
                       m.isa, m.installed_on_demand or m.on_demand,     # older servers say only the latter
                       m.image_fingerprint)
            for m in messages]
