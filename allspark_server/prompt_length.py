"""Refuses prompts that are certainly too long by their characters, before anything is made of them."""

from __future__ import annotations

from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.types import ModelInfo

#: a chat may have so many times the characters of the longest text: templates leave parts of it out, such as earlier
#: reasoning
_CHAT = 4


def check_characters(info: ModelInfo, text: int, chat: int = 0) -> None:
    """Raises AllSparkError if a text, or the messages of a chat together, have more characters than can make a prompt
    for the model.
    """
    limit, kind = (info.max_characters, "a text") if text else (_CHAT * info.max_characters, "a chat")
    length = text or chat
    if info.max_characters and length > limit:
        raise AllSparkError(
            AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR,
            f"the prompt is {kind} of {length} characters: more than the {limit} that can make {info.max_length} "
            f"tokens (engine_max_length of model {info.name!r}, prompt and output together)")
