"""The files beside a tokenizer: tokenizer_config.json, special tokens, chat templates."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from ..weights.files import MIB, parse_json, read_file

# Several times the sizes of the largest published checkpoints.
MAX_TOKENIZER_CONFIG_BYTES, MAX_TEMPLATE_BYTES = 16 * MIB, MIB
MAX_TEMPLATES = 64


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file does not exist. ValueError if it holds anything else."""
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
    """The text of a special token, written as a string or as an object with its properties."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def special_tokens_of(config: dict[str, Any]) -> dict[str, Any]:
    """The special tokens of a tokenizer_config.json by the names that chat templates use."""
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


def chat_templates_of(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. Separate files take precedence over tokenizer_config.json. ValueError for wrong ones."""
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
    from_json = read_object(path / "chat_template.json").get("chat_template")
    if isinstance(from_json, str):
        templates["default"] = from_json
    if os.path.lexists(path / "chat_template.jinja"):
        templates["default"] = read_template(path / "chat_template.jinja")
    found = sorted(itertools.islice((path / "additional_chat_templates").glob("*.jinja"), MAX_TEMPLATES + 1))
    for file in found:
        templates[file.stem] = read_template(file)
    if len(templates) > MAX_TEMPLATES:
        raise ValueError(f"{path} has more than {MAX_TEMPLATES} chat templates")
    for name, template in templates.items():
        if not isinstance(name, str) or not isinstance(template, str) or len(template) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"{path}: chat template {name!r} must be a str of at most {MAX_TEMPLATE_BYTES} characters")
    return templates


def read_template(file: Path) -> str:
    """A template's file. ValueError if it is not UTF-8."""
    try:
        return read_file(file, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from error
