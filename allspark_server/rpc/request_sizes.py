"""Limits of what a request's message may hold, checked before it is converted.

Conversion makes Python objects of every item under the interpreter lock, which all other clients' threads need, too: a
second for a few million items. So lists that no model could use are refused by their length alone.
"""

from __future__ import annotations

from allspark_client._proto import allspark_pb2 as pb
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.generate_checks import MAX_STOPS, MAX_WORD_IDS, MAX_WORDS
from allspark_client.images import MAX_FRAMES, MAX_IMAGES
from allspark_client.types import ModelInfo

from ..access import Role
from ..json_structure import JsonStructure
from ..prompt_length import check_characters

MAX_SAMPLES = 1024
MAX_MESSAGES = 1 << 12
#: characters of a field of JSON; a chat's messages are limited by the model's length
MAX_JSON = 1 << 20


def check_sizes(request: pb.GenerateRequest, info: ModelInfo, role: Role) -> None:
    """Raises ValueError or AllSparkError for a list or a text that is longer than any request for the model can use,
    and for a vocabulary from a client that is not the role admin.
    """
    config, chat = request.config, request.chat_options
    if len(request.input_ids.ids) > info.max_length:
        raise AllSparkError(AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
                            f"the prompt has {len(request.input_ids.ids)} tokens; engine_max_length={info.max_length} "
                            f"of model {request.model[:80]!r} counts prompt and output")
    if len(config.vocab) and role is not Role.ADMIN:
        raise AllSparkError(AsStatus.ALLSPARK_REQUEST_DENIED,
                            f"vocab needs the role {Role.ADMIN.value}; this client's is {role.value}. Without it, "
                            "response_format uses the checkpoint's vocabulary")
    sizes = [
        ("generated", len(request.generated), info.max_length, "tokens"),
        ("samples", len(request.samples), MAX_SAMPLES, "samples"),
        *((f"samples[{i}]", len(sample.ids), info.max_length, "tokens")
          for i, sample in enumerate(request.samples[:MAX_SAMPLES])),
        ("messages", len(request.chat.messages), MAX_MESSAGES, "messages"),
        ("images", len(request.images), MAX_IMAGES, "images"),
        *((f"images[{i}].frames", len(image.frames), MAX_FRAMES, "frames")
          for i, image in enumerate(request.images[:MAX_IMAGES])),
        ("eos_token_id", len(config.eos_token_ids.ids), MAX_WORDS, "ids"),
        ("stop_words_ids", len(config.stop_words_ids), MAX_WORDS, "words"),
        ("bad_words_ids", len(config.bad_words_ids), MAX_WORDS, "words"),
        *((f"{name}[{i}]", len(word.ids), MAX_WORD_IDS, "ids")
          for name in ("stop_words_ids", "bad_words_ids") for i, word in enumerate(getattr(config, name)[:MAX_WORDS])),
        ("stop", len(config.stop), MAX_STOPS, "strings"),
        ("bad_words", len(config.bad_words), MAX_STOPS, "strings"),
        ("prediction", len(config.prediction), info.max_characters or MAX_JSON, "characters"),
        ("logit_bias", len(config.logit_bias), MAX_WORDS, "ids"),
        ("vocab", len(config.vocab), info.vocab_size, "tokens"),
        ("response_format", len(config.response_format_json), MAX_JSON, "bytes as JSON"),
        ("chat_template", len(chat.chat_template), MAX_JSON, "characters"),
        *((name, len(getattr(chat, f"{name}_json")), MAX_JSON, "bytes as JSON")
          for name in ("tools", "tool_choice", "chat_template_kwargs")),
    ]
    for name, size, most, unit in sizes:
        if size > most:
            raise ValueError(f"{name} has {size} {unit}; allowed: at most {most}")
    check_characters(info, len(request.text),
                     sum(len(message.content) + len(message.json) for message in request.chat.messages))
    _check_json(request)


def _check_json(request: pb.GenerateRequest) -> None:
    """Raises ValueError if the fields of JSON, which are parsed later, hold too much. They count together."""
    chat, structure = request.chat_options, JsonStructure()
    fields = [("response_format", request.config.response_format_json),
              *((name, getattr(chat, f"{name}_json")) for name in ("tools", "tool_choice", "chat_template_kwargs")),
              *((f"messages[{i}]", message.json) for i, message in enumerate(request.chat.messages))]
    for name, text in fields:
        try:
            structure.take(text.encode())
            structure.end()
        except ValueError as error:
            raise ValueError(f"{name}: the fields of JSON have {error}") from None
