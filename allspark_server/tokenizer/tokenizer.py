"""Text in and out: tokenizers (tokenizer.json), chat templates and streaming detokenization."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..weights.files import MIB, parse_json, read_file
from . import decoders, vocabularies
from .templates import renderer
from .text_size import characters_per_token

logger = logging.getLogger(__name__)

# Several times what the largest published checkpoints have.
MAX_TOKENIZER_CONFIG_BYTES, MAX_TEMPLATE_BYTES = 16 * MIB, MIB
MAX_TEMPLATES = 64


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, Any] | None = None,
        chat_templates: dict[str, str] | None = None,
        source: str = "tokenizer",
        stop_ids: Sequence[int] = (),
    ):
        """backend: of the `tokenizers` package. special_tokens: e.g. {"eos_token": "</s>"}, seen by chat templates by
        these names. chat_templates: jinja sources by name, the usual one "default". source: named in error messages.
        stop_ids: that end an answer, beside what the model's config has.
        """
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.stop_ids = list(stop_ids)
        self._source = source
        with decoders.named_errors(f"{source} has a decoder that is unknown"):
            # Its own form alone: writing all of a tokenizer goes through every id up to the highest, which may be any.
            decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._characters_per_token = characters_per_token(backend)
        self._decoder = decoder
        self._exact = decoders.chain(decoder) is not None
        if not self._exact:
            logger.info("%s: decoder %s is streamed by decoding a window again", source, decoder.get("type"))
        added = backend.get_added_tokens_decoder()
        self._special_texts = {token.content for token in added.values() if token.special}
        self._marks = {token.content: i for i, token in added.items() if token.special or decoders.is_mark(token.content)}

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load tokenizer.json of a Hugging Face directory, or the vocabulary that stands for it (vocabularies.py);
        tokenizer_config.json, special_tokens_map.json and the chat template (chat_template.jinja, chat_template.json or
        inside of tokenizer_config.json) if they are there.

        Raises FileNotFoundError without either, ValueError for a file that cannot be read as what it should be,
        AllSparkError for one that is no regular file or too large.
        """
        path = Path(path)
        data, file = vocabularies.tokenizer_json(path), vocabularies.vocabulary_file(path)
        with decoders.named_errors(f"{file} is not a tokenizer that tokenizers {tokenizers.__version__} can read"):
            backend = tokenizers.Tokenizer.from_buffer(data)
        config = _read_object(path / "tokenizer_config.json")
        special = _special_tokens({**_read_object(path / "special_tokens_map.json"), **config})
        templates = _chat_templates(path, config)
        chat = vocabularies.chat_of(path, backend.get_vocab())
        if chat is not None:
            templates.setdefault("default", chat[0])
        if templates:
            renderer().start()
        return cls(backend, special, templates, str(path), chat[1] if chat else ())

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included (a model's own vocabulary may be padded beyond)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token; None if the tokenizer names none."""
        return self._special_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of the begin-of-sequence token; None if the tokenizer names none."""
        return self._special_id("bos_token")

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with what the tokenizer puts around it (say, a begin-of-sequence token) unless told not."""
        if not isinstance(text, str):
            raise TypeError(f"text to encode is {type(text).__name__}; it must be str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text to encode is no valid Unicode: half of a surrogate pair at position {error.start}"
            ) from error
        with decoders.named_errors(f"the tokenizer of {self._source} failed"):
            # Of the calls this is the one that computes no offsets: faster, and with the GIL released but for the ids.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def longest_text(self, tokens: int) -> int | None:
        """Characters beyond which every text has more than so many tokens; None if the tokenizer sets no bound."""
        return None if self._characters_per_token is None else tokens * self._characters_per_token

    def detokenizer(self, keep: Iterable[str] = ()) -> StreamDetokenizer:
        """A new one, for the ids of one sequence as they come. keep: special tokens that are text here."""
        return StreamDetokenizer(self, keep=keep)

    def mark_id(self, text: str) -> int | None:
        """The id of a token that marks something, such as <|python_tag|> or <tool_call>; None for other text."""
        return self._marks.get(text)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; those that the tokenizer does not know are passed over. Invalid UTF-8 comes out as U+FFFD.
        Spaces are not cleaned up (transformers' clean_up_tokenization_spaces would change what a stream has given).
        """
        if not self._exact:
            with decoders.named_errors(f"the tokenizer of {self._source} failed"):
                return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        stream = StreamDetokenizer(self, skip_special_tokens)
        return stream.push(ids) + stream.finish()

    def token_bytes(self, ids: Iterable[int]) -> list[bytes]:
        """The bytes that each id stands for within a text; nothing for those that the tokenizer does not know. A token
        may be a part of a character.
        """
        special = {i: token.content for i, token in self.backend.get_added_tokens_decoder().items()}
        found = []
        for i in ids:
            token = self.backend.id_to_token(i)
            plain = special.get(i)
            found.append(plain.encode() if plain is not None else
                         b"" if token is None else decoders.token_bytes(self._decoder, token))
        return found

    def apply_chat_template(
        self,
        messages: Sequence[dict],
        add_generation_prompt: bool = True,
        tools: list[dict] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render messages ({"role": …, "content": …}, …) as transformers does. kwargs are variables of the template
        (`enable_thinking=False`, `documents=…`). Raises ValueError for malformed messages, a missing template, or an
        error in or from the template.
        """
        _check_messages(messages)
        if tools is not None and not (
            isinstance(tools, (list, tuple)) and all(isinstance(tool, dict) for tool in tools)
        ):
            raise ValueError("tools must be a list of JSON schemas (dicts)")
        variables = {
            **self.special_tokens,
            "documents": None,
            **kwargs,
            "messages": [_as_seen(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self.chat_template(tools is not None)
        try:
            return renderer().render(template, variables)
        except ValueError as error:
            raise ValueError(f"the chat template of {self._source} {error}") from error

    def encode_chat(self, messages: Sequence[dict], **kwargs: Any) -> list[int]:
        """Ids of rendered messages; the template writes the special tokens itself. kwargs: see apply_chat_template."""
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)

    def chat_template(self, tools: bool) -> str:
        """The source of the template for chats with tools, or without. ValueError if there is none."""
        name = "tool_use" if tools and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            raise ValueError(
                f"{self._source} has no chat template"
                + (
                    f" named {name!r}; it has {sorted(self.chat_templates)}"
                    if self.chat_templates
                    else "; send text or ids instead"
                )
            )
        return self.chat_templates[name]


# ---- files --------------------------------------------------------------------------------------------------


def _read_object(file: Path) -> dict[str, Any]:
    if not os.path.lexists(file):
        return {}
    data = read_file(file, MAX_TOKENIZER_CONFIG_BYTES)
    try:
        value = parse_json(data)
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}; it must hold an object")
    return value


def _token_text(value: Any) -> str | None:
    """The text of a special token, which is written as a string or as an object with its properties."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, Any]:
    special: dict[str, Any] = {}
    for name, value in config.items():
        if name == "additional_special_tokens" and isinstance(value, list):
            special[name] = [text for text in map(_token_text, value) if text is not None]
        elif name.endswith("_token") and not name.startswith("add_") and (text := _token_text(value)) is not None:
            special[name] = text
    for name, value in (
        (config.get("extra_special_tokens") or {}).items()
        if isinstance(config.get("extra_special_tokens"), dict)
        else ()
    ):
        if (text := _token_text(value)) is not None:
            special[name] = text
    return special


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; files of their own come before what tokenizer_config.json holds."""
    source = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(source, str):
        templates["default"] = source
    elif isinstance(source, dict):
        templates.update(source)
    elif isinstance(source, list):
        templates.update(
            {
                entry["name"]: entry["template"]
                for entry in source
                if isinstance(entry, dict) and isinstance(entry.get("name"), str) and "template" in entry
            }
        )
    held = _read_object(path / "chat_template.json").get("chat_template")
    if isinstance(held, str):
        templates["default"] = held
    if os.path.lexists(path / "chat_template.jinja"):
        templates["default"] = _read_template(path / "chat_template.jinja")
    found = sorted(itertools.islice((path / "additional_chat_templates").glob("*.jinja"), MAX_TEMPLATES + 1))
    for file in found:
        templates[file.stem] = _read_template(file)
    if len(templates) > MAX_TEMPLATES:
        raise ValueError(f"{path} has more than {MAX_TEMPLATES} chat templates")
    for name, template in templates.items():
        if not isinstance(name, str) or not isinstance(template, str) or len(template) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"chat template {name!r} of {path} is no text of at most {MAX_TEMPLATE_BYTES} characters")
    return templates


def _read_template(file: Path) -> str:
    try:
        return read_file(file, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from error


# ---- chat templates -----------------------------------------------------------------------------------------


def _as_seen(message: dict) -> dict:
    """A message as transformers shows it to templates: without keys that are None, reasoning under all of its names."""
    shown = {key: value for key, value in message.items() if value is not None}
    for name in ("reasoning_content", "thinking", "reasoning"):
        if name in shown:
            return {"thinking": shown[name], **shown, "reasoning_content": shown[name]}
    return shown


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages is {type(messages).__name__}; it must be a list of {{'role': …, 'content': …}}")
    if not messages:
        raise ValueError("messages is empty; at least one message is needed")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {i} is {type(message).__name__}; it must be a dict with 'role' and 'content'")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} has role {message.get('role')!r}; it must be a string such as 'user'")
        if not isinstance(message.get("content"), (str, list, type(None))):
            raise ValueError(
                f"message {i} has content of type {type(message['content']).__name__}; "
                "it must be a string or a list of parts"
            )


# ---- detokenization -----------------------------------------------------------------------------------------


class StreamDetokenizer:
    """The text of a sequence of ids, given as soon as it is certain.

    The pieces returned, joined, are Tokenizer.decode of all ids. A piece never ends within a character and is never
    taken back.
    Constant time for each id. Not thread-safe: one for each sequence.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, keep: Iterable[str] = ()):
        self._backend = tokenizer.backend
        self._special = tokenizer._special_texts.difference(keep) if skip_special_tokens else frozenset()
        self._chain = decoders.chain(tokenizer._decoder)
        self._window = None if self._chain is not None else decoders.Window(tokenizer.backend)

    def push(self, ids: Iterable[int]) -> str:
        """Take further ids; returns the text that they complete, "" if none."""
        out: list[str] = []
        for i in ids:
            token = self._backend.id_to_token(int(i)) if i >= 0 else None
            if token is None or token in self._special:
                continue
            if self._window is not None:
                out.append(self._window.feed(int(i)))
            else:
                out.extend(decoders.through(self._chain, [token]))
        return "".join(out)

    def finish(self) -> str:
        """The sequence ends: what was held back (half a character as U+FFFD). Then the object may start anew."""
        if self._window is not None:
            return self._window.finish()
        out: list[str] = []
        for at, step in enumerate(self._chain):
            out.extend(decoders.through(self._chain[at + 1 :], step.finish()))
        return "".join(out)
