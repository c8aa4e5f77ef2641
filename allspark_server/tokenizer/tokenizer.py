"""A checkpoint's tokenizer: text to ids and back."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from . import detokenizer, vocabularies
from .detokenizer import ByteTokens, StreamDetokenizer
from .files import chat_templates_of, read_object, read_template, special_tokens_of
from .templates import ChatTemplates, renderer
from .text_size import characters_per_token

logger = logging.getLogger(__name__)


class Tokenizer:
    """A checkpoint's tokenizer and chat templates. Safe to use from several threads.

    `templates`: the chat templates. `marks`: ids by text of the marker tokens, such as <|python_tag|> or
    <tool_call>. `detokenizer(keep=(), skip_special_tokens=True)` makes a StreamDetokenizer for one sequence.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: dict[str, Any] | None = None,
        chat_templates: dict[str, str] | None = None, source: str = "tokenizer", stop_ids: Sequence[int] = (),
    ):
        """`special_tokens`: for example {"eos_token": "</s>"}; chat templates see them by these names.
        `chat_templates`: jinja sources by name; the usual one is "default". `source`: the name in error messages.
        `stop_ids`: ids that end an answer, besides those of the model's config.
        """
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.templates = ChatTemplates(self.chat_templates, self.special_tokens, source)
        self.stop_ids = list(stop_ids)
        self._source = source
        with detokenizer.named_errors(f"{source} has a decoder that is unknown"):
            # Serialize only the decoder: serializing a whole tokenizer visits every id up to the highest, which may be
            # huge.
            decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._characters_per_token = characters_per_token(backend)
        self._decoder = decoder
        self._exact = detokenizer.chain(decoder) is not None
        if not self._exact:
            logger.info("%s: decoder %s is streamed by decoding a window again", source, (decoder or {}).get("type"))
        added = backend.get_added_tokens_decoder()
        special_texts = frozenset(token.content for token in added.values() if token.special)
        self.marks = {token.content: i for i, token in added.items()
                      if token.special or detokenizer.is_mark(token.content)}
        self.detokenizer = functools.partial(StreamDetokenizer, backend, decoder, special_texts, ByteTokens(backend))

    @classmethod
    def from_dir(cls, path: str | Path, chat_template: str = "") -> Tokenizer:
        """Reads a Hugging Face directory: tokenizer.json or the vocabulary that replaces it (vocabularies.py), and, if
        they exist, tokenizer_config.json, special_tokens_map.json and the chat template (chat_template.jinja,
        chat_template.json, or inside tokenizer_config.json). `chat_template`: a file whose template replaces these.

        Raises FileNotFoundError if neither exists, ValueError for a file of the wrong form,
        AllSparkError for a file that is not regular or too large.
        """
        path = Path(path)
        data, file = vocabularies.tokenizer_json(path), vocabularies.vocabulary_file(path)
        with detokenizer.named_errors(f"{file} is not a tokenizer that tokenizers {tokenizers.__version__} can read"):
            backend = tokenizers.Tokenizer.from_buffer(data)
        config = read_object(path / "tokenizer_config.json")
        special = special_tokens_of({**read_object(path / "special_tokens_map.json"), **config})
        templates = chat_templates_of(path, config)
        if chat_template:
            templates = {"default": read_template(Path(chat_template))}
        elif (template := vocabularies.pair_template_of(path)) is not None:
            templates["default"] = template
        chat = vocabularies.chat_of(path, backend.get_vocab())
        if chat is not None:
            templates.setdefault("default", chat[0])
        if templates:
            renderer().start()
        return cls(backend, special, templates, str(path), chat[1] if chat else ())

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included. A model's own vocabulary may be larger by padding."""
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
        """The ids of a text. `add_special_tokens`: with what the tokenizer puts around it, such as a begin-of-sequence
        token. TypeError or ValueError if it is not valid text.
        """
        _check_text(text)
        try:
            # This call computes no offsets, so it is the fastest; it holds the GIL only to make the list of ids.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise detokenizer.named(error, f"the tokenizer of {self._source} failed") from error

    def encode_pair(self, text: str, pair: str) -> list[int]:
        """The ids of two texts, with what the tokenizer puts around and between them. Errors as `encode`."""
        _check_text(text)
        _check_text(pair)
        with detokenizer.named_errors(f"the tokenizer of {self._source} failed"):
            return self.backend.encode(text, pair).ids

    def cut(self, ids: list[int], most: int) -> list[int]:
        """The first ids, so many that, with what the tokenizer puts at the end of a text, there are at most `most`."""
        if len(ids) <= most:
            return ids
        end = self._suffix if most > len(self._suffix) and ids[len(ids) - len(self._suffix):] == self._suffix else []
        return ids[:most - len(end)] + end

    @functools.cached_property
    def _suffix(self) -> list[int]:
        """The ids that the tokenizer puts at the end of a text."""
        plain, whole = self.encode("a", False), self.encode("a")
        after = next((i + len(plain) for i in range(len(whole)) if whole[i:i + len(plain)] == plain), len(whole))
        return whole[after:]

    def longest_text(self, tokens: int) -> int | None:
        """The length in characters beyond which every text has more than `tokens` tokens; None if there is no bound."""
        return None if self._characters_per_token is None else tokens * self._characters_per_token

    def mark_id(self, text: str) -> int | None:
        """The id of a token of `marks`; None for other text."""
        return self.marks.get(text)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Unknown ids are skipped; invalid UTF-8 becomes U+FFFD. Spaces are not cleaned up:
        transformers' clean_up_tokenization_spaces would change text that a stream has already given.
        """
        if not self._exact:
            with detokenizer.named_errors(f"the tokenizer of {self._source} failed"):
                return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return stream.push(ids) + stream.finish()

    def token_bytes(self, ids: Iterable[int]) -> list[bytes]:
        """The bytes of each id within a text; b"" for unknown ids. A token may be a part of a character."""
        special = {i: token.content for i, token in self.backend.get_added_tokens_decoder().items()}
        found = []
        for i in ids:
            token = self.backend.id_to_token(i)
            plain = special.get(i)
            found.append(plain.encode() if plain is not None else
                         b"" if token is None else detokenizer.token_bytes(self._decoder, token))
        return found

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None, **variables: Any,
    ) -> str:
        """The text of a chat; see ChatTemplates.render."""
        return self.templates.render(messages, add_generation_prompt, tools, **variables)

    def encode_chat(self, messages: Sequence[dict[str, Any]], **variables: Any) -> list[int]:
        """Ids of a rendered chat, whose template writes the special tokens itself; see ChatTemplates.render."""
        return self.encode(self.templates.render(messages, **variables), add_special_tokens=False)


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text to encode is {type(text).__name__}; it must be str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text to encode is not valid Unicode: half of a surrogate pair at position {error.start}"
        ) from error
