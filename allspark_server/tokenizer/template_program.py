"""The program of the processes that render chat templates: see templates.py and limited_process.py."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

MAX_CHARACTERS = 1 << 26  # of a rendered text
KNOWN_TEMPLATES = 64  # that a process keeps; when there are more, it forgets all

_sources: dict[str, str] = {}  # by their ids


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's words for training; here only its body matters."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass_on"), [], [], body).set_lineno(line)

    def _pass_on(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which would be wrong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    """The template in the environment that templates of published checkpoints expect, which is transformers'."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


def _rendered(template: str, variables: dict[str, Any]) -> tuple[str, str]:
    try:
        text = _compiled(template).render(variables)
        if len(text) > MAX_CHARACTERS:
            return "error", f"gives more than {MAX_CHARACTERS} characters"
        return "text", text
    except jinja2.TemplateSyntaxError as error:
        return "error", f"has an error in line {error.lineno}: {error.message}"
    except jinja2.TemplateError as error:
        return "error", f"refused the messages{_line(error)}: {error}"
    except Exception as error:  # a template can cause any
        return "error", f"failed on the messages{_line(error)}: {type(error).__name__}: {str(error)[:1000]}"


def _line(error: Exception) -> str:
    """The line of the template in which an error occurred, for the message."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""


def answer(request: bytes, continues: bool) -> list[bytes]:
    """Answers two lines, [id, template or "" if it is known] and the variables, with [kind, text]."""
    head, _, variables = request.partition(b"\n")
    digest, template = json.loads(head)
    if template:
        if len(_sources) == KNOWN_TEMPLATES:  # as the other side counts
            _sources.clear()
        _sources[digest] = template
    return [json.dumps(_rendered(_sources.get(digest, ""), json.loads(variables))).encode()]
